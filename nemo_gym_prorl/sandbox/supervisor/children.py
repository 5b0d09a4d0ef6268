# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Child processes of the supervisor: fork, signal and reap them. Only this module reaps.

Work that may block, or that must join a sandbox's namespaces, runs in a child forked by the supervisor or by the
supervisor's *launcher*. A child sends one message and exits; the supervisor waits for the exit, never for the message.
A child inherits only the file descriptors that the caller lists.

The kernel reuses a pid as soon as the process is reaped. So the supervisor signals a :class:`Child` only until the
child is reaped, and never attributes an exit to an earlier process with the same pid (:meth:`Children.starting`).

The launcher (``launcher/launcher.c``) is a small process that forks for the supervisor, whose page tables are
expensive to copy. Processes forked by the launcher are children of the supervisor and start in the sandbox's control
group. The launcher is in no sandbox's PID namespace, has only its request socket and descriptors 0 to 2 open, and ends
with the supervisor. A killed launcher is replaced at the next request.
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
from nemo_gym_prorl.sandbox.launcher import LAUNCHER, load_launcher
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
from nemo_gym_prorl.sandbox.supervisor.protocol import (
    HELPER_KILLED,
    Refused,
    failure,
    no_process,
    print_without_source,
)


Reply = tuple[Message, list[int]]
"""A message, and the file descriptors sent with the message."""

ChildAction = Callable[[], Reply]
"""The work of a forked child; returns the reply that the child sends to the supervisor."""

RegisterChild = Callable[[int], "Child"]
"""Registers the pid of a child that another process has forked, and returns the :class:`Child`."""


class Child:
    """A child process. The pid is valid until the child is reaped, which sets ``status`` (``None`` before)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None
        self._waiting: list[asyncio.Future[int]] = []

    @property
    def alive(self) -> bool:
        return self.status is None

    def signal(self, number: int, *, group: bool = False) -> None:
        """Signal the process, or with ``group`` its process group; a no-op once the process is reaped."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def wait(self) -> asyncio.Future[int]:
        """Return a new future of the exit code: -N after signal N. Cancelling the future affects no other caller."""
        end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(end)
        if self.status is not None:
            self.set_status(self.status)
        return end

    def set_status(self, status: int) -> None:
        """Record the wait status and resolve the futures of :meth:`wait`."""
        self.status = status
        while self._waiting:
            end = self._waiting.pop()
            if not end.done():
                end.set_result(os.waitstatus_to_exitcode(status))


class Children:
    """Registry of the children of a single-threaded process; reaps the children on SIGCHLD.

    Args:
        on_orphan: called with the pid of each reaped process without a :class:`Child`, such as a sandbox's orphan.
    """

    def __init__(self, on_orphan: Callable[[int], object] = lambda pid: None) -> None:
        self._on_orphan = on_orphan
        self._known: dict[int, Child] = {}
        self._starting: dict[int, dict[int, int]] = {}
        """For each active :meth:`starting` block: wait status by pid of the orphans reaped since the block began."""
        # loop.add_signal_handler would delay each reap by two more iterations of the loop.
        self._woken, self._wakeup = socket.socketpair()
        self._woken.setblocking(False)
        self._wakeup.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        asyncio.get_running_loop().add_reader(self._woken.fileno(), self._wake)

    def fork(self, program: Callable[[], Any], files: Sequence[int] = (), group: Group | None = None) -> Child:
        """Fork a child that runs ``program`` and exits. Only descriptors 0 to 2 and ``files`` stay open in the child.

        The child starts in the control group ``group``. Its exit code is 0, or 1 after an exception.

        Raises:
            Refused: no process can be started.
        """
        parent = os.getpid()
        try:
            pid = group.fork() if group else os.fork()
        except OSError as error:
            raise no_process(error, group) from error
        if pid == 0:
            _run_forked(program, files, parent)
        child = self._known[pid] = Child(pid)
        return child

    def can_fork(self) -> bool:
        """Fork a child that exits at once; return whether this user could start a process on this machine."""
        try:
            self.fork(lambda: None)
        except Refused:
            return False
        return True

    async def run(self, action: ChildAction, files: Sequence[int] = (), group: Group | None = None) -> Reply:
        """Run ``action`` in a child, as :meth:`fork`, and return the reply. Cancellation kills the child.

        Raises:
            Refused: the action failed, the child was killed, or no process can be started.
        """
        try:
            ours, theirs = socket_pair()
        except OSError as error:
            raise no_process(error, group) from error
        with ours:
            with theirs:
                child = self.fork(lambda: _send_reply(action, theirs), [*files, theirs.fileno()], group)
            return await self.reply(child, ours)

    async def reply(
        self, child: Child, channel: socket.socket, take: Callable[[socket.socket], Reply] = receive
    ) -> Reply:
        """Wait for a child's exit and return the reply that ``take`` receives. Cancellation kills the child.

        Raises:
            Refused: the reply is an error, or the child ended without a reply.
        """
        try:
            await child.wait()
        except asyncio.CancelledError:
            child.kill()
            raise
        try:
            reply, files = take(channel)
        except (BlockingIOError, PeerGone):
            raise Refused(HELPER_KILLED) from None
        if "error" in reply:
            raise Refused(reply)
        return reply, files

    @contextlib.contextmanager
    def starting(self) -> Iterator[RegisterChild]:
        """Yield a function that registers a child of which another process reports the pid within the block. The
        child may be reaped before the pid arrives, so exit statuses of unknown pids are kept until the block ends.
        Statuses reaped before the block are not kept: a reused pid never gets an earlier process's status."""
        reaped: dict[int, int] = {}
        self._starting[id(reaped)] = reaped

        def register(pid: int) -> Child:
            child = Child(pid)
            if pid in reaped:
                child.set_status(reaped[pid])
            else:
                self._known[pid] = child
            return child

        try:
            yield register
        finally:
            del self._starting[id(reaped)]

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        self.reap()

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if child := self._known.pop(pid, None):
                child.set_status(status)
            else:
                for reaped in self._starting.values():
                    reaped[pid] = status
                self._on_orphan(pid)


def send_from_child(channel: socket.socket, message: Message, files: Sequence[int] = ()) -> None:
    """Send a message and descriptors on a blocking socket, from a forked child without an event loop."""
    send(channel, pack(message, files))


def _run_forked(program: Callable[[], object], files: Sequence[int], parent: int) -> NoReturn:
    """Run a program in a forked child and exit: the child must never return to its copy of the event loop."""
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


def _send_reply(action: ChildAction, channel: socket.socket) -> None:
    try:
        reply, files = action()
    except Exception as error:
        reply, files = failure(error), []
    channel.setblocking(True)
    send_from_child(channel, reply, files)


LAUNCHER_TRIES = 5
"""Attempts per request, each with a new launcher; a request fails only if all five launchers are killed."""

CHANNEL = 3
"""Descriptor of the request socket in the launcher; ``launcher.c`` has the same number."""

_STARTED = struct.Struct("=q")
"""The launcher's reply to a request: a pid, or a negative errno."""

_MIN_PROGRAM_FD = 64
"""Lowest descriptor for the launcher's executable: above :data:`CHANNEL`, which ``posix_spawn`` overwrites."""


class Launcher:
    """The supervisor's launcher process; started on first use and replaced after its death."""

    def __init__(self, children: Children, folder: Path) -> None:
        self._folder = folder
        self._children = children
        self._program: int | None = None
        self._process: Child | None = None
        self._connection: Connection[int] | None = None
        self._asked: deque[asyncio.Future[int | None]] = deque()

    async def begin(self, request: Request, files: Sequence[int], group: Group | None) -> tuple[Child, socket.socket]:
        """Start a child in ``group`` that carries out a request, in up to :data:`LAUNCHER_TRIES` attempts. A retry is
        safe: a child changes nothing before ``GO``, which is sent once the launcher has reported the child's pid.

        Returns:
            The child, and the socket on which the child replies, which the caller closes.

        Raises:
            Refused: no process, or no launcher, can be started.
        """
        for _ in range(LAUNCHER_TRIES):
            with contextlib.suppress(PeerGone):
                return await self._begin(request, files, group)
        raise Refused(HELPER_KILLED)

    async def _begin(self, request: Request, files: Sequence[int], group: Group | None) -> tuple[Child, socket.socket]:
        try:
            ours, theirs = socket_pair()
        except OSError as error:
            raise no_process(error, group) from error
        try:
            with theirs, self._children.starting() as register:
                # The child blocks in reads and sends; the supervisor's end is non-blocking.
                theirs.setblocking(True)
                child = register(await self._ask(request, [theirs.fileno(), *files], group))
            with contextlib.suppress(ConnectionError):
                # The child may have failed and exited already; its reply, still in the socket, has the error.
                ours.send(GO)
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError) and not isinstance(error, PeerGone):
                raise no_process(error, group) from error
            raise
        return child, ours

    async def run(self, request: Request, files: Sequence[int] = (), group: Group | None = None) -> Reply:
        """Carry out a request in a child, as :meth:`begin`, and return the child's reply.

        Raises:
            Refused: the request failed, or no process can be started.
        """
        child, channel = await self.begin(request, files, group)
        with channel:
            return await self._children.reply(child, channel, receive_answer)

    def program(self) -> int:
        """Return a descriptor of the launcher's executable, which each sandbox's first process also executes.

        Raises:
            OSError: there is no launcher for this machine's architecture.
        """
        if self._program is None:
            made = load_launcher(self._folder)
            self._program = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, _MIN_PROGRAM_FD)
            os.close(made)
        return self._program

    async def _ask(self, request: Request, files: Sequence[int], group: Group | None) -> int:
        """Send a request to the launcher; return the pid of the child that the launcher has forked for the request."""
        connection = self._running()
        group_fd = os.open(group.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if group else None
        packet = request.packet(group_fd, files)
        # Queue the future before sending: the launcher replies in the order of the requests.
        reply: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._asked.append(reply)
        try:
            await connection.send_packet(packet)
            pid = await reply
        finally:
            if not packet.sent and reply in self._asked:
                self._asked.remove(reply)
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
        with theirs, self._children.starting() as register:
            theirs.setblocking(True)
            try:
                pid = os.posix_spawn(
                    f"/proc/self/fd/{executable}",
                    [LAUNCHER],
                    {},
                    file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), CHANNEL)],
                )
            except OSError:
                ours.close()
                raise
            self._process = register(pid)
        self._connection = Connection(ours, self._on_started, self._on_lost, _receive_started)
        return self._connection

    def _on_started(self, pid: int) -> None:
        if self._asked and not (reply := self._asked.popleft()).done():
            reply.set_result(pid)

    def _on_lost(self) -> None:
        self._connection = None
        asked, self._asked = self._asked, deque()
        for reply in asked:
            if not reply.done():
                reply.set_result(None)


def _receive_started(channel: socket.socket) -> tuple[int]:
    data, _files, _whole = receive_packet(channel, _STARTED.size)
    if len(data) != _STARTED.size:
        raise PeerGone
    return _STARTED.unpack(data)
