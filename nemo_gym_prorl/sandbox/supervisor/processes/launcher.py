# SPDX-License-Identifier: Apache-2.0
"""The supervisor's launcher: a tiny process that forks others in its place, each to do one thing in a sandbox.

To fork the supervisor takes the kernel a millisecond, and both sides as long again to make memory theirs that they had
in common. The launcher (``launcher/launcher.c``) has nothing but a few pages. What it forks are children of the
supervisor's, born in the sandbox's control group. It is not to be seen from inside any sandbox, holds no file but its
channel, and ends with the supervisor. One that was killed, or does not answer, is replaced when it is needed.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemo_gym_prorl.sandbox.launcher import program
from nemo_gym_prorl.sandbox.launcher.requests import Request, receive
from nemo_gym_prorl.sandbox.limits.cgroups import Group
from nemo_gym_prorl.sandbox.supervisor.processes.children import KILLED, Children, Done, no_process
from nemo_gym_prorl.sandbox.supervisor.processes.event_loop import Loop, guarded
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Outbox, PeerGone, close_all, socket_pair


ANSWER_S = 5.0
"""How long it may say nothing while it is asked to fork, which takes a fraction of a millisecond, before it counts as
dead."""

TRIES = 3
"""To have something done, each time by another launcher."""

CHANNEL = 3
"""The open file over which the launcher is asked."""

_STARTED = struct.Struct("=q")
"""What it says of each request: the number of the process, or less than 0 for an error."""

_OUT_OF_THE_WAY = 64


@dataclass(slots=True, eq=False)
class Task:
    """One request, from when it was asked until it is known who carries it out.

    Attributes:
        begun: told the number of the process.
        ended: told the process's status, after that.
        failed: told why no process can be started.
        lost: told that the launcher died first, with the files in time to give them to somebody else. What it may have
            begun gets no word of anybody's.
        files: what the request goes with, its own copies.
        which: counts what was started, as :meth:`.Children.expect` does.
    """

    begun: Callable[[int], None]
    ended: Callable[[int], None]
    failed: Callable[[OSError], None]
    lost: Callable[[list[int]], None]
    files: list[int]
    which: int


class Launcher:
    """See the module. ``folder`` is the supervisor's."""

    def __init__(self, loop: Loop, children: Children, folder: Path) -> None:
        self._folder = folder
        self._loop = loop
        self._children = children
        self._program: int | None = None
        self._pid: int | None = None
        self._channel: socket.socket | None = None
        self._outbox: Outbox | None = None
        self._asked: deque[Task] = deque()
        self._heard = 0.0
        """When it last answered."""
        children.shed(self._close_files)

    def start(
        self,
        request: Request,
        files: Sequence[int],
        group: Group | None,
        *,
        begun: Callable[[int], None],
        ended: Callable[[int], None],
        failed: Callable[[OSError], None],
        lost: Callable[[list[int]], None],
    ) -> int:
        """Have a request carried out by a child in ``group``; see :class:`Task`. Returns which child it is.

        Raises:
            OSError: no process can be started, or no launcher.
        """
        outbox = self._running()
        task = Task(begun, ended, failed, lost, [], self._children.expect())
        try:
            for file in files:
                task.files.append(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 0))
            place = os.open(group.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if group else None
            packet = request.packet(place, task.files, partial(self._unsent, task))
        except OSError:
            close_all(task.files)
            raise
        self._asked.append(task)
        outbox.put(packet)
        self._loop.call_in(ANSWER_S, partial(self._overdue, task))
        self._flush()
        return task.which

    def run(
        self,
        request: Request,
        files: Sequence[int],
        group: Group | None,
        done: Done,
        lost: Callable[[], None],
    ) -> None:
        """As :meth:`.Children.fork`, for a request; the first of the files that go with it is where it answers.

        Raises:
            OSError: no process can be started, or no launcher.
        """
        ours, theirs = socket_pair()
        which = 0

        def ended(_status: int) -> None:
            self._children.answered(ours, which, done, receive)

        def failed(error: OSError) -> None:
            ours.close()
            done(no_process(error, group), [])

        def given_up(_files: list[int]) -> None:
            ours.close()
            lost()

        with theirs:
            try:
                which = self.start(
                    request,
                    [theirs.fileno(), *files],
                    group,
                    begun=lambda _pid: None,
                    ended=ended,
                    failed=failed,
                    lost=given_up,
                )
            except BaseException:
                ours.close()
                raise

    def ask(self, request: Request, done: Done, tries: int = TRIES) -> None:
        """As :meth:`run`, for what can be done again where its launcher was killed."""

        def lost() -> None:
            if tries > 1:
                self.ask(request, done, tries - 1)
            else:
                done(KILLED, [])

        try:
            self.run(request, [], None, done, lost)
        except OSError as error:
            done(no_process(error, None), [])

    def _close_files(self) -> None:
        """In a forked child, to which they mean nothing: that a request's channel closes says that it is done."""
        for task in self._asked:
            close_all(task.files)

    def _flush(self) -> None:
        if self._channel is None or self._outbox is None:
            return
        try:
            self._loop.expect(self._channel, write=not self._outbox.flush())
        except PeerGone:
            # Not from within a question: whoever asks is told later.
            self._loop.call_in(0.0, partial(self._lose, self._channel))

    def _turn(self) -> None:
        """Take its answers."""
        channel = self._channel
        self._flush()
        while self._channel is not None and self._channel is channel:
            try:
                answer = channel.recv(_STARTED.size)
            except BlockingIOError:
                return
            except OSError:
                answer = b""
            if len(answer) != _STARTED.size or not self._asked:
                self._lose(channel)
                return
            self._heard = time.monotonic()
            self._settle(self._asked.popleft(), *_STARTED.unpack(answer))

    def _settle(self, task: Task, pid: int) -> None:
        close_all(task.files)
        if pid < 0:
            guarded(partial(task.failed, OSError(-pid, os.strerror(-pid))))
            return
        guarded(partial(task.begun, pid))
        # It may have ended already.
        self._children.adopt(pid, task.ended, task.which)

    def _unsent(self, task: Task, error: OSError) -> None:
        self._asked.remove(task)
        close_all(task.files)
        self._loop.call_in(0.0, partial(task.failed, error))

    def _overdue(self, task: Task) -> None:
        # What it said, if only to others, may be here unheard: on a busy machine we are the slow one.
        self._turn()
        waited = time.monotonic() - self._heard
        if task not in self._asked or self._channel is None or self._outbox is None:
            return
        if len(self._asked) > len(self._outbox) and waited >= ANSWER_S:
            self._lose(self._channel)
        else:
            self._loop.call_in(max(ANSWER_S - waited, ANSWER_S / 10), partial(self._overdue, task))

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

    def _running(self) -> Outbox:
        if self._outbox is not None:
            return self._outbox
        executable = self.program()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._pid = os.posix_spawn(
                    f"/proc/self/fd/{executable}",
                    [program.LAUNCHER],
                    {},
                    file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), CHANNEL)],
                )
            except OSError:
                ours.close()
                raise
        self._children.adopt(self._pid, partial(self._ended, ours), self._children.expect())
        ours.setblocking(False)
        self._channel, self._outbox = ours, Outbox(ours)
        self._loop.watch(ours, self._turn)
        return self._outbox

    def _ended(self, channel: socket.socket, _status: int) -> None:
        if self._channel is channel:
            self._pid = None
            # What it said before is heard first.
            self._turn()
            self._lose(channel)

    def _lose(self, channel: socket.socket) -> None:
        """What does not answer does not live; the next is another."""
        if self._channel is not channel or self._outbox is None:
            return
        self._outbox.close()
        self._loop.drop(channel)
        self._channel = self._outbox = None
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)
            self._pid = None
        asked, self._asked = self._asked, deque()
        for task in asked:
            try:
                guarded(partial(task.lost, task.files))
            finally:
                close_all(task.files)
