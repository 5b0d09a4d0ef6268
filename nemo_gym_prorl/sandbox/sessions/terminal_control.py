# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Terminal control (window, echo, control characters, end of file) of a terminal that a container has made.

That is ptyprocess's, but for one thing: it wants to make the terminal and fork the program itself. Here the terminal
must come from the container's own ``devpts``, or the program could not open it by its name, and the program must be
born in the container's namespaces; so both are the supervisor's work. What comes back is the controlling end and a
process that is no child of ours: it can be neither waited for nor killed from here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import sys

from ptyprocess import PtyProcess

from nemo_gym_prorl.sandbox.supervisor.processes.foreground import Session


_TIOCGPTN = 0x80045430
"""Asks for the number of a terminal; another one on PowerPC and MIPS only."""

_TIOCGPTPEER = 0x5441
"""Opens the other end of a terminal, by no name. Python knows it from 3.13 on, Linux from 4.13."""


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
