# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Signals to processes that are not our children: never to a number alone, which the kernel gives away again.

A descriptor of a process (Linux 5.3) is opened first, and then what is known of the process is compared: whatever
bears the number later, the signal goes to the one that was compared. Older kernels leave a moment between the two.

A process group's number is another's as soon as the last of it has ended. So the kernel is asked to kill the group
whose first process a descriptor holds (Linux 6.9), which is one step even for a group that forks for ever. Where the
kernel can't, or that process has ended and the others have not (``true | sleep 9``), each is looked for and killed.
Not by descent: a process whose parent has ended descends from none of them, and the kernel does not list what a thread
forked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nemo_gym_prorl.sandbox.limits import usage


_PF_EXITING = 0x4


def start_time(pid: int) -> int | None:
    """When a process was started, in ticks since boot; ``None`` if it has ended."""
    try:
        found = usage.read_stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if found[usage.STATE] in usage.ENDED_STATES else int(found[usage.STARTED])


def is_exiting(pid: int) -> bool:
    """Whether a process has begun to end, or has ended; the first of a PID namespace ends after all others."""
    try:
        return bool(int(usage.read_stat(pid)[usage.FLAGS]) & _PF_EXITING)
    except (FileNotFoundError, ProcessLookupError):
        return True


def send(pid: int, number: int, is_it: Callable[[], bool]) -> bool:
    """Send a signal to a process if it is the one that is meant; returns whether it was sent.

    Args:
        pid: its number.
        number: of the signal.
        is_it: whether what bears the number now is the one.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:
        # A kernel without, or no descriptor left.
        descriptor = -1
    try:
        if not is_it():
            return False
        if descriptor < 0:
            os.kill(pid, number)
        else:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return True


def kill(pid: int, started: int) -> None:
    """End the process of that number that was started then, if it lives."""
    with contextlib.suppress(PermissionError):
        send(pid, signal.SIGKILL, lambda: start_time(pid) == started)


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
        return cls(pid, start_time(pid))

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
                    state, parent, *numbers = usage.read_stat(int(name))[:4]
                    if state not in usage.ENDED_STATES and list(map(int, numbers)) == [group, self.pid]:
                        yield _Member(int(name), int(parent), state not in "Tt")

    def _send(self, pid: int, group: int, number: signal.Signals) -> None:
        # With several users inside, not all are ours to signal.
        with contextlib.suppress(PermissionError):
            send(pid, number, lambda: self._has(pid, group))

    def _has(self, pid: int, group: int) -> bool:
        """Whether a process is in that group of this session."""
        try:
            found = (os.getpgid(pid), os.getsid(pid))
        except OSError:
            return False
        # The session first, then that it was the session's own number.
        return found == (group, self.pid) and self.started is not None and start_time(self.pid) == self.started
