# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Start, signal, pause and resume programs in sandboxes.

The launcher forks a *joiner*, which joins the sandbox's namespaces and forks a process as the supervisor's child. The
joiner reports the pid of that process, sends it a message, and exits. After that message the process executes the
program. The process reports an error on its channel, or the channel closes on ``exec``. Sandboxed processes can delay
a start for ever with SIGSTOP (``kill -STOP -1``), so only the client of a start waits for the start.

A program can be killed at any stage of its start: a process that gets no message from its joiner does not execute.

:func:`pause` sends SIGSTOP to all programs. A shell that sees its child stop makes the child a background job. So
:func:`pause` stops parents before their children, and :func:`resume` continues children before their parents. Since
programs may fork faster than that, ``kill(-1)`` in the PID namespace then stops all in one step. The first process of
the sandbox, and its child that watches for the supervisor's end, keep running.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
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
    Child,
    Children,
    Launcher,
    RegisterChild,
    Reply,
)
from nemo_gym_prorl.sandbox.supervisor.connection import PeerGone, close_all, ready
from nemo_gym_prorl.sandbox.supervisor.lifecycle import Sandboxes
from nemo_gym_prorl.sandbox.supervisor.protocol import EXHAUSTED, HELPER_KILLED, Refused, SpawnRequest, no_process
from nemo_gym_prorl.sandbox.supervisor.sandbox import Sandbox


class Program:
    """State of one starting or running program.

    Attributes:
        joiner: the process that joins the sandbox and forks ``process``; ``None`` until the launcher has forked it.
        process: the process that executes the program; ``None`` until the joiner has reported its pid.
        start_timeout: time limit of the start, which :meth:`kill` expires; ``None`` once the program runs.
        killed: whether :meth:`kill` was called.
    """

    def __init__(self) -> None:
        self.joiner: Child | None = None
        self.process: Child | None = None
        self.start_timeout: asyncio.Timeout | None = asyncio.timeout(None)
        self.killed = False

    def kill(self) -> None:
        """Kill the program's process group; while the program is starting, cancel the start."""
        self.killed = True
        if self.start_timeout is None:
            self.kill_process()
        elif not self.start_timeout.expired():
            self.start_timeout.reschedule(0.0)

    def kill_process(self) -> None:
        """Kill the process and its process group, if the pid is known."""
        if self.process:
            self.process.signal(signal.SIGKILL, group=True)
            self.process.kill()  # before setsid the process leads no group


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
        """Start a program in a sandbox and wait for its ``exec``.

        Args:
            files: descriptors that become the program's open files; the caller closes its copies.
            on_exit: called with the exit code, -N after signal N.

        Returns:
            The pid, and a list with the descriptor of the controlling end of the program's terminal, if it has one.

        Raises:
            Refused: the program does not start.
            OSError: a program with this name exists.
        """
        name = spawn.spawn
        if name in self._all:
            raise OSError(f"a program {name} exists already")
        namespaces = sandbox.namespaces_to_join()
        program = self._all[name] = Program()
        try:
            request = requests.spawn(namespaces, spawn)
            assert program.start_timeout
            async with program.start_timeout:
                terminal = await self._begin(program, request, files, sandbox.group)
        except BaseException as error:
            del self._all[name]
            refusal = self._refusal(error, program, sandbox.group)
            if isinstance(refusal, Refused) and "exhausted" in refusal.reply:
                self._sandboxes.spawn_refused(sandbox.name, refusal.reply["exhausted"])
            if isinstance(refusal, Refused) and refusal.reply.get("killed"):
                # Raises NoSandbox, in place of the refusal, if the end of the sandbox has killed the program.
                await self._sandboxes.check_not_ending(sandbox.name)
            if refusal is error:
                raise
            raise refusal from error
        program.start_timeout = None
        if program.killed:
            program.kill_process()
        assert program.process
        self._sandboxes.process_started(sandbox.name)

        def finish(end: asyncio.Future[int]) -> None:
            del self._all[name]
            with log_exceptions():
                self._sandboxes.process_ended(sandbox.name, end.result())
            on_exit(end.result())

        program.process.wait().add_done_callback(finish)
        return program.process.pid, terminal

    def signal(self, name: str, number: int) -> None:
        """Signal a program's process group; a no-op once the program has ended. SIGKILL also cancels a start."""
        program = self._all.get(name)
        if program and number == signal.SIGKILL:
            program.kill()
        elif program and program.process:
            program.process.signal(number, group=True)

    async def _begin(
        self, program: Program, request: requests.Request, files: list[int], group: Group | None
    ) -> list[int]:
        with self._children.starting() as register:
            program.joiner, channel = await self._launcher.begin(request, files, group)
            with channel:
                try:
                    return await _wait_started(program, channel, register)
                except asyncio.CancelledError:
                    await _abort_start(program, channel, register)
                    raise

    def _refusal(self, error: BaseException, program: Program, group: Group | None) -> BaseException:
        if program.start_timeout and program.start_timeout.expired():
            return Refused(HELPER_KILLED)
        if isinstance(error, OSError):
            return no_process(error, group)
        if isinstance(error, Refused) and error.reply.get("errno") == errno.EAGAIN and self._is_full():
            return Refused(EXHAUSTED)
        return error

    def _is_full(self) -> bool:
        """Return whether a fork failed at the sandbox's process limit, and not at a limit of the user or machine: the
        supervisor can fork. Before Linux 5.14 a sandbox has no limit of its own."""
        return HostFacts.of_host(frozenset()).kernel >= COUNTED_PER_NAMESPACE and self._children.can_fork()


async def _abort_start(program: Program, channel: socket.socket, register: RegisterChild) -> None:
    """Abort a start: kill the joiner, and the program's process if its pid was reported. A process that got SIGSTOP
    before its pid was reported executes nothing, but may remain until the sandbox ends."""
    assert program.joiner
    program.joiner.kill()
    await program.joiner.wait()
    with contextlib.suppress(BlockingIOError, PeerGone):
        message, files = requests.receive_reply(channel)
        close_all(files)
        if "pid" in message:
            program.process = register(message["pid"])
    program.kill_process()


async def _wait_started(program: Program, channel: socket.socket, register: RegisterChild) -> list[int]:
    await ready(channel)
    try:
        message, files = requests.receive_reply(channel)
    except PeerGone:
        raise Refused(HELPER_KILLED) from None
    if "error" in message:
        raise Refused(message)
    program.process = register(message["pid"])
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
"""Time limit in seconds for SIGSTOP to all programs of a sandbox, which usually takes milliseconds."""

ONE_BY_ONE_S = 1.0
"""Seconds of sending SIGSTOP to programs one by one, parents first, before ``kill(-1)`` stops all in one step."""

_STOPPED = "TtZX"
"""States in ``/proc/PID/stat`` of processes that do not run: stopped, traced, zombie, dead."""


async def pause(
    children: Children, launcher: Launcher, pid_namespace: state_dir.PidNamespace, namespaces: SandboxNamespaces
) -> Reply:
    """Send SIGSTOP to all programs of a sandbox, also to programs that are started during the pause.

    Raises:
        Refused: programs still run after :data:`STOP_TIMEOUT_S`; all programs are resumed.
    """
    deadline = time.monotonic() + STOP_TIMEOUT_S
    await children.run(partial(_stop_each, pid_namespace, time.monotonic() + ONE_BY_ONE_S))
    stopped = False
    while pid_namespace.alive and not stopped and time.monotonic() < deadline:
        reply, _files = await launcher.run(requests.stop(namespaces))
        stopped = bool(reply["number"])
    return await children.run(partial(_verify_stopped, pid_namespace, deadline, stopped=stopped))


def _verify_stopped(namespace: state_dir.PidNamespace, deadline: float, *, stopped: bool) -> Reply:
    """Continue the sandbox's own processes, which ``kill(-1)`` has stopped, too; stop programs that started meanwhile.
    Resume all on failure."""
    for started, pid, _state, own in _processes(namespace):
        if own and pid != namespace.init:
            _send_signal(pid, started, signal.SIGCONT)
    reply, _files = _stop_each(namespace, deadline)
    if reply["running"] or (namespace.alive and not stopped):
        resume(namespace)
        raise OSError(f"processes {reply['running'] or 'of the sandbox'} do not stop")
    return {}, []


def _stop_each(namespace: state_dir.PidNamespace, deadline: float) -> Reply:
    """Send SIGSTOP to running programs until none runs; return the pids of programs that run at the ``deadline``."""
    while running := [(pid, started) for started, pid, state in _programs(namespace) if state not in _STOPPED]:
        for pid, started in running:
            _send_signal(pid, started, signal.SIGSTOP)
            # Wait until this process has stopped, or it could still see its children stop.
            while _runs(pid, started) and time.monotonic() < deadline:
                time.sleep(0.0002)
        if time.monotonic() > deadline:
            return {"running": [pid for pid, _started in running]}, []
    return {"running": []}, []


def resume(namespace: state_dir.PidNamespace) -> Reply:
    """Send SIGCONT to all programs of a sandbox, children before their parents."""
    for started, pid, _state in reversed(_programs(namespace)):
        _send_signal(pid, started, signal.SIGCONT)
    return {}, []


def programs_not_of(namespace: state_dir.PidNamespace, pid: int) -> tuple[int, bool]:
    """Return the number of programs that are no children of the process ``pid``, and whether any program may be busy.
    A program may be busy if it does not sleep (state ``S``), or has several threads."""
    others, busy = 0, False
    for _started, program, state in _programs(namespace):
        with contextlib.suppress(OSError):
            found = usage.read_stat(program)
            others += int(found[usage.PARENT]) != pid
            busy |= state != "S" or int(found[usage.THREADS]) > 1
    return others, busy


def _programs(namespace: state_dir.PidNamespace) -> list[tuple[int, int, str]]:
    """Return start time, pid and state of every program in a PID namespace, parents first."""
    return sorted((started, pid, state) for started, pid, state, own in _processes(namespace) if not own)


def _processes(namespace: state_dir.PidNamespace) -> Iterator[tuple[int, int, str, bool]]:
    """Yield start time, pid and state of every process in a PID namespace, and whether it is the sandbox's own."""
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
    """Return ``socket:[INODE]`` if the standard input of a process is a socket, else an empty text. The sandbox's own
    processes have the supervisor's socket there, which no program can open."""
    try:
        found = os.readlink(f"/proc/{pid}/fd/0")
    except OSError:
        return ""
    return found if found.startswith("socket:") else ""


def _send_signal(pid: int, started: int, number: signal.Signals) -> None:
    signals.send(pid, number, lambda: signals.start_time(pid) == started)
