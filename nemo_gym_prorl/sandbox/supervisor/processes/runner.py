# SPDX-License-Identifier: Apache-2.0
"""The supervisor's runner: a tiny process that forks others in its place, each to carry out a script.

To fork the supervisor takes the kernel a millisecond, and both sides as long again to make memory theirs that they had
in common. The runner has nothing but a few pages (:mod:`..isolation.scripts`). What it forks are children of the
supervisor's, born in the sandbox's control group. It is not to be seen from inside any sandbox, holds no file but its
channel, and ends with the supervisor. One that was killed, or does not answer, is replaced when it is needed.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from nemo_gym_prorl.sandbox.isolation.scripting import scripts
from nemo_gym_prorl.sandbox.isolation.scripting.scripts import (
    CHANNEL,
    CLONE_INTO_CGROUP,
    CLONE_PARENT,
    FIRST_FILE,
    Script,
)
from nemo_gym_prorl.sandbox.limits.cgroups import Group
from nemo_gym_prorl.sandbox.supervisor.processes.children import Children, Done, no_process
from nemo_gym_prorl.sandbox.supervisor.processes.event_loop import Loop, guarded
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Outbox, Packet, PeerGone, close_all, socket_pair


ANSWER_S = 5.0
"""How long it may say nothing while it is asked to fork, which takes a fraction of a millisecond, before it counts as
dead."""

NAME = "script"

_OUT_OF_THE_WAY = 64

_IGNORED = (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python, or the supervisor, ignores; what is started here is not to."""


class RunnerLostError(Exception):
    """There is none, and none can be started."""


@dataclass(slots=True, eq=False)
class Task:
    """One script, from when it was asked for until it is known who carries it out.

    Attributes:
        begun: told the number of the process.
        ended: told the process's status, after that.
        failed: told why no process can be started.
        lost: told that the runner died first, with the files in time to give them to somebody else. What it may have
            begun gets no word of anybody's.
        files: what the script is sent with, its own copies.
        which: counts what was started, as :meth:`.Children.expect` does.
    """

    begun: Callable[[int], None]
    ended: Callable[[int], None]
    failed: Callable[[OSError], None]
    lost: Callable[[list[int]], None]
    files: list[int]
    which: int


class Runner:
    """See the module."""

    def __init__(self, loop: Loop, children: Children) -> None:
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

    def first_file(self, group: Group | None) -> int:
        """The number that the first of the files has which a script is sent with."""
        return FIRST_FILE + (group is not None)

    def start(
        self,
        script: Script,
        files: Sequence[int],
        group: Group | None,
        *,
        begun: Callable[[int], None],
        ended: Callable[[int], None],
        failed: Callable[[OSError], None],
        lost: Callable[[list[int]], None],
    ) -> int:
        """Have a script carried out by a child in ``group``; see :class:`Task`. Returns which child it is.

        Raises:
            RunnerLostError: it has to be done in another way.
            OSError: no process can be started.
            UnfitError: the script is too large.
        """
        flags = CLONE_PARENT | (CLONE_INTO_CGROUP if group else 0)
        message = scripts.clone_arguments(flags, FIRST_FILE).ljust(2 * scripts.SIZE, b"\0") + script.packed()
        outbox = self._running()
        task = Task(begun, ended, failed, lost, [], self._children.expect())
        given: list[int] = []
        try:
            for file in files:
                task.files.append(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 0))
            if group:
                given.append(os.open(group.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError:
            close_all(task.files)
            raise
        self._asked.append(task)
        outbox.put(Packet(message, given + task.files, given, partial(self._unsent, task)))
        self._loop.call_in(ANSWER_S, partial(self._overdue, task))
        self._flush()
        return task.which

    def run(
        self,
        script: Script,
        files: Sequence[int],
        group: Group | None,
        done: Done,
        lost: Callable[[], None],
    ) -> None:
        """As :meth:`.Children.fork`, for a script; the first of the files that it has is where it answers.

        Raises:
            RunnerLostError: it has to be done in another way.
            OSError: no process can be started.
            UnfitError: the script is too large.
        """
        ours, theirs = socket_pair()
        which = 0

        def ended(_status: int) -> None:
            self._children.answered(ours, which, done)

        def failed(error: OSError) -> None:
            ours.close()
            done(no_process(error, group), [])

        def given_up(_files: list[int]) -> None:
            ours.close()
            lost()

        with theirs:
            try:
                which = self.start(
                    script,
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

    def _close_files(self) -> None:
        """In a forked child, to which they mean nothing: that a script's channel closes says that it is done."""
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
                answer = channel.recv(scripts.ANSWER.size)
            except BlockingIOError:
                return
            except OSError:
                answer = b""
            if len(answer) != scripts.ANSWER.size or not self._asked:
                self._lose(channel)
                return
            self._heard = time.monotonic()
            self._settle(self._asked.popleft(), *scripts.ANSWER.unpack(answer))

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

    def _running(self) -> Outbox:
        if self._outbox is not None:
            return self._outbox
        try:
            if self._program is None:
                made = scripts.make()
                # It gets its own files by number, of which this is to be none.
                self._program = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY)
                os.close(made)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise RunnerLostError from error
        with theirs:
            try:
                self._pid = os.posix_spawn(
                    f"/proc/self/fd/{self._program}",
                    [NAME],
                    {},
                    file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), CHANNEL)],
                    setsigdef=_IGNORED,
                )
            except OSError as error:
                ours.close()
                raise RunnerLostError from error
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
