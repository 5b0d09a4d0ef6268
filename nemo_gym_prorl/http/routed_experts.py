# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which experts of a mixture each token went to, for a trainer that routes as its engine did (router replay).

NeMo RL's chat server gives them with each turn, for the whole sequence, as a text: ``nrlre1:<numbers>:<rows>x<layers>x
<experts of a token>:<base64>``, a row for each token. They are by far the most of what a rollout has (half a KiB a
token of Qwen3-30B-A3B), so they stay the text that they are, and of each turn only its last rows are kept: those of
its own tokens, and of the one before, whose row comes with the next prompt, since its experts were not asked while it
was the last that was sampled.

Pure.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Self


_FORM = re.compile(r"nrlre1:(int8|int16|int32):(\d{1,9})x(\d{1,6})x(\d{1,6}):")
_BYTES = {"int8": 1, "int16": 2, "int32": 4}


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Rows of experts, read no further than to know how many there are.

    Attributes:
        numbers: of what kind they are, as torch names it.
        rows: one for each token.
        layers: of experts.
        top: experts of a token in a layer.
        encoded: the rows in base64.
    """

    numbers: str
    rows: int
    layers: int
    top: int
    encoded: str

    @classmethod
    def read(cls, text: str) -> Self:
        """Take the text apart.

        Raises:
            ValueError: it has another form, or is not as long as it says.
        """
        head = _FORM.match(text)
        if head is None:
            raise ValueError(f"routed_experts are not in NeMo RL's form: {text[:40]!r}")
        rows, layers, top = map(int, head.group(2, 3, 4))
        found = cls(head[1], rows, layers, top, text[head.end() :])
        if len(found.encoded) != (found.rows * found.width + 2) // 3 * 4:
            raise ValueError(f"routed_experts are no {found.rows} rows of {found.width} bytes")
        return found

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self.layers * self.top * _BYTES[self.numbers]

    @property
    def text(self) -> str:
        return f"nrlre1:{self.numbers}:{self.rows}x{self.layers}x{self.top}:{self.encoded}"

    def last(self, rows: int) -> bytes:
        """So many, from the end.

        Raises:
            ValueError: there are fewer, or they are no base64.
        """
        if rows > self.rows:
            raise ValueError(f"routed_experts have {self.rows} rows, and {rows} tokens want one")
        skip = (self.rows - rows) * self.width
        return b64decode(self.encoded[skip // 3 * 4 :], validate=True)[skip % 3 :]

    def of(self, rows: bytes) -> RoutedExperts:
        """Others of the same kind."""
        count = len(rows) // self.width if self.width else 0
        return RoutedExperts(self.numbers, count, self.layers, self.top, b64encode(rows).decode())


def last_rows(text: str, rows: int) -> str:
    """The last rows alone.

    Raises:
        ValueError: see :class:`RoutedExperts`.
    """
    experts = RoutedExperts.read(text)
    return experts.of(experts.last(rows)).text


def continued(before: str | None, text: str | None, rows: int) -> str | None:
    """All rows of a sequence of which ``text`` has the last ones, and ``before`` at least all that come before those.
    ``None`` if they are not there."""
    if text is None:
        return None
    experts = RoutedExperts.read(text)
    if experts.rows >= rows:
        return last_rows(text, rows)
    first = RoutedExperts.read(before) if before is not None else None
    missing = rows - experts.rows
    if first is None or first.rows < missing or first.width != experts.width:
        return None
    return experts.of(first.last(first.rows)[: missing * first.width] + experts.last(experts.rows)).text
