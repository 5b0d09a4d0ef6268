# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Kill a process group of a terminal's session: all of it, and nobody who was given its number since.

A group's number is another's as soon as the last of it has ended. So the kernel is asked to kill the group whose
first process a descriptor holds (Linux 6.9), which is one step even for a group that forks for ever. Where the kernel
can't, or that process has ended and the others have not (``true | sleep 9``), each is looked for and killed. Not by
descent: whose parent has ended descends from nobody, and what a thread forked the kernel does not tell.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

from nemo_gym_prorl.sandbox.limits import usage
from nemo_gym_prorl.sandbox.supervisor.processes import pidfd


_PIDFD_SIGNAL_PROCESS_GROUP = 1 << 2

PATIENCE_S = 5.0
"""How long each is looked for, again and again, while they start more."""


@dataclass(frozen=True, slots=True)
class _Member:
    pid: int
    parent: int
    running: bool


@dataclass(frozen=True, slots=True)
class Session:
    """A session by its first process. As long as that lives, its number is nobody else's."""

    pid: int
    started: int | None

    @classmethod
    def of(cls, pid: int) -> Session:
        """The session whose first process is ``pid``."""
        return cls(pid, pidfd.start_time(pid))

    def kill(self, group: int) -> None:
        """Kill one of its process groups; does nothing if its first process has ended."""
        if not self._kill_at_once(group):
            self._kill_each(group)

    def _kill_at_once(self, group: int) -> bool:
        """Whether it could be done in one step."""
        try:
            descriptor = os.pidfd_open(group)
        except OSError:
            return False
        try:
            if not self._has(group, group):
                return False
            signal.pidfd_send_signal(descriptor, signal.SIGKILL, None, _PIDFD_SIGNAL_PROCESS_GROUP)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _kill_each(self, group: int) -> None:
        # First those that the shell waits for, which is not to see them stopped; the others are stopped first, and
        # so keep their places among the processes that a sandbox may have: what forks for ever comes to an end.
        for one in self._members(group):
            if one.parent == self.pid:
                self._send(one.pid, group, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while running := [one for one in self._members(group) if one.running and one.parent != self.pid]:
            for one in running:
                self._send(one.pid, group, signal.SIGSTOP)
            if time.monotonic() > deadline:
                break
        deadline = time.monotonic() + PATIENCE_S
        while members := list(self._members(group)):
            for one in members:
                self._send(one.pid, group, signal.SIGKILL)
            if time.monotonic() > deadline:
                break

    def _members(self, group: int) -> Iterator[_Member]:
        """The live ones; looks at every process of the machine."""
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    state, parent, *numbers = usage.status(int(name))[:4]
                    if state not in usage.ENDED and list(map(int, numbers)) == [group, self.pid]:
                        yield _Member(int(name), int(parent), state not in "Tt")

    def _send(self, pid: int, group: int, number: signal.Signals) -> None:
        # With several users inside, not all are ours to signal.
        with contextlib.suppress(PermissionError):
            pidfd.send(pid, number, lambda: self._has(pid, group))

    def _has(self, pid: int, group: int) -> bool:
        """Whether a process is in that group of this session."""
        try:
            found = (os.getpgid(pid), os.getsid(pid))
        except OSError:
            return False
        # The session first, then that it was the session's own number.
        return found == (group, self.pid) and self.started is not None and pidfd.start_time(self.pid) == self.started
