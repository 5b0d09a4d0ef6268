# SPDX-License-Identifier: Apache-2.0
"""Output of any size in bounded memory: the beginning and the end are kept, what is between is counted."""

from __future__ import annotations

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
            self._tail.append(data)
            self._tail_size += len(data)
            while self._tail_size - len(self._tail[0]) >= self._half:
                self._tail_size -= len(self._tail.popleft())

    @property
    def omitted(self) -> int:
        """Bytes that were not kept."""
        return max(0, self.total - len(self._head) - min(self._tail_size, self._half))

    def text(self) -> str:
        """What was kept, invalid UTF-8 replaced, with one line that says how many bytes are left out."""
        tail = b"".join(self._tail)[-self._half :]
        if not self.omitted:
            return (bytes(self._head) + tail).decode("utf-8", "replace")
        # A character may have been cut in two on either side.
        head = self._head.decode("utf-8", "ignore")
        return f"{head}\n[... {self.omitted} bytes omitted ...]\n{tail.decode('utf-8', 'ignore')}"
