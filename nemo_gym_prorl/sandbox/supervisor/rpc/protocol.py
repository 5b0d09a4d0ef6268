# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Messages between a server, its supervisor and that one's helpers: one packet each, JSON, with open files beside it.

The socket keeps packets apart (``SOCK_SEQPACKET``): one is sent whole or not at all, so whoever is cancelled or killed
while sending leaves nothing that others could trip over. A message that no packet holds travels as a file of memory
(:data:`LARGEST_INLINE`), and the packet says only whose it is.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


Message = dict[str, Any]

MAX_FILES = 8
"""Most open files beside one message."""

LARGEST_INLINE = 60_000
"""Bytes of a message that goes into a packet: some fit into a socket's buffer, of 208 KiB by default, at a time."""

LARGEST_MESSAGE = 16 << 20
"""Bytes; the kernel takes less for the arguments and variables of a program."""

_ENVELOPE = 256
"""Bytes more that a packet may have."""

_ROOM_FOR_FILES = socket.CMSG_LEN((MAX_FILES + 1) * array("i").itemsize)


class PeerGone(ConnectionError):
    """The other end is closed, or sends what is no message."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends over which messages can go; neither blocks."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


@dataclass(slots=True, eq=False)
class Packet:
    """A message on its way.

    Attributes:
        data: its packet.
        files: to go with it.
        own: those of them that are closed here once it is sent, or will not be.
        sent: whether it is.
        waiter: who waits for that.
    """

    data: bytes
    files: list[int]
    own: list[int] = field(default_factory=list)
    sent: bool = False
    waiter: asyncio.Future[None] | None = None

    def close(self) -> None:
        """Close the files that are ours to close."""
        while self.own:
            os.close(self.own.pop())


def pack(message: Message, files: Sequence[int] = ()) -> Packet:
    """A message with its files, ready to send.

    Raises:
        OSError: it is too large, or there is no memory for it.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    packet = Packet(body, list(files))
    if len(body) > LARGEST_INLINE:
        if len(body) > LARGEST_MESSAGE:
            raise OSError(errno.E2BIG, f"a request of {len(body)} bytes; {LARGEST_MESSAGE} at most")
        memory = os.memfd_create("message", os.MFD_CLOEXEC)
        packet.own.append(memory)
        packet.files.append(memory)
        with os.fdopen(memory, "wb", closefd=False) as file:
            file.write(body)
        packet.data = json.dumps({"id": message.get("id"), "size": len(body)}).encode()
    return packet


def send(connection: socket.socket, packet: Packet) -> None:
    """Send a packet.

    Raises:
        BlockingIOError: there is no room now.
        PeerGone: nobody will ever take it.
        OSError: the kernel refuses this one.
    """
    try:
        if packet.files:
            socket.send_fds(connection, [packet.data], packet.files)
        else:
            connection.send(packet.data)
    except ConnectionError as error:
        raise PeerGone(*error.args) from None


def receive_packet(connection: socket.socket, largest: int) -> tuple[bytes, list[int], bool]:
    """Take the next packet, of ``largest`` bytes at most, with its files, which are the caller's to close.

    Returns:
        The packet, the files, and whether those are all: this process may not be allowed to open more.

    Raises:
        BlockingIOError: there is none now.
        PeerGone: there never will be.
    """
    try:
        # Not socket.recv_fds, which ignores its flags: every program that is executed would inherit the files.
        data, ancillary, flags, _address = connection.recvmsg(largest, _ROOM_FOR_FILES, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError as error:
        raise PeerGone(*error.args) from None
    numbers = array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            # Of one that was cut off there may be a part.
            numbers.frombytes(content[: len(content) // numbers.itemsize * numbers.itemsize])
    files = list(numbers)
    if not data or flags & socket.MSG_TRUNC:
        close_all(files)
        raise PeerGone(errno.EPIPE, "closed")
    return data, files, not flags & socket.MSG_CTRUNC


def receive(connection: socket.socket) -> tuple[Message, list[int]]:
    """Take the next message, with its files, which are the caller's to close.

    One whose files could not be received, since this process may open no more, has the key ``torn``.

    Raises:
        BlockingIOError: there is none now.
        PeerGone: there never will be.
    """
    data, files, whole = receive_packet(connection, LARGEST_INLINE + _ENVELOPE)
    try:
        message = json.loads(data)
        if not whole:
            message["torn"] = True
        elif "size" in message:
            message = json.loads(_read(files[-1], message["size"]))
            os.close(files.pop())
        if not isinstance(message, dict):
            raise TypeError(type(message).__name__)
    except Exception as error:
        # Whatever was sent in place of one, such as a pipe for a file of memory.
        close_all(files)
        raise PeerGone(errno.EPROTO, f"no message: {error}") from error
    if "torn" in message:
        close_all(files)
    return message, files


def _read(memory: int, size: int) -> bytes:
    if size > LARGEST_MESSAGE:
        raise ValueError(f"{size} bytes")
    return os.pread(memory, size, 0)


def close_all(files: list[int]) -> None:
    """Close open files, and forget them."""
    while files:
        os.close(files.pop())
