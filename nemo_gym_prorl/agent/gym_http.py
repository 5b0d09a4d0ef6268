# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""HTTP client for Gym servers: one cookie jar per rollout, bodies as bytes, typed transport errors.

Gym's own client retries dropped connections without limit, even of calls that are not idempotent, and cannot
distinguish a lost session from a tool's error. This client sends a call once. Failures become errors of
:mod:`nemo_gym_prorl.failures`, and the pipeline owns retries. Bodies stay bytes until a caller parses them, because
token arrays are the bulk of the traffic.

Gym's servers identify a session by a signed cookie, so each rollout has a cookie jar per server.

Addresses come only from the deployment's configuration. The client follows no redirects and ignores the environment
variables for proxies. A server may report only the failure kinds in :data:`REPORTABLE_KINDS`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import orjson
from starlette.datastructures import Headers

from nemo_gym_prorl.async_tasks import start_eager_task
from nemo_gym_prorl.failures import (
    FAILURE_KIND_HEADER,
    FINAL,
    CallerError,
    FailureKind,
    InfrastructureError,
    RolloutError,
    TaskError,
)
from nemo_gym_prorl.http.client import ConnectFailed, ConnectionDropped, HttpAnswer, HttpClient
from nemo_gym_prorl.http.keys import authorization
from nemo_gym_prorl.http.tracing import trace_headers
from nemo_gym_prorl.rollout.job import Job


REPORTABLE_KINDS = frozenset(FailureKind) - {
    FailureKind.CANCELLED,
    FailureKind.KILL_SHAPED,
    FailureKind.SHUTDOWN,
    FailureKind.AGENT_TIMEOUT,
}
"""Failure kinds that a server may report for its own answer. The service sets the other kinds itself: a cancelled
rollout leaves no trace in Gym's files, so an environment could otherwise make rollouts vanish."""

BAD_ROW_STATUSES = frozenset({400, 413, 415, 422})
"""Statuses that blame the row. Every other 4xx (a wrong key, route or model name, a restarted server) is a fault of
the deployment, so the row can be retried."""
_PROBE_TIMEOUT_S = 3.0

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_VISIBLE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")


@dataclass(slots=True)
class CookieJar:
    """The cookies of one rollout at one server."""

    values: dict[str, str] = field(default_factory=dict)

    def header(self) -> dict[str, str]:
        """Return the ``Cookie`` header; empty without cookies."""
        if not self.values:
            return {}
        return {"Cookie": "; ".join(f"{name}={value}" for name, value in self.values.items())}

    def update(self, headers: Headers) -> None:
        """Store the cookies that a response sets."""
        for cookie in (value.decode("latin-1") for name, value in headers.raw if name == b"set-cookie"):
            if '"' in cookie:  # a quoted value may contain ";"
                self.values.update((name, morsel.value) for name, morsel in SimpleCookie(cookie).items())
                continue
            name, equals, value = cookie.partition(";")[0].partition("=")
            if equals and (name := name.strip()):
                self.values[name] = value.strip()


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server of the deployment.

    Attributes:
        url: base URL without a trailing slash.
        key: bearer token that the server requires, or ``None``.
    """

    url: str
    key: str | None = None


class GymServer:
    """Client of one Gym server.

    Args:
        http: shared client, without a limit on connections: the pipeline's pools bound the calls in flight.

    Attributes:
        traits: capabilities that earlier answers of the server have shown, for all rollouts.
    """

    def __init__(self, name: str, address: Address, http: HttpClient) -> None:
        self.name = name
        self.url = address.url
        self.traits: set[str] = set()
        self._authorization = authorization(address.key)
        self._http = http

    async def post(self, path: str, body: Any, jar: CookieJar) -> HttpAnswer:
        """Send a POST request (:meth:`call`)."""
        return await self.call("POST", path, body, jar)

    async def is_reachable(self) -> bool:
        """Return whether the server answers a probe within 3 s, with any status."""
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                await self._http.request("GET", self.url + "/", {})
        except (ConnectionError, TimeoutError):
            return False
        return True

    async def call(
        self, method: str, path: str, body: Any, jar: CookieJar, extra_headers: Mapping[str, str] = _NO_HEADERS
    ) -> HttpAnswer:
        """Send a request once and read the answer of any status.

        Args:
            path: path with its leading slash.
            body: JSON as bytes, or a value for orjson; ``None`` for no body.
            jar: cookies to send; updated from the answer.
            extra_headers: headers besides those for body, cookies, key and tracing.

        Raises:
            InfrastructureError: the server cannot be reached, dropped the connection, or reports a failure (header
                ``X-ProRL-Failure-Kind``).
            TaskError: the server reports a failure with a status in :data:`BAD_ROW_STATUSES`.
        """
        data = [] if body is None else [body if isinstance(body, bytes) else orjson.dumps(body)]
        headers = {"Content-Type": "application/json", **self._authorization, **jar.header(), **extra_headers}
        try:
            answer = await self._http.request(method, self.url + path, {**headers, **trace_headers()}, data)
        except ConnectFailed as error:
            raise InfrastructureError(
                f"{self.name} at {self.url} cannot be reached: {error}",
                kind=FailureKind.TRANSPORT_UNREACHABLE,
                server=self.name,
            ) from error
        except ConnectionDropped as error:
            raise InfrastructureError(
                f"{self.name} dropped the connection during {path}: {error}",
                kind=FailureKind.TRANSPORT_PEER_DROP,
                server=self.name,
            ) from error
        jar.update(answer.headers)
        if (kind := answer.headers.get(FAILURE_KIND_HEADER)) is not None:
            reason, known = f"{self.name} {path}: {answer.error_text(2000)}", _reported_kind(kind.removesuffix(FINAL))
            if answer.status in BAD_ROW_STATUSES:
                raise TaskError(reason, kind=known)
            raise InfrastructureError(reason, kind=known, final=kind.endswith(FINAL))
        return answer


def addresses(config: Mapping[str, Any]) -> dict[str, Address]:
    """Return the address of every server in a merged Gym configuration, by instance name.

    A server's key is its setting ``control_token``; ``prorl_model`` has this setting under ``policy``.
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


def quote_header(identifier: str) -> str:
    """Encode an id for a header: visible ASCII unchanged, other characters percent-encoded."""
    return quote(identifier, safe=_VISIBLE)


def quote_segment(identifier: str) -> str:
    """Encode an id as one segment of a URL path."""
    return quote(identifier, safe="")


def require_ok(answer: HttpAnswer, what: str, kind: FailureKind, refusal: type[RolloutError] = CallerError) -> None:
    """Raise an error for every status but 2xx.

    Args:
        what: the called server and route, for the message.
        kind: failure kind of an infrastructure error.
        refusal: error class for the statuses in :data:`BAD_ROW_STATUSES`.

    Raises:
        RolloutError: the server refuses the request; the error contains the server's message.
        InfrastructureError: any other status. For 410 the kind is ``session_lost``: the server has lost the session or
            the rollout, for example by a restart, so another attempt may succeed.
    """
    if answer.ok:
        return
    reason = f"{what}: HTTP {answer.status}: {answer.error_text(2000)}"
    if answer.status in BAD_ROW_STATUSES:
        raise refusal(reason)
    raise InfrastructureError(reason, kind=FailureKind.SESSION_LOST if answer.status == 410 else kind)


def require_json(answer: HttpAnswer, what: str, kind: FailureKind) -> Any:
    """Return the JSON of a successful answer.

    Raises:
        InfrastructureError: the body is not JSON, so another program may listen at the address.
    """
    try:
        return answer.json()
    except orjson.JSONDecodeError as error:
        raise InfrastructureError(f"{what} did not answer with JSON: {answer.text(500)}", kind=kind) from error


def _reported_kind(kind: str) -> FailureKind:
    return FailureKind(kind) if kind in REPORTABLE_KINDS else FailureKind.PROVIDER_UNAVAILABLE


LOGGER = logging.getLogger(__name__)


LEASE_HEADER = "X-ProRL-Lease"
HARNESS_HEADER = "X-ProRL-Harness"
RENEW_S = 5.0  # between two renewals of a lease; a server ends a session after six missed renewals


class BackgroundCleanup:
    """Best-effort cleanup requests of one service, sent in the background, and the leases of its sessions.

    A cleanup request is lost if the agent server crashes. So the agent server names a lease when it seeds a session,
    and renews the lease. The resources server ends a session whose lease lapses.

    Args:
        bound_s: default time limit of a cleanup request in seconds.
    """

    def __init__(self, bound_s: float = 60.0) -> None:
        self._bound_s = bound_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._not_renewed: set[str] = set()
        """Names of the servers whose last renewal failed; each outage is logged once."""
        self.leases: dict[str, tuple[Job, GymServer, str]] = {}
        """Per lease, the rollout that owns the lease, and the server and path at which the lease is renewed."""

    async def renew(self) -> float:
        """Renew the leases of live rollouts, drop all other leases, and return the seconds until the next renewal."""
        self.leases = {lease: held for lease, held in self.leases.items() if not held[0].state.terminal}
        by_route: dict[tuple[GymServer, str], list[str]] = defaultdict(list)
        for lease, (_, server, path) in self.leases.items():
            by_route[server, path].append(lease)
        for (server, path), leases in by_route.items():
            self.start(f"renewing leases at {server.name}", self._renew(server, path, leases))
        return RENEW_S

    async def _renew(self, server: GymServer, path: str, leases: list[str]) -> None:
        try:
            async with asyncio.timeout(RENEW_S):
                await server.post(path, {"leases": leases}, CookieJar())
        except Exception as error:
            if server.name not in self._not_renewed:
                why = str(error) or f"no answer within {RENEW_S:g} s"
                fix = "its sessions end after 30 s without renewal; look at its load and its log"
                LOGGER.warning("cannot renew leases at %s: %s: %s; %s", server.name, type(error).__name__, why, fix)
            self._not_renewed.add(server.name)
        else:
            if server.name in self._not_renewed:
                LOGGER.warning("leases at %s are renewed again", server.name)
            self._not_renewed.discard(server.name)

    def start(self, what: str, work: Coroutine[Any, Any, Any], bound_s: float | None = None) -> asyncio.Task[None]:
        """Run ``work`` in the background for at most ``bound_s`` seconds (default: that of the constructor). The
        returned task never raises: errors and time-outs are logged under the name ``what``."""
        task = start_eager_task(self._bounded(what, work, bound_s or self._bound_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for all requests; cancel the rest, and wait up to 1 s for them to end."""
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
        except Exception as error:  # only logged: the rollout's result is final and does not depend on the cleanup
            why = str(error) or f"not done within {bound_s:g} s"
            LOGGER.warning("%s failed: %s: %s", what, type(error).__name__, why)
