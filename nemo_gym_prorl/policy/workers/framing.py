# SPDX-License-Identifier: Apache-2.0
"""Where HTTP/1.1 messages begin and end in a stream of bytes, and nothing more (pure).

A proxy that hands messages on as they are needs their borders and a few headers. Where two readers could see different
borders (two lengths, a length and chunks, a bare line feed, space before a colon, CONNECT) the message is refused:
what one takes for a body must not be another's request. An offer to speak another protocol is left out of what is
handed on (:func:`without_upgrade`), as who takes it reads no body.
"""

from __future__ import annotations

from dataclasses import dataclass


HEAD_BYTES = 64 * 1024
"""How long the head of a message may be."""

_LINE_BYTES = 4096

_OF_THE_CONNECTION = (b"connection", b"upgrade", b"http2-settings")


class Malformed(Exception):
    """This is no HTTP/1.1 that has one meaning."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a message.

    Attributes:
        start: the three parts of its first line.
        headers: the first of each name, names in lower case; of ``connection`` all.
        length: of its body, if it says.
        chunked: whether the body comes in chunks.
        size: bytes of the head itself, with the empty line.
    """

    start: tuple[bytes, bytes, bytes]
    headers: dict[bytes, bytes]
    length: int | None
    chunked: bool
    size: int

    def closes(self, version: bytes) -> bool:
        """Whether the sender ends the connection after this message."""
        options = [option.strip() for option in self.headers.get(b"connection", b"").lower().split(b",")]
        return b"close" in options or (version == b"HTTP/1.0" and b"keep-alive" not in options)


def read_head(data: bytes | bytearray) -> Head | None:
    """The head at the beginning of ``data``; ``None`` if it is not all there yet.

    Raises:
        Malformed: it is none, or too long.
    """
    end = data.find(b"\r\n\r\n", 0, HEAD_BYTES)
    if end < 0:
        if len(data) >= HEAD_BYTES:
            raise Malformed(f"the head is longer than {HEAD_BYTES} bytes")
        return None
    first, *lines = bytes(data[:end]).split(b"\r\n")
    parts = first.split(b" ", 2)
    if len(parts) != 3 or b"\n" in first:
        raise Malformed("the first line is none of HTTP/1.1")
    if parts[0].upper() == b"CONNECT":
        raise Malformed("CONNECT asks for a tunnel, which this is not")
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip() or b"\n" in line or b"\r" in line:
            raise Malformed("a header is no name and value on one line")
        name, value = name.lower(), value.strip()
        if name in headers and (
            name == b"transfer-encoding" or (name == b"content-length" and headers[name] != value)
        ):
            raise Malformed(f"two of {name.decode('latin-1')}")
        if name == b"connection" and name in headers:
            headers[name] += b"," + value
        headers.setdefault(name, value)
    given, coding = headers.get(b"content-length"), headers.get(b"transfer-encoding")
    if given is not None and not given.isdigit():
        raise Malformed("content-length is no number")
    if coding is not None and (coding.lower() != b"chunked" or given is not None):
        raise Malformed("the body's length has two meanings")
    length = int(given) if given is not None else None
    return Head((parts[0], parts[1], parts[2]), headers, length, coding is not None, end + 4)


def without_upgrade(head: bytes | bytearray) -> bytes:
    """The bytes of a request's head without what asks for another protocol, which a server may ignore (RFC 9110, 7.8).
    The connection's other options go with it: they are for who reads this head first."""
    first, *lines = bytes(head[:-4]).split(b"\r\n")
    kept = [line for line in lines if line.partition(b":")[0].lower() not in _OF_THE_CONNECTION]
    return b"\r\n".join([first, *kept, b"", b""])


class Body:
    """Finds the end of a body while it passes by.

    Args:
        length: in bytes; ``None`` where the connection's end is the body's.
        chunked: whether it comes in chunks instead.

    Attributes:
        done: it is complete.
    """

    def __init__(self, length: int | None, chunked: bool) -> None:
        self._left = 0 if chunked else length
        self._chunked = chunked
        self._line = b""
        self._state = "size"
        self.done = not chunked and length == 0

    def take(self, data: bytes | bytearray) -> int:
        """How many of the next bytes belong to the body.

        Raises:
            Malformed: these are no chunks.
        """
        if not self._chunked:
            if self._left is None:
                return len(data)
            taken = min(self._left, len(data))
            self._left -= taken
            self.done = self._left == 0
            return taken
        position = 0
        while position < len(data) and not self.done:
            position = self._chunk(data, position)
        return position

    def _chunk(self, data: bytes | bytearray, position: int) -> int:
        """Pass over one part of a chunk; gives where the next one begins."""
        if self._state == "data":
            assert self._left is not None
            taken = min(self._left, len(data) - position)
            self._left -= taken
            if not self._left:
                self._state = "end"
            return position + taken
        end = data.find(b"\n", position)
        until = len(data) if end < 0 else end + 1
        self._line += data[position:until]
        if len(self._line) > _LINE_BYTES:
            raise Malformed("a chunk's head is too long")
        if end >= 0:
            line, self._line = self._line, b""
            if not line.endswith(b"\r\n"):
                raise Malformed("a line of a chunk does not end as one")
            self._after(line[:-2])
        return until

    def _after(self, line: bytes) -> None:
        """A whole line was passed."""
        if self._state == "end":
            if line:
                raise Malformed("a chunk is longer than it said")
            self._state = "size"
        elif self._state == "trailer":
            self.done = not line
        else:
            size = line.partition(b";")[0].strip()
            if not size or size.strip(b"0123456789abcdefABCDEF"):
                raise Malformed("a chunk's size is no number")
            self._left = int(size, 16)
            self._state = "data" if self._left else "trailer"
