# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Connections to engines that are kept, and requests that may not open one.

None outlives the engine that it was opened to. So whoever must know what is at the other end asks over a connection
that an earlier request has opened, and says that none is to be opened for it: :class:`NotOpen` sends it to look first.

Engines close a connection that was idle for some seconds (vLLM: 5), perhaps just as it is used again. That says
nothing about their health, so :class:`Dropped` tells whether an answer had begun; whether anything is sent again is
the caller's to say. A request that is cancelled ends its connection, by which engines notice.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import aiohttp
from yarl import URL

from nemo_gym_prorl.serving.tracing import trace_headers


_IDLE_S = 15.0
"""How long an idle connection is used again."""
_CONNECT_S = 5.0
"""How long opening a connection may take; what is asked over it may take any time."""
_JSON = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


class NotOpen(Exception):
    """A connection would have to be opened first."""


class Dropped(ConnectionError):
    """The connection ended.

    Attributes:
        begun: within an answer.
    """

    def __init__(self, reason: str, *, begun: bool) -> None:
        super().__init__(reason)
        self.begun = begun


class Connections(contextlib.AbstractAsyncContextManager["Connections"]):
    """The client sessions of a server's engines; each opened in the loop that first uses it."""

    @functools.cached_property
    def kept(self) -> aiohttp.ClientSession:
        """For samples."""
        return self._session(0)

    @functools.cached_property
    def control(self) -> aiohttp.ClientSession:
        """For all else, each within the time that opening a connection may take."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=_CONNECT_S)
        )

    async def __aexit__(self, *_: object) -> None:
        await self.kept.close()
        await self.control.close()

    @contextlib.asynccontextmanager
    async def single(self) -> AsyncIterator[aiohttp.ClientSession]:
        """One connection, which nobody has used before."""
        async with self._session(1) as session:
            yield session

    def _session(self, limit: int) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_start.append(_opens)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=limit, keepalive_timeout=_IDLE_S, socket_factory=_socket),
            timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[trace],
        )


async def post(
    session: aiohttp.ClientSession,
    url: str,
    headers: Mapping[str, str],
    body: Sequence[bytes],
    *,
    opens: bool = True,
) -> tuple[int, bytes]:
    """Status and content of the answer. Redirects are answers like any other.

    Args:
        session: of a :class:`Connections`.
        url: where.
        headers: besides those of the message itself.
        body: JSON, in parts.
        opens: whether a connection may be opened for it.

    Raises:
        NotOpen: it would have to be.
        aiohttp.ClientConnectorError: nobody accepts a connection there.
        TimeoutError: no connection in time.
        Dropped: the connection ended before the answer did, or what came is none.
        ValueError: a header cannot be sent.
    """
    begun = False
    sent = session.post(
        URL(url, encoded=True),
        data=b"".join(body),
        headers={**headers, **_JSON, **trace_headers()},
        allow_redirects=False,
        trace_request_ctx=opens,
    )
    try:
        async with sent as response:
            begun = True
            return response.status, await response.read()
    except (aiohttp.ClientConnectorError, TimeoutError):
        raise
    except aiohttp.ClientError as error:
        begun = begun or isinstance(error, aiohttp.ClientResponseError)
        raise Dropped(repr(error), begun=begun) from error


async def _opens(session: aiohttp.ClientSession, context: SimpleNamespace, _: Any) -> None:
    if not context.trace_request_ctx:
        raise NotOpen


def _socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    # Sampling may take an hour without a byte: an engine whose machine is gone is noticed by the kernel alone.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return made
