# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Output of any size in bounded memory: the beginning and the end are kept, what is between is counted."""

from __future__ import annotations

import codecs
from collections import deque


class HeadTail:
    """Keeps the first and the last bytes of a stream, half of ``limit`` each, and knows how many there were."""

    def __init__(self, limit: int) -> None:
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._half = max(1, limit // 2)
        self.total = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            # Not what can't be among the last bytes: it would be held with them.
            self._tail.append(data[-self._half :])
            self._tail_size += len(self._tail[-1])
            while self._tail_size - len(self._tail[0]) >= self._half:
                self._tail_size -= len(self._tail.popleft())

    @property
    def omitted(self) -> int:
        """Bytes that were not kept, or of which a part was not kept."""
        head, tail = self._ends()
        return self.total - len(head) - len(tail)

    def text(self) -> str:
        """What was kept, invalid UTF-8 replaced, with one line that says how many bytes are left out."""
        head, tail = self._ends()
        omitted = self.total - len(head) - len(tail)
        if not omitted:
            return (head + tail).decode("utf-8", "replace")
        between = f"\n[... {omitted} bytes omitted ...]\n"
        return head.decode("utf-8", "replace") + between + tail.decode("utf-8", "replace")

    def _ends(self) -> tuple[bytes, bytes]:
        """Beginning and end; if something is missing between them, without the halves of a character that was cut."""
        head, tail = bytes(self._head), b"".join(self._tail)[-self._half :]
        if len(head) + len(tail) == self.total:
            return head, tail
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(head)
        cut = len(decoder.getstate()[0])
        begin = next((i for i, byte in enumerate(tail[:3]) if byte & 0xC0 != 0x80), min(3, len(tail)))
        return head[: len(head) - cut], tail[begin:]
