# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""HTTP client for requests between servers of a deployment: one aiohttp session per event loop, bodies as bytes.

The client supports no cookies, redirects or proxies. Only the time to connect is limited; callers set time limits for
whole requests.

A server may close an idle connection just as a request reuses it. The client then sends requests with an idempotent
method again; all others fail as :class:`ConnectionDropped`. Cancelling a request closes its connection.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import aiohttp
import orjson
from pydantic import ValidationError
from starlette.datastructures import Headers
from yarl import URL

from nemo_gym_prorl.http.problem_document import Problem


_IDLE_S = 15.0
"""Seconds for which an idle connection is reused; Gym's servers keep idle connections for 30 s."""
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f]")


class ConnectFailed(ConnectionError):
    """A connection could not be opened; ``__cause__`` is the system's error, a time-out or a certificate error."""


class ConnectionDropped(ConnectionError):
    """The connection ended before the response was complete, or the response is not HTTP.

    Attributes:
        begun: whether the server had begun to respond.
    """

    def __init__(self, reason: str, *, begun: bool) -> None:
        super().__init__(reason)
        self.begun = begun


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """HTTP response with its whole body in memory."""

    status: int
    body: bytes
    headers: Headers

    @property
    def ok(self) -> bool:
        """Return whether the status is 2xx. The client does not follow redirects, so a 3xx is an error."""
        return 200 <= self.status < 300

    def text(self, limit: int | None = None) -> str:
        return _truncate(self.body.decode(errors="replace"), limit)

    def error_text(self, limit: int) -> str:
        """Return a problem document's ``detail``, or the text of another body, cut to ``limit`` characters."""
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


class HttpClient(contextlib.AbstractAsyncContextManager["HttpClient"]):
    """Connection pool of one event loop to any number of servers; connections are unlimited and opened on demand.

    Args:
        connect_s: time limit for opening a connection, in seconds.
    """

    def __init__(self, connect_s: float = 30.0) -> None:
        self._connect_s = connect_s
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: Sequence[bytes] = ()
    ) -> HttpAnswer:
        """Send a request and read the whole response.

        Args:
            url: absolute URL, percent-encoded; a user and password in the URL are ignored.
            headers: request headers; ``Host`` and ``Content-Length`` are added.
            body: parts of the request's body, sent joined; without parts no body is sent.

        Raises:
            ConnectFailed: no connection could be opened in time.
            ConnectionDropped: the connection ended before the response was complete, or the response is not HTTP.
            ValueError: the URL or a header is invalid.
        """
        target, session, begun = _parsed(url), self._open(), False
        try:
            data = b"".join(body) if body else None
            response = await session.request(method, target, headers=headers, data=data, allow_redirects=False)
            begun = True
            content = await response.read()
        except aiohttp.ClientConnectorError as error:
            raise ConnectFailed(f"cannot connect to {target.host}:{target.port}: {error.os_error}") from error.os_error
        except aiohttp.ClientConnectorCertificateError as error:
            raise ConnectFailed(f"cannot connect to {target.host}:{target.port}: {error.certificate_error}") from error
        except aiohttp.ConnectionTimeoutError as error:
            reason = f"cannot connect to {target.host}:{target.port}: no connection within the time limit"
            raise ConnectFailed(reason) from error
        except aiohttp.ClientResponseError as error:  # use str: repr contains the request's headers, with the key
            raise ConnectionDropped(f"the answer is not HTTP: {_one_line(error)}", begun=True) from error
        except aiohttp.ClientError as error:
            raise ConnectionDropped(f"the connection ended: {_one_line(error)}", begun=begun) from error
        raw = [(name.lower(), value) for name, value in response.raw_headers]
        return HttpAnswer(response.status, content, Headers(raw=raw))

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S, socket_factory=_keepalive_socket),
                timeout=aiohttp.ClientTimeout(total=None, connect=self._connect_s),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _keepalive_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Create a socket with TCP keep-alive, to detect a dead machine: a response may take an hour without a byte."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return made


@lru_cache(4096)
def _parsed(url: str) -> URL:
    parsed = URL(url, encoded=True)
    if parsed.scheme not in ("http", "https") or not parsed.host or _FORBIDDEN.search(url):
        raise ValueError(f"{url!r:.200} is not an HTTP URL")
    return parsed.with_user(None)  # aiohttp refuses credentials in the URL together with an Authorization header


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _truncate(text: str, limit: int | None) -> str:
    return text if limit is None or len(text) <= limit else text[:limit] + "…"
