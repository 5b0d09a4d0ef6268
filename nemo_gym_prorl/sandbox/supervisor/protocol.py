# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Requests to a supervisor, its replies and its errors: the same types at both ends of its socket.

The values of a specification are checked once, where the specification is made (:mod:`..spec`). :func:`decode` checks
the shape of a request before any work starts; the supervisor relies on that shape from then on.

:class:`SandboxLost` and :class:`SandboxRefused` are failures of the infrastructure: the same rollout may succeed
elsewhere. :class:`SandboxExhausted` and :class:`SandboxBroken` are the agent's: a retry would end the same way.
"""

from __future__ import annotations

import errno
import sys
import traceback
import types
import typing
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from nemo_gym_prorl.failures import AgentError, FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox.limits import rlimits
from nemo_gym_prorl.sandbox.limits.cgroups import Group
from nemo_gym_prorl.sandbox.supervisor.connection import Message


Start = Literal["auto", "direct", "runtime"]


@dataclass(frozen=True, kw_only=True)
class CreateRequest:
    """Start a sandbox. Plain values: the supervisor builds the command lines.

    Attributes:
        start: start method; ``auto`` prefers a direct start.
        image_identity: identifies an unpacked image; changes when the folder at the same path is replaced.
        scripted: whether scripts of the image may set variables, which only the runtime can evaluate.
        uid: user id inside; 0 for root.
        capabilities: numbers of the capabilities that root inside has beyond the default set.
        network: ``none``, ``public``, ``host`` or a list of hosts; see :mod:`nemo_gym_prorl.network_access`.
        snapshot: path of the archive that the writable layer is restored from; empty for none.
        snapshot_paths: paths inside that are restored; all if empty.

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
        """Soft and hard limits of this request, by ``resource.RLIMIT_*``; open files have limits of their own."""
        return rlimits.program_limits(self.processes, self.disk_mib)


@dataclass(frozen=True)
class StartReply:
    """Reply to a :class:`CreateRequest` when the sandbox is up.

    Attributes:
        environment: variables that the image sets.
        start_method: method that started the sandbox.
        fallback_reason: reason that a direct start was not possible; empty otherwise.
        in_memory: whether the files of sandboxes are kept in memory.
        steps: duration of each step, for logs.
    """

    environment: dict[str, str]
    controllers: list[str]
    start_method: Literal["direct", "runtime"]
    fallback_reason: str
    in_memory: bool
    steps: str


@dataclass(frozen=True)
class CheckRequest:
    """Check that a sandbox is up, and subscribe the client to its events.

    Attributes:
        memory: whether a process that the kernel ended for want of the machine's memory counts as a lost sandbox.
    """

    sandbox: str
    memory: bool = False


@dataclass(frozen=True)
class DestroyRequest:
    """End a sandbox; the reply comes when its processes and files are gone."""

    sandbox: str


@dataclass(frozen=True, kw_only=True)
class SpawnRequest:
    """Start a program in a sandbox, with the attached files as its open files.

    Attributes:
        spawn: name of the program in a :class:`SignalRequest`.
        user: user who runs the program; ``None`` for the sandbox's own user.
        tty: rows and columns of a terminal for the program; ``None`` for no terminal.
    """

    sandbox: str
    spawn: str
    argv: list[str]
    env: dict[str, str]
    cwd: str
    user: str | int | None = None
    tty: list[int] | None = None
    echo: bool = False


@dataclass(frozen=True)
class SignalRequest:
    """Signal a program's process group. SIGKILL is also effective while the program is still starting."""

    spawn: str
    signal: int


@dataclass(frozen=True)
class PauseRequest:
    """Stop every process of a sandbox."""

    sandbox: str


@dataclass(frozen=True)
class ResumeRequest:
    """Let every process of a sandbox continue."""

    sandbox: str


@dataclass(frozen=True)
class SnapshotRequest:
    """Pack the writable layer of a paused sandbox into the attached file.

    Attributes:
        header: text that precedes the archive.
        quiescent: accept a sandbox that is not paused; the reply has ``busy`` if a program in it is not idle.
    """

    sandbox: str
    header: str
    quiescent: bool = False


@dataclass(frozen=True)
class EgressRequest:
    """Return which hosts a sandbox has asked its proxy for."""

    sandbox: str


@dataclass(frozen=True)
class PolicyRequest:
    """Serve a policy on a port of the sandbox's loopback device in place of the last one; none if ``url`` is empty."""

    sandbox: str
    url: str = ""
    key: str = field(default="", repr=False)


@dataclass(frozen=True)
class PutRequest:
    """Write the attached file to a path of the sandbox; without a ``mode``, an existing file keeps its own."""

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
    | PauseRequest
    | ResumeRequest
    | SnapshotRequest
    | EgressRequest
    | PolicyRequest
    | PutRequest
    | GetRequest
)


def encode(request: Request) -> Message:
    return {"do": _name(type(request)), **vars(request)}


def decode(message: Message) -> Request:
    """Return the request of a message.

    Raises:
        Refused: the kind is unknown, or a field is missing, unknown or of a wrong type.
    """
    values = {name: value for name, value in message.items() if name not in ("do", "id")}
    kind = _KINDS.get(str(message.get("do")))
    if kind is None:
        raise Refused({"error": f"unknown request {message.get('do')!r}"})
    wrong = [name for name, value in values.items() if not isinstance(value, _TYPES[kind].get(name, ()))]
    missing = {field.name for field in fields(kind) if field.default is MISSING} - values.keys()
    if wrong or missing:
        raise Refused({"error": f"{message['do']}: fields missing or wrong: {', '.join(sorted({*wrong, *missing}))}"})
    request: Request = kind(**values)
    return request


def _name(kind: type) -> str:
    return kind.__name__.removesuffix("Request").lower()


def _json_types(hint: Any) -> tuple[type, ...]:
    """Return the types that JSON gives a value of a field."""
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return tuple(kind for part in typing.get_args(hint) for kind in _json_types(part))
    if hint is float:
        return (float, int)
    return (str,) if origin is Literal else (origin or hint,)


_KINDS: dict[str, Any] = {_name(kind): kind for kind in typing.get_args(Request)}
_TYPES = {
    kind: {name: _json_types(hint) for name, hint in typing.get_type_hints(kind).items()} for kind in _KINDS.values()
}


Resource = Literal["disk", "memory", "processes", "terminals"]
"""Resources whose exhaustion is reported to the agent by name."""

SHORTAGES = {
    errno.EAGAIN: "no further process can be started on this machine for this user (ulimit -u, pids.max, pid_max)",
    errno.ENOMEM: "this machine has no memory left",
    errno.ENOBUFS: "this machine has no memory left",
    errno.EMFILE: "a process may open no more files (ulimit -Hn)",
    errno.ENFILE: "this machine may open no more files (fs.file-max)",
    errno.ETOOMANYREFS: "this user's processes have too many open files in transit over sockets "
    "(ulimit -Hn of the server)",
}
"""Shortages of the machine by ``errno``: transient, and independent of the request."""


class SandboxRefused(InfrastructureError):
    """The supervisor could not carry out a request.

    Attributes:
        number: the ``errno`` of a failed system call, or 0.
        log: output of the container runtime, if the runtime failed.
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
    """Programs in the sandbox reached one of its limits."""

    def __init__(self, reason: str, resource: Resource) -> None:
        super().__init__(reason)
        self.resource = resource


HELPER_KILLED: Message = {"error": "the supervisor's helper was killed", "killed": True}


class Refused(Exception):
    """A request has failed, in the supervisor or one of its children.

    Attributes:
        reply: the error reply, from which :mod:`.client` makes an exception.
    """

    def __init__(self, reply: Message) -> None:
        super().__init__(reply["error"])
        self.reply = reply


def exhausted(what: str) -> Message:
    """Return the error reply for a sandbox at its limit of ``what``."""
    return {"error": f"the sandbox has as many {what} as it may have", "exhausted": what}


EXHAUSTED = exhausted("processes")


def no_process(error: OSError, group: Group | None) -> Refused:
    """Return the error for a process that cannot be started: the sandbox's limit, or a shortage of the machine."""
    if isinstance(error, BlockingIOError) and group and group.is_full():
        return Refused(EXHAUSTED)
    return Refused({"error": f"no process can be started: {error_text(error)}", "errno": error.errno})


def error_text(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def failure(error: BaseException) -> Message:
    if isinstance(error, Refused):
        return error.reply
    if isinstance(error, OSError):
        return {"error": error_text(error), "errno": error.errno}
    print_without_source(error)
    return {"error": f"the supervisor failed: {type(error).__name__}: {error}"}


def print_without_source(error: BaseException) -> None:
    """Print a traceback without source lines: a child that has joined a sandbox would read the sandbox's files."""
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    print(*places, f"{type(error).__name__}: {error}", sep="\n", file=sys.stderr)
