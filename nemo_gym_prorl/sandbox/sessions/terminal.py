# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The terminal of a shell: its control (window, echo, control characters, end of file) and its output.

The control is ptyprocess's, but for one thing: ptyprocess makes the terminal and forks the program itself. Here the
terminal must come from the container's own ``devpts``, or the program could not open it by its name, and the program
must be born in the container's namespaces; so both are the supervisor's work. The supervisor returns the controlling
end, and a process that is no child of this one: it can be neither waited for nor killed from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import select
import sys

from ptyprocess import PtyProcess

from nemo_gym_prorl.sandbox.sessions.output import HeadTail
from nemo_gym_prorl.sandbox.supervisor.signals import Session


_TIOCGPTN = 0x80045430
"""Asks for the number of a terminal; another one on PowerPC and MIPS only."""

_TIOCGPTPEER = 0x5441
"""Opens the other end of a terminal, by no name. Python knows it from 3.13 on, Linux from 4.13."""

_READ_BYTES = 1 << 16
_READS_A_TURN = 16
"""Reads before other tasks of the loop get a turn while a command floods the terminal."""

_LAST_READS = 64
"""Reads after a command's end; more than all that the kernel holds of what it wrote."""


class ContainerTerminal(PtyProcess):  # type: ignore[misc]  # has no types
    """The controlling end, never blocking. Its process is known to the supervisor alone."""

    def __init__(self, pid: int, fd: int) -> None:
        super().__init__(pid, fd)
        self.closed: bool = False
        self._session = Session.of(pid)
        os.set_blocking(fd, False)
        self.number = int.from_bytes(fcntl.ioctl(fd, _TIOCGPTN, bytes(4)), sys.byteorder)
        """In the sandbox its path is ``/dev/pts/NUMBER``."""

    def press_control(self, key: str) -> None:
        """Press Ctrl and a key; who is in the foreground has the signal of it when this returns.

        It is lost where nobody has read what was typed before and no more fits.
        """
        with contextlib.suppress(BlockingIOError):
            self.sendcontrol(key)
            self._take_typed()

    def _take_typed(self) -> None:
        """Have the kernel take what was typed, which it else does in its own time.

        A Ctrl-C that is late by a millisecond strikes bash between two commands, or in the middle of the next one's
        line. The kernel takes what it has at once where somebody looks, at the other end, whether there is input.
        """
        with contextlib.suppress(OSError):  # nobody has the terminal any more, or the kernel is too old
            other_end = fcntl.ioctl(self.fd, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                look = select.poll()
                look.register(other_end, select.POLLIN)
                look.poll(0)
            finally:
                os.close(other_end)

    def foreground(self) -> int | None:
        """The process group in the foreground; ``None`` for the first process itself, or nobody."""
        # It fails where nobody is in the foreground, or nobody has the terminal any more.
        with contextlib.suppress(OSError):
            group = os.tcgetpgrp(self.fd)
            return group if group != self.pid else None
        return None

    def kill_foreground(self) -> None:
        """Kill what runs in the foreground, if it is not the first process itself. May take some time."""
        with contextlib.suppress(OSError):
            if (group := self.foreground()) is not None:
                self._session.kill(group)

    def close(self, force: bool = False) -> None:
        """Close our end, which hangs up on everything in the terminal's session."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(OSError):
                self.fileobj.close()
            self.fd = -1


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
