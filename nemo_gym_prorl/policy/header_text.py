# SPDX-License-Identifier: Apache-2.0
"""Names in headers: a rollout's and a group's may be any text, which a header is not."""

from __future__ import annotations

from contextlib import suppress
from urllib.parse import unquote


def header_text(value: str) -> str:
    """A header whose value may be any text: percent-encoded, or as the bytes of UTF-8 or Latin-1.

    Args:
        value: its bytes, read as Latin-1.
    """
    if value.isascii() and "%" not in value:
        return value
    with suppress(UnicodeDecodeError):
        value = value.encode("latin-1").decode()
    return unquote(value)
