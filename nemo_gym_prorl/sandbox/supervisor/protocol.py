# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Request, reply and error types of the supervisor's socket, shared by the client and the supervisor.

:mod:`..spec` validates the values of a sandbox's specification; the supervisor relies on that check.

:class:`SandboxLost` and :class:`SandboxRefused` are infrastructure failures: a retry of the rollout may succeed.
:class:`SandboxExhausted` and :class:`SandboxBroken` are agent failures: a retry would fail in the same way.
"""

from __future__ import annotations

import errno
import resource
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from nemo_gym_prorl.failures import AgentError, FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox.limits import rlimits
from nemo_gym_prorl.sandbox.limits.cgroups import Group
from nemo_gym_prorl.sandbox.supervisor.connection import Message


Start = Literal["auto", "direct", "runtime"]


@dataclass(frozen=True, kw_only=True)
class CreateRequest:
    """Start a sandbox.

    Attributes:
        sandbox: name of the new sandbox: ``b-`` and twelve hexadecimal digits.
        runtime: path of the container runtime's executable.
        image_identity: cache key of the unpacked image; changes when the image's folder is replaced.
        scripted: whether the image's scripts may set variables, so that only the runtime can report the variables.
        uid: user id in the sandbox; 0 for root.
        host_uid: user id on the host that ``uid`` is mapped to; the first id of a block if ``users`` is set.
        host_gid: group id on the host, likewise.
        capabilities: numbers of the capabilities that the sandbox's root has beyond the default set.
        network: ``none``, ``public``, ``host`` or a list of hosts; see :mod:`nemo_gym_prorl.network_access`.
        snapshot: path of the archive from which the writable layer is restored; empty for an empty layer.
        snapshot_paths: paths in the sandbox that are restored from the snapshot; all if empty.

    The other fields are those of :class:`..spec.ContainerSpec`.
    """

    sandbox: str
    runtime: str
    start: Start
    image: str
    image_identity: str
    scripted: bool
    uid: int
    host_uid: int
    host_gid: int
    users: bool
    network: str | list[str]
    binds: list[str]
    capabilities: list[int]
    memory_mib: int
    cpus: float
    processes: int
    disk_mib: int
    shared_memory_mib: int
    ttl_s: float | None
    start_timeout_s: float
    snapshot: str
    snapshot_paths: list[str]

    @property
    def limits(self) -> dict[int, int]:
        """Soft and hard limit of each program by ``resource.RLIMIT_*`` constant, without the limit of open files."""
        limits = {resource.RLIMIT_NPROC: rlimits.process_limit_here(self.processes), resource.RLIMIT_CORE: 0}
        if self.disk_mib:
            limits[resource.RLIMIT_FSIZE] = self.disk_mib << 20
        return limits


@dataclass(frozen=True)
class StartReply:
    """Reply to a :class:`CreateRequest` when the sandbox is up.

    Attributes:
        environment: environment variables that the image sets.
        controllers: names of the control group controllers that limit the sandbox.
        fallback_reason: why ``start: auto`` used the runtime instead of a direct start; empty otherwise.
        in_memory: whether the supervisor's folder is on a file system in memory, such as tmpfs.
        steps: names and durations of the start's steps, for logs.
    """

    environment: dict[str, str]
    controllers: list[str]
    start_method: Literal["direct", "runtime"]
    fallback_reason: str
    in_memory: bool
    steps: str


@dataclass(frozen=True)
class CheckRequest:
    """Check that a sandbox is up, and subscribe the client to its events. With ``memory``, a sandbox in which the
    machine's OOM killer may have killed a process is reported as lost."""

    sandbox: str
    memory: bool = False


@dataclass(frozen=True)
class DestroyRequest:
    """End a sandbox; the reply comes when its processes and files are gone."""

    sandbox: str


@dataclass(frozen=True, kw_only=True)
class SpawnRequest:
    """Start a program in a sandbox. Attached descriptors become its files from 0 on; with ``tty``, from 3 on.

    Attributes:
        spawn: name of the program in a :class:`SignalRequest` and in the program's ``exit`` event.
        cwd: working directory in the sandbox.
        user: name or number of the user who runs the program; ``None`` for the sandbox's own user.
        tty: rows and columns of a new terminal, which becomes files 0 to 2; ``None`` for no terminal.
    """

    sandbox: str
    spawn: str
    argv: list[str]
    env: dict[str, str]
    cwd: str
    user: str | int | None = None
    tty: list[int] | None = None


@dataclass(frozen=True)
class SignalRequest:
    """Signal a program's process group. SIGKILL is also effective while the program is still starting."""

    spawn: str
    signal: int


@dataclass(frozen=True)
class SnapshotRequest:
    """Pause a sandbox's programs, archive its writable layer in the attached file, and resume the programs.

    Attributes:
        header: text that is stored at the beginning of the archive.
        quiescent: skip the pause if only idle shells run in the sandbox, since pausing may take longer than copying.
    """

    sandbox: str
    header: str
    quiescent: bool = False


@dataclass(frozen=True)
class EgressRequest:
    """Return which hosts programs of a sandbox have requested from the sandbox's proxy."""

    sandbox: str


@dataclass(frozen=True)
class PolicyRequest:
    """Forward the sandbox's ``POLICY_PORT`` to the base URL of a policy, with the bearer token ``key``. An empty
    ``url`` closes the port."""

    sandbox: str
    url: str = ""
    key: str = field(default="", repr=False)


@dataclass(frozen=True)
class PutRequest:
    """Write the attached file to a path; without a ``mode``, an existing file keeps its mode, a new file gets 0644."""

    sandbox: str
    path: str
    mode: int | None = None


@dataclass(frozen=True)
class GetRequest:
    """Copy a file of the sandbox, of at most ``limit`` bytes, into the attached file."""

    sandbox: str
    path: str
    limit: int


Request = (
    CreateRequest
    | CheckRequest
    | DestroyRequest
    | SpawnRequest
    | SignalRequest
    | SnapshotRequest
    | EgressRequest
    | PolicyRequest
    | PutRequest
    | GetRequest
)


def encode(request: Request) -> Message:
    return {"do": _name(type(request)), **vars(request)}


def decode(message: Message) -> Request:
    """Return the request that :func:`encode` has put into a message.

    Raises:
        Refused: the type of request is unknown, or a field is missing or unknown.
    """
    values = {name: value for name, value in message.items() if name not in ("do", "id")}
    try:
        request: Request = _KINDS[message["do"]](**values)
    except (KeyError, TypeError) as error:
        raise Refused({"error": f"unknown request {message.get('do')!r}: {error}"}) from error
    return request


def _name(kind: type) -> str:
    return kind.__name__.removesuffix("Request").lower()


_KINDS: dict[str, Any] = {_name(kind): kind for kind in get_args(Request)}

SHORTAGES = {
    errno.EAGAIN: "no further process can be started on this machine for this user (ulimit -u, pids.max, pid_max)",
    errno.ENOMEM: "this machine has no memory left",
    errno.ENOBUFS: "this machine has no memory left",
    errno.EMFILE: "a process may open no more files (ulimit -Hn)",
    errno.ENFILE: "this machine may open no more files (fs.file-max)",
    errno.ETOOMANYREFS: "this user's processes have too many open files in transit over sockets "
    "(ulimit -Hn of the server)",
}
"""Message by ``errno`` for shortages of the machine: transient failures that the request did not cause."""


class SandboxRefused(InfrastructureError):
    """The supervisor could not carry out a request.

    Attributes:
        number: the ``errno`` of a failed system call; 0 if there is none, or for a shortage of the machine.
        log: output of the container runtime if the runtime failed; empty otherwise.
    """

    default_kind = FailureKind.AGENT_RUN_ERROR

    def __init__(self, reason: str, number: int = 0, log: str = "", *, kind: FailureKind | None = None) -> None:
        super().__init__(reason, kind=kind)
        self.number = number
        self.log = log


class SandboxLost(InfrastructureError):
    """The sandbox or its supervisor is gone."""

    default_kind = FailureKind.SESSION_LOST


class SandboxBroken(AgentError):
    """Programs in the sandbox removed a file that a session needs, or ended the sandbox."""


class SandboxExhausted(AgentError):
    """Programs in the sandbox have used up a limit of the sandbox, which the message names."""


HELPER_KILLED: Message = {"error": "the supervisor's helper was killed", "killed": True}


class Refused(Exception):
    """A failed request; ``reply`` is the error reply, which :mod:`.client` converts to an exception."""

    def __init__(self, reply: Message) -> None:
        super().__init__(reply["error"])
        self.reply = reply


def exhausted(what: str) -> Message:
    """Return the error reply for a sandbox that has used up its limit of ``what``: ``processes`` or ``terminals``."""
    return {"error": f"the sandbox has as many {what} as it may have", "exhausted": what}


EXHAUSTED = exhausted("processes")


def no_process(error: OSError, group: Group | None) -> Refused:
    """Return the error for a failed fork: the sandbox is at its process limit, or the machine lacks a resource."""
    if isinstance(error, BlockingIOError) and group and group.is_full():
        return Refused(EXHAUSTED)
    return Refused({"error": f"no process can be started: {error_text(error)}", "errno": error.errno})


def error_text(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def failure(error: BaseException) -> Message:
    """Return the error reply for an exception; the traceback of an unexpected exception goes to standard error."""
    if isinstance(error, Refused):
        return error.reply
    if isinstance(error, OSError):
        return {"error": error_text(error), "errno": error.errno}
    print_without_source(error)
    return {"error": f"the supervisor failed: {type(error).__name__}: {error}"}


def print_without_source(error: BaseException) -> None:
    """Print a traceback without source lines, which a child that has joined a sandbox would read from the sandbox."""
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    lines = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    print(*lines, f"{type(error).__name__}: {error}", sep="\n", file=sys.stderr)
