# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Output that waits for a reader, and a bounded piece of what was read before, so that another reader can go back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Some output of one stream.

    Attributes:
        begin: how many bytes of all streams came before it.
        stream: which stream.
        data: what it says.
    """

    begin: int
    stream: str
    data: bytes

    @property
    def end(self) -> int:
        return self.begin + len(self.data)


SMALL = 4096
"""Pieces that are smaller in sum become one, so that there are never many: a program may write byte by byte."""


class Window:
    """Pieces in order. Nothing that was not read is ever dropped: who adds must stop while it is :attr:`full`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._past: deque[Piece] = deque()
        self._waiting: deque[Piece] = deque()
        self._end = 0
        self.position = 0
        """Bytes read so far."""

    @property
    def full(self) -> bool:
        """As much waits as may."""
        return self._end - self.position >= self._limit

    @property
    def begin(self) -> int:
        """The first byte that is still there."""
        for pieces in (self._past, self._waiting):
            if pieces:
                return pieces[0].begin
        return self._end

    def add(self, stream: str, data: bytes) -> None:
        """Take output, and forget the oldest of what was read."""
        if data:
            last = self._waiting[-1] if self._waiting else None
            if last and last.stream == stream and len(last.data) + len(data) <= SMALL:
                self._waiting[-1] = Piece(last.begin, stream, last.data + data)
            else:
                self._waiting.append(Piece(self._end, stream, data))
            self._end += len(data)
        while self._past and self._past[0].end <= self._end - self._limit:
            self._past.popleft()

    def next(self) -> Piece | None:
        """The next piece to read; it stays the next until :meth:`read`."""
        if not self._waiting:
            return None
        piece = self._waiting[0]
        skipped = max(0, self.position - piece.begin)
        return Piece(piece.begin + skipped, piece.stream, piece.data[skipped:])

    def read(self, piece: Piece) -> None:
        """It was read."""
        self.position = piece.end
        while self._waiting and self._waiting[0].end <= self.position:
            self._past.append(self._waiting.popleft())

    def go_back(self, position: int) -> None:
        """Read again from that byte on, or from the first that is still there."""
        self.position = max(self.begin, min(position, self._end))
        while self._past and self._past[-1].end > self.position:
            self._waiting.appendleft(self._past.pop())
        while self._waiting and self._waiting[0].end <= self.position:
            self._past.append(self._waiting.popleft())
