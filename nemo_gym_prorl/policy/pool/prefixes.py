# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What rollouts share: the beginnings of their first prompts, in blocks that an engine caches once for all of them.

A block is named by a digest of all tokens up to its end, so two prompts have a block in common exactly if they are the
same up to there. Groups need not be told apart from what all rollouts share, such as a system prompt: both are blocks
that more than one rollout has.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b


BLOCK = 256
"""Tokens of a block. Smaller ones tell prompts apart further, and each costs a place in every count."""

_DIGEST = 8
"""Bytes of a block's name."""


def blocks_of(prompt: Sequence[int]) -> bytes:
    """The names of a prompt's whole blocks, from its beginning; what is left of it is its own."""
    tokens = memoryview(array("q", prompt))
    digest = blake2b(digest_size=_DIGEST)
    names = bytearray()
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        digest.update(tokens[start : start + BLOCK])
        names += digest.digest()
    return bytes(names)


def tokens_in(blocks: bytes) -> int:
    """How many tokens so many blocks have."""
    return len(blocks) // _DIGEST * BLOCK


class Holdings:
    """How many live rollouts of a backend have each block."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()

    def add(self, blocks: bytes) -> None:
        """A rollout with these blocks is live here."""
        self._counts.update(_each(blocks))

    def remove(self, blocks: bytes) -> None:
        """It is so no longer."""
        for block in _each(blocks):
            self._counts[block] -= 1
            if not self._counts[block]:
                del self._counts[block]

    def tokens_of(self, blocks: bytes) -> int:
        """How many tokens of a prompt are here. They are its beginning, whose end a binary search finds."""
        low, high = 0, len(blocks) // _DIGEST
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[(middle - 1) * _DIGEST : middle * _DIGEST] in self._counts:
                low = middle
            else:
                high = middle - 1
        return low * BLOCK

    @property
    def tokens(self) -> int:
        """Of all blocks, each counted once."""
        return len(self._counts) * BLOCK


def _each(blocks: bytes) -> Iterator[bytes]:
    return (blocks[start : start + _DIGEST] for start in range(0, len(blocks), _DIGEST))
