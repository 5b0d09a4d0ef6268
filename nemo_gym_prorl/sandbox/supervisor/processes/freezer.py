# SPDX-License-Identifier: Apache-2.0
"""Stop everything that runs in a sandbox, and let it go on: for rollouts that wait for something else meanwhile.

A shell must not see that a program of its was stopped, or it takes it for a background job: parents have stopped
before their children are told to, and continue after them. The container's first process and the child by which it
notices its supervisor's end are left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from nemo_gym_prorl.sandbox.limits import threads
from nemo_gym_prorl.sandbox.supervisor.processes import pidfd
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message
from nemo_gym_prorl.sandbox.supervisor.storage import state_dir


PATIENCE_S = 5.0

_STOPPED = "TtZX"


def pause(space: state_dir.Space) -> tuple[Message, list[int]]:
    """Stop what runs, until nothing does: it may start more meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while running := [(pid, started) for started, pid, state in _programs(space) if state not in _STOPPED]:
        for pid, started in running:
            _send(pid, started, signal.SIGSTOP)
            # On a busy machine it takes some time to stop, in which it could still look after its children.
            while _runs(pid, started) and time.monotonic() < deadline:
                time.sleep(0.0002)
        if time.monotonic() > deadline:
            resume(space)
            raise OSError(f"processes {[pid for pid, _started in running]} do not stop")
    return {}, []


def resume(space: state_dir.Space) -> tuple[Message, list[int]]:
    """Let everything go on."""
    for started, pid, _state in reversed(_programs(space)):
        _send(pid, started, signal.SIGCONT)
    return {}, []


def _programs(space: state_dir.Space) -> list[tuple[int, int, str]]:
    """Start time, number and state of every process but the container's own, parents first."""
    line = _line(space.init)
    found = []
    for pid in space.members():
        with contextlib.suppress(OSError):
            state, parent, *rest = threads.status(pid)
            if pid != space.init and not (line and int(parent) == space.init and _line(pid) == line):
                found.append((int(rest[17]), pid, state))
    return sorted(found)


def _runs(pid: int, started: int) -> bool:
    try:
        state, *rest = threads.status(pid)
    except OSError:
        return False
    return state not in _STOPPED and int(rest[18]) == started


def _line(pid: int) -> str:
    """The socket on which a process hears of the supervisor's end, which no program inside gets hold of."""
    try:
        found = os.readlink(f"/proc/{pid}/fd/0")
    except OSError:
        return ""
    return found if found.startswith("socket:") else ""


def _send(pid: int, started: int, number: signal.Signals) -> None:
    pidfd.send(pid, number, lambda: pidfd.start_time(pid) == started)
