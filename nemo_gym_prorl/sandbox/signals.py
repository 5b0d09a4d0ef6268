# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Signals to processes that are not children. Identity is checked beyond the pid, since the kernel reuses pids.

:func:`send` opens a pidfd first (Linux 5.3) and then checks the process, so the signal reaches the checked process
even if its pid is reused. Older kernels leave a race between the check and the signal.

A process group's id may be reused once the group's last member has ended. So :class:`Session` kills a group by the
pidfd of its leader, in one atomic step (Linux 6.9), which works even for a group that forks for ever. On older
kernels, or if the leader ends before other members (``true | sleep 9``), :class:`Session` finds and kills each member.
Members are found by session and group id, not by descent: an orphan is no descendant of a member.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nemo_gym_prorl.sandbox.limits import usage


_PF_EXITING = 0x4  # the kernel's flag of processes that are exiting


def start_time(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot; ``None`` if the process has ended."""
    try:
        found = usage.read_stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if found[usage.STATE] in usage.ENDED_STATES else int(found[usage.STARTED])


def is_exiting(pid: int) -> bool:
    """Return whether a process is exiting or has ended. A PID namespace's first process is exiting until all other
    processes of the namespace have ended."""
    try:
        return bool(int(usage.read_stat(pid)[usage.FLAGS]) & _PF_EXITING)
    except (FileNotFoundError, ProcessLookupError):
        return True


def send(pid: int, number: int, is_it: Callable[[], bool]) -> bool:
    """Send a signal to a process after a check of its identity; return whether the signal was sent.

    Args:
        pid: the process id.
        number: the signal.
        is_it: returns whether the process that now has the pid is the intended process.

    Raises:
        PermissionError: this process may not signal the intended process.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:
        # The kernel does not support pidfds, or this process has no descriptor left.
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
"""Time limit for suspending, and again for killing, a group member by member; the members may keep forking."""


@dataclass(frozen=True, slots=True)
class _Member:
    pid: int
    parent: int
    running: bool


@dataclass(frozen=True, slots=True)
class Session:
    """A POSIX session, identified by its leader: the session's id is not reused while the leader lives.

    Attributes:
        pid: pid of the session leader, which is also the session's id.
        started: start time of the leader, as :func:`start_time`; ``None`` if the leader had ended already.
    """

    pid: int
    started: int | None

    @classmethod
    def of(cls, pid: int) -> Session:
        return cls(pid, start_time(pid))

    def kill(self, group: int) -> None:
        """Kill a process group of the session; a no-op if the session's leader has ended."""
        if not self._kill_at_once(group):
            self._kill_each(group)

    def _kill_at_once(self, group: int) -> bool:
        """Kill the group in one atomic step; return ``False`` if the kernel cannot, or a leader has ended."""
        try:
            descriptor = os.pidfd_open(group)
        except OSError:
            return False
        try:
            if not self._has_member(group, group):
                return False
            signal.pidfd_send_signal(descriptor, signal.SIGKILL, None, _PIDFD_SIGNAL_PROCESS_GROUP)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _kill_each(self, group: int) -> None:
        # The session leader's children are killed first: a shell would report a child that gets SIGSTOP. Others get
        # SIGSTOP before any is killed: suspended processes count against the limit, so a fork bomb cannot fork again.
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
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    state, parent, *numbers = usage.read_stat(int(name))[:4]
                    if state not in usage.ENDED_STATES and list(map(int, numbers)) == [group, self.pid]:
                        yield _Member(int(name), int(parent), state not in "Tt")

    def _send(self, pid: int, group: int, number: signal.Signals) -> None:
        # In a sandbox with several user ids, some processes may not be signalled.
        with contextlib.suppress(PermissionError):
            send(pid, number, lambda: self._has_member(pid, group))

    def _has_member(self, pid: int, group: int) -> bool:
        try:
            found = (os.getpgid(pid), os.getsid(pid))
        except OSError:
            return False
        # The leader is checked last: if the leader still lives, the session id read above was not reused.
        return found == (group, self.pid) and self.started is not None and start_time(self.pid) == self.started
