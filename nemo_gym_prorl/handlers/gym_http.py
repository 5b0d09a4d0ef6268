# SPDX-License-Identifier: Apache-2.0
"""The HTTP client between a handler and Gym servers: cookies per rollout, raw JSON, typed transport errors.

Gym's own client looks a server's address up in the OmegaConf tree on every call, retries dropped connections for ever,
even of calls that are not safe to repeat, and has no way to tell a lost session from a tool's error message. Here a
call is made once; what fails becomes an error of :mod:`nemo_gym_prorl.failures`, and the pipeline decides on retries
with a cap. Bodies stay bytes until somebody needs them, since token arrays are the bulk of the traffic.

Gym's servers know a session by a signed cookie, so each rollout keeps one jar per server and sends it with every call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import aiohttp
import orjson

from nemo_gym_prorl import open_files
from nemo_gym_prorl.failures import FAILURE_KIND_HEADER, CallerError, FailureKind, InfrastructureError


_DESCRIPTOR_WAIT_S = 30.0
"""How long a call waits for a file descriptor: those of refused callers are free again soon."""

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


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
        for name, morsel in response.cookies.items():
            self.values[name] = morsel.value


@dataclass(frozen=True, slots=True)
class Answer:
    """A response read to its end."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Status below 400."""
        return self.status < 400

    def text(self, limit: int | None = None) -> str:
        """The body as text; at most ``limit`` characters."""
        text = self.body.decode(errors="replace")
        return text if limit is None or len(text) <= limit else text[:limit] + "…"

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            orjson.JSONDecodeError: it is none.
        """
        return orjson.loads(self.body)


class GymServer:
    """One Gym server, as a rollout sees it.

    Args:
        name: the instance name, for error messages.
        url: base URL without a trailing slash.
        http: shared session; without limits of its own, since the pipeline's pools bound what is in flight.
    """

    def __init__(self, name: str, url: str, http: HttpClient) -> None:
        self.name = name
        self.url = url
        self._http = http

    async def post(self, path: str, body: Any, jar: CookieJar) -> Answer:
        """:meth:`call` with POST."""
        return await self.call("POST", path, body, jar)

    async def call(
        self, method: str, path: str, body: Any, jar: CookieJar, extra_headers: Mapping[str, str] = _NO_HEADERS
    ) -> Answer:
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
        """
        data = body if body is None or isinstance(body, bytes) else orjson.dumps(body)
        headers = {"Content-Type": "application/json", **jar.header(), **extra_headers}
        try:
            response = await self._request(method, self.url + path, data, headers)
            async with response:
                content = await response.read()
        except aiohttp.ClientConnectorError as error:
            if open_files.is_exhaustion(error):
                raise open_files.exhausted() from error
            raise InfrastructureError(
                f"{self.name} at {self.url} cannot be reached: {error}", kind=FailureKind.TRANSPORT_UNREACHABLE
            ) from error
        except aiohttp.ClientError as error:
            raise InfrastructureError(
                f"{self.name} dropped the connection during {path}: {type(error).__name__}: {error}",
                kind=FailureKind.TRANSPORT_PEER_DROP,
            ) from error
        jar.update(response)
        answer = Answer(response.status, content, response.headers)
        if (kind := response.headers.get(FAILURE_KIND_HEADER)) is not None:
            raise InfrastructureError(f"{self.name} {path}: {answer.text(2000)}", kind=_known_kind(kind))
        return answer

    async def _request(
        self, method: str, url: str, data: bytes | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """The call itself. Without a descriptor for a connection nothing was sent, so it is made again a while."""
        give_up = asyncio.get_running_loop().time() + _DESCRIPTOR_WAIT_S
        while True:
            try:
                return await self._http.session.request(method, url, data=data, headers=headers)
            except aiohttp.ClientConnectorError as error:
                if not open_files.is_exhaustion(error) or asyncio.get_running_loop().time() > give_up:
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


def server_urls(config: Mapping[str, Any]) -> dict[str, str]:
    """Instance name → base URL of every server in a merged Gym configuration."""
    urls: dict[str, str] = {}
    for name, block in config.items():
        if not isinstance(block, Mapping):
            continue
        for implementations in block.values():
            if not isinstance(implementations, Mapping):
                continue
            for server in implementations.values():
                if isinstance(server, Mapping) and server.get("host") and server.get("port"):
                    urls[str(name)] = f"http://{server['host']}:{server['port']}"
    return urls


def require_ok(answer: Answer, what: str, kind: FailureKind) -> None:
    """Turn an error status into an error.

    Raises:
        InfrastructureError: the status is 500 or above.
        CallerError: it is 400 or above; what the server says is passed on.
    """
    if answer.status >= 500:
        raise InfrastructureError(f"{what}: HTTP {answer.status}: {answer.text(2000)}", kind=kind)
    if answer.status >= 400:
        raise CallerError(f"{what} refused the row: HTTP {answer.status}: {answer.text(2000)}", field="row")


def _known_kind(kind: str) -> FailureKind:
    try:
        return FailureKind(kind)
    except ValueError:
        return FailureKind.AGENT_RUN_ERROR
