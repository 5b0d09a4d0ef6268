# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The server name in the first record of a TLS client."""

from __future__ import annotations

import contextlib
import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.sandbox.egress.proxy import server_name


def hello(name: str | None) -> bytes:
    """Return the first record of this Python's TLS."""
    context = ssl.create_default_context()
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


HELLO = hello("files.example.com")


@pytest.mark.parametrize(
    ("name", "told"), [("example.com", "example.com"), ("A.Example.COM", "a.example.com"), (None, ""), ("::1", "")]
)
def test_the_name_that_a_client_asks_for(name: str | None, told: str) -> None:
    assert server_name(hello(name)) == told
    assert server_name(hello(name) + b"more") == told


@given(st.integers(0, len(HELLO) - 1))
def test_a_part_of_a_message_has_no_name(size: int) -> None:
    record = HELLO[:3] + (size - 5).to_bytes(2) + HELLO[5:size] if size > 5 else HELLO[:size]
    with pytest.raises(ValueError, match="the message is cut off"):
        server_name(record)


@given(st.lists(st.tuples(st.integers(0, len(HELLO) - 1), st.integers(0, 255)), max_size=4))
def test_any_other_bytes_are_a_name_or_a_value_error(changes: list[tuple[int, int]]) -> None:
    record = bytearray(HELLO)
    for place, byte in changes:
        record[place] = byte
    with contextlib.suppress(ValueError):
        assert isinstance(server_name(bytes(record)), str)
