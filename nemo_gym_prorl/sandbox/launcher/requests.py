# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Requests to the launcher and its replies: encoded and decoded in the same field order as in ``launcher.c``.

A request consists of words of eight bytes and NUL-terminated texts. A request that is too large for a packet is sent
in a memfd, the last descriptor of the packet. A reply consists of two numbers and a text that names the step.
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

from nemo_gym_prorl.network_access import HOST, HOST_NAME
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
"""``CLONE_NEW*`` flag by name of the namespace in ``/proc/PID/ns``."""


class ProcDirectory:
    """Open descriptor (``fd``) of ``/proc/PID``, which never refers to a later process with the same pid. Closed with
    the last reference to this object; an unsent :class:`Request` holds such a reference."""

    def __init__(self, pid: int) -> None:
        self.fd: int = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    def namespace_inode(self, name: str) -> int:
        """Return the inode number of the process's namespace ``name``; ended namespaces' numbers are reused."""
        return os.stat(f"ns/{name}", dir_fd=self.fd).st_ino


@dataclass(frozen=True, slots=True)
class SandboxNamespaces:
    """Parameters of joining a running sandbox.

    Attributes:
        process: ``/proc`` directory of the sandbox's first process.
        uid: user and group id that a joining process gets in the sandbox; 0 for root.
        limits: value by ``resource.RLIMIT_*`` constant, soft and hard limit of every executed program.
        namespace_flags: ``CLONE_NEW*`` flags of the namespaces to join; see :func:`unshared_namespaces`.
        is_pivoted: whether the root of the mount namespace is the sandbox's root; else a joining process needs
            ``chroot``.
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

    Shared namespaces need no joining, and a caller may lack the privilege to join them."""
    differing = (
        flag
        for name, flag in NAMESPACE_FLAGS.items()
        if process.namespace_inode(name) != os.stat(f"/proc/self/ns/{name}").st_ino
    )
    return sum(differing)


class RequestKind(IntEnum):
    """Request types; ``launcher.c`` has the same numbers."""

    MAKE = 1
    SPAWN = 2
    PUT = 3
    GET = 4
    ERASE = 5
    PREPARE = 6
    STOP = 7
    LISTEN = 8


class ReplyKind(IntEnum):
    """Reply types; ``launcher.c`` has the same numbers."""

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
"""Largest request in bytes that is sent in the packet itself; ``launcher.c`` receives up to 64 KiB."""

_HEADER = struct.Struct("=IIQ")  # request type, whether a control group is sent, bytes of the request
_WORD = struct.Struct("=Q")
_REPLY = struct.Struct("=ii")  # reply type, number
_MAX_REPLY_TEXT_BYTES = 4096  # bytes of a reply's text; must equal MAX_STEP_BYTES in launcher.c

MAX_ENVIRONMENT_BYTES = 2 << 20
"""Bytes of variables that an image may set: the kernel's default limit for a program's arguments and variables."""

GO = b"g"
"""Byte by which the supervisor lets a new process continue, once the supervisor has registered its pid."""


class Request:
    """Builder of a request to the launcher; fields are added in the order in which ``launcher.c`` reads them."""

    def __init__(self, kind: RequestKind) -> None:
        self._kind = kind
        self._body = bytearray()
        self.namespaces: SandboxNamespaces | None = None
        """Namespaces to join, whose ``/proc`` directory is sent with the request; ``None`` to join none."""

    def words(self, *numbers: int) -> None:
        """Add numbers as unsigned 64-bit words, negative numbers in two's complement."""
        for number in numbers:
            self._body += _WORD.pack(number & 0xFFFFFFFFFFFFFFFF)

    def text(self, *texts: str | bytes) -> None:
        """Add NUL-terminated texts.

        Raises:
            OSError: a text contains a NUL character.
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
        """Add rlimits: ``resource.RLIMIT_*`` constant, soft limit, hard limit."""
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
        """Add the files of ``/etc`` that are written for a sandbox, and the lines for its user and group."""
        resolver = mounts.resolv_conf(order.network == HOST)
        files = (("/etc/hosts", mounts.HOSTS), ("/etc/hostname", f"{HOST_NAME}\n"), ("/etc/resolv.conf", resolver))
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
        """Return the packet of the request, with its descriptors.

        Args:
            group: descriptor of the folder of the control group in which the launcher's child starts, which is closed
                with the packet; ``None`` for the launcher's group.
            files: descriptors for the child, the reply socket first; not closed.
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
    """Return the request to start ``order.argv`` in a new session, as the supervisor's child.

    The caller sends the reply socket and the program's descriptors with the request. The descriptors become the
    program's files from 0 on; with ``order.tty`` from 3 on, after a new terminal.

    The launcher's child waits for :data:`GO` on the reply socket, forks the program's process, and replies with the
    ``pid`` and the terminal's controlling end. The socket then closes on ``exec``, or a second reply has the error. A
    process whose parent was killed executes nothing, and replies :data:`ReplyKind.KILLED`.
    """
    request = Request(RequestKind.SPAWN)
    _add_namespaces(request, namespaces)
    bounded = HostFacts.of_host(frozenset()).kernel >= COUNTED_PER_NAMESPACE
    request.words(namespaces.limits[resource.RLIMIT_NPROC] if bounded else 0)
    rows, columns = order.tty or (0, 0)
    request.words(order.tty is not None, rows, columns)
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
    """Return the request to send SIGSTOP to a sandbox's processes but the first; the reply says 1 on success."""
    request = Request(RequestKind.STOP)
    _add_namespaces(request, namespaces)
    return request


def listen(namespaces: SandboxNamespaces, port: int) -> Request:
    """Return the request for a TCP socket that listens on a sandbox's loopback device, sent with the reply."""
    request = Request(RequestKind.LISTEN)
    _add_namespaces(request, namespaces)
    request.words(port)
    return request


def put(namespaces: SandboxNamespaces, path: str, mode: int | None) -> Request:
    """Return the request to write the sent file's contents to ``path`` atomically, creating missing folders. The
    reply's number is 1 if the file existed. Without a ``mode``, an existing file keeps its mode, and a new file gets
    0644."""
    request = Request(RequestKind.PUT)
    _add_namespaces(request, namespaces)
    request.text(path)
    request.words(-1 if mode is None else mode)
    return request


def get(namespaces: SandboxNamespaces, path: str, most: int) -> Request:
    """Return the request to copy the regular file at ``path``, of at most ``most`` bytes, into the sent file."""
    request = Request(RequestKind.GET)
    _add_namespaces(request, namespaces)
    request.words(_rights(namespaces), most)
    request.text(path)
    return request


def prepare(namespaces: SandboxNamespaces, order: CreateRequest) -> Request:
    """Return the request to adjust a sandbox of the container runtime to match a direct start. The launcher's child
    writes the variables that the image sets into the sent file."""
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
    """Return the request to remove an ended sandbox's control group (``None`` without one) and then its folder."""
    request = Request(RequestKind.ERASE)
    request.text(str(group or ""), str(folder))
    return request


def _rights(namespaces: SandboxNamespaces) -> int:
    """Return the capabilities of the sandbox's root, as a bit mask."""
    return sum(1 << number for number in namespaces.capabilities.union(DEFAULT_CAPABILITIES.values()))


def _message(kind: ReplyKind, number: int, step: str) -> Message:
    """Return a reply of a launcher's child in the form of the supervisor's replies to its clients."""
    match kind:
        case ReplyKind.STARTED:
            return {"pid": number}
        case ReplyKind.READY:
            return {"ready": True}
        case ReplyKind.DONE:
            return {"number": number}
        case ReplyKind.EXHAUSTED:
            return exhausted(step)
        case ReplyKind.KILLED:
            return HELPER_KILLED
        case ReplyKind.NO_USER:
            return {"error": f"there is no user {step!r} in this sandbox", "errno": number}
        case ReplyKind.OTHER_USER:
            error = f"this sandbox has one user, and that is not {step!r}; users: true gives it all of them"
            return {"error": error, "errno": number}
    error = ": ".join(filter(None, [step, os.strerror(number)]))
    return {"error": error, "lost": True} if kind is ReplyKind.LOST else {"error": error, "errno": number}


def receive_reply(channel: socket.socket) -> tuple[Message, list[int]]:
    """Receive the next reply, as a message, and its descriptors, which the caller must close.

    Raises:
        BlockingIOError: no reply has arrived yet.
        PeerGone: the launcher's child has ended, or has sent an invalid reply.
    """
    data, files, whole = receive_packet(channel, _REPLY.size + _MAX_REPLY_TEXT_BYTES)
    try:
        kind, number = _REPLY.unpack_from(data)
        message = _message(ReplyKind(kind), number, os.fsdecode(data[_REPLY.size :]))
    except (struct.error, ValueError) as error:
        close_all(files)
        raise PeerGone(errno.EPROTO, f"the launcher's reply can't be read: {error}") from error
    if not whole:
        close_all(files)
    return message, files
