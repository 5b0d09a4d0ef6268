# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What the launcher is asked, and what it answers: the supervisor's side of ``launcher.c``, which has the same order.

A request is words of eight bytes and texts that end with a zero. One that does not fit into a packet goes in a memory
file, the last of the descriptors beside it. An answer is two numbers, and what was being done in words.
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

from nemo_gym_prorl.sandbox.isolation import mounts, seccomp
from nemo_gym_prorl.sandbox.isolation.mounts import SMALL_TMPFS, shared_memory_options, terminal_options
from nemo_gym_prorl.sandbox.isolation.namespaces import SandboxNamespaces
from nemo_gym_prorl.sandbox.isolation.privilege import DEFAULT_CAPABILITIES, is_machine_root_in_namespace
from nemo_gym_prorl.sandbox.limits import rlimits
from nemo_gym_prorl.sandbox.limits.rlimits import COUNTED_PER_NAMESPACE, HostFacts
from nemo_gym_prorl.sandbox.supervisor.connection import Message, Packet, PeerGone, close_all, receive_packet


if TYPE_CHECKING:
    from nemo_gym_prorl.sandbox.supervisor.messages import CreateRequest, SpawnRequest
from nemo_gym_prorl.sandbox.supervisor.errors import KILLED, exhausted


class RequestKind(IntEnum):
    """What is asked for."""

    MAKE = 1
    SPAWN = 2
    PUT = 3
    GET = 4
    ERASE = 5
    PREPARE = 6
    STOP = 7


class ReplyKind(IntEnum):
    """What is answered."""

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
"""Bytes of a request that go in a packet."""

_HEADER = struct.Struct("=IIQ")
_WORD = struct.Struct("=Q")
_ANSWER = struct.Struct("=ii")
_LARGEST_WORDS = 4096

MAX_ENVIRONMENT_BYTES = 2 << 20
"""Bytes of variables that an image may set: as much as the kernel takes for a program, arguments included."""

GO = b"g"
"""The word that a process waits for before it goes on: the supervisor knows of it."""


class Request:
    """One request, as it is put together."""

    def __init__(self, kind: RequestKind) -> None:
        self._kind = kind
        self._body = bytearray()
        self.place: SandboxNamespaces | None = None
        """What it joins, which goes with it."""

    def words(self, *numbers: int) -> None:
        """Add numbers; -1 is the largest."""
        for number in numbers:
            self._body += _WORD.pack(number & 0xFFFFFFFFFFFFFFFF)

    def text(self, *texts: str | bytes) -> None:
        """Add texts.

        Raises:
            OSError: there is a zero in one, where it would end.
        """
        for each in texts:
            encoded = os.fsencode(each)
            if b"\0" in encoded:
                raise OSError(errno.EINVAL, "there is a NUL in it")
            self._body += encoded + b"\0"

    def texts(self, texts: Sequence[str | bytes]) -> None:
        """Add how many there are, and each."""
        self.words(len(texts))
        self.text(*texts)

    def content(self, content: bytes) -> None:
        """Add how many bytes there are, and them."""
        self.words(len(content))
        self._body += content

    def limits(self, limits: Iterable[tuple[int, int, int]]) -> None:
        """Add limits of a process: ``resource.RLIMIT_*``, soft, hard."""
        given = list(limits)
        self.words(len(given))
        for limit in given:
            self.words(*limit)

    def rules(self) -> None:
        """Add the filter of system calls.

        Raises:
            OSError: there is none for this machine.
        """
        if not seccomp.FILTER:
            raise OSError(errno.ENOSYS, f"there is no filter of system calls for {os.uname().machine}")
        self.content(seccomp.FILTER)

    def settings(self, order: CreateRequest) -> None:
        """Add the files of ``/etc`` that each sandbox has of its own, whoever makes it."""
        files = list(mounts.etc_files(mounts.resolv_conf(order.network)))
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
        """As it is sent. What is sent with it stays open, but for ``group``: the folder of the control group in which
        its process is to be born."""
        own = [] if group is None else [group]
        joined = [self.place.process.fd] if self.place else []
        header = _HEADER.pack(self._kind, len(own), len(self._body))
        body, more = bytes(self._body), []
        if len(body) > MAX_INLINE_BYTES:
            memory = os.memfd_create("request", os.MFD_CLOEXEC)
            with os.fdopen(memory, "wb", closefd=False) as file:
                file.write(body)
            body, more = b"", [memory]
        return Packet(header + body, [*own, *files[:1], *joined, *files[1:], *more], [*own, *more])


def _place(request: Request, place: SandboxNamespaces) -> None:
    request.place = place
    request.words(place.uid, place.namespace_flags, place.is_pivoted)


def spawn(place: SandboxNamespaces, order: SpawnRequest) -> Request:
    """Start ``order.argv`` in a session of its own, as the supervisor's child.

    Goes with its channel and files. With ``order.tty`` (rows and columns) the first three files of the program are
    a terminal of the sandbox, and those that go with it follow as 3, 4, ...; without, they are its files from 0 on.

    On the channel it waits for :data:`GO`, tells the new process's number (``pid``) with the controlling end of its
    terminal; then why it could not execute its program, or nothing but its end. If it is killed before the program
    begins, it says so or ends, and nothing was executed.
    """
    request = Request(RequestKind.SPAWN)
    _place(request, place)
    bounded = HostFacts.of_host(frozenset()).kernel >= COUNTED_PER_NAMESPACE
    request.words(place.limits[resource.RLIMIT_NPROC] if bounded else 0)
    rows, columns = order.tty or (0, 0)
    request.words(order.tty is not None, rows, columns, order.echo)
    request.text(order.cwd)
    request.words(_rights(place))
    files = rlimits.command_open_files_limit()
    limits = [(resource.RLIMIT_NOFILE, *files)] if files else []
    request.limits([*limits, *((name, most, most) for name, most in place.limits.items())])
    request.words(order.user is not None)
    if order.user is not None:
        request.text(str(order.user))
    request.rules()
    request.texts(order.argv)
    request.texts([f"{name}={value}" for name, value in order.env.items()])
    request.texts([""] if "/" in order.argv[0] else os.get_exec_path(order.env))
    return request


def stop(place: SandboxNamespaces) -> Request:
    """Have the kernel stop all of it but its first process, in one step. Answers with whether it did."""
    request = Request(RequestKind.STOP)
    _place(request, place)
    return request


def put(place: SandboxNamespaces, path: str, mode: int | None) -> Request:
    """Make ``path`` inside a file with the contents of the one that goes with it; missing folders are made. Never half
    a file. Without a ``mode`` it keeps the one it has, if there is one. Answers with how many there were before."""
    request = Request(RequestKind.PUT)
    _place(request, place)
    request.text(path)
    request.words(-1 if mode is None else mode)
    return request


def get(place: SandboxNamespaces, path: str, most: int) -> Request:
    """Copy the ordinary file ``path`` of at most so many bytes into the one that goes with it."""
    request = Request(RequestKind.GET)
    _place(request, place)
    request.words(_rights(place), most)
    request.text(path)
    return request


def prepare(place: SandboxNamespaces, order: CreateRequest) -> Request:
    """Make what the container runtime has started as others are. Goes with a file for the variables that it has by the
    image's own doing."""
    request = Request(RequestKind.PREPARE)
    _place(request, place)
    request.words(math.ceil(order.start_timeout_s), MAX_ENVIRONMENT_BYTES)
    request.text(SMALL_TMPFS, shared_memory_options(order.shared_memory_mib), terminal_options())
    request.texts(mounts.RUNTIME_MOUNTED_FILES)
    request.texts([path for path in mounts.RUNTIME_COPIED_FILES if not os.path.lexists(order.image + path)])
    request.words(is_machine_root_in_namespace())
    request.settings(order)
    return request


def erase(folder: Path, group: Path | None) -> Request:
    """Remove what an ended sandbox left: its control group, when nothing is left in it, and then its folder."""
    request = Request(RequestKind.ERASE)
    request.text(str(group or ""), str(folder))
    return request


def _rights(place: SandboxNamespaces) -> int:
    """The capabilities that a sandbox's commands can have."""
    return sum(1 << number for number in place.capabilities.union(DEFAULT_CAPABILITIES.values()))


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer."""

    said: ReplyKind
    number: int = 0
    words: str = ""

    def message(self) -> Message:
        """What is told of it."""
        match self.said:
            case ReplyKind.STARTED:
                return {"pid": self.number}
            case ReplyKind.READY:
                return {"ready": True}
            case ReplyKind.DONE:
                return {"number": self.number}
            case ReplyKind.EXHAUSTED:
                return exhausted(self.words)
            case ReplyKind.KILLED:
                return KILLED
            case ReplyKind.NO_USER:
                return {"error": f"there is no user {self.words!r} in this sandbox", "errno": self.number}
            case ReplyKind.OTHER_USER:
                error = f"this sandbox has one user, and that is not {self.words!r}; users: true gives it all of them"
                return {"error": error, "errno": self.number}
        error = ": ".join(filter(None, [self.words, os.strerror(self.number)]))
        return (
            {"error": error, "lost": True} if self.said is ReplyKind.LOST else {"error": error, "errno": self.number}
        )


def receive_reply(channel: socket.socket) -> tuple[Message, list[int]]:
    """Take the next answer, with its files, which are the caller's to close.

    Raises:
        BlockingIOError: there is none now.
        PeerGone: there never will be.
    """
    data, files, whole = receive_packet(channel, _ANSWER.size + _LARGEST_WORDS)
    try:
        said, number = _ANSWER.unpack_from(data)
        message = Reply(ReplyKind(said), number, os.fsdecode(data[_ANSWER.size :])).message()
    except (struct.error, ValueError) as error:
        close_all(files)
        raise PeerGone(errno.EPROTO, f"no answer: {error}") from error
    if not whole:
        close_all(files)
    return message, files
