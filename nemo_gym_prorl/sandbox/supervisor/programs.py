# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Start, signal, pause and resume programs in sandboxes. A program can be killed at any stage of its start.

The launcher forks a *joiner*, which enters the sandbox's namespaces, starts one process there as the supervisor's
child, reports its pid, lets it begin, and exits. That process executes the program. Before the ``exec``, sandboxed
processes may stop that process (``kill -STOP -1``), for ever; only its client waits. The channel carries an error, or
closes on ``exec``.

A kill is effective at every stage: it ends the joiner, and a process that the joiner has started, reported or not,
begins nothing without the joiner's message.

:func:`pause` stops all programs. A shell that sees a child stopped makes it a background job. So :func:`pause` stops
parents before their children, and :func:`resume` continues parents after them. Programs that fork faster are stopped
by the kernel, which signals all processes of a namespace in one step. The sandbox's own processes are not stopped: the
first one, and the child by which it notices the supervisor's end.
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

from nemo_gym_prorl.async_tasks import log_exceptions
from nemo_gym_prorl.sandbox import signals
from nemo_gym_prorl.sandbox.launcher import requests
from nemo_gym_prorl.sandbox.launcher.requests import SandboxNamespaces
from nemo_gym_prorl.sandbox.limits import usage
from nemo_gym_prorl.sandbox.limits.cgroups import Group
from nemo_gym_prorl.sandbox.limits.rlimits import COUNTED_PER_NAMESPACE, HostFacts
from nemo_gym_prorl.sandbox.supervisor import state_dir
from nemo_gym_prorl.sandbox.supervisor.children import (
    LAUNCHER_TRIES,
    Adopt,
    Child,
    Children,
    Launcher,
    LauncherLost,
    Reply,
)
from nemo_gym_prorl.sandbox.supervisor.connection import PeerGone, close_all, ready
from nemo_gym_prorl.sandbox.supervisor.lifecycle import Sandboxes
from nemo_gym_prorl.sandbox.supervisor.protocol import EXHAUSTED, HELPER_KILLED, Refused, SpawnRequest, no_process
from nemo_gym_prorl.sandbox.supervisor.sandbox import Sandbox


class Program:
    """One program.

    Attributes:
        process: the program's process, once it is reported.
        start_timeout: expired by a kill while the program is starting; ``None`` once it runs.
        killed: whether a kill was requested; the program may have begun in the same moment.
    """

    def __init__(self) -> None:
        self.joiner: Child | None = None
        self.process: Child | None = None
        self.start_timeout: asyncio.Timeout | None = asyncio.timeout(None)
        self.killed = False

    def kill(self) -> None:
        """Kill the program and its process group, or keep it from starting."""
        self.killed = True
        if self.start_timeout is None:
            self.kill_process()
        elif not self.start_timeout.expired():
            self.start_timeout.reschedule(0.0)

    def kill_process(self) -> None:
        """Kill the process and its group, if known; before its ``setsid`` the process has no group of its own."""
        if self.process:
            self.process.signal(signal.SIGKILL, group=True)
            self.process.kill()


class Programs:
    """All programs that are starting or running in the sandboxes of a supervisor."""

    def __init__(self, children: Children, launcher: Launcher, sandboxes: Sandboxes) -> None:
        self._children = children
        self._launcher = launcher
        self._sandboxes = sandboxes
        self._all: dict[str, Program] = {}

    async def start(
        self, sandbox: Sandbox, spawn: SpawnRequest, files: list[int], on_exit: Callable[[int], object]
    ) -> tuple[int, list[int]]:
        """Start a program.

        Args:
            sandbox: receives the start and the end of the program.
            spawn: as for :func:`.requests.spawn`.
            files: open files of the program; the caller closes its copies.
            on_exit: called with the exit code, negative for a signal.

        Returns:
            The pid, and the controlling end of the program's terminal if it has one.

        Raises:
            Refused: the program does not start.
        """
        name = spawn.spawn
        if name in self._all:
            raise OSError(f"a program {name} exists already")
        place = sandbox.place_to_join()
        program = self._all[name] = Program()
        try:
            request = requests.spawn(place, spawn)
            assert program.start_timeout
            async with program.start_timeout:
                terminal = await self._start(program, request, files, sandbox.group)
        except BaseException as error:
            del self._all[name]
            refusal = self._refusal(error, program, place, sandbox.group)
            if isinstance(refusal, Refused) and "exhausted" in refusal.reply:
                self._sandboxes.spawn_refused(sandbox.name, refusal.reply["exhausted"])
            if isinstance(refusal, Refused) and refusal.reply.get("killed"):
                # The sandbox's end may have killed it, and is reported first.
                await self._sandboxes.check_not_ending(sandbox.name)
            if refusal is error:
                raise
            raise refusal from error
        program.start_timeout = None
        if program.killed:
            program.kill_process()
        assert program.process
        self._sandboxes.process_started(sandbox.name, program.process.pid)

        def finish(end: asyncio.Future[int]) -> None:
            del self._all[name]
            with log_exceptions():
                self._sandboxes.process_ended(sandbox.name, end.result())
            on_exit(end.result())

        program.process.wait().add_done_callback(finish)
        return program.process.pid, terminal

    def signal(self, name: str, number: int) -> None:
        """Signal a program's process group; a no-op once it has ended. SIGKILL is also effective before the program
        runs.
        """
        program = self._all.get(name)
        if program and number == signal.SIGKILL:
            program.kill()
        elif program and program.process:
            program.process.signal(number, group=True)

    async def _start(
        self, program: Program, request: requests.Request, files: list[int], group: Group | None
    ) -> list[int]:
        for _ in range(LAUNCHER_TRIES):
            with contextlib.suppress(LauncherLost):
                return await self._begin(program, request, files, group)
        raise Refused(HELPER_KILLED)

    async def _begin(
        self, program: Program, request: requests.Request, files: list[int], group: Group | None
    ) -> list[int]:
        """Start a program through the launcher; return its terminal, if it has one."""
        with self._children.starting() as adopt:
            program.joiner, channel = await self._launcher.begin(request, files, group)
            with channel:
                try:
                    return await _wait_started(program, channel, adopt)
                except asyncio.CancelledError:
                    await _abort_start(program, channel, adopt)
                    raise

    def _refusal(
        self, error: BaseException, program: Program, place: SandboxNamespaces, group: Group | None
    ) -> BaseException:
        """Return the error to report for a failed start."""
        if program.start_timeout and program.start_timeout.expired():
            return Refused(HELPER_KILLED)
        if isinstance(error, OSError):
            return no_process(error, group)
        if isinstance(error, Refused) and error.reply.get("errno") == errno.EAGAIN and self._is_full(place):
            return Refused(EXHAUSTED)
        return error

    def _is_full(self, place: SandboxNamespaces) -> bool:
        """Return whether the sandbox, not the machine, was at its limit of processes. The sandbox may be below the
        limit again.

        Kernels that do not count processes per namespace need the count of threads in the sandbox.
        """
        if HostFacts.of_host(frozenset()).kernel >= COUNTED_PER_NAMESPACE:
            return self._children.can_fork()
        with contextlib.suppress(FileNotFoundError):
            namespace = place.process.namespace_inode("pid")
            # The limit minus 1: a command needs a process for itself and one for its child.
            return usage.threads_in(namespace) >= place.limits[resource.RLIMIT_NPROC] - 1
        return False


async def _abort_start(program: Program, channel: socket.socket, adopt: Adopt) -> None:
    """Keep a program from starting; its stopped process may remain until the sandbox ends."""
    assert program.joiner
    program.joiner.kill()
    await program.joiner.wait()
    # The joiner may have reported a process; an unreported one does not begin.
    with contextlib.suppress(BlockingIOError, PeerGone):
        message, files = requests.receive_reply(channel)
        close_all(files)
        if "pid" in message:
            program.process = adopt(message["pid"])
    program.kill_process()


async def _wait_started(program: Program, channel: socket.socket, adopt: Adopt) -> list[int]:
    await ready(channel)
    try:
        message, files = requests.receive_reply(channel)
    except PeerGone:
        raise Refused(HELPER_KILLED) from None
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


STOP_TIMEOUT_S = 5.0
"""Time to stop all programs; an ordinary sandbox takes milliseconds."""

ONE_BY_ONE_S = 1.0
"""Time to stop programs one by one, parents first, before the kernel stops all at once."""

_STOPPED = "TtZX"


async def pause(
    children: Children, launcher: Launcher, namespace: state_dir.PidNamespace, place: SandboxNamespaces
) -> Reply:
    """Stop all programs of a sandbox, also those that they start meanwhile.

    Raises:
        Refused: programs do not stop in time.
    """
    deadline = time.monotonic() + STOP_TIMEOUT_S
    await children.run(partial(_stop_each, namespace, time.monotonic() + ONE_BY_ONE_S))
    stopped = False
    while namespace.alive and not stopped and time.monotonic() < deadline:
        reply, _files = await launcher.run(requests.stop(place))
        stopped = bool(reply["number"])
    return await children.run(partial(_verify_stopped, namespace, deadline, stopped=stopped))


def _verify_stopped(namespace: state_dir.PidNamespace, deadline: float, *, stopped: bool) -> Reply:
    """Continue the sandbox's own processes, and stop programs that were started during the pause."""
    for pid, started in _own(namespace):
        _send(pid, started, signal.SIGCONT)
    reply, _files = _stop_each(namespace, deadline)
    if reply["running"] or (namespace.alive and not stopped):
        resume(namespace)
        raise OSError(f"processes {reply['running'] or 'of the sandbox'} do not stop")
    return {}, []


def _stop_each(namespace: state_dir.PidNamespace, deadline: float) -> Reply:
    """Stop running programs until none is seen; return the pids that still run at the deadline."""
    while running := [(pid, started) for started, pid, state in _programs(namespace) if state not in _STOPPED]:
        for pid, started in running:
            _send(pid, started, signal.SIGSTOP)
            # A stop takes effect late on a busy machine; until then the parent could see its children stopped.
            while _runs(pid, started) and time.monotonic() < deadline:
                time.sleep(0.0002)
        if time.monotonic() > deadline:
            return {"running": [pid for pid, _started in running]}, []
    return {"running": []}, []


def resume(namespace: state_dir.PidNamespace) -> Reply:
    """Continue all programs of a sandbox, children first."""
    for started, pid, _state in reversed(_programs(namespace)):
        _send(pid, started, signal.SIGCONT)
    return {}, []


def programs_not_of(namespace: state_dir.PidNamespace, pid: int) -> tuple[int, bool]:
    """Return the number of programs that process ``pid`` has not started itself, and whether any program may be busy.

    A program may be busy if it is not waiting, or has several threads.
    """
    others, busy = 0, False
    for _started, program, state in _programs(namespace):
        with contextlib.suppress(OSError):
            found = usage.read_stat(program)
            others += int(found[usage.PARENT]) != pid
            busy |= state != "S" or int(found[usage.THREADS]) > 1
    return others, busy


def _programs(namespace: state_dir.PidNamespace) -> list[tuple[int, int, str]]:
    """Start time, pid and state of every process but the sandbox's own, parents first."""
    return sorted((started, pid, state) for started, pid, state, own in _processes(namespace) if not own)


def _own(namespace: state_dir.PidNamespace) -> list[tuple[int, int]]:
    """Pid and start time of the sandbox's own processes, except the first."""
    return [(pid, started) for started, pid, _state, own in _processes(namespace) if own and pid != namespace.init]


def _processes(namespace: state_dir.PidNamespace) -> Iterator[tuple[int, int, str, bool]]:
    """Start time, pid and state of every process, and whether it is the sandbox's own."""
    channel = _channel_of(namespace.init)
    for pid in namespace.members():
        with contextlib.suppress(OSError):
            state, parent, *rest = usage.read_stat(pid)
            own = pid == namespace.init or (
                bool(channel) and int(parent) == namespace.init and _channel_of(pid) == channel
            )
            yield int(rest[17]), pid, state, own


def _runs(pid: int, started: int) -> bool:
    try:
        state, *rest = usage.read_stat(pid)
    except OSError:
        return False
    return state not in _STOPPED and int(rest[18]) == started


def _channel_of(pid: int) -> str:
    """Identity of the socket on which a process notices the supervisor's end; programs inside cannot open it."""
    try:
        found = os.readlink(f"/proc/{pid}/fd/0")
    except OSError:
        return ""
    return found if found.startswith("socket:") else ""


def _send(pid: int, started: int, number: signal.Signals) -> None:
    signals.send(pid, number, lambda: signals.start_time(pid) == started)
