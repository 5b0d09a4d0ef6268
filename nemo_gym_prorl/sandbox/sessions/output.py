# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Output of any size in bounded memory: the beginning and the end are kept, what is between is counted."""

from __future__ import annotations

import asyncio
import codecs
import errno
import os
from collections import deque


_READ_BYTES = 1 << 16
_READS_A_TURN = 16
"""Reads before other tasks of the loop get a turn while a command floods the terminal."""

_LAST_READS = 64
"""Reads after a command's end; more than all that the kernel holds of what it wrote."""


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


class TerminalOutput:
    """The output of one shell's terminal, and when there was some. Belongs to one event loop.

    Output that comes between two commands, from background jobs, belongs to the next command.

    Args:
        limit: bytes that are kept of a command's output.
    """

    def __init__(self, limit: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._terminal = -1
        self._limit = limit
        self._changed: asyncio.Future[None] | None = None
        self.kept = HeadTail(limit)
        self.heard = 0.0
        """When there was output last, by the loop's clock."""

    def listen_to(self, terminal: int) -> None:
        """Read from a terminal's descriptor, and drop what came from another one."""
        self._terminal = terminal
        self.kept = HeadTail(self._limit)
        self._loop.add_reader(terminal, self._read)

    def stop(self) -> None:
        """Read no more; call it before the terminal is closed."""
        if self._terminal >= 0:
            self._loop.remove_reader(self._terminal)
            self._terminal = -1

    def limit_to(self, limit: int) -> None:
        """Keep so many bytes from now on."""
        if limit != self._limit:
            earlier, self._limit = self.kept.text(), limit
            self.kept = HeadTail(limit)
            self.kept.add(earlier.encode())

    def clear(self) -> None:
        """Drop what was kept: its command has ended."""
        self.kept = HeadTail(self._limit)

    def take_last(self) -> None:
        """Read what was written until now."""
        self._take(_LAST_READS)

    def notify(self) -> None:
        """Wake the waiter of :meth:`change`, also when there is no output."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def change(self, until: float) -> None:
        """Wait for output or :meth:`notify`, or until a time of the loop's clock."""
        self._changed = self._loop.create_future()
        timer = self._loop.call_at(until, self.notify)
        try:
            await self._changed
        finally:
            timer.cancel()
            self._changed = None

    def _read(self) -> None:
        if not self._take(_READS_A_TURN) and self._terminal >= 0:
            self._loop.remove_reader(self._terminal)
        self.heard = self._loop.time()
        self.notify()

    def _take(self, most: int) -> bool:
        """Read so many times at most; return whether there may ever be more."""
        for _ in range(most):
            if self._terminal < 0:
                return False
            try:
                data = os.read(self._terminal, _READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                # A terminal whose last user is gone.
                if error.errno != errno.EIO:
                    raise
                return False
            self.kept.add(data)
        return True
