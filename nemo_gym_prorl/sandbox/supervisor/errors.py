# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a sandbox that was started, by whose doing it is.

:class:`SandboxLost` and :class:`SandboxRefused` are ours: the same rollout may well succeed elsewhere.
:class:`SandboxExhausted` is the agent's: it filled its disk, or took all the memory, processes or terminals it may
have, and would do so again. So it is no lost session, and nobody tries it again. :class:`SandboxBroken` is, too: what
a session needs was there, and is not any more; or the sandbox itself was ended from inside.
"""

from __future__ import annotations

import errno
from typing import Literal

from nemo_gym_prorl.failures import AgentError, FailureKind, InfrastructureError


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
