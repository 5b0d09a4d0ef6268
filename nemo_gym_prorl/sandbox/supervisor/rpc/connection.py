# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""One end of a packet socket in an event loop: what is sent waits for room, in order; what comes is told.

Servers, the supervisor and all its helpers talk over such ends; which packets go over it is its user's to say
(:func:`.protocol.receive`, unless told otherwise).
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from io import FileIO

from nemo_gym_prorl.sandbox.supervisor.rpc import protocol
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message, Packet, PeerGone, pack


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
        take: Callable[[socket.socket], tuple[*Taken]] = protocol.receive,  # type: ignore[assignment]
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
                protocol.send(self._ours, self._waiting[0])
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
