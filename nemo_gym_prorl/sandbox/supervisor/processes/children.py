# SPDX-License-Identifier: Apache-2.0
"""The supervisor's children: every process that ends with it, and who is told of its end.

What may take long, or must join a container, runs in a child that was forked for it. It sends one message and ends;
its end is what counts, so no message is ever waited for.

The kernel gives a process's number away again as soon as it is reaped, on some machines after 32,768 others. So an end
is never taken for that of another process which bore the number before: see :meth:`Children.adopt`.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from nemo_gym_prorl.sandbox.isolation import syscalls
from nemo_gym_prorl.sandbox.limits import descriptors
from nemo_gym_prorl.sandbox.limits.cgroups import Group
from nemo_gym_prorl.sandbox.supervisor.processes.event_loop import guarded
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message, PeerGone, pack, receive, send, socket_pair


Action = Callable[[], tuple[Message, list[int]]]
"""What a forked child does; the message and open files are its answer."""


class Unreachable(Exception):
    """What an action was to act on has ended, or is about to; nobody's request was wrong."""


Done = Callable[[Message, list[int]], None]

Take = Callable[[socket.socket], tuple[Message, list[int]]]
"""How an answer is read."""

KILLED: Message = {"error": "the supervisor's helper was killed", "killed": True}


def exhausted(what: str) -> Message:
    """The answer to a request for one more of what a sandbox has all of."""
    return {"error": f"the sandbox has as many {what} as it may have", "exhausted": what}


EXHAUSTED = exhausted("processes")

MOST_UNCLAIMED = 1024
"""Ends of strangers that are remembered: orphans of containers come here too, and nobody asks for those."""


class Children:
    """All children of a single-threaded process, which are reaped here and nowhere else."""

    def __init__(self) -> None:
        self._waiting: dict[int, Callable[[int], None]] = {}
        self._forked = 0
        """How many were forked here so far."""
        self._answering = 0
        """Which of them, counted from 1, is the one whose answer is being told."""
        self._shed: list[Callable[[], None]] = []
        self._unclaimed: dict[int, tuple[int, int]] = {}
        """Number to status of those that were reaped unknown, and how many had been forked by then."""

    def __contains__(self, pid: int) -> bool:
        """Whether somebody waits for that child, which therefore has not been reaped."""
        return pid in self._waiting

    def shed(self, files: Callable[[], None]) -> None:
        """Have each forked child call ``files`` first, which closes what is held for somebody else on the way there.

        A child may last, and what it holds does not close, which is waited for.
        """
        self._shed.append(files)

    def fork(
        self, action: Action, done: Done, group: Group | None = None, *, files: Sequence[int] | None = None
    ) -> None:
        """Run ``action`` in a forked child; ``done`` gets what it returns, or ``{"error": ...}``, also if none can be
        forked.

        What the child starts is in the control group ``group``, as it is itself. One that may last says which
        ``files`` it needs, and keeps no others open: that they close is waited for elsewhere.
        """
        try:
            ours, theirs = socket_pair()
        except OSError as error:
            done(no_process(error, group), [])
            return
        which = 0

        def ended(_status: int) -> None:
            self.answered(ours, which, done)

        try:
            which = self.start(partial(_run, action, theirs, files), ended, group)[1]
        except OSError as error:
            ours.close()
            done(no_process(error, group), [])
        finally:
            theirs.close()

    def answered(self, channel: socket.socket, which: int, done: Done, take: Take = receive) -> None:
        """Have ``done`` told what the child number ``which``, which has ended, said on a channel, and close that."""
        try:
            answer, files = take(channel)
        except (BlockingIOError, PeerGone):
            answer, files = KILLED, []
        finally:
            channel.close()
        self._answering = which
        done(answer, files)

    def start(
        self, program: Callable[[], NoReturn], ended: Callable[[int], None], group: Group | None = None
    ) -> tuple[int, int]:
        """Fork a child that runs ``program``; ``ended`` gets its status. Returns its number, and how many there were.

        Raises:
            OSError: none can be forked.
        """
        parent = os.getpid()
        pid = group.fork() if group else os.fork()
        if pid == 0:
            try:
                syscalls.end_with(parent)
                for close in self._shed:
                    close()
                gc.disable()
                signal.set_wakeup_fd(-1)
                program()
            except BaseException as error:
                print_without_source(error)
            finally:
                os._exit(1)
        self._waiting[pid] = ended
        return pid, self.expect()

    def expect(self) -> int:
        """A child is being started by somebody else, who will be told its number: returns how many there were."""
        self._forked += 1
        return self._forked

    def adopt(self, pid: int, ended: Callable[[int], None], since: int | None = None) -> None:
        """Have ``ended`` called with the status of a process that a forked child started.

        Such a process is or becomes ours, and may be reaped before we have heard of it. What was reaped before the
        child was even forked is another one that had its number.

        Args:
            pid: the process.
            ended: gets its status.
            since: which child it was, as :meth:`start` says; that whose ``done`` calls this, if not given.
        """
        status, forked = self._unclaimed.pop(pid, (0, 0))
        if forked >= (self._answering if since is None else since):
            ended(status)
        else:
            self._waiting[pid] = ended

    def reap(self) -> list[int]:
        """Collect every dead child; returns the numbers of those that nobody waits for, or not yet."""
        strangers: list[int] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return strangers
            if pid == 0:
                return strangers
            if ended := self._waiting.pop(pid, None):
                guarded(partial(ended, status))
            else:
                strangers.append(pid)
                self._unclaimed[pid] = status, self._forked
                if len(self._unclaimed) > MOST_UNCLAIMED:
                    del self._unclaimed[next(iter(self._unclaimed))]


def in_words(error: OSError) -> str:
    """What an error says, and of which file."""
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def no_process(error: OSError, group: Group | None) -> Message:
    """The answer when none can be started, by whose doing it is."""
    if isinstance(error, BlockingIOError) and group and group.full():
        return EXHAUSTED
    return {"error": f"no process can be started: {in_words(error)}", "errno": error.errno}


def print_without_source(error: BaseException) -> None:
    """As a traceback, but no file is read: in a child that has joined a sandbox it would be one of the sandbox's."""
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    print(*places, f"{type(error).__name__}: {error}", sep="\n", file=sys.stderr)


def failure(error: BaseException) -> Message:
    """The answer to a request that led to an exception, whatever it is."""
    if isinstance(error, Unreachable):
        return {"error": str(error), "lost": True}
    if isinstance(error, OSError):
        return {"error": in_words(error), "errno": error.errno}
    print_without_source(error)
    return {"error": f"the supervisor failed: {type(error).__name__}: {error}"}


def tell(channel: socket.socket, message: Message, files: list[int]) -> None:
    """In a forked child: send a message, which there is always room for."""
    send(channel, pack(message, files))


def _run(action: Action, channel: socket.socket, files: Sequence[int] | None) -> NoReturn:
    """In a forked child: run ``action``, send what it returns, and end."""
    if files is not None:
        descriptors.close_all_but([0, 1, 2, *files, channel.fileno()])
    try:
        answer, passed = action()
    except Exception as error:
        answer, passed = failure(error), []
    channel.setblocking(True)
    tell(channel, answer, passed)
    os._exit(0)
