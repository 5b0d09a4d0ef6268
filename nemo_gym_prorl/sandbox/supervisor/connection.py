# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Message framing between a server, its supervisor and the supervisor's helpers: JSON packets with open files.

The socket is a ``SOCK_SEQPACKET``: the kernel sends a packet whole or not at all, so a cancelled or killed sender
leaves no partial message. A message above :data:`MAX_INLINE_BYTES` travels as a memory file, and its packet holds only
the id and the size.

:class:`Connection` is one end of such a socket in an event loop: it queues outgoing packets in order and passes
incoming ones to a callback.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import FileIO
from typing import Any


Message = dict[str, Any]

MAX_FILES = 8
"""Open files per message; the largest request needs fewer."""

MAX_INLINE_BYTES = 60_000
"""Bytes of a message that fits into a packet; a socket's default buffer of 208 KiB holds three such packets."""

MAX_MESSAGE_BYTES = 16 << 20
"""Bytes; the kernel accepts less for the arguments and variables of a program."""

_ENVELOPE = 256
"""Bytes that a packet may be larger than its message."""

_ROOM_FOR_FILES = socket.CMSG_LEN((MAX_FILES + 1) * array("i").itemsize)


class PeerGone(ConnectionError):
    """The other end is closed, or has sent an invalid message."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected, non-blocking ends for messages."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


@dataclass(slots=True, eq=False)
class Packet:
    """A message that is ready to send.

    Attributes:
        data: the bytes of the packet.
        files: open files that travel with the packet.
        own: files that the packet owns; closed once it is sent or dropped.
        sent: whether the kernel has taken the packet.
        waiter: resolved when the packet is sent or has failed.
    """

    data: bytes
    files: list[int]
    own: list[int] = field(default_factory=list)
    sent: bool = False
    waiter: asyncio.Future[None] | None = None

    def close(self) -> None:
        while self.own:
            os.close(self.own.pop())


def pack(message: Message, files: Sequence[int] = ()) -> Packet:
    """Encode a message with its files.

    Raises:
        OSError: the message is too large, or there is no memory for it.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    packet = Packet(body, list(files))
    if len(body) > MAX_INLINE_BYTES:
        if len(body) > MAX_MESSAGE_BYTES:
            raise OSError(errno.E2BIG, f"a request of {len(body)} bytes; {MAX_MESSAGE_BYTES} at most")
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
        BlockingIOError: the socket's buffer is full.
        PeerGone: the other end is closed.
        OSError: the kernel refuses this packet.
    """
    try:
        if packet.files:
            socket.send_fds(connection, [packet.data], packet.files)
        else:
            connection.send(packet.data)
    except ConnectionError as error:
        raise PeerGone(*error.args) from None


def receive_packet(connection: socket.socket, largest: int) -> tuple[bytes, list[int], bool]:
    """Receive the next packet, of ``largest`` bytes at most, with its files, which the caller closes.

    Returns:
        The packet, the files, and whether the files are complete; this process's limit of open files may cut them.

    Raises:
        BlockingIOError: no packet has arrived.
        PeerGone: the other end is closed.
    """
    try:
        # Not socket.recv_fds: it ignores its flags, and without CLOEXEC executed programs would inherit the files.
        data, ancillary, flags, _address = connection.recvmsg(largest, _ROOM_FOR_FILES, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError as error:
        raise PeerGone(*error.args) from None
    numbers = array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            # A truncated control message may end within a number.
            numbers.frombytes(content[: len(content) // numbers.itemsize * numbers.itemsize])
    files = list(numbers)
    if not data or flags & socket.MSG_TRUNC:
        close_all(files)
        raise PeerGone(errno.EPIPE, "closed")
    return data, files, not flags & socket.MSG_CTRUNC


def receive(connection: socket.socket) -> tuple[Message, list[int]]:
    """Receive the next message, with its files, which the caller closes.

    A message has the key ``torn`` if its files were lost because this process may open no more.

    Raises:
        BlockingIOError: no message has arrived.
        PeerGone: the other end is closed, or has sent no valid packet.
    """
    data, files, whole = receive_packet(connection, MAX_INLINE_BYTES + _ENVELOPE)
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
        # Also an untrusted file in place of the memory file, such as a pipe.
        close_all(files)
        raise PeerGone(errno.EPROTO, f"not a message: {error}") from error
    if "torn" in message:
        close_all(files)
    return message, files


def _read(memory: int, size: int) -> bytes:
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"{size} bytes")
    return os.pread(memory, size, 0)


def close_all(files: list[int]) -> None:
    while files:
        os.close(files.pop())


MAX_UNSENT_PACKETS = 256
"""Packets queued for a client before its requests are no longer read (backpressure)."""

READS_PER_CALLBACK = 16
"""Packets read before the loop runs its other callbacks, so that a flood starves no connection."""

PAUSE_S = 0.5
"""Pause before reading again after an unexpected error, which would repeat at once and keep the loop busy."""

File = socket.socket | FileIO


class Connection[*Received]:
    """One end of a packet socket in an event loop.

    Args:
        ours: the socket; closed with the connection.
        on_message: called with each message. The loop reports its exceptions; the connection continues.
        on_gone: called once when the other end is closed, never from within a call of this object.
        take: reads and decodes one packet.
        bounded: read nothing while :data:`MAX_UNSENT_PACKETS` packets wait to be sent.
    """

    def __init__(
        self,
        ours: socket.socket,
        on_message: Callable[[*Received], object],
        on_gone: Callable[[], object],
        take: Callable[[socket.socket], tuple[*Received]] = receive,  # type: ignore[assignment]
        *,
        bounded: bool = False,
    ) -> None:
        ours.setblocking(False)
        self._ours = ours
        # The loop gets the descriptor: with a socket object it would make two more system calls per registration.
        self._number = ours.fileno()
        self._on_message = on_message
        self._on_gone = on_gone
        self._take = take
        self._bounded = bounded
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[Packet] = deque()
        self._reading = True
        self._writing = False
        self.closed = False
        self._loop.add_reader(self._number, self._read)

    def post(self, message: Message) -> None:
        """Queue a message without waiting; a lost message is not reported."""
        if not self.closed:
            self._enqueue(pack(message))

    async def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Send a message, waiting for room. A cancelled call has not sent the message.

        Raises:
            PeerGone: the other end is closed.
            OSError: the kernel refuses this message.
        """
        await self.send_packet(pack(message, files))

    async def send_packet(self, packet: Packet) -> None:
        """Send an encoded message, as :meth:`send`."""
        if self.closed:
            packet.close()
            raise PeerGone
        waiter = packet.waiter = self._loop.create_future()
        self._enqueue(packet)
        try:
            await waiter
        finally:
            if packet in self._unsent:
                self._unsent.remove(packet)
                packet.close()

    def close(self) -> None:
        """Close the socket and drop unsent packets. No callback runs afterwards."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._number)
            self._loop.remove_writer(self._number)
            self._ours.close()
            while self._unsent:
                self._finish_first(PeerGone())

    def _enqueue(self, packet: Packet) -> None:
        self._unsent.append(packet)
        if len(self._unsent) == 1:
            self._flush()

    def _finish_first(self, error: OSError | None = None) -> None:
        packet = self._unsent.popleft()
        packet.close()
        packet.sent = error is None
        if packet.waiter and not packet.waiter.done():
            if error:
                packet.waiter.set_exception(error)
            else:
                packet.waiter.set_result(None)

    def _flush(self) -> None:
        while self._unsent:
            try:
                send(self._ours, self._unsent[0])
            except BlockingIOError:
                self._writing = True
                self._loop.add_writer(self._number, self._flush)
                return
            except PeerGone:
                # Not within the caller's call: see ``on_gone``.
                self._loop.call_soon(self._end)
                return
            except OSError as error:
                self._finish_first(error)
            else:
                self._finish_first()
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._number)
        if not self._reading:
            self._listen()

    def _listen(self) -> None:
        if not self.closed:
            self._reading = True
            self._loop.add_reader(self._number, self._read)

    def _read(self) -> None:
        for _ in range(READS_PER_CALLBACK):
            if self.closed:
                return
            if self._bounded and len(self._unsent) > MAX_UNSENT_PACKETS:
                self._reading = False
                self._loop.remove_reader(self._number)
                return
            try:
                received = self._take(self._ours)
            except BlockingIOError:
                return
            except PeerGone:
                self._end()
                return
            except Exception:
                self._loop.remove_reader(self._number)
                self._loop.call_later(PAUSE_S, self._listen)
                raise
            self._on_message(*received)

    def _end(self) -> None:
        if not self.closed:
            self.close()
            self._on_gone()


async def ready(file: File | int, *, write: bool = False, unless: asyncio.Future[int] | None = None) -> None:
    """Wait until a file is readable, or with ``write`` writable, or until ``unless`` is done; cancel ``unless``."""
    loop, number = asyncio.get_running_loop(), file if isinstance(file, int) else file.fileno()
    waiter = loop.create_future()

    def wake(*_: object) -> None:
        if not waiter.done():
            waiter.set_result(None)

    begin, end = (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
    begin(number, wake)
    if unless:
        unless.add_done_callback(wake)
    try:
        await waiter
    finally:
        end(number)
        if unless:
            unless.cancel()


def drop(file: File) -> None:
    loop = asyncio.get_running_loop()
    loop.remove_reader(file.fileno())
    loop.remove_writer(file.fileno())
    file.close()
