# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Routed experts of each token in a mixture-of-experts model, for trainers that replay the engine's routing. Pure.

NeMo RL's chat server returns routed experts with each turn, for the whole sequence, as text:
``nrlre1:<numbers>:<rows>x<layers>x<experts of a token>:<base64>``, with a row per token. Routed experts are the
largest part of a rollout (half a KiB per token of Qwen3-30B-A3B), so rows stay encoded, and a turn keeps only its last
rows: those of its own tokens and of the token before. That token is the previous turn's last sample, whose row the
engine computes only with the next prompt.
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
    """Routed experts of consecutive tokens; only the header is decoded.

    Attributes:
        numbers: integer type of expert indices (``int8``, ``int16`` or ``int32``).
        rows: number of tokens.
        layers: number of layers with experts.
        top: number of experts per token and layer.
        encoded: the rows in base64.
    """

    numbers: str
    rows: int
    layers: int
    top: int
    encoded: str

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse the header of NeMo RL's text.

        Raises:
            ValueError: the text has another form, or its length does not match the header.
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
        return self.layers * self.top * _BYTES[self.numbers]

    @property
    def text(self) -> str:
        return f"nrlre1:{self.numbers}:{self.rows}x{self.layers}x{self.top}:{self.encoded}"

    def last(self, rows: int) -> bytes:
        """Return the last ``rows`` rows, decoded.

        Raises:
            ValueError: there are fewer rows, or the text is not base64.
        """
        if rows > self.rows:
            raise ValueError(f"routed_experts have {self.rows} rows, and {rows} tokens want one")
        skip = (self.rows - rows) * self.width
        return b64decode(self.encoded[skip // 3 * 4 :], validate=True)[skip % 3 :]

    def of(self, rows: bytes) -> RoutedExperts:
        """Encode other rows with the same layers, experts per layer and integer type."""
        count = len(rows) // self.width if self.width else 0
        return RoutedExperts(self.numbers, count, self.layers, self.top, b64encode(rows).decode())


def last_rows(text: str, rows: int) -> str:
    """Return NeMo RL's text of routed experts, reduced to the last ``rows`` rows.

    Raises:
        ValueError: the text is invalid, or has fewer rows.
    """
    experts = RoutedExperts.read(text)
    return experts.of(experts.last(rows)).text


def continued(before: str | None, text: str | None, rows: int) -> str | None:
    """Return the text of all ``rows`` rows of a sequence, from its last rows ``text`` and its first rows ``before``.
    Returns ``None`` if ``text`` is ``None`` or rows are missing; raises ``ValueError`` if a text is invalid."""
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
