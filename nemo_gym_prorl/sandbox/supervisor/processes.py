# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The supervisor's children: every process that ends with it, and what became of each. They are reaped here only.

What may take long, or must join a container, runs in a child: forked from the supervisor, or by its *launcher*. A
child sends one message and ends; its end is what counts, so no message is ever waited for. It has no open file but
those it was given.

The kernel gives a process's number away again as soon as it is reaped. So a signal goes to a :class:`Child` that is
not reaped yet, and an end is never taken for that of another process which bore the number before
(:meth:`Children.starting`).

To fork the supervisor takes the kernel a millisecond, and both sides as long again to copy shared memory. The launcher
(``launcher/launcher.c``) is a tiny process that forks in its place. Its children are the supervisor's, born in the
sandbox's control group. It cannot be seen from inside any sandbox, holds no file but its channel, and ends with the
supervisor. A launcher that was killed is replaced when it is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import os
import signal
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nemo_gym_prorl.sandbox.isolation import syscalls
from nemo_gym_prorl.sandbox.launcher import binary
from nemo_gym_prorl.sandbox.launcher.requests import GO, Request
from nemo_gym_prorl.sandbox.launcher.requests import receive_reply as receive_answer
from nemo_gym_prorl.sandbox.limits import rlimits
from nemo_gym_prorl.sandbox.limits.cgroups import Group
from nemo_gym_prorl.sandbox.supervisor.connection import (
    Connection,
    Message,
    PeerGone,
    pack,
    receive,
    receive_packet,
    send,
    socket_pair,
)
from nemo_gym_prorl.sandbox.supervisor.errors import KILLED, Refused, failure, no_process, print_without_source


Answer = tuple[Message, list[int]]
"""A message, and open files that go with it."""

Action = Callable[[], Answer]
"""What a forked child does, and answers."""

Adopt = Callable[[int], "Child"]


class Child:
    """A process of ours. Its number is its own until it is reaped, which is when it has a ``status``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None
        self._waiting: list[asyncio.Future[int]] = []

    @property
    def alive(self) -> bool:
        """Whether it has not been reaped."""
        return self.status is None

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send it a signal, or its process group; does nothing if it has ended."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.signal(signal.SIGKILL)

    def wait(self) -> asyncio.Future[int]:
        """Its exit code when it has ended, negative for a signal; to be cancelled by whoever asks."""
        end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(end)
        if self.status is not None:
            self.reaped(self.status)
        return end

    def reaped(self, status: int) -> None:
        """It has ended."""
        self.status = status
        while self._waiting:
            end = self._waiting.pop()
            if not end.done():
                end.set_result(os.waitstatus_to_exitcode(status))


class Children:
    """All children of a single-threaded process.

    Args:
        stranger: told the number of each that was reaped and that nobody knows: orphans of containers come here, too.
    """

    def __init__(self, stranger: Callable[[int], object] = lambda pid: None) -> None:
        self._stranger = stranger
        self._known: dict[int, Child] = {}
        self._starting: dict[int, dict[int, int]] = {}
        """Of each start by somebody else that is under way: number to status of the strangers reaped since."""
        # Not by the loop's own way, which takes two turns more for each.
        self._woken, self._wakeup = socket.socketpair()
        self._woken.setblocking(False)
        self._wakeup.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        asyncio.get_running_loop().add_reader(self._woken.fileno(), self._wake)

    def fork(self, program: Callable[[], Any], files: Sequence[int] = (), group: Group | None = None) -> Child:
        """Fork a child that runs ``program``, with these ``files`` and no others, in the control group ``group``.

        Raises:
            Refused: none can be forked.
        """
        parent = os.getpid()
        try:
            pid = group.fork() if group else os.fork()
        except OSError as error:
            raise no_process(error, group) from error
        if pid == 0:
            _become(program, files, parent)
        child = self._known[pid] = Child(pid)
        return child

    def can_fork(self) -> bool:
        """Whether this machine, and its user, have room for a process, by trying."""
        try:
            self.fork(lambda: None)
        except Refused:
            return False
        return True

    async def run(self, action: Action, files: Sequence[int] = (), group: Group | None = None) -> Answer:
        """Run ``action`` in a forked child, with these ``files`` and no others; returns what that does.

        What the child starts is in the control group ``group``, as it is itself.

        Raises:
            Refused: it failed, or none can be forked.
        """
        try:
            ours, theirs = socket_pair()
        except OSError as error:
            raise no_process(error, group) from error
        with ours:
            with theirs:
                child = self.fork(lambda: _answer(action, theirs), [*files, theirs.fileno()], group)
            return await self.answer(child, ours)

    async def answer(
        self, child: Child, channel: socket.socket, take: Callable[[socket.socket], Answer] = receive
    ) -> Answer:
        """What a child said on a channel, once it has ended; it does so if nobody waits any more.

        Raises:
            Refused: it failed.
        """
        try:
            await child.wait()
        except asyncio.CancelledError:
            child.kill()
            raise
        try:
            answer, files = take(channel)
        except (BlockingIOError, PeerGone):
            raise Refused(KILLED) from None
        if "error" in answer:
            raise Refused(answer)
        return answer, files

    @contextlib.contextmanager
    def starting(self) -> Iterator[Adopt]:
        """Within the block somebody else starts a child of ours, which may be reaped before its number is heard of.

        Yields what makes a :class:`Child` of such a number. What was reaped before the block is another that bore it.
        """
        reaped: dict[int, int] = {}
        self._starting[id(reaped)] = reaped

        def adopt(pid: int) -> Child:
            child = Child(pid)
            if pid in reaped:
                child.reaped(reaped[pid])
            else:
                self._known[pid] = child
            return child

        try:
            yield adopt
        finally:
            del self._starting[id(reaped)]

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        self.reap()

    def reap(self) -> None:
        """Collect every dead child."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if child := self._known.pop(pid, None):
                child.reaped(status)
            else:
                for reaped in self._starting.values():
                    reaped[pid] = status
                self._stranger(pid)


def tell(channel: socket.socket, message: Message, files: Sequence[int] = ()) -> None:
    """In a forked child: send a message, which there is always room for."""
    send(channel, pack(message, files))


def _become(program: Callable[[], object], files: Sequence[int], parent: int) -> NoReturn:
    """In a forked child, which has a copy of our loop, and never returns to it."""
    try:
        syscalls.die_with_parent(parent)
        gc.disable()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        rlimits.close_all_but([0, 1, 2, *files])
        program()
        os._exit(0)
    except BaseException as error:
        print_without_source(error)
    finally:
        os._exit(1)


def _answer(action: Action, channel: socket.socket) -> None:
    """In a forked child: run ``action``, and send what it returns."""
    try:
        answer, files = action()
    except Exception as error:
        answer, files = failure(error), []
    channel.setblocking(True)
    tell(channel, answer, files)


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
            return await self._children.answer(child, channel, receive_answer)

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
            made = binary.load_launcher(self._folder)
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
                    [binary.LAUNCHER],
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
        if self._asked and not (answer := self._asked.popleft()).done():
            answer.set_result(pid)

    def _lose(self) -> None:
        """It was killed; the next is another."""
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
