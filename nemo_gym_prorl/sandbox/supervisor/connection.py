# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Message framing between a server, its supervisor and the supervisor's children: JSON packets with file descriptors.

The sockets are ``SOCK_SEQPACKET``: the kernel sends a packet completely or not at all, so a cancelled or killed sender
leaves no partial message. A message above :data:`MAX_INLINE_BYTES` is sent as a memfd, with a packet that contains the
message's id and size only.

:class:`Connection` is one end of such a socket in an event loop: it queues outgoing packets in order and passes
incoming packets to a callback.
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
"""File descriptors per message, without the memfd of a large message; no request has as many."""

MAX_INLINE_BYTES = 60_000
"""Largest message in bytes that is sent in a packet; a socket's default buffer of 208 KiB holds three such packets."""

MAX_MESSAGE_BYTES = 16 << 20
"""Largest message in bytes; the kernel's limit for the arguments and variables of a program is lower."""

_ENVELOPE = 256
"""Bytes of a receive buffer above :data:`MAX_INLINE_BYTES`: the kernel truncates a packet above the buffer's size."""

_ANCILLARY_BYTES = socket.CMSG_LEN((MAX_FILES + 1) * array("i").itemsize)


class PeerGone(ConnectionError):
    """The other end of a socket is closed, or has sent an invalid message."""


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
        files: descriptors to send with the packet.
        own: descriptors among ``files`` that are closed once the packet is sent or dropped.
        sent: whether the kernel has accepted the packet.
        waiter: resolved when the packet is sent or has failed; ``None`` if no caller waits.
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
    """Encode a message that is sent with the descriptors ``files``, which stay the caller's.

    Raises:
        OSError: ``E2BIG`` above :data:`MAX_MESSAGE_BYTES`, or an error of creating the memfd of a large message.
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
    """Send a packet on a socket.

    Raises:
        BlockingIOError: the socket is non-blocking and its buffer is full.
        PeerGone: the other end is closed.
        OSError: the kernel refuses this packet, such as ``ETOOMANYREFS``.
    """
    try:
        if packet.files:
            socket.send_fds(connection, [packet.data], packet.files)
        else:
            connection.send(packet.data)
    except ConnectionError as error:
        raise PeerGone(*error.args) from None


def receive_packet(connection: socket.socket, largest: int) -> tuple[bytes, list[int], bool]:
    """Receive the next packet, of at most ``largest`` bytes, and its file descriptors, which the caller closes.

    Returns:
        The packet, the descriptors, and whether all descriptors were received. The kernel drops descriptors above this
        process's limit of open files.

    Raises:
        BlockingIOError: the socket is non-blocking and no packet has arrived.
        PeerGone: the other end is closed, or the packet is too large.
    """
    try:
        # socket.recv_fds ignores its flags; without CLOEXEC executed programs would inherit the descriptors.
        data, ancillary, flags, _address = connection.recvmsg(largest, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError as error:
        raise PeerGone(*error.args) from None
    numbers = array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            # A truncated control message may end in the middle of a descriptor's number.
            numbers.frombytes(content[: len(content) // numbers.itemsize * numbers.itemsize])
    files = list(numbers)
    if not data or flags & socket.MSG_TRUNC:
        close_all(files)
        raise PeerGone(errno.EPIPE, "closed")
    return data, files, not flags & socket.MSG_CTRUNC


def receive(connection: socket.socket) -> tuple[Message, list[int]]:
    """Receive the next message and its file descriptors, which the caller closes.

    The message gets the key ``torn``, and no descriptors, if this process's limit of open files was reached.

    Raises:
        BlockingIOError: the socket is non-blocking and no message has arrived.
        PeerGone: the other end is closed, or has sent an invalid packet.
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
        # An untrusted sender may also send a pipe instead of a memfd.
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
"""Unsent packets to a client above which no further requests of the client are read (backpressure)."""

READS_PER_CALLBACK = 16
"""Packets read per callback of the event loop, so that one busy connection does not starve others."""

PAUSE_S = 0.5
"""Pause in seconds before reading again after an unexpected error, which may recur at once."""

File = socket.socket | FileIO


class Connection[*Received]:
    """One end of a packet socket in an event loop.

    Args:
        ours: the socket; closed with the connection.
        on_message: called with what ``take`` returns; the loop logs its exceptions, and the connection continues.
        on_gone: called once when the other end is closed, but never during a method call on this object.
        take: reads and decodes one packet from the socket.
        bounded: whether to stop reading while more than :data:`MAX_UNSENT_PACKETS` packets wait to be sent.
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
        # With a socket object instead of a descriptor, the loop would make two more system calls per registration.
        self._descriptor = ours.fileno()
        self._on_message = on_message
        self._on_gone = on_gone
        self._take = take
        self._bounded = bounded
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[Packet] = deque()
        self._reading = True
        self._writing = False
        self.closed = False
        self._loop.add_reader(self._descriptor, self._read)

    def post(self, message: Message) -> None:
        """Queue a message without waiting; a message that cannot be sent is dropped."""
        if not self.closed:
            self._enqueue(pack(message))

    async def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Send a message, with the descriptors ``files``; wait until the kernel has accepted it.

        Cancellation drops a message that is not sent yet.

        Raises:
            PeerGone: the other end is closed.
            OSError: the kernel refuses this message, or as :func:`pack`.
        """
        await self.send_packet(pack(message, files))

    async def send_packet(self, packet: Packet) -> None:
        """Send an encoded message, as :meth:`send`; afterwards ``packet.sent`` is set."""
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
        """Close the socket; senders of unsent packets get :class:`PeerGone`. No callback runs afterwards."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._descriptor)
            self._loop.remove_writer(self._descriptor)
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
                self._loop.add_writer(self._descriptor, self._flush)
                return
            except PeerGone:
                # Deferred: on_gone must not run during the caller's method call.
                self._loop.call_soon(self._end)
                return
            except OSError as error:
                self._finish_first(error)
            else:
                self._finish_first()
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._descriptor)
        if not self._reading:
            self._listen()

    def _listen(self) -> None:
        if not self.closed:
            self._reading = True
            self._loop.add_reader(self._descriptor, self._read)

    def _read(self) -> None:
        for _ in range(READS_PER_CALLBACK):
            if self.closed:
                return
            if self._bounded and len(self._unsent) > MAX_UNSENT_PACKETS:
                self._reading = False
                self._loop.remove_reader(self._descriptor)
                return
            try:
                received = self._take(self._ours)
            except BlockingIOError:
                return
            except PeerGone:
                self._end()
                return
            except Exception:
                self._loop.remove_reader(self._descriptor)
                self._loop.call_later(PAUSE_S, self._listen)
                raise
            self._on_message(*received)

    def _end(self) -> None:
        if not self.closed:
            self.close()
            self._on_gone()


async def ready(file: File | int, *, write: bool = False, unless: asyncio.Future[int] | None = None) -> None:
    """Wait until a non-blocking file is readable, or with ``write`` writable, or until ``unless`` is done. ``unless``
    is cancelled afterwards."""
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
