# SPDX-License-Identifier: Apache-2.0
"""One POST after the other to an engine, over HTTP/1.1 connections that are kept.

Asking the engine was the dearest part of a short turn when a general client did it: 0.6 ms of CPU, of which a request
of known length and an answer that is read whole need a fifth. What an engine could do to a caller is told apart as
there: :class:`Unreachable`, :class:`Dropped` before an answer began or within it, no connection in time. Whether
anything is sent again is the caller's to say.

A connection is taken, used for one request after the other, and kept for others to take. One that is new says that
another engine may be at its other end, since none outlives the engine that it was opened to: whoever takes it looks.

A request that is cancelled ends its connection, by which engines notice. Redirects are answers like any other, and
content comes as it is, since no coding is asked for.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from nemo_gym_prorl.policy.engines.answers import Content


IDLE_S = 15.0
"""How long an idle connection is used again."""


class Unreachable(ConnectionError):
    """Nobody accepts a connection there."""


class Dropped(ConnectionError):
    """The connection ended.

    Attributes:
        begun: within an answer.
    """

    def __init__(self, reason: str, *, begun: bool) -> None:
        super().__init__(reason)
        self.begun = begun


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a URL points to."""

    host: str
    port: int
    tls: bool
    shown: str
    target: str


@functools.lru_cache(maxsize=1024)
def _place(url: str) -> _Place:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    shown = parts.netloc.rpartition("@")[2]
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Place(parts.hostname or "", parts.port or (443 if tls else 80), tls, shown, target)


class KeepAlive:
    """Connections to engines.

    Args:
        connect_timeout_s: how long opening one may take; what is asked over it may take any time.
    """

    def __init__(self, connect_timeout_s: float = 5.0) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[tuple[str, int, bool], list[Line]] = {}

    def close(self) -> None:
        """Close what is idle."""
        for idle in self._idle.values():
            for line in idle:
                line.end()
        self._idle.clear()

    async def take(self, url: str, *, fresh: bool = False) -> Line:
        """A connection that nobody else uses until it is given to :meth:`keep`.

        Args:
            url: where to.
            fresh: a new one, as one that is known may be about to close.

        Raises:
            Unreachable: no connection.
            TimeoutError: none in time.
        """
        place = _place(url)
        idle = self._idle.get((place.host, place.port, place.tls))
        while idle and not fresh:
            line = idle.pop()
            if line.usable():
                return line
            line.end()
        return await self._connect(place)

    def keep(self, url: str, line: Line) -> None:
        """Have a connection used again, if it can be."""
        place = _place(url)
        if line.usable():
            self._idle.setdefault((place.host, place.port, place.tls), []).append(line)

    def leave(self, url: str) -> None:
        """Use no idle connection to there again."""
        place = _place(url)
        for line in self._idle.pop((place.host, place.port, place.tls), []):
            line.end()

    async def post(
        self, line: Line, url: str, headers: Mapping[str, str], body: Sequence[bytes], *, echo: Sequence[bytes] = ()
    ) -> tuple[int, bytearray]:
        """Status and content of the answer.

        Args:
            line: a connection that was taken; it is ended where it cannot be used again.
            url: where.
            headers: besides those of the message itself.
            body: JSON, in parts.
            echo: see :class:`.Content`.

        Raises:
            Dropped: the connection ended before the answer did, or what came is none.
            ValueError: a header cannot be sent.
        """
        head = _head(_place(url), headers, sum(map(len, body)))
        # No name for the request: sampling may take an hour, and as many prompts as there are turns would be kept.
        answer = line.ask(b"".join((head, *body)), Content(echo))
        try:
            await answer.whole
        except BaseException:
            line.end()
            raise
        finally:
            answer.let_go()
        line.answered()
        return answer.status, answer.content.whole()

    async def _connect(self, place: _Place) -> Line:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, line = await loop.create_connection(Line, place.host, place.port, ssl=True if place.tls else None)
        except TimeoutError:
            raise
        except OSError as error:
            raise Unreachable(f"Cannot connect to {place.shown}: {error}") from error
        return line


def _head(place: _Place, headers: Mapping[str, str], length: int) -> bytes:
    said = {"host": place.shown, "accept": "*/*"}
    said |= {name.lower(): value for name, value in headers.items()}
    said |= {"content-type": "application/json", "content-length": str(length)}
    lines = [f"{name}: {value}" for name, value in said.items()]
    if any("\r" in line or "\n" in line or "\0" in line for line in lines):
        raise ValueError("a header has more than one line")
    return "\r\n".join([f"POST {place.target} HTTP/1.1", *lines, "\r\n"]).encode()


class _Answer:
    """What comes back for one request; callbacks as :mod:`httptools` names them.

    Args:
        content: takes the body.
    """

    def __init__(self, content: Content) -> None:
        self.content = content
        self.whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.begun = False
        self.last = False
        self.until_end = False
        self._framed = False
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    def let_go(self) -> None:
        """Nobody waits for more. The parser holds this, and so all that came, until somebody looks for cycles."""
        self._parser = None

    def feed(self, data: bytes) -> None:
        """More of it."""
        self.begun = True
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"no HTTP: {error!r}")

    def fail(self, reason: str) -> None:
        """It ends here."""
        self.last = True
        if not self.whole.done():
            self.whole.set_exception(Dropped(reason, begun=self.begun))

    def on_message_begin(self) -> None:
        """Part of httptools' protocol."""
        self.last = self.last or self.whole.done()  # nobody asked for two

    def on_header(self, name: bytes, value: bytes) -> None:
        """Part of httptools' protocol."""
        self._framed = self._framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        """Part of httptools' protocol."""
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        self.until_end = not self._framed

    def on_body(self, body: bytes) -> None:
        """Part of httptools' protocol."""
        self.content.feed(body)

    def on_message_complete(self) -> None:
        """Part of httptools' protocol."""
        if 100 <= self.status < 200:
            self._framed = self.until_end = False
            return
        assert self._parser is not None
        self.last = self.last or not self._parser.should_keep_alive()
        if not self.whole.done():
            self.whole.set_result(None)


class Line(asyncio.Protocol):
    """One connection, which carries one request at a time.

    Attributes:
        met: what is at its other end, as whoever took it found out; ``None`` while nobody has.
    """

    def __init__(self) -> None:
        self.met: object = None
        self._transport: asyncio.Transport | None = None
        self._answer: _Answer | None = None
        self._idle_since = asyncio.get_running_loop().time()

    def ask(self, request: bytes, content: Content) -> _Answer:
        """Send a request; its answer is there once it is whole."""
        assert self._transport is not None
        self._answer = answer = _Answer(content)
        if self._transport.is_closing():
            answer.fail("the connection was closed")
        else:
            self._transport.write(request)
        return answer

    def answered(self) -> None:
        """Its request was; a connection that cannot be used again ends here."""
        answer, self._answer = self._answer, None
        assert self._transport is not None
        assert answer is not None
        self._idle_since = asyncio.get_running_loop().time()
        # An answer to half a request: the engine may take the rest for anything.
        if answer.last or self._transport.get_write_buffer_size():
            self.end()

    def usable(self) -> bool:
        """Whether it may still be open."""
        assert self._transport is not None
        fresh = asyncio.get_running_loop().time() - self._idle_since < IDLE_S
        return fresh and not self._transport.is_closing()

    def end(self) -> None:
        """Close it, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio's protocol."""
        self._transport = cast(asyncio.Transport, transport)
        # Sampling may take an hour without a byte: an engine whose machine is gone is noticed by the kernel alone.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        """Part of asyncio's protocol."""
        if self._answer is None:
            self.end()  # nobody asked
        else:
            self._answer.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        """Part of asyncio's protocol."""
        if (answer := self._answer) is None:
            return
        if error is None and answer.until_end and not answer.whole.done():
            answer.last = True
            answer.whole.set_result(None)
        else:
            answer.fail("the connection ended" if error is None else repr(error))
