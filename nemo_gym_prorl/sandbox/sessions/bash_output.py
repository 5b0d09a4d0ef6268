# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a shell's terminal shows: taken as it comes, kept up to a limit, and told to whoever waits for something new.

What comes between two commands, from the background, goes to the next one.
"""

from __future__ import annotations

import asyncio
import errno
import os

from nemo_gym_prorl.sandbox.sessions.output import HeadTail
from nemo_gym_prorl.sandbox.sessions.terminal_control import ContainerTerminal


_READ = 1 << 16
_READS_A_TURN = 16
"""Reads before other tasks of the loop get a turn while a command floods the terminal."""

_LAST_READS = 64
"""Reads after a command's end; more than all that the kernel holds of what it wrote."""


class BashOutput:
    """The output of one shell, and when there was some. Belongs to one event loop.

    Args:
        limit: bytes that are kept of a command's output.
    """

    def __init__(self, limit: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._terminal: ContainerTerminal | None = None
        self._limit = limit
        self._changed: asyncio.Future[None] | None = None
        self.kept = HeadTail(limit)
        self.heard = 0.0
        """When there was output last, by the loop's clock."""

    def listen_to(self, terminal: ContainerTerminal) -> None:
        """Take what comes from there, and forget what came from another one."""
        self._terminal = terminal
        self.kept = HeadTail(self._limit)
        self._loop.add_reader(terminal.fd, self._read)

    def let_go(self) -> None:
        """Take nothing any more; the terminal will be closed."""
        if self._terminal:
            self._loop.remove_reader(self._terminal.fd)
            self._terminal = None

    def limit_to(self, limit: int) -> None:
        """Keep so many bytes from now on."""
        if limit != self._limit:
            earlier, self._limit = self.kept.text(), limit
            self.kept = HeadTail(limit)
            self.kept.add(earlier.encode())

    def begin_anew(self) -> None:
        """What was kept belongs to a command that has ended."""
        self.kept = HeadTail(self._limit)

    def take_last(self) -> None:
        """Take what was written until now."""
        self._take(_LAST_READS)

    def notify(self) -> None:
        """There is something new, be it no output."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def change(self, until: float) -> None:
        """Wait for something new, or until a time of the loop's clock."""
        self._changed = self._loop.create_future()
        timer = self._loop.call_at(until, self.notify)
        try:
            await self._changed
        finally:
            timer.cancel()
            self._changed = None

    def _read(self) -> None:
        if not self._take(_READS_A_TURN) and self._terminal:
            self._loop.remove_reader(self._terminal.fd)
        self.heard = self._loop.time()
        self.notify()

    def _take(self, most: int) -> bool:
        """Read so many times at most; whether there may ever be more."""
        for _ in range(most):
            if self._terminal is None:
                return False
            try:
                data = os.read(self._terminal.fd, _READ)
            except BlockingIOError:
                break
            except OSError as error:
                # A terminal whose last user is gone.
                if error.errno != errno.EIO:
                    raise
                return False
            self.kept.add(data)
        return True
