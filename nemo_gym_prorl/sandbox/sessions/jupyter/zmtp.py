# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""ZMTP 3.0, the wire protocol of ZeroMQ, as far as one must speak it to a Jupyter kernel: pure, bytes in, frames out.

Not pyzmq, which is libzmq: that would do more, but keeps what a peer sends. It has bounds for a frame and for the
number of messages, and none for the frames of a message, whose sum is the peer's to choose: with ``ZMQ_MAXMSGSIZE`` of
64 KiB and one message let in, a message of endless frames of 255 bytes took 1.1 GiB of the receiver in 4 s. Here
whoever takes the frames is asked before each whether it is to be kept, and nothing else is: what is not wanted is
counted and forgotten as it comes. What no honest peer sends (:data:`MOST_FRAMES`, :data:`LARGEST_MESSAGE`) is a
:class:`Violation`.

The protocol: https://rfc.zeromq.org/spec/23. Its security mechanisms other than ``NULL`` are not spoken, nor are the
commands of version 3.1, which a peer does not use towards one of 3.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


MOST_FRAMES = 1024
"""In one message; a kernel's has six or seven, and one for each binary buffer of a widget."""

LARGEST_MESSAGE = 256 << 20
"""Bytes of all its frames, kept or not."""

LARGEST_COMMAND = 4096

_MORE, _LONG, _COMMAND = 1, 2, 4
_LONGEST_SHORT = 255
_SHORT_HEAD, _LONG_HEAD = 2, 9
_GREETING_SIZE = 64
_MECHANISM = b"NULL".ljust(20, b"\0")
_MAJOR = 3

GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes([_MAJOR, 0]) + _MECHANISM + bytes(32)
SUBSCRIBE_TO_ALL = b"\x01"
"""The message by which a ``SUB`` asks for everything."""


class Violation(Exception):
    """The peer does not speak the protocol, or sends what no honest peer does; says what."""


class Receiver(Protocol):
    """Who takes the frames of one connection."""

    def room(self, size: int) -> bool:
        """Whether the frame that begins now, of so many bytes, is to be kept."""
        ...

    def frame(self, body: bytes | bytearray | None, size: int, more: bool) -> None:
        """A frame is through; ``None`` if it was not kept. With ``more`` the message goes on."""
        ...


def ready(socket_type: str) -> bytes:
    """The command that follows the greeting, of a socket that has no name of its own."""
    properties = {b"Socket-Type": socket_type.encode(), b"Identity": b""}
    body = b"\x05READY" + b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4) + value for name, value in properties.items()
    )
    return bytes([_COMMAND, len(body)]) + body


def message(frames: Iterable[bytes]) -> bytes:
    """A message, as it is sent."""
    *others, last = frames
    return b"".join([*(_frame(frame, _MORE) for frame in others), _frame(last, 0)])


def _frame(body: bytes, flags: int) -> bytes:
    size = len(body)
    if size > _LONGEST_SHORT:
        return bytes([flags | _LONG]) + size.to_bytes(8) + body
    return bytes([flags, size]) + body


class Decoder:
    """One connection's incoming bytes. Keeps of them a head at most, and the one frame that is to be kept.

    Attributes:
        ready: the peer has said that it takes messages.
    """

    def __init__(self, receiver: Receiver) -> None:
        self.ready = False
        self._receiver = receiver
        self._greeted = False
        self._head = b""
        self._flags: int | None = None
        self._size = 0
        self._left = 0
        self._body: bytearray | None = None
        self._frames = 0
        self._bytes = 0

    def feed(self, data: bytes) -> None:
        """Take what came.

        Raises:
            Violation: then nothing more is to be fed.
        """
        if self._head:
            data, self._head = self._head + data, b""
        position = 0
        if not self._greeted:
            position = self._greet(data)
        while position < len(data):
            if self._flags is None:
                size_ends = position + (_LONG_HEAD if data[position] & _LONG else _SHORT_HEAD)
                if size_ends > len(data):
                    self._head = data[position:]
                    return
                size = int.from_bytes(data[position + 1 : size_ends])
                kept = self._begin(data[position], size)
                position = size_ends
                if position + size <= len(data):
                    # All of it is there already, as nearly always.
                    self._end(data[position : position + size] if kept else None)
                    position += size
                    continue
                self._left = size
                self._body = bytearray() if kept else None
            part = min(self._left, len(data) - position)
            if self._body is not None:
                self._body += memoryview(data)[position : position + part]
            self._left -= part
            position += part
            if self._left == 0:
                body, self._body = self._body, None
                self._end(body)

    def _greet(self, data: bytes) -> int:
        """Take the greeting, once it is there; returns where it ends."""
        if len(data) < _GREETING_SIZE:
            self._head = data
            return len(data)
        if data[0] != GREETING[0] or data[9] != GREETING[9] or data[10] < _MAJOR or data[12:32] != _MECHANISM:
            raise Violation("what answers is no ZeroMQ of version 4 or later without a security mechanism")
        self._greeted = True
        return _GREETING_SIZE

    def _begin(self, flags: int, size: int) -> bool:
        """A frame begins; whether it is to be kept."""
        self._flags, self._size = flags, size
        if flags & _COMMAND:
            if flags & _MORE or size > LARGEST_COMMAND:
                raise Violation("a command that is none")
            return not self.ready
        if flags & ~(_MORE | _LONG) or not self.ready:
            raise Violation("a frame that is none")
        self._frames += 1
        self._bytes += size
        if self._frames > MOST_FRAMES:
            raise Violation(f"a message of more than {MOST_FRAMES} frames")
        if self._bytes > LARGEST_MESSAGE:
            raise Violation(f"a message of more than {LARGEST_MESSAGE} bytes")
        return self._receiver.room(size)

    def _end(self, body: bytes | bytearray | None) -> None:
        """A frame is through."""
        flags, self._flags = self._flags, None
        assert flags is not None
        if flags & _COMMAND:
            if not self.ready and not (body and body.startswith(b"\x05READY")):
                raise Violation("another command than that it is ready")
            self.ready = True
            return
        if not flags & _MORE:
            self._frames = self._bytes = 0
        self._receiver.frame(body, self._size, bool(flags & _MORE))
