# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Signals to processes that are not children: by identity, since the kernel reuses pids.

:func:`send` opens a pidfd first (Linux 5.3) and compares the process afterwards, so the signal reaches the compared
process even if its pid is reused. Older kernels leave a race between the comparison and the signal.

The id of a process group is reused once its last member has ended. So the kernel kills the group of a pidfd's process
in one step (Linux 6.9), which works even for a group that forks for ever. On older kernels, or if the group's leader
has ended before others (``true | sleep 9``), :class:`Session` looks for each member and kills it. Members are found by
session and group, not by descent: an orphan descends from no member, and the kernel does not list children of threads.
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
    """Return a process's start time in ticks since boot; ``None`` if it has ended."""
    try:
        found = usage.read_stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if found[usage.STATE] in usage.ENDED_STATES else int(found[usage.STARTED])


def is_exiting(pid: int) -> bool:
    """Return whether a process is exiting or has ended. The first process of a namespace exits after all others."""
    try:
        return bool(int(usage.read_stat(pid)[usage.FLAGS]) & _PF_EXITING)
    except (FileNotFoundError, ProcessLookupError):
        return True


def send(pid: int, number: int, is_it: Callable[[], bool]) -> bool:
    """Send a signal to a process of known identity; return whether it was sent.

    Args:
        pid: the process id.
        number: the signal.
        is_it: returns whether the process that has the pid now is the intended one.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:
        # The kernel has no pidfd, or this process may open no more files.
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
    """Kill the process with this pid and start time, if it lives."""
    with contextlib.suppress(PermissionError):
        send(pid, signal.SIGKILL, lambda: start_time(pid) == started)


_PIDFD_SIGNAL_PROCESS_GROUP = 1 << 2

KILL_EACH_S = 5.0
"""Time to stop, and to kill, a group whose members keep forking; an ordinary group takes milliseconds."""


@dataclass(frozen=True, slots=True)
class _Member:
    pid: int
    parent: int
    running: bool


@dataclass(frozen=True, slots=True)
class Session:
    """A session, identified by its leader: while the leader lives, its pid is not reused.

    Attributes:
        pid: pid of the session leader.
        started: start time of the leader; ``None`` if it had ended already.
    """

    pid: int
    started: int | None

    @classmethod
    def of(cls, pid: int) -> Session:
        return cls(pid, start_time(pid))

    def kill(self, group: int) -> None:
        """Kill a process group of the session; a no-op if the leader has ended."""
        if not self._kill_at_once(group):
            self._kill_each(group)

    def _kill_at_once(self, group: int) -> bool:
        """Kill the group in one step; return whether the kernel could."""
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
        # Children of the leader first: a shell must not see a child stopped. The others are stopped before they are
        # killed: a stopped process still counts against the sandbox's limit, so a fork bomb runs out of processes.
        for one in self._members(group):
            if one.parent == self.pid:
                self._send(one.pid, group, signal.SIGKILL)
        deadline = time.monotonic() + KILL_EACH_S
        while running := [one for one in self._members(group) if one.running and one.parent != self.pid]:
            for one in running:
                self._send(one.pid, group, signal.SIGSTOP)
            if time.monotonic() > deadline:
                break
        deadline = time.monotonic() + KILL_EACH_S
        while members := list(self._members(group)):
            for one in members:
                self._send(one.pid, group, signal.SIGKILL)
            if time.monotonic() > deadline:
                break

    def _members(self, group: int) -> Iterator[_Member]:
        """Yield the live members of a group; read every process of the machine."""
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    state, parent, *numbers = usage.read_stat(int(name))[:4]
                    if state not in usage.ENDED_STATES and list(map(int, numbers)) == [group, self.pid]:
                        yield _Member(int(name), int(parent), state not in "Tt")

    def _send(self, pid: int, group: int, number: signal.Signals) -> None:
        # In a sandbox with several user ids, some processes may not be signalled.
        with contextlib.suppress(PermissionError):
            send(pid, number, lambda: self._has(pid, group))

    def _has(self, pid: int, group: int) -> bool:
        try:
            found = (os.getpgid(pid), os.getsid(pid))
        except OSError:
            return False
        # The order matters: the leader alive afterwards proves that the session id was not reused.
        return found == (group, self.pid) and self.started is not None and start_time(self.pid) == self.started
