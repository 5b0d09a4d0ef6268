# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Kept connections to engines, and answers checked once where they enter.

Engines close a connection that was idle for some seconds (vLLM: 5), perhaps just as it is used again. That says
nothing about their health, so a request whose connection ends before an answer is sent again. A request that is
cancelled ends its connection, by which engines abort the request.

More than one choice, missing ids or log-probs, an end that was none: each is an error that says so, never a wrong
trajectory.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from yarl import URL

from nemo_gym_prorl.http.tracing import trace_headers
from nemo_gym_prorl.policy.engines.engine import BackendErred, BackendFailed, Misconfigured, RequestRefused
from nemo_gym_prorl.policy.generation import Finish


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


_ECHO = b'"prompt_token_ids":'


class ContextFull(Exception):
    """The prompt leaves no room in the engine's context."""


def only_choice(answer: Mapping[str, Any], url: str) -> dict[str, Any]:
    """The one choice of an OpenAI-style answer."""
    choices = required(answer, "choices", url)
    if not choices:
        raise LookupError("no choice")
    if len(choices) != 1:
        raise RequestRefused(
            f"{url} returned {len(choices)} choices: ask for n rollouts, not for n choices of one",
            field="n",
        )
    return dict(choices[0])


def without_echo(content: bytes, echo: Sequence[bytes]) -> bytes:
    """An answer's content without the prompt's ids, if it repeats exactly those that were sent: comparing bytes costs
    nothing, reading 64k numbers does. Any others stay, to be looked at.

    Args:
        content: JSON.
        echo: the list of ids as JSON, in parts; where they stood is ``null`` then.
    """
    # No string can hold the name with bare quotes, so this is a field.
    field = content.find(_ECHO)
    if field < 0 or not echo:
        return content
    at = start = field + len(_ECHO)
    for part in echo:
        if not content.startswith(part, at):
            return content
        at += len(part)
    return b"%bnull%b" % (content[:start], content[at:])


def required(answer: Mapping[str, Any], name: str, url: str) -> Any:
    """What no exact trajectory can do without."""
    value = answer.get(name)
    if value is None:
        raise Misconfigured(
            f"{url} answered without {name!r}, which an exact trajectory needs: is it the engine that was configured?",
            field="policy_base_url",
        )
    return value


def finish(reason: str | None, url: str) -> Finish:
    """Why sampling ended.

    Raises:
        BackendFailed: it did not end by itself.
    """
    if reason in (None, "abort"):
        raise BackendFailed(f"{url} dropped the request before it was done")
    if reason == "error":
        raise BackendErred(f"{url} met an error before it was done")
    if not isinstance(reason, str):
        raise TypeError(f"finish reason {reason!r:.100}")
    return Finish.LENGTH if reason == "length" else Finish.STOP


def cached_tokens(answer: Mapping[str, Any]) -> int | None:
    """How many tokens of the prompt the engine had already, if it tells."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return None if cached is None else max(0, int(cached))
