# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Programs on their way into a sandbox, and in it: each can be killed at any stage, by the name that its asker chose.

A *joiner* that the launcher forks enters the sandbox's namespaces, starts one process there as our own child, says
which one it is, lets it begin, and ends. That process executes the program. Whatever is inside may stop it before
(``kill -STOP -1``), for ever: nobody waits for it but who asked. The channel tells what became of it: a complaint, or
nothing when the program was executed and the channel so closed.

So a kill is effective whenever it comes: the joiner is ended, and what it started, known or not, begins nothing
without its joiner's word.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import signal
import socket
from collections.abc import Callable

from nemo_gym_prorl.background import log_exceptions
from nemo_gym_prorl.sandbox.isolation.joining import Place
from nemo_gym_prorl.sandbox.launcher import requests
from nemo_gym_prorl.sandbox.limits import usage
from nemo_gym_prorl.sandbox.limits.cgroups import Group
from nemo_gym_prorl.sandbox.limits.rlimits import COUNTED_PER_NAMESPACE, Facts
from nemo_gym_prorl.sandbox.supervisor.lifecycle import Sandboxes
from nemo_gym_prorl.sandbox.supervisor.processes.children import Adopt, Child, Children
from nemo_gym_prorl.sandbox.supervisor.processes.launcher import TRIES, Launcher, LauncherLost
from nemo_gym_prorl.sandbox.supervisor.rpc.answers import EXHAUSTED, KILLED, Refused, no_process
from nemo_gym_prorl.sandbox.supervisor.rpc.connection import ready
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message, PeerGone, close_all
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
        self, name: str, sandbox: Sandbox, order: Message, files: list[int], ended: Callable[[int], object]
    ) -> tuple[int, list[int]]:
        """Start a program; its number when it runs, with its terminal if it has one.

        Args:
            name: by which it can be signalled.
            sandbox: where, which is told of it, and of its end.
            order: as for :func:`.requests.spawn`.
            files: its open files; the caller's.
            ended: told its exit code, negative for a signal, after this.

        Raises:
            Refused: it does not run.
        """
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

    def _refusal(self, error: BaseException, program: Program, place: Place, group: Group | None) -> BaseException:
        """What a program's start failed by, as it is told."""
        if program.wanted and program.wanted.expired():
            return Refused(KILLED)
        if isinstance(error, OSError):
            return no_process(error, group)
        if isinstance(error, Refused) and error.answer.get("errno") == errno.EAGAIN and self._is_full(place):
            return Refused(EXHAUSTED)
        return error

    def _is_full(self, place: Place) -> bool:
        """Whether it is the sandbox that had no room for a process: it may have some by now, as those inside like it.
        Where its own are not counted apart, only if it has as many as it may."""
        if Facts.here(frozenset()).kernel >= COUNTED_PER_NAMESPACE:
            return self._children.can_fork()
        with contextlib.suppress(FileNotFoundError):
            space = place.process.namespace("pid")
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
        message, files = requests.receive(channel)
        close_all(files)
        if "pid" in message:
            program.process = adopt(message["pid"])
    program.strike()


async def _until_it_runs(program: Program, channel: socket.socket, adopt: Adopt) -> list[int]:
    await ready(channel)
    try:
        message, files = requests.receive(channel)
    except PeerGone:
        raise Refused(KILLED) from None
    if "error" in message:
        raise Refused(message)
    program.process = adopt(message["pid"])
    try:
        await ready(channel)
        message, _files = requests.receive(channel)
    except PeerGone:
        return files
    except BaseException:
        close_all(files)
        raise
    close_all(files)
    raise Refused(message)
