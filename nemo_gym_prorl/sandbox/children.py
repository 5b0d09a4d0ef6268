# SPDX-License-Identifier: Apache-2.0
"""The supervisor's children: every process that ends with it, and who is told of its end.

What may take long, or must join a container, runs in a child that was forked for it. It sends one message and ends;
its end is what counts, so no message is ever waited for.

The kernel gives a process's number away again as soon as it is reaped, on some machines after 32,768 others. So an end
is never taken for that of another process which bore the number before: see :meth:`Children.adopt`.
"""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Callable

from nemo_gym_prorl.sandbox import linux
from nemo_gym_prorl.sandbox.cgroup import Group
from nemo_gym_prorl.sandbox.wire import Inbox, Message, pack, send_files


Action = Callable[[], tuple[Message, list[int]]]
"""What a forked child does; the message and open files are its answer."""


class Unreachable(Exception):
    """What an action was to act on has ended, or is about to; nobody's request was wrong."""


Done = Callable[[Message, list[int]], None]

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
        self._unclaimed: dict[int, tuple[int, int]] = {}
        """Number to status of those that were reaped unknown, and how many had been forked by then."""

    def __contains__(self, pid: int) -> bool:
        """Whether somebody waits for that child, which therefore has not been reaped."""
        return pid in self._waiting

    def fork(self, action: Action, done: Done, group: Group | None = None) -> None:
        """Run ``action`` in a forked child; ``done`` gets what it returns, or ``{"error": ...}``, also if none can be
        forked.

        What the child starts is in the control group ``group``, as it is itself.
        """
        ours, theirs = socket.socketpair()
        try:
            pid = group.fork() if group else os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            done({"error": f"no process can be started: {in_words(error)}", "errno": error.errno}, [])
            return
        if pid == 0:
            _run(action, theirs)
        theirs.close()
        self._forked += 1
        which = self._forked

        def ended(_status: int) -> None:
            ours.setblocking(False)
            received = Inbox(ours).receive()
            ours.close()
            answer, files = (
                received[0] if received else ({"error": "the supervisor's helper was killed", "killed": True}, [])
            )
            self._answering = which
            done(answer, files)

        self._waiting[pid] = ended

    def on_end(self, pid: int, ended: Callable[[int], None]) -> None:
        """Have ``ended`` called with the status of a child that was forked just now."""
        self._waiting[pid] = ended

    def adopt(self, pid: int, ended: Callable[[int], None]) -> None:
        """Have ``ended`` called with the status of a process that a forked child started, when told of it: to be
        called by that child's ``done``.

        Such a process becomes ours when the child ends, and may be reaped before we have heard of it. What was reaped
        before the child was even forked is another one that had its number.
        """
        status, forked = self._unclaimed.pop(pid, (0, 0))
        if forked >= self._answering:
            ended(status)
        else:
            self._waiting[pid] = ended

    def reap(self) -> bool:
        """Collect every dead child; returns whether there were any that nobody waits for, or not yet."""
        strangers = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return strangers
            if pid == 0:
                return strangers
            if ended := self._waiting.pop(pid, None):
                ended(status)
            else:
                strangers = True
                self._unclaimed[pid] = status, self._forked
                if len(self._unclaimed) > MOST_UNCLAIMED:
                    del self._unclaimed[next(iter(self._unclaimed))]


def in_words(error: OSError) -> str:
    """What an error says, and of which file."""
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def _run(action: Action, channel: socket.socket) -> None:
    """In a forked child: run ``action``, send what it returns, and end."""
    try:
        signal.set_wakeup_fd(-1)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            answer, files = action()
        except Unreachable as error:
            answer, files = {"error": str(error), "lost": True}, []
        except OSError as error:
            answer, files = {"error": in_words(error), "errno": error.errno}, []
        send_files(channel, pack({**answer, "files": len(files)}), files)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
