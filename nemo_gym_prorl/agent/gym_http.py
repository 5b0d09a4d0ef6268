# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The HTTP client between a handler and Gym servers: cookies per rollout, raw JSON, typed transport errors.

Gym's own client looks a server's address up in the OmegaConf tree on every call, retries dropped connections for ever,
even of calls that are not safe to repeat, and has no way to tell a lost session from a tool's error message. Here a
call is made once; what fails becomes an error of :mod:`nemo_gym_prorl.failures`, and the pipeline decides on retries
with a cap. Bodies stay bytes until somebody needs them, since token arrays are the bulk of the traffic.

Gym's servers know a session by a signed cookie, so each rollout keeps one jar per server and sends it with every call.

A server is an address of the deployment, nothing that a rollout brings along: redirects are not followed, proxies of
the environment are not used, and what a server says about its own failures is believed only as far as
:data:`SERVERS_KINDS` goes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
from pydantic import ValidationError

from nemo_gym_prorl.failures import (
    FAILURE_KIND_HEADER,
    CallerError,
    FailureKind,
    InfrastructureError,
    RolloutError,
    TaskError,
)
from nemo_gym_prorl.http.keys import authorization
from nemo_gym_prorl.http.problem_document import Problem
from nemo_gym_prorl.http.server_process import descriptor_exhaustion, is_descriptor_exhaustion
from nemo_gym_prorl.http.tracing import trace_headers
from nemo_gym_prorl.rollout.handler_calls import start_eager_task
from nemo_gym_prorl.rollout.job import Job


SERVERS_KINDS = frozenset(FailureKind) - {
    FailureKind.CANCELLED,
    FailureKind.KILL_SHAPED,
    FailureKind.SHUTDOWN,
    FailureKind.AGENT_TIMEOUT,
}
"""Failure kinds that a server may give for its own answer. The others are the service's own: a rollout that was taken
back leaves no trace in Gym's files, so an environment that could say so could make rollouts vanish."""

ROWS_FAULT = frozenset({400, 413, 415, 422})
"""Statuses that blame what was asked. Every other 4xx (a wrong key, route or model name, a restarted server) is for
whoever runs the deployment to mend, and the row is as good as before."""
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=3.0)
_DESCRIPTOR_WAIT_S = 30.0
"""How long a call waits for a file descriptor: those of refused callers are free again soon."""

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_VISIBLE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")


@dataclass(slots=True)
class CookieJar:
    """The cookies of one rollout at one server."""

    values: dict[str, str] = field(default_factory=dict)

    def header(self) -> dict[str, str]:
        """As a request header; empty without cookies."""
        if not self.values:
            return {}
        return {"Cookie": "; ".join(f"{name}={value}" for name, value in self.values.items())}

    def update(self, response: aiohttp.ClientResponse) -> None:
        """Take over what a response set."""
        given = response.headers.getall("Set-Cookie", ())
        if any('"' in cookie for cookie in given):  # a quoted value, which may hold anything
            self.values.update((name, morsel.value) for name, morsel in response.cookies.items())
            return
        for cookie in given:
            name, equals, value = cookie.partition(";")[0].partition("=")
            if equals and (name := name.strip()):
                self.values[name] = value.strip()


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A response read to its end."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Status 2xx: nothing else is an answer, since redirects are not followed."""
        return 200 <= self.status < 300

    def text(self, limit: int | None = None) -> str:
        """The body as text; at most ``limit`` characters."""
        return _cut(self.body.decode(errors="replace"), limit)

    def said(self, limit: int) -> str:
        """What an error says, for a person: a problem document's detail or its text, at most ``limit`` characters."""
        try:
            return _cut(Problem.model_validate_json(self.body).detail, limit)
        except ValidationError:
            return self.text(limit)

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            orjson.JSONDecodeError: it is none.
        """
        return orjson.loads(self.body)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server of the deployment is.

    Attributes:
        url: base URL without a trailing slash.
        key: what it wants to be shown as a bearer token; ``None`` if nothing.
    """

    url: str
    key: str | None = None


class GymServer:
    """One Gym server, as a rollout sees it.

    Args:
        name: the instance name, for error messages.
        address: where it is, and its key.
        http: shared session; without limits of its own, since the pipeline's pools bound what is in flight.

    Attributes:
        traits: what was learnt about the server from its answers, so that nobody has to ask again.
    """

    def __init__(self, name: str, address: Address, http: HttpClient) -> None:
        self.name = name
        self.url = address.url
        self.traits: set[str] = set()
        self._authorization = authorization(address.key)
        self._http = http

    async def post(self, path: str, body: Any, jar: CookieJar) -> HttpAnswer:
        """:meth:`call` with POST."""
        return await self.call("POST", path, body, jar)

    async def answers(self) -> bool:
        """It answers a call now, with whatever status, within a few seconds; also if it cannot be asked, for want of
        a file descriptor."""
        try:
            async with self._http.session.get(self.url + "/", timeout=_PROBE_TIMEOUT):
                return True
        except (aiohttp.ClientError, TimeoutError) as error:
            return is_descriptor_exhaustion(error)

    async def call(
        self, method: str, path: str, body: Any, jar: CookieJar, extra_headers: Mapping[str, str] = _NO_HEADERS
    ) -> HttpAnswer:
        """Call once and read the answer, whatever its status.

        Args:
            method: HTTP method.
            path: with its leading slash.
            body: JSON as bytes, or anything orjson can dump; ``None`` for no body.
            jar: sent with the call, and updated by the answer.
            extra_headers: besides those of the body and the jar.

        Raises:
            InfrastructureError: the server cannot be reached, dropped the connection, or says itself that the answer
                is a failure (header ``X-ProRL-Failure-Kind``).
            TaskError: it says so with a status that blames the row.
        """
        data = body if body is None or isinstance(body, bytes) else orjson.dumps(body)
        headers = {"Content-Type": "application/json", **self._authorization, **jar.header(), **extra_headers}
        headers |= trace_headers()
        try:
            response = await self._request(method, self.url + path, data, headers)
            async with response:
                content = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if is_descriptor_exhaustion(error):
                raise descriptor_exhaustion() from error
            raise InfrastructureError(
                f"{self.name} at {self.url} cannot be reached: {error}",
                kind=FailureKind.TRANSPORT_UNREACHABLE,
                server=self.name,
            ) from error
        except aiohttp.ClientError as error:
            raise InfrastructureError(
                f"{self.name} dropped the connection during {path}: {type(error).__name__}: {error}",
                kind=FailureKind.TRANSPORT_PEER_DROP,
                server=self.name,
            ) from error
        jar.update(response)
        answer = HttpAnswer(response.status, content, response.headers)
        if (kind := response.headers.get(FAILURE_KIND_HEADER)) is not None:
            blame = TaskError if answer.status in ROWS_FAULT else InfrastructureError
            raise blame(f"{self.name} {path}: {answer.said(2000)}", kind=_known_kind(kind))
        return answer

    async def _request(
        self, method: str, url: str, data: bytes | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """The call itself. Without a descriptor for a connection nothing was sent, so it is made again a while."""
        give_up = asyncio.get_running_loop().time() + _DESCRIPTOR_WAIT_S
        while True:
            try:
                return await self._http.session.request(method, url, data=data, headers=headers, allow_redirects=False)
            except aiohttp.ClientConnectorError as error:
                if not is_descriptor_exhaustion(error) or asyncio.get_running_loop().time() > give_up:
                    raise
            await asyncio.sleep(0.2)


class HttpClient:
    """The process's client session, opened at first use inside the running loop."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session; the same one until :meth:`close`."""
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def close(self) -> None:
        """Close the session and its connections."""
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)  # lets the transports finish closing


def addresses(config: Mapping[str, Any]) -> dict[str, Address]:
    """Instance name → address of every server in a merged Gym configuration.

    The key is the server's ``control_token``; ``prorl_model`` has it under ``policy``.
    """
    found: dict[str, Address] = {}
    for name, block in config.items():
        if not isinstance(block, Mapping):
            continue
        for implementations in block.values():
            if not isinstance(implementations, Mapping):
                continue
            for server in implementations.values():
                if isinstance(server, Mapping) and server.get("host") and server.get("port"):
                    policy = server.get("policy")
                    inner = policy.get("control_token") if isinstance(policy, Mapping) else None
                    host = str(server["host"])
                    authority = f"[{host}]" if ":" in host else host
                    key = server.get("control_token") or inner
                    found[str(name)] = Address(f"http://{authority}:{server['port']}", key)
    return found


def in_header(identifier: str) -> str:
    """An id as a header can carry it: ASCII as it stands, all else percent-encoded."""
    return quote(identifier, safe=_VISIBLE)


def in_path(identifier: str) -> str:
    """An id as one segment of a path."""
    return quote(identifier, safe="")


def require_ok(answer: HttpAnswer, what: str, kind: FailureKind, refusal: type[RolloutError] = CallerError) -> None:
    """Turn every status but 2xx into an error, by whose fault it is.

    Args:
        answer: the answer.
        what: who answered what, for the message.
        kind: of a failure that is the server's own.
        refusal: the error where the server blames what it was asked, :data:`ROWS_FAULT`.

    Raises:
        RolloutError: the refusal; what the server says is passed on.
        InfrastructureError: everything else. 410 is ``session_lost``: the server does not know the session or rollout
            any more, because it was restarted, say; from the beginning it may well succeed.
    """
    if answer.ok:
        return
    reason = f"{what}: HTTP {answer.status}: {answer.said(2000)}"
    if answer.status in ROWS_FAULT:
        raise refusal(reason)
    raise InfrastructureError(reason, kind=FailureKind.SESSION_LOST if answer.status == 410 else kind)


def json_of(answer: HttpAnswer, what: str, kind: FailureKind) -> Any:
    """The JSON of a good answer.

    Raises:
        InfrastructureError: it is none: something else answers at that address.
    """
    try:
        return answer.json()
    except orjson.JSONDecodeError as error:
        raise InfrastructureError(f"{what} answered no JSON: {answer.text(500)}", kind=kind) from error


def _cut(text: str, limit: int | None) -> str:
    return text if limit is None or len(text) <= limit else text[:limit] + "…"


def _known_kind(kind: str) -> FailureKind:
    return FailureKind(kind) if kind in SERVERS_KINDS else FailureKind.PROVIDER_UNAVAILABLE


LOGGER = logging.getLogger(__name__)


LEASE_HEADER = "X-ProRL-Lease"
RENEW_S = 5.0  # a server ends a session after six without a renewal


class BackgroundCleanup:
    """Best-effort cleanup requests of one service, sent in the background, and the leases of its sessions.

    A cleanup request may be lost with the agent or on its way. So the agent chooses a lease for each session, names
    the lease to the server when it seeds the session, and renews it. The server ends a session whose lease lapses.

    Args:
        bound_s: seconds after which such work is given up, unless it is started with another bound.
    """

    def __init__(self, bound_s: float = 60.0) -> None:
        self._bound_s = bound_s
        self._tasks: set[asyncio.Task[None]] = set()
        self.leases: dict[str, tuple[Job, GymServer, str]] = {}
        """By lease: the rollout for whose life it is renewed, at which server and path."""

    async def renew(self) -> float:
        """Renew the leases of sessions; returns the pause until the next time."""
        self.leases = {lease: held for lease, held in self.leases.items() if not held[0].state.terminal}
        told: dict[tuple[GymServer, str], list[str]] = defaultdict(list)
        for lease, (_, server, path) in self.leases.items():
            told[server, path].append(lease)
        for (server, path), leases in told.items():
            self.start(f"leases at {server.name}", server.post(path, {"leases": leases}, CookieJar()), RENEW_S)
        return RENEW_S

    def start(self, what: str, work: Coroutine[Any, Any, Any], bound_s: float | None = None) -> asyncio.Task[None]:
        """Have ``work`` done. The task never raises: what goes wrong is logged under the name ``what``."""
        task = start_eager_task(self._bounded(what, work, bound_s or self._bound_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self, timeout: float) -> None:
        """Wait until all is said, at most ``timeout`` seconds; what is left then is cancelled."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout)
        left = set(self._tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)

    async def _bounded(self, what: str, work: Coroutine[Any, Any, Any], bound_s: float) -> None:
        try:
            async with asyncio.timeout(bound_s):
                await work
        except Exception as error:  # the rollout is over; a failure of its clean-up changes nothing about it
            LOGGER.warning("%s: %s: %s", what, type(error).__name__, error)
