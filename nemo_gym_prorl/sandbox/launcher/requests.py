# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Requests to the launcher and its replies: the supervisor's side of ``launcher.c``, which has the same field order.

A request consists of words of eight bytes and NUL-terminated texts. A request too large for a packet is sent in a
memory file, the last of its descriptors. A reply consists of two numbers and a text that names the step.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_gym_prorl.network_access import HOST
from nemo_gym_prorl.sandbox.isolation import mounts, seccomp
from nemo_gym_prorl.sandbox.isolation.mounts import SMALL_TMPFS, shared_memory_options, terminal_options
from nemo_gym_prorl.sandbox.isolation.privilege import DEFAULT_CAPABILITIES, is_machine_root_in_namespace
from nemo_gym_prorl.sandbox.limits import rlimits
from nemo_gym_prorl.sandbox.limits.rlimits import COUNTED_PER_NAMESPACE, HostFacts
from nemo_gym_prorl.sandbox.supervisor.connection import Message, Packet, PeerGone, close_all, receive_packet


if TYPE_CHECKING:
    from nemo_gym_prorl.sandbox.supervisor.protocol import CreateRequest, SpawnRequest
from nemo_gym_prorl.sandbox.supervisor.protocol import HELPER_KILLED, exhausted


NAMESPACE_FLAGS = {
    "user": os.CLONE_NEWUSER,
    "mnt": os.CLONE_NEWNS,
    "pid": os.CLONE_NEWPID,
    "ipc": os.CLONE_NEWIPC,
    "net": os.CLONE_NEWNET,
    "uts": os.CLONE_NEWUTS,
    "cgroup": os.CLONE_NEWCGROUP,
}
"""``CLONE_NEW*`` flag of each namespace in ``/proc/PID/ns``. The user namespace comes first: joining it gives the
right to join the others.
"""


class ProcDirectory:
    """Open descriptor of ``/proc/PID``.

    The descriptor names this process even after the kernel has reused its number. The descriptor is closed with the
    last reference to this object, so a packet that is still to be sent keeps it open.
    """

    def __init__(self, pid: int) -> None:
        self.fd: int = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    def namespace_inode(self, name: str) -> int:
        """Return the inode number of a namespace. The kernel may reuse the number after the namespace has ended."""
        return os.stat(f"ns/{name}", dir_fd=self.fd).st_ino


@dataclass(frozen=True, slots=True)
class SandboxNamespaces:
    """Parameters of joining a running sandbox.

    Attributes:
        process: ``/proc`` directory of the sandbox's first process.
        uid: the only user id inside, or 0 for a sandbox that has root.
        limits: ``resource.RLIMIT_*`` constant to value, soft and hard limit of every executed program.
        namespace_flags: ``CLONE_NEW*`` flags of the namespaces to join; see :func:`unshared_namespaces`.
        is_pivoted: the root of the mount namespace is the sandbox's root, so that no ``chroot`` is needed.
        capabilities: capability numbers of the sandbox's root beyond the default set.
    """

    process: ProcDirectory
    uid: int
    limits: dict[int, int]
    namespace_flags: int
    is_pivoted: bool = False
    capabilities: frozenset[int] = frozenset()


def unshared_namespaces(process: ProcDirectory) -> int:
    """Return the ``CLONE_NEW*`` flags of the namespaces that ``process`` does not share with this process.

    Shared namespaces are left out because they need no joining, and because not every caller has the right to join
    them.
    """
    differing = (
        flag
        for name, flag in NAMESPACE_FLAGS.items()
        if process.namespace_inode(name) != os.stat(f"/proc/self/ns/{name}").st_ino
    )
    return sum(differing)


class RequestKind(IntEnum):
    """Request types."""

    MAKE = 1
    SPAWN = 2
    PUT = 3
    GET = 4
    ERASE = 5
    PREPARE = 6
    STOP = 7
    LISTEN = 8


class ReplyKind(IntEnum):
    """Reply types."""

    STARTED = 1
    READY = 2
    DONE = 3
    FAILED = 4
    LOST = 5
    EXHAUSTED = 6
    KILLED = 7
    NO_USER = 8
    OTHER_USER = 9


MAX_INLINE_BYTES = 60_000
"""Largest request that is sent in the packet itself; packets of Unix sockets have a limited size."""

_HEADER = struct.Struct("=IIQ")
_WORD = struct.Struct("=Q")
_REPLY = struct.Struct("=ii")
_LARGEST_WORDS = 4096

MAX_ENVIRONMENT_BYTES = 2 << 20
"""Bytes of variables that an image may set: as many as the kernel takes for a program, arguments included."""

GO = b"g"
"""Byte that a new process waits for: the supervisor has registered it."""


class Request:
    """A request under construction."""

    def __init__(self, kind: RequestKind) -> None:
        self._kind = kind
        self._body = bytearray()
        self.namespaces: SandboxNamespaces | None = None
        """The sandbox to join; its ``/proc`` directory is sent with the request."""

    def words(self, *numbers: int) -> None:
        """Add numbers; -1 becomes the largest."""
        for number in numbers:
            self._body += _WORD.pack(number & 0xFFFFFFFFFFFFFFFF)

    def text(self, *texts: str | bytes) -> None:
        """Add texts.

        Raises:
            OSError: a text contains a NUL.
        """
        for each in texts:
            encoded = os.fsencode(each)
            if b"\0" in encoded:
                raise OSError(errno.EINVAL, "paths, arguments and variables must not contain NUL")
            self._body += encoded + b"\0"

    def texts(self, texts: Sequence[str | bytes]) -> None:
        self.words(len(texts))
        self.text(*texts)

    def content(self, content: bytes) -> None:
        self.words(len(content))
        self._body += content

    def limits(self, limits: Iterable[tuple[int, int, int]]) -> None:
        """Add process limits: ``resource.RLIMIT_*``, soft, hard."""
        given = list(limits)
        self.words(len(given))
        for limit in given:
            self.words(*limit)

    def rules(self) -> None:
        """Add the system call filter.

        Raises:
            OSError: this machine has no filter.
        """
        if not seccomp.FILTER:
            raise OSError(errno.ENOSYS, f"sandboxes have no system call filter for {os.uname().machine}")
        self.content(seccomp.FILTER)

    def settings(self, order: CreateRequest) -> None:
        """Add the files of ``/etc`` that are written for every sandbox."""
        files = list(mounts.etc_files(mounts.resolv_conf(order.network == HOST)))
        self.words(len(files))
        for path, content in files:
            self.text(path)
            self.content(os.fsencode(content))
        names = list(mounts.account_lines(order.uid, order.uid))
        self.words(len(names))
        for path, line, number in names:
            self.text(path, line)
            self.words(number)

    def packet(self, group: int | None, files: Sequence[int]) -> Packet:
        """Return the packet to send, with its descriptors. Sending closes the descriptor of ``group`` and no other of
        the caller's.

        Args:
            group: folder of the control group in which the launcher's child starts.
            files: descriptors for the child.
        """
        own = [] if group is None else [group]
        joined = [self.namespaces.process.fd] if self.namespaces else []
        header = _HEADER.pack(self._kind, len(own), len(self._body))
        body, more = bytes(self._body), []
        if len(body) > MAX_INLINE_BYTES:
            memory = os.memfd_create("request", os.MFD_CLOEXEC)
            with os.fdopen(memory, "wb", closefd=False) as file:
                file.write(body)
            body, more = b"", [memory]
        return Packet(header + body, [*own, *files[:1], *joined, *files[1:], *more], [*own, *more])


def _add_namespaces(request: Request, namespaces: SandboxNamespaces) -> None:
    request.namespaces = namespaces
    request.words(namespaces.uid, namespaces.namespace_flags, namespaces.is_pivoted)


def spawn(namespaces: SandboxNamespaces, order: SpawnRequest) -> Request:
    """Start ``order.argv`` in a new session, as the supervisor's child.

    Descriptors sent with the request: the reply socket, and the program's files. With ``order.tty`` (rows and columns)
    the program's files 0 to 2 are a new terminal, and the sent files follow from 3 on; without it they are numbered
    from 0.

    The new process waits for :data:`GO` on the reply socket, and replies with its number (``pid``) and the controlling
    end of its terminal. A second reply reports why the program could not be executed, or the socket closes. A process
    killed before its program starts replies :data:`ReplyKind.KILLED` or closes the socket; nothing was executed then.
    """
    request = Request(RequestKind.SPAWN)
    _add_namespaces(request, namespaces)
    bounded = HostFacts.of_host(frozenset()).kernel >= COUNTED_PER_NAMESPACE
    request.words(namespaces.limits[resource.RLIMIT_NPROC] if bounded else 0)
    rows, columns = order.tty or (0, 0)
    request.words(order.tty is not None, rows, columns, order.echo)
    request.text(order.cwd)
    request.words(_rights(namespaces))
    files = rlimits.program_file_limits()
    limits = [(resource.RLIMIT_NOFILE, *files)] if files else []
    request.limits([*limits, *((name, most, most) for name, most in namespaces.limits.items())])
    request.words(order.user is not None)
    if order.user is not None:
        request.text(str(order.user))
    request.rules()
    request.texts(order.argv)
    request.texts([f"{name}={value}" for name, value in order.env.items()])
    request.texts([""] if "/" in order.argv[0] else os.get_exec_path(order.env))
    return request


def stop(namespaces: SandboxNamespaces) -> Request:
    """Stop every process of a sandbox but the first, in one step; replies with 1 if that happened."""
    request = Request(RequestKind.STOP)
    _add_namespaces(request, namespaces)
    return request


def listen(namespaces: SandboxNamespaces, port: int) -> Request:
    """Open a socket that listens on the sandbox's loopback device; the reply carries its descriptor."""
    request = Request(RequestKind.LISTEN)
    _add_namespaces(request, namespaces)
    request.words(port)
    return request


def put(namespaces: SandboxNamespaces, path: str, mode: int | None) -> Request:
    """Write a file inside with the contents of the sent file; creates missing folders and replaces the file
    atomically.

    Replies with 1 if the file existed. Without a ``mode`` an existing file keeps its mode.
    """
    request = Request(RequestKind.PUT)
    _add_namespaces(request, namespaces)
    request.text(path)
    request.words(-1 if mode is None else mode)
    return request


def get(namespaces: SandboxNamespaces, path: str, most: int) -> Request:
    """Copy the regular file ``path`` of at most ``most`` bytes into the sent file."""
    request = Request(RequestKind.GET)
    _add_namespaces(request, namespaces)
    request.words(_rights(namespaces), most)
    request.text(path)
    return request


def prepare(namespaces: SandboxNamespaces, order: CreateRequest) -> Request:
    """Adjust a sandbox that the container runtime has started to match one that the launcher made.

    The sent file receives the variables that the image sets.
    """
    request = Request(RequestKind.PREPARE)
    _add_namespaces(request, namespaces)
    request.words(math.ceil(order.start_timeout_s), MAX_ENVIRONMENT_BYTES)
    request.text(SMALL_TMPFS, shared_memory_options(order.shared_memory_mib), terminal_options())
    request.texts(mounts.RUNTIME_MOUNTED_FILES)
    request.texts([path for path in mounts.RUNTIME_COPIED_FILES if not os.path.lexists(order.image + path)])
    request.words(is_machine_root_in_namespace())
    request.settings(order)
    return request


def erase(folder: Path, group: Path | None) -> Request:
    """Remove the control group of an ended sandbox, once it is empty, and then the sandbox's folder."""
    request = Request(RequestKind.ERASE)
    request.text(str(group or ""), str(folder))
    return request


def _rights(namespaces: SandboxNamespaces) -> int:
    """Return the capabilities that a sandbox's commands can have, as a bit mask."""
    return sum(1 << number for number in namespaces.capabilities.union(DEFAULT_CAPABILITIES.values()))


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of the launcher."""

    kind: ReplyKind
    number: int = 0
    step: str = ""

    def message(self) -> Message:
        """Return the reply as a message for the supervisor's client."""
        match self.kind:
            case ReplyKind.STARTED:
                return {"pid": self.number}
            case ReplyKind.READY:
                return {"ready": True}
            case ReplyKind.DONE:
                return {"number": self.number}
            case ReplyKind.EXHAUSTED:
                return exhausted(self.step)
            case ReplyKind.KILLED:
                return HELPER_KILLED
            case ReplyKind.NO_USER:
                return {"error": f"there is no user {self.step!r} in this sandbox", "errno": self.number}
            case ReplyKind.OTHER_USER:
                error = f"this sandbox has one user, and that is not {self.step!r}; users: true gives it all of them"
                return {"error": error, "errno": self.number}
        error = ": ".join(filter(None, [self.step, os.strerror(self.number)]))
        return (
            {"error": error, "lost": True} if self.kind is ReplyKind.LOST else {"error": error, "errno": self.number}
        )


def receive_reply(channel: socket.socket) -> tuple[Message, list[int]]:
    """Receive the next reply and its descriptors, which the caller must close.

    Raises:
        BlockingIOError: no reply has arrived yet.
        PeerGone: the launcher's child has ended, or sent no valid reply.
    """
    data, files, whole = receive_packet(channel, _REPLY.size + _LARGEST_WORDS)
    try:
        kind, number = _REPLY.unpack_from(data)
        message = Reply(ReplyKind(kind), number, os.fsdecode(data[_REPLY.size :])).message()
    except (struct.error, ValueError) as error:
        close_all(files)
        raise PeerGone(errno.EPROTO, f"the launcher's reply can't be read: {error}") from error
    if not whole:
        close_all(files)
    return message, files
