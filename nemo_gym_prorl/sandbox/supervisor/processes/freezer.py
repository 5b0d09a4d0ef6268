# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Stop everything that runs in a sandbox, and let it go on: for rollouts that wait for something else meanwhile.

A shell must not see that a program of its was stopped, or it takes it for a background job: parents have stopped
before their children are told to, and continue after them. What forks faster than anybody looks is stopped by the
kernel after that, which signals all processes of a namespace in one step, in which none is forked. The container's
first process and the child by which it notices its supervisor's end are left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from functools import partial

from nemo_gym_prorl.sandbox.isolation.joining import Place
from nemo_gym_prorl.sandbox.launcher import requests
from nemo_gym_prorl.sandbox.limits import usage
from nemo_gym_prorl.sandbox.supervisor.processes import pidfd
from nemo_gym_prorl.sandbox.supervisor.processes.children import Answer, Children
from nemo_gym_prorl.sandbox.supervisor.processes.launcher import Launcher
from nemo_gym_prorl.sandbox.supervisor.storage import state_dir


PATIENCE_S = 5.0

EACH_S = 1.0
"""For how long they are stopped one after the other, before all are at once."""

_STOPPED = "TtZX"


async def pause(children: Children, launcher: Launcher, space: state_dir.Space, place: Place) -> Answer:
    """Stop what runs, until nothing does: it may start more meanwhile.

    Raises:
        Refused: it does not stop.
    """
    deadline = time.monotonic() + PATIENCE_S
    await children.run(partial(_stop_each, space, time.monotonic() + EACH_S))
    stopped = False
    while space.alive and not stopped and time.monotonic() < deadline:
        answer, _files = await launcher.run(requests.stop(place))
        stopped = bool(answer["number"])
    return await children.run(partial(_settle, space, deadline, stopped=stopped))


def _settle(space: state_dir.Space, deadline: float, *, stopped: bool) -> Answer:
    """Let go on what is the container's own, and stop what was not there yet."""
    for pid, started in _own(space):
        _send(pid, started, signal.SIGCONT)
    answer, _files = _stop_each(space, deadline)
    if answer["running"] or (space.alive and not stopped):
        resume(space)
        raise OSError(f"processes {answer['running'] or 'of it'} do not stop")
    return {}, []


def _stop_each(space: state_dir.Space, deadline: float) -> Answer:
    """Stop what is seen to run, until nothing does; with the numbers of what still ran when time was up."""
    while running := [(pid, started) for started, pid, state in _programs(space) if state not in _STOPPED]:
        for pid, started in running:
            _send(pid, started, signal.SIGSTOP)
            # On a busy machine it takes some time to stop, in which it could still look after its children.
            while _runs(pid, started) and time.monotonic() < deadline:
                time.sleep(0.0002)
        if time.monotonic() > deadline:
            return {"running": [pid for pid, _started in running]}, []
    return {"running": []}, []


def resume(space: state_dir.Space) -> Answer:
    """Let everything go on."""
    for started, pid, _state in reversed(_programs(space)):
        _send(pid, started, signal.SIGCONT)
    return {}, []


def not_started_by(space: state_dir.Space, pid: int) -> tuple[int, bool]:
    """How many programs run that a process has not started itself, and whether one of those that it has may be doing
    something: it does not wait, or has threads of which one may not."""
    others, busy = 0, False
    for _started, program, state in _programs(space):
        with contextlib.suppress(OSError):
            found = usage.status(program)
            others += int(found[usage.PARENT]) != pid
            busy |= state != "S" or int(found[usage.THREADS]) > 1
    return others, busy


def _programs(space: state_dir.Space) -> list[tuple[int, int, str]]:
    """Start time, number and state of every process but the container's own, parents first."""
    return sorted((started, pid, state) for started, pid, state, own in _all(space) if not own)


def _own(space: state_dir.Space) -> list[tuple[int, int]]:
    """Number and start time of what is the container's own beside its first process."""
    return [(pid, started) for started, pid, _state, own in _all(space) if own and pid != space.init]


def _all(space: state_dir.Space) -> Iterator[tuple[int, int, str, bool]]:
    """Start time, number and state of every process, and whether it is the container's own."""
    line = _line(space.init)
    for pid in space.members():
        with contextlib.suppress(OSError):
            state, parent, *rest = usage.status(pid)
            own = pid == space.init or (bool(line) and int(parent) == space.init and _line(pid) == line)
            yield int(rest[17]), pid, state, own


def _runs(pid: int, started: int) -> bool:
    try:
        state, *rest = usage.status(pid)
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
