# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Kept connections to engines.

Engines close a connection that was idle for some seconds (vLLM: 5), perhaps just as it is used again. That says
nothing about their health, so a request whose connection ends before an answer is sent again. A request that is
cancelled ends its connection, by which engines abort the request.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from yarl import URL

from nemo_gym_prorl.serving.tracing import trace_headers


_TRIES = 3
"""Tries of a request whose connection ends before an answer."""
_IDLE_S = 15.0
"""How long an idle connection is used again."""
_CONNECT_S = 5.0
"""How long opening a connection may take; what is asked over it may take any time."""
_JSON = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


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
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S, socket_factory=_socket),
            timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    @functools.cached_property
    def control(self) -> aiohttp.ClientSession:
        """For all else, each within the time that opening a connection may take."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=_CONNECT_S)
        )

    async def __aexit__(self, *_: object) -> None:
        await self.kept.close()
        await self.control.close()


async def post(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], body: Sequence[bytes]
) -> tuple[int, bytes]:
    """Status and content of the answer. Redirects are answers like any other.

    Args:
        session: of a :class:`Connections`.
        url: where.
        headers: besides those of the message itself.
        body: JSON, in parts.

    Raises:
        aiohttp.ClientConnectorError: nobody accepts a connection there.
        TimeoutError: no connection in time.
        Dropped: the connection ended before the answer did, or what came is none.
        ValueError: a header cannot be sent.
    """
    for left in reversed(range(_TRIES)):
        try:
            return await _post(session, url, headers, body)
        except Dropped as dropped:
            if dropped.begun or not left:
                raise
    raise AssertionError


async def _post(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], body: Sequence[bytes]
) -> tuple[int, bytes]:
    begun = False
    sent = session.post(
        URL(url, encoded=True),
        data=b"".join(body),
        headers={**headers, **_JSON, **trace_headers()},
        allow_redirects=False,
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


def _socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    # Sampling may take an hour without a byte: an engine whose machine is gone is noticed by the kernel alone.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return made
