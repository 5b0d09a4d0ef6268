# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The supervisor's children: every process that ends with it, and what became of each. They are reaped here only.

What may take long, or must join a container, runs in a child that was forked for it. It sends one message and ends;
its end is what counts, so no message is ever waited for. It has no open file but those it was given: that a file
closes is waited for elsewhere.

The kernel gives a process's number away again as soon as it is reaped, on some machines after 32,768 others. So a
signal goes to a :class:`Child` that is not reaped yet, and an end is never taken for that of another process which
bore the number before (:meth:`Children.starting`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from nemo_gym_prorl.sandbox.isolation import syscalls
from nemo_gym_prorl.sandbox.limits import rlimits
from nemo_gym_prorl.sandbox.limits.cgroups import Group
from nemo_gym_prorl.sandbox.supervisor.rpc.answers import KILLED, Refused, failure, no_process, print_without_source
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message, PeerGone, pack, receive, send, socket_pair


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
        syscalls.end_with(parent)
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
