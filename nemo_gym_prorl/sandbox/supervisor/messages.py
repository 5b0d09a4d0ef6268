# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Requests to a supervisor, one frozen dataclass each: the same types at both ends of its socket.

The values of a specification are checked once, where it is made (:mod:`..spec`). :func:`decode` checks the shape of a
request once, before anything is begun for it; the supervisor relies on it from then on.
"""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from nemo_gym_prorl.sandbox.limits import rlimits
from nemo_gym_prorl.sandbox.supervisor.connection import Message
from nemo_gym_prorl.sandbox.supervisor.errors import Refused


Start = Literal["auto", "direct", "runtime"]


@dataclass(frozen=True, kw_only=True)
class CreateRequest:
    """Start a sandbox: plain values, of which the supervisor makes command lines itself.

    Attributes:
        sandbox: its name.
        runtime: path of the container runtime, which starts it or says what the image sets.
        start: how it is made.
        image: path of the image.
        image_identity: tells an unpacked image from any other, also from what lay at its path before.
        scripted: whether scripts of the image may set variables, which only the runtime knows.
        uid: user id inside; 0 for root.
        host_uid: user id that it runs under on the host; ``host_gid`` the same of groups.
        capabilities: that root inside has beyond the usual, by number.
        snapshot: path of an archive with which its layer begins; empty for none.

    The others are those of :class:`..spec.ContainerSpec`.
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
    network: bool
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

    @property
    def limits(self) -> dict[int, int]:
        """``resource.RLIMIT_*`` to the hard limit of whatever is executed in it."""
        return rlimits.program_limits(self.processes, self.disk_mib)


@dataclass(frozen=True)
class StartReply:
    """Reply to a :class:`CreateRequest` when the sandbox is up.

    Attributes:
        environment: the variables that the image sets.
        controllers: of its control group.
        start_method: how it was made; ``fallback_reason`` why not directly.
        in_memory: whether sandboxes' files are kept in memory.
        steps: how long each step took, in words.
    """

    environment: dict[str, str]
    controllers: list[str]
    start_method: Literal["direct", "runtime"]
    fallback_reason: str
    in_memory: bool
    steps: str


@dataclass(frozen=True)
class CheckRequest:
    """Say whether a sandbox is up; the client is told of its end from then on. With ``memory``, an end of anything in
    it for want of the machine's memory counts as one."""

    sandbox: str
    memory: bool = False


@dataclass(frozen=True)
class DestroyRequest:
    """End a sandbox; answered when nothing of it is left."""

    sandbox: str


@dataclass(frozen=True, kw_only=True)
class SpawnRequest:
    """Start a program in a sandbox, with the files that come along.

    Attributes:
        sandbox: where.
        spawn: name by which the program can be signalled.
        tty: rows and columns of its terminal, if it is to have one; ``echo`` whether that echoes.
        user: who runs it; the sandbox's own user if not given.
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
    """Signal the process group of a program by its name; SIGKILL also if it is still starting."""

    spawn: str
    signal: int


@dataclass(frozen=True)
class PauseRequest:
    """Stop all that runs in a sandbox."""

    sandbox: str


@dataclass(frozen=True)
class ResumeRequest:
    """Let all that runs in a sandbox continue."""

    sandbox: str


@dataclass(frozen=True)
class SnapshotRequest:
    """Pack what a paused sandbox has written into the file that comes along, after a ``header``. With ``at_rest`` it
    need not be paused; the answer says so if anything but idle programs of ours runs in it."""

    sandbox: str
    header: str
    at_rest: bool = False


@dataclass(frozen=True)
class PutRequest:
    """Write the file that comes along to a path of the sandbox; without a ``mode`` a file there keeps its own."""

    sandbox: str
    path: str
    mode: int | None = None


@dataclass(frozen=True)
class GetRequest:
    """Copy the file at a path of the sandbox, of at most ``limit`` bytes, into the one that comes along."""

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
    | PutRequest
    | GetRequest
)


def encode(request: Request) -> Message:
    """Return a request as it is sent."""
    return {"do": _name(type(request)), **vars(request)}


def decode(message: Message) -> Request:
    """Return the request that a message is.

    Raises:
        Refused: it is none, lacks a field, has another one, or one of another type.
    """
    values = {name: value for name, value in message.items() if name not in ("do", "id")}
    kind = _KINDS.get(str(message.get("do")))
    if kind is None:
        raise Refused({"error": f"there is no request {message.get('do')!r}"})
    wrong = [name for name, value in values.items() if not isinstance(value, _TYPES[kind].get(name, ()))]
    lacking = {field.name for field in fields(kind) if field.default is MISSING} - values.keys()
    if wrong or lacking:
        raise Refused({"error": f"{message['do']}: {', '.join(sorted({*wrong, *lacking}))}: wrong or not there"})
    request: Request = kind(**values)
    return request


def _name(kind: type) -> str:
    return kind.__name__.removesuffix("Request").lower()


def _json_types(hint: Any) -> tuple[type, ...]:
    """What a value of a field's type is in JSON."""
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
