# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Errors of sandboxes, by whose doing it is; and the answers that carry them from the supervisor.

:class:`SandboxLost` and :class:`SandboxRefused` are ours: the same rollout may well succeed elsewhere.
:class:`SandboxExhausted` is the agent's: it filled its disk, or took all the memory, processes or terminals it may
have, and would do so again. So it is no lost session, and is not retried. :class:`SandboxBroken` is, too: what
a session needs was there, and is not any more; or the sandbox itself was ended from inside.

In the supervisor and its children a :class:`Refused` has the answer of a request that could not be carried out.
"""

from __future__ import annotations

import errno
import sys
import traceback
from typing import Literal

from nemo_gym_prorl.failures import AgentError, FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox.limits.cgroups import Group
from nemo_gym_prorl.sandbox.supervisor.connection import Message


Resource = Literal["disk", "memory", "processes", "terminals"]
"""What an agent can use up."""

SHORTAGES = {
    errno.EAGAIN: "no further process can be started on this machine for this user (ulimit -u, pids.max, pid_max)",
    errno.ENOMEM: "this machine has no memory for it",
    errno.ENOBUFS: "this machine has no memory for it",
    errno.EMFILE: "a process may open no more files (ulimit -Hn)",
    errno.ENFILE: "this machine may open no more files (fs.file-max)",
    errno.ETOOMANYREFS: "this user's processes have as many open files on their way over sockets as the kernel allows "
    "(ulimit -Hn of the server)",
}
"""What a machine can run out of, whoever asks: errors that say nothing of the request, and may be over soon."""


class SandboxRefused(InfrastructureError):
    """The supervisor could not do what it was asked to.

    Attributes:
        number: the ``errno`` of a failed system call, or 0.
        log: what the container runtime said, if it was the one to fail.
    """

    default_kind = FailureKind.AGENT_RUN_ERROR

    def __init__(self, reason: str, number: int = 0, log: str = "", *, kind: FailureKind | None = None) -> None:
        super().__init__(reason, kind=kind)
        self.number = number
        self.log = log


class SandboxLost(InfrastructureError):
    """The sandbox, or the supervisor that owned it, is gone."""

    default_kind = FailureKind.SESSION_LOST


class SandboxBroken(AgentError):
    """What ran in the sandbox took away what a session in it needs, or ended it."""


class SandboxExhausted(AgentError):
    """What ran in the sandbox used up what the sandbox may use.

    Attributes:
        resource: which limit it ran into.
    """

    def __init__(self, reason: str, resource: Resource) -> None:
        super().__init__(reason)
        self.resource = resource


KILLED: Message = {"error": "the supervisor's helper was killed", "killed": True}


class Unreachable(Exception):
    """What an action was to act on has ended, or is about to; nobody's request was wrong."""


class Refused(Exception):
    """A question has this for an answer: ``error``, and what else :mod:`.client` tells errors apart by."""

    def __init__(self, answer: Message) -> None:
        super().__init__(answer["error"])
        self.answer = answer


def exhausted(what: str) -> Message:
    """The answer to a request for one more of what a sandbox has all of."""
    return {"error": f"the sandbox has as many {what} as it may have", "exhausted": what}


EXHAUSTED = exhausted("processes")


def no_process(error: OSError, group: Group | None) -> Refused:
    """That none can be started, by whose doing it is."""
    if isinstance(error, BlockingIOError) and group and group.is_full():
        return Refused(EXHAUSTED)
    return Refused({"error": f"no process can be started: {in_words(error)}", "errno": error.errno})


def in_words(error: OSError) -> str:
    """What an error says, and of which file."""
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def failure(error: BaseException) -> Message:
    """The answer to a request that led to an exception, whatever it is."""
    if isinstance(error, Refused):
        return error.answer
    if isinstance(error, Unreachable):
        return {"error": str(error), "lost": True}
    if isinstance(error, OSError):
        return {"error": in_words(error), "errno": error.errno}
    print_without_source(error)
    return {"error": f"the supervisor failed: {type(error).__name__}: {error}"}


def print_without_source(error: BaseException) -> None:
    """As a traceback, but no file is read: in a child that has joined a sandbox it would be one of the sandbox's."""
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    print(*places, f"{type(error).__name__}: {error}", sep="\n", file=sys.stderr)
