# SPDX-License-Identifier: Apache-2.0
"""Stop everything that runs in a sandbox, and let it go on: for rollouts that wait for something else meanwhile.

A shell must not see that a program of its was stopped, or it takes it for a background job: parents are stopped before
their children, and continued after them. The container's first process and the child by which it notices its
supervisor's end are left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from nemo_gym_prorl.sandbox import lease
from nemo_gym_prorl.sandbox.wire import Message


PATIENCE_S = 5.0

_STOPPED = "TtZX"


def pause(space: lease.Space) -> tuple[Message, list[int]]:
    """Stop what runs, until nothing does: it may start more meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while running := [pid for pid, state in _programs(space) if state not in _STOPPED]:
        for pid in running:
            _send(pid, signal.SIGSTOP)
        if time.monotonic() > deadline:
            resume(space)
            raise OSError(f"processes {running} do not stop")
        time.sleep(0.002)
    return {}, []


def resume(space: lease.Space) -> tuple[Message, list[int]]:
    """Let everything go on."""
    for pid, _state in reversed(_programs(space)):
        _send(pid, signal.SIGCONT)
    return {}, []


def _programs(space: lease.Space) -> list[tuple[int, str]]:
    """Number and state of every process but the container's own two, parents first."""
    first = _words(space.init)
    found = []
    for pid in space.members():
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/stat") as file:
                state, parent, *rest = file.read().rpartition(")")[2].split()
            if pid != space.init and (int(parent) != space.init or _words(pid) != first):
                found.append((int(rest[17]), pid, state))
    return [(pid, state) for _started, pid, state in sorted(found)]


def _words(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
