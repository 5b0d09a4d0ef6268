# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 client for the small requests of a turn: kept connections, bodies as bytes, two errors.

A turn is three requests between servers of one deployment. The client does only what these need: no cookies,
redirects, proxies or compression, and no time limit besides that of connecting. Callers bound the rest.

A server may close an idle connection just as a request reuses it. Requests with an idempotent method are then sent
again over a new connection, all others fail as :class:`ConnectionDropped`. Cancelling a request closes its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import httptools
import orjson
from pydantic import ValidationError
from starlette.datastructures import Headers

from nemo_gym_prorl.http.problem_document import Problem


_IDLE_S = 15.0
"""Seconds for which an idle connection is reused; Gym's servers keep connections for 30."""
_IDEMPOTENT = frozenset({"GET", "PUT", "DELETE"})
_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})
_FORBIDDEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class ConnectFailed(ConnectionError):
    """No connection to the server; the cause is the system's error, or a :class:`TimeoutError`."""


class ConnectionDropped(ConnectionError):
    """The connection ended before the answer did, or the answer is not HTTP.

    Attributes:
        begun: whether the answer had begun.
    """

    def __init__(self, reason: str, *, begun: bool) -> None:
        super().__init__(reason)
        self.begun = begun


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Fully read response."""

    status: int
    body: bytes
    headers: Headers

    @property
    def ok(self) -> bool:
        """Return whether the status is 2xx. Redirects are not followed, so a 3xx is an error."""
        return 200 <= self.status < 300

    def text(self, limit: int | None = None) -> str:
        """Return the body as text, truncated to ``limit`` characters."""
        return _truncate(self.body.decode(errors="replace"), limit)

    def error_text(self, limit: int) -> str:
        """Return a problem document's detail, else the body's text, truncated to ``limit`` characters."""
        try:
            return _truncate(Problem.model_validate_json(self.body).detail, limit)
        except ValidationError:
            return self.text(limit)

    def json(self) -> Any:
        """Parse the body as JSON.

        Raises:
            orjson.JSONDecodeError: the body is not JSON.
        """
        return orjson.loads(self.body)


class _Target(NamedTuple):
    host: str
    port: int
    is_tls: bool


class HttpClient(contextlib.AbstractAsyncContextManager["HttpClient"]):
    """Connections of one event loop to any number of servers, opened on demand and without a limit on their number.

    Args:
        connect_s: time limit for opening a connection, in seconds.
    """

    def __init__(self, connect_s: float = 30.0) -> None:
        self._connect_s = connect_s
        self._idle: dict[_Target, list[_Connection]] = {}
        self._open: set[_Connection] = set()

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: Sequence[bytes] = ()
    ) -> HttpAnswer:
        """Send a request and read its answer.

        Args:
            method: HTTP method.
            url: absolute URL, encoded.
            headers: headers besides those of host and length.
            body: the body, in parts.

        Raises:
            ConnectFailed: no connection could be opened in time.
            ConnectionDropped: the connection ended before the answer did, or the answer is not HTTP.
            ValueError: the URL or a header is invalid.
        """
        target, host, path = _parsed(url)
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
        if any(_FORBIDDEN.search(line, 0, len(line) - 2) for line in lines):
            raise ValueError("a header contains a control character")
        length = f"Content-Length: {sum(map(len, body))}\r\n" if body or method != "GET" else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{length}{''.join(lines)}\r\n"
        data = [head.encode(errors="surrogateescape"), *body]
        connection, is_reused = self._idle_connection(target), True
        while True:
            if connection is None:
                connection, is_reused = await self._connect(target), False
            try:
                return await connection.exchange(data)
            except ConnectionDropped as dropped:
                if dropped.begun or not is_reused or method not in _IDEMPOTENT:
                    raise
            connection = None

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; requests in flight fail."""
        for connection in [*self._open]:
            connection.transport.close()
        await asyncio.sleep(0)  # lets the transports finish closing

    def _idle_connection(self, target: _Target) -> _Connection | None:
        idle = self._idle.get(target)
        while idle:
            connection = idle.pop()
            if time.monotonic() - connection.idle_since < _IDLE_S and not connection.transport.is_closing():
                return connection
            connection.transport.close()
        return None

    async def _connect(self, target: _Target) -> _Connection:
        idle = self._idle.setdefault(target, [])
        context = _tls_context() if target.is_tls else None
        try:
            async with asyncio.timeout(self._connect_s):
                _, made = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(idle, self._open), target.host, target.port, ssl=context
                )
        except (TimeoutError, OSError) as error:
            why = "no connection within the time limit" if isinstance(error, TimeoutError) else str(error)
            raise ConnectFailed(f"cannot connect to {target.host}:{target.port}: {why}") from error
        return made


class _Connection(asyncio.Protocol):
    """One connection, with at most one request in flight; appends itself to ``idle`` after each answer."""

    transport: asyncio.Transport

    def __init__(self, idle: list[_Connection], opened: set[_Connection]) -> None:
        self._idle, self._opened = idle, opened
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[HttpAnswer] | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._status = 0
        self.idle_since = 0.0

    async def exchange(self, data: Sequence[bytes]) -> HttpAnswer:
        """Send a request and return its answer."""
        answer: asyncio.Future[HttpAnswer] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._status = 0
        self.transport.writelines(data)
        try:
            return await answer
        finally:
            if self._answer is answer:  # cancelled
                self.transport.abort()
            del answer  # its exception references this frame: break the cycle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._opened.add(self)
        # An answer can take an hour without a byte, so only TCP keep-alive detects a dead machine.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the answer is not HTTP: {error!r}", begun=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._opened.discard(self)
        if self in self._idle:
            self._idle.remove(self)
        if self._status and exc is None and not any(name in _LENGTHS for name, _ in self._headers):
            self._complete()  # the end of the connection is the end of such an answer
        self._fail(f"the connection ended: {exc or 'closed by the server'}", begun=bool(self._status))

    def on_message_begin(self) -> None:
        self._headers, self._parts = [], []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if self._status < 200:
            self._status = 0  # informational: the answer follows
        elif self._answer is None or not self._parser.should_keep_alive():
            self._complete()
            self.transport.close()
        else:
            self._complete()
            self.idle_since = time.monotonic()
            self._idle.append(self)

    def _complete(self) -> None:
        answer, self._answer = self._answer, None
        parts, self._parts = self._parts, []
        if answer is not None and not answer.done():
            answer.set_result(HttpAnswer(self._status, b"".join(parts), Headers(raw=self._headers)))

    def _fail(self, reason: str, *, begun: bool) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(ConnectionDropped(reason, begun=begun))
        self.transport.close()


@lru_cache(4096)
def _parsed(url: str) -> tuple[_Target, str, str]:
    """Return target, ``Host`` header and path of a URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or _FORBIDDEN.search(url) or " " in url:
        raise ValueError(f"{url!r:.200} is not an HTTP URL")
    is_tls = parts.scheme == "https"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return (
        _Target(parts.hostname, parts.port or (443 if is_tls else 80), is_tls),
        parts.netloc.rpartition("@")[2],
        path,
    )


@lru_cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


def _truncate(text: str, limit: int | None) -> str:
    return text if limit is None or len(text) <= limit else text[:limit] + "…"
