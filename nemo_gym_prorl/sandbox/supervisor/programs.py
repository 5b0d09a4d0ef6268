# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Programs on their way into a sandbox, and in it: each can be killed at any stage, by the name that its asker chose.

A *joiner* that the launcher forks enters the sandbox's namespaces, starts one process there as our own child, says
which one it is, lets it begin, and ends. That process executes the program. Whatever is inside may stop it before
(``kill -STOP -1``), for ever: only its asker waits for it. The channel tells what became of it: a complaint, or
nothing when the program was executed and the channel so closed.

So a kill is effective whenever it comes: the joiner is ended, and what it started, known or not, begins nothing
without its joiner's word.

:func:`pause` stops all that runs. A shell must not see that a program of its was stopped, or it takes it for a
background job: parents have stopped before their children are told to, and continue after them. What forks faster than
that is stopped by the kernel, which signals all processes of a namespace in one step, in which none is forked. The
container's first process and the child by which it notices its supervisor's end are left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

from nemo_gym_prorl.background import log_exceptions
from nemo_gym_prorl.sandbox.isolation.namespaces import SandboxNamespaces
from nemo_gym_prorl.sandbox.launcher import requests
from nemo_gym_prorl.sandbox.limits import usage
from nemo_gym_prorl.sandbox.limits.cgroups import Group
from nemo_gym_prorl.sandbox.limits.rlimits import COUNTED_PER_NAMESPACE, HostFacts
from nemo_gym_prorl.sandbox.supervisor import signals, state_dir
from nemo_gym_prorl.sandbox.supervisor.connection import PeerGone, close_all, ready
from nemo_gym_prorl.sandbox.supervisor.errors import EXHAUSTED, KILLED, Refused, no_process
from nemo_gym_prorl.sandbox.supervisor.lifecycle import Sandboxes
from nemo_gym_prorl.sandbox.supervisor.messages import SpawnRequest
from nemo_gym_prorl.sandbox.supervisor.processes import TRIES, Adopt, Answer, Child, Children, Launcher, LauncherLost
from nemo_gym_prorl.sandbox.supervisor.sandbox import Sandbox


class Program:
    """One program.

    Attributes:
        joiner: what starts it.
        process: it, once it is known.
        wanted: the time in which it is started, which a kill ends; ``None`` when it has begun.
        killed: whether it is to end; it may have begun in the moment in which that was said.
    """

    def __init__(self) -> None:
        self.joiner: Child | None = None
        self.process: Child | None = None
        self.wanted: asyncio.Timeout | None = asyncio.timeout(None)
        self.killed = False

    def kill(self) -> None:
        """End it with its process group, or see that it does not begin."""
        self.killed = True
        if self.wanted is None:
            self.strike()
        elif not self.wanted.expired():
            self.wanted.reschedule(0.0)

    def strike(self) -> None:
        """Kill its process, if that is known; as long as it is in our session, it has no group."""
        if self.process:
            self.process.signal(signal.SIGKILL, group=True)
            self.process.kill()


class Programs:
    """All programs that run, or are to run, in the sandboxes of a supervisor."""

    def __init__(self, children: Children, launcher: Launcher, sandboxes: Sandboxes) -> None:
        self._children = children
        self._launcher = launcher
        self._sandboxes = sandboxes
        self._all: dict[str, Program] = {}

    async def start(
        self, sandbox: Sandbox, order: SpawnRequest, files: list[int], ended: Callable[[int], object]
    ) -> tuple[int, list[int]]:
        """Start a program; its number when it runs, with its terminal if it has one.

        Args:
            sandbox: where, which is told of it, and of its end.
            order: as for :func:`.requests.spawn`.
            files: its open files; the caller's.
            ended: told its exit code, negative for a signal, after this.

        Raises:
            Refused: it does not run.
        """
        name = order.spawn
        if name in self._all:
            raise OSError(f"there is a program {name} already")
        place = sandbox.place_to_join()
        program = self._all[name] = Program()
        try:
            request = requests.spawn(place, order)
            assert program.wanted
            async with program.wanted:
                terminal = await self._start(program, request, files, sandbox.group)
        except BaseException as error:
            del self._all[name]
            refusal = self._refusal(error, program, place, sandbox.group)
            if isinstance(refusal, Refused) and "exhausted" in refusal.answer:
                self._sandboxes.start_refused(sandbox.name, refusal.answer["exhausted"])
            if isinstance(refusal, Refused) and refusal.answer.get("killed"):
                # Its sandbox's end may have done that, and is told first.
                await self._sandboxes.living(sandbox.name)
            if refusal is error:
                raise
            raise refusal from error
        program.wanted = None
        if program.killed:
            program.strike()
        assert program.process
        self._sandboxes.process_started(sandbox.name, program.process.pid)

        def note(end: asyncio.Future[int]) -> None:
            del self._all[name]
            with log_exceptions():
                self._sandboxes.process_ended(sandbox.name, end.result())
            ended(end.result())

        program.process.wait().add_done_callback(note)
        return program.process.pid, terminal

    def signal(self, name: str, number: int) -> None:
        """Signal a program and its process group; nothing happens if it has ended. SIGKILL works before it runs."""
        program = self._all.get(name)
        if program and number == signal.SIGKILL:
            program.kill()
        elif program and program.process:
            program.process.signal(number, group=True)

    async def _start(
        self, program: Program, request: requests.Request, files: list[int], group: Group | None
    ) -> list[int]:
        for _ in range(TRIES):
            with contextlib.suppress(LauncherLost):
                return await self._begin(program, request, files, group)
        raise Refused(KILLED)

    async def _begin(
        self, program: Program, request: requests.Request, files: list[int], group: Group | None
    ) -> list[int]:
        """Start a program by the launcher; return its terminal, if it has one."""
        with self._children.starting() as adopt:
            program.joiner, channel = await self._launcher.begin(request, files, group)
            with channel:
                try:
                    return await _until_it_runs(program, channel, adopt)
                except asyncio.CancelledError:
                    await _give_up(program, channel, adopt)
                    raise

    def _refusal(
        self, error: BaseException, program: Program, place: SandboxNamespaces, group: Group | None
    ) -> BaseException:
        """What a program's start failed by, as it is told."""
        if program.wanted and program.wanted.expired():
            return Refused(KILLED)
        if isinstance(error, OSError):
            return no_process(error, group)
        if isinstance(error, Refused) and error.answer.get("errno") == errno.EAGAIN and self._is_full(place):
            return Refused(EXHAUSTED)
        return error

    def _is_full(self, place: SandboxNamespaces) -> bool:
        """Whether it is the sandbox that had no room for a process: it may have some by now, as those inside like it.
        Where its own are not counted apart, only if it has as many as it may."""
        if HostFacts.of_host(frozenset()).kernel >= COUNTED_PER_NAMESPACE:
            return self._children.can_fork()
        with contextlib.suppress(FileNotFoundError):
            space = place.process.namespace_inode("pid")
            # With one left no command could be started that starts another.
            return usage.threads_in(space) >= place.limits[resource.RLIMIT_NPROC] - 1
        return False


async def _give_up(program: Program, channel: socket.socket, adopt: Adopt) -> None:
    """Have nothing run of it. It may lie there stopped until its sandbox ends."""
    assert program.joiner
    program.joiner.kill()
    await program.joiner.wait()
    # It may have said what it started; what it has not said does not begin.
    with contextlib.suppress(BlockingIOError, PeerGone):
        message, files = requests.receive_reply(channel)
        close_all(files)
        if "pid" in message:
            program.process = adopt(message["pid"])
    program.strike()


async def _until_it_runs(program: Program, channel: socket.socket, adopt: Adopt) -> list[int]:
    await ready(channel)
    try:
        message, files = requests.receive_reply(channel)
    except PeerGone:
        raise Refused(KILLED) from None
    if "error" in message:
        raise Refused(message)
    program.process = adopt(message["pid"])
    try:
        await ready(channel)
        message, _files = requests.receive_reply(channel)
    except PeerGone:
        return files
    except BaseException:
        close_all(files)
        raise
    close_all(files)
    raise Refused(message)


PATIENCE_S = 5.0

EACH_S = 1.0
"""For how long they are stopped one after the other, before all are at once."""

_STOPPED = "TtZX"


async def pause(children: Children, launcher: Launcher, space: state_dir.Space, place: SandboxNamespaces) -> Answer:
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
            found = usage.read_stat(program)
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
            state, parent, *rest = usage.read_stat(pid)
            own = pid == space.init or (bool(line) and int(parent) == space.init and _line(pid) == line)
            yield int(rest[17]), pid, state, own


def _runs(pid: int, started: int) -> bool:
    try:
        state, *rest = usage.read_stat(pid)
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
    signals.send(pid, number, lambda: signals.start_time(pid) == started)
