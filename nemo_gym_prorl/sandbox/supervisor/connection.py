# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Messages between a server, its supervisor and that one's helpers: one packet each, JSON, with open files beside it.

The socket keeps packets apart (``SOCK_SEQPACKET``): one is sent whole or not at all, so a sender that is cancelled or
killed leaves nothing that others could trip over. A message that no packet holds travels as a file of memory
(:data:`LARGEST_INLINE`), and the packet says only whose it is.

:class:`Connection` is one end of such a socket in an event loop: what is sent waits for room, in order; what comes is
told.
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


MOST_WAITING = 256
"""Packets that wait for a client. One that takes no answers is asked for no more requests meanwhile."""

READS_A_TURN = 16
"""Packets that are read before others of the loop get their turn."""

PAUSE_S = 0.5
"""For so long a file that can't be read is not looked at: it would be ready again at once, and fail again."""

File = socket.socket | FileIO


class Connection[*Taken]:
    """See the module.

    Args:
        ours: the end; closed with this.
        heard: told what each packet says. Its exceptions are the loop's to report, and end nothing.
        gone: told once that the other end is closed; not from within a call of this object's.
        take: reads a packet.
        bounded: read nothing as long as :data:`MOST_WAITING` packets wait to be sent.
    """

    def __init__(
        self,
        ours: socket.socket,
        heard: Callable[[*Taken], object],
        gone: Callable[[], object],
        take: Callable[[socket.socket], tuple[*Taken]] = receive,  # type: ignore[assignment]
        *,
        bounded: bool = False,
    ) -> None:
        ours.setblocking(False)
        self._ours = ours
        # Its number, since the loop asks the kernel for a socket's addresses to say that it does not know it.
        self._number = ours.fileno()
        self._heard = heard
        self._gone = gone
        self._take = take
        self._bounded = bounded
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Packet] = deque()
        self._reads = True
        self._writes = False
        self.closed = False
        self._loop.add_reader(self._number, self._read)

    def post(self, message: Message) -> None:
        """Send a message as soon as there is room; nobody is told if that never happens."""
        if not self.closed:
            self._put(pack(message))

    async def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Send a message, which waits for room; who is cancelled meanwhile has not sent it.

        Raises:
            PeerGone: nobody will take it.
            OSError: the kernel refuses this one.
        """
        await self.send_packet(pack(message, files))

    async def send_packet(self, packet: Packet) -> None:
        """As :meth:`send`."""
        if self.closed:
            packet.close()
            raise PeerGone
        waiter = packet.waiter = self._loop.create_future()
        self._put(packet)
        try:
            await waiter
        finally:
            if packet in self._waiting:
                self._waiting.remove(packet)
                packet.close()

    def close(self) -> None:
        """Let go of it; nothing more is told. What waits is not sent."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._number)
            self._loop.remove_writer(self._number)
            self._ours.close()
            while self._waiting:
                self._done(PeerGone())

    def _put(self, packet: Packet) -> None:
        self._waiting.append(packet)
        if len(self._waiting) == 1:
            self._flush()

    def _done(self, error: OSError | None = None) -> None:
        packet = self._waiting.popleft()
        packet.close()
        packet.sent = error is None
        if packet.waiter and not packet.waiter.done():
            if error:
                packet.waiter.set_exception(error)
            else:
                packet.waiter.set_result(None)

    def _flush(self) -> None:
        while self._waiting:
            try:
                send(self._ours, self._waiting[0])
            except BlockingIOError:
                self._writes = True
                self._loop.add_writer(self._number, self._flush)
                return
            except PeerGone:
                # Whoever asks for this is told later.
                self._loop.call_soon(self._end)
                return
            except OSError as error:
                self._done(error)
            else:
                self._done()
        if self._writes:
            self._writes = False
            self._loop.remove_writer(self._number)
        if not self._reads:
            self._listen()

    def _listen(self) -> None:
        if not self.closed:
            self._reads = True
            self._loop.add_reader(self._number, self._read)

    def _read(self) -> None:
        for _ in range(READS_A_TURN):
            if self.closed:
                return
            if self._bounded and len(self._waiting) > MOST_WAITING:
                self._reads = False
                self._loop.remove_reader(self._number)
                return
            try:
                taken = self._take(self._ours)
            except BlockingIOError:
                return
            except PeerGone:
                self._end()
                return
            except Exception:
                self._loop.remove_reader(self._number)
                self._loop.call_later(PAUSE_S, self._listen)
                raise
            self._heard(*taken)

    def _end(self) -> None:
        if not self.closed:
            self.close()
            self._gone()


async def ready(file: File | int, *, write: bool = False, unless: asyncio.Future[int] | None = None) -> None:
    """Wait until a file can be read, or takes more; or until something else has happened, which is only waited for
    here."""
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
    """Attend to a file no longer, and close it."""
    loop = asyncio.get_running_loop()
    loop.remove_reader(file.fileno())
    loop.remove_writer(file.fileno())
    file.close()
