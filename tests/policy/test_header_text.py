# SPDX-License-Identifier: Apache-2.0
"""Names of rollouts as headers carry them."""

from __future__ import annotations

from urllib.parse import unquote

from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.handlers.gym_http import in_header
from nemo_gym_prorl.policy.http.callers import header_text


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), min_size=1, max_size=30))
def test_a_header_says_what_our_agent_wrote(name: str) -> None:
    assert header_text(in_header(name)) == name


@given(st.binary(max_size=40))
def test_a_header_of_any_bytes_is_read(value: bytes) -> None:
    text = value.decode("latin-1")
    try:
        expected = unquote(value.decode())
    except UnicodeDecodeError:
        expected = unquote(text)
    assert header_text(text) == expected
