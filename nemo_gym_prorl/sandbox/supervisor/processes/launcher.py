# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The supervisor's launcher: a tiny process that forks others in its place, each to do one thing in a sandbox.

To fork the supervisor takes the kernel a millisecond, and both sides as long again to make memory theirs that they had
in common. The launcher (``launcher/launcher.c``) has nothing but a few pages. What it forks are children of the
supervisor's, born in the sandbox's control group. It is not to be seen from inside any sandbox, holds no file but its
channel, and ends with the supervisor. One that was killed, or does not answer, is replaced when it is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from nemo_gym_prorl.background import spawn_task
from nemo_gym_prorl.sandbox.launcher import program
from nemo_gym_prorl.sandbox.launcher.requests import GO, Request, receive
from nemo_gym_prorl.sandbox.limits.cgroups import Group
from nemo_gym_prorl.sandbox.supervisor.processes.children import Answer, Child, Children
from nemo_gym_prorl.sandbox.supervisor.rpc.answers import KILLED, Refused, no_process
from nemo_gym_prorl.sandbox.supervisor.rpc.connection import Connection
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import PeerGone, receive_packet, socket_pair


ANSWER_S = 5.0
"""How long it may say nothing while it is asked to fork, which takes a fraction of a millisecond, before it counts as
dead."""

LOOKS = 10
"""In that time, at what it has said: on a busy machine we are the slow one."""

TRIES = 5
"""To have something done, each time by another launcher."""

CHANNEL = 3
"""The open file over which the launcher is asked."""

_STARTED = struct.Struct("=q")
"""What it says of each request: the number of the process, or less than 0 for an error."""

_OUT_OF_THE_WAY = 64


class LauncherLost(Refused):
    """The launcher was killed first. What it may have begun has no word of anybody's to go on."""

    def __init__(self) -> None:
        super().__init__(KILLED)


class Launcher:
    """See the module. ``folder`` is the supervisor's."""

    def __init__(self, children: Children, folder: Path) -> None:
        self._folder = folder
        self._children = children
        self._program: int | None = None
        self._process: Child | None = None
        self._connection: Connection[int] | None = None
        self._asked: deque[asyncio.Future[int | None]] = deque()
        self._silent = 0
        """At so many looks in a row it had said nothing."""
        self._looking = spawn_task(self._look(), expected=Refused)

    async def begin(self, request: Request, files: Sequence[int], group: Group | None) -> tuple[Child, socket.socket]:
        """Have a request carried out by a child in ``group``; returns that, and the channel on which it answers, the
        caller's to close.

        Raises:
            LauncherLost: see there.
            Refused: no process can be started, or no launcher.
        """
        try:
            ours, theirs = socket_pair()
        except OSError as error:
            raise no_process(error, group) from error
        try:
            with theirs, self._children.starting() as adopt:
                # Of both ends only this one is waited on.
                theirs.setblocking(True)
                child = adopt(await self._ask(request, [theirs.fileno(), *files], group))
            with contextlib.suppress(ConnectionError):
                # It may have failed already, and says why.
                ours.send(GO)
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise (LauncherLost() if isinstance(error, PeerGone) else no_process(error, group)) from error
            raise
        return child, ours

    async def run_once(self, request: Request, files: Sequence[int] = (), group: Group | None = None) -> Answer:
        """As :meth:`.Children.run`, for a request.

        Raises:
            LauncherLost: it may be done by another.
            Refused: it failed, or no process can be started.
        """
        child, channel = await self.begin(request, files, group)
        with channel:
            return await self._children.answer(child, channel, receive)

    async def run(self, request: Request, files: Sequence[int] = (), group: Group | None = None) -> Answer:
        """As :meth:`run_once`, and once more where its launcher was killed: what joins a sandbox waits for our word
        there, and what erases can do so twice."""
        for _ in range(TRIES - 1):
            try:
                return await self.run_once(request, files, group)
            except LauncherLost:
                continue
        return await self.run_once(request, files, group)

    def program(self) -> int:
        """It as a descriptor, to be executed. First processes of sandboxes become it, too.

        Raises:
            OSError: there is none for this machine.
        """
        if self._program is None:
            made = program.load(self._folder)
            # Whom it is executed by gets its own files by number, of which this is to be none.
            self._program = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY)
            os.close(made)
        return self._program

    async def _ask(self, request: Request, files: Sequence[int], group: Group | None) -> int:
        """The number of the process that carries out a request.

        Raises:
            PeerGone: it was killed.
            OSError: there is none.
        """
        connection = self._running()
        place = os.open(group.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if group else None
        packet = request.packet(place, files)
        # Before it is sent, since what it says comes in that order.
        answer: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        if self._looking.done():
            self._looking = spawn_task(self._look(), expected=Refused)
        try:
            await connection.send_packet(packet)
            pid = await answer
        finally:
            if not packet.sent and answer in self._asked:
                self._asked.remove(answer)
        if pid is None:
            raise PeerGone
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def _running(self) -> Connection[int]:
        if self._connection:
            return self._connection
        executable = self.program()
        ours, theirs = socket_pair()
        with theirs, self._children.starting() as adopt:
            theirs.setblocking(True)
            try:
                pid = os.posix_spawn(
                    f"/proc/self/fd/{executable}",
                    [program.LAUNCHER],
                    {},
                    file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), CHANNEL)],
                )
            except OSError:
                ours.close()
                raise
            self._process = adopt(pid)
        self._connection = Connection(ours, self._answered, self._lose, _started)
        return self._connection

    def _answered(self, pid: int) -> None:
        self._silent = 0
        if self._asked and not (answer := self._asked.popleft()).done():
            answer.set_result(pid)

    async def _look(self) -> None:
        """See that it answers while it is asked."""
        self._silent = 0
        while self._asked:
            await asyncio.sleep(ANSWER_S / LOOKS)
            self._silent += 1
            if self._silent > LOOKS:
                self._lose()

    def _lose(self) -> None:
        """What does not answer does not live; the next is another."""
        if self._connection and self._process:
            self._process.kill()
            self._connection.close()
            self._connection = None
        asked, self._asked = self._asked, deque()
        for answer in asked:
            if not answer.done():
                answer.set_result(None)


def _started(channel: socket.socket) -> tuple[int]:
    data, _files, _whole = receive_packet(channel, _STARTED.size)
    if len(data) != _STARTED.size:
        raise PeerGone
    return _STARTED.unpack(data)
