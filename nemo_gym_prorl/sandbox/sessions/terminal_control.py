# SPDX-License-Identifier: Apache-2.0
"""Terminal control (window, echo, control characters, end of file) of a terminal that a container has made.

That is ptyprocess's, but for one thing: it wants to make the terminal and fork the program itself. Here the terminal
must come from the container's own ``devpts``, or the program could not open it by its name, and the program must be
born in the container's namespaces; so both are the supervisor's work. What comes back is the controlling end and a
process that is no child of ours: it can be neither waited for nor killed from here.
"""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial

from ptyprocess import PtyProcess

from nemo_gym_prorl.sandbox.limits.threads import children
from nemo_gym_prorl.sandbox.supervisor.processes import pidfd


class ContainerTerminal(PtyProcess):  # type: ignore[misc]  # has no types
    """The controlling end, never blocking. Its process is known to the supervisor alone."""

    def __init__(self, pid: int, fd: int) -> None:
        super().__init__(pid, fd)
        self.closed: bool = False
        os.set_blocking(fd, False)

    def press_control(self, key: str) -> None:
        """Press Ctrl and a key. It is lost where nobody has read what was typed before and no more fits."""
        with contextlib.suppress(BlockingIOError):
            self.sendcontrol(key)

    def kill_foreground(self) -> None:
        """Kill what runs in the foreground, if it is not the first process itself.

        Not the group by its number, which may be another's as soon as the last of it has ended: each that descends
        from the first process, if it is in the group still.
        """
        try:
            group = os.tcgetpgrp(self.fd)
        except OSError:
            # Nobody is in the foreground, or nobody has the terminal any more.
            return
        if group == self.pid:
            return
        family = [self.pid]
        for pid in family:
            family += children(pid)
        for pid in family[1:]:
            # With several users inside, not all are ours to signal.
            with contextlib.suppress(PermissionError):
                pidfd.send(pid, signal.SIGKILL, partial(_is_in, pid, group, self.pid))

    def close(self, force: bool = False) -> None:
        """Close our end, which hangs up on everything in the terminal's session."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(OSError):
                self.fileobj.close()
            self.fd = -1


def _is_in(pid: int, group: int, session: int) -> bool:
    """Whether a process is in that group of that session, whose first process lives."""
    try:
        return (os.getpgid(pid), os.getsid(pid)) == (group, session)
    except OSError:
        return False
