# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Authentication and authorization of callers by bearer keys. A server without keys serves this machine only.

A rollout service runs its callers' code and holds all callers' samples. So a server starts only if it listens on
loopback or has a key. With keys *every* route requires a key, except ``/healthz`` for load balancers.

``control_token`` in a server's configuration is the deployment's own key, a bearer token with all scopes. Our servers
read each other's keys from the merged configuration of their deployment. Gym's own client sends no key, unless its
process called :func:`~nemo_gym_prorl.servers.gym_client.send_keys`. A rollout service may also have clients with keys
of their own, each with some scopes. :class:`RouteScopes` holds the scope of each route; a route without an entry
requires the scope ``admin``.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Mapping
from ipaddress import ip_address

from starlette.requests import HTTPConnection, Request
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as Connection

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.http.keys import DEPLOYMENT, Caller, Scope, authorization
from nemo_gym_prorl.http.problems import ProblemError


LOGGER = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/healthz"})
"""Routes that need no key: they reveal only that the server is up."""

_CALLER, _LOGGED_SCOPES = "prorl.caller", "prorl.logged"


class RouteScopes:
    """Required scope by method and route.

    Args:
        table: scope by method and path; paths have FastAPI's form, such as ``/jobs/{id}``.
    """

    def __init__(self, table: Mapping[tuple[str, str], Scope]) -> None:
        self.table = dict(table)
        self._patterns = [
            (method, compile_path(path)[0], scope) for (method, path), scope in table.items() if "{" in path
        ]

    def of(self, method: str, path: str) -> Scope:
        method = "GET" if method == "HEAD" else method
        if (found := self.table.get((method, path))) is not None:
            return found
        fitting = (scope for of, pattern, scope in self._patterns if of == method and pattern.fullmatch(path))
        return next(fitting, Scope.ADMIN)

    def needs(self, method: str, path: str) -> Scope | None:
        """Return the scope that a route requires; ``None`` for a route that needs no key."""
        return None if path in OPEN_PATHS else self.of(method, path)


class KeyGuard:
    """ASGI middleware that refuses requests without a key of the required scope before the body is read.

    Logs all administrative calls, refused ones included.

    Args:
        app: the guarded application.
        key: the deployment's own key. If ``key`` and ``clients`` are ``None``, every request passes.
        clients: returns the client that owns a key, ``None`` for an unknown key.
        scopes: required scopes; with ``None`` each key is valid for all routes.
    """

    def __init__(
        self,
        app: ASGIApp,
        key: str | None,
        clients: Callable[[str], Caller | None] | None = None,
        scopes: RouteScopes | None = None,
    ) -> None:
        self._app = app
        self._expected = authorization(key).get("Authorization", "").encode() if key is not None else None
        self._clients = clients
        self._scopes = scopes

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        caller = self._caller(scope)
        needed = self._scopes.of(scope.get("method", ""), scope["path"]) if self._scopes is not None else None
        scope = {**scope, _CALLER: caller, _LOGGED_SCOPES: {needed}}
        if caller is not None and caller.name is not None:
            send = self._end_on_revocation(scope, send)
        if needed is not None:
            send = _log_admin_call(scope, caller, send)
        if caller is None:
            await _UNAUTHORIZED.response()(scope, receive, send)
        elif needed is not None and not caller.may(needed):
            await _scope_missing(caller, needed).response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _caller(self, scope: Connection) -> Caller | None:
        if self._expected is None and self._clients is None:
            return DEPLOYMENT
        given = HTTPConnection(scope).headers.get("authorization", "")
        if self._expected is not None and hmac.compare_digest(given.encode("latin-1"), self._expected):
            return DEPLOYMENT
        word, _, key = given.partition(" ")
        return self._clients(key) if self._clients is not None and word == "Bearer" else None

    def _end_on_revocation(self, scope: Connection, send: Send) -> Send:
        """Return a ``send`` that ends a streamed response at the next chunk after the caller's key is revoked."""
        ended = False

        async def checked(message: Message) -> None:
            nonlocal ended
            if ended:
                return
            if message.get("more_body") and self._caller(scope) != scope[_CALLER]:
                ended, message = True, {"type": "http.response.body", "body": b""}
            await send(message)

        return checked


async def caller_of(request: Request) -> Caller:
    return caller_in(request.scope)


def caller_in(scope: Connection) -> Caller:
    caller: Caller = scope.get(_CALLER, DEPLOYMENT)
    return caller


def log_as_admin(scope: Connection) -> None:
    """Mark a request to be logged as an administrative call, whatever scope its route requires."""
    scope.get(_LOGGED_SCOPES, set()).add(Scope.ADMIN)


def _log_admin_call(scope: Connection, caller: Caller | None, send: Send) -> Send:
    async def logged(message: Message) -> None:
        if message["type"] == "http.response.start" and Scope.ADMIN in scope[_LOGGED_SCOPES]:
            who = "no known key" if caller is None else f"client {caller.name!r}" if caller.name else "the deployment"
            where = (scope.get("client") or ("?",))[0]
            # Logged as a warning: Gym keeps Python's default log level, which hides lower levels.
            what = scope["method"], scope["path"]
            LOGGER.warning("admin: %s %r by %s from %s: %s", *what, who, where, message["status"])
        await send(message)

    return logged


def check_exposure(host: str | None, key: str | None, *, field: str = "control_token", others: bool = False) -> None:
    """Refuse to start a server that is reachable from other machines and has no key.

    Args:
        host: the address to listen on; ``None`` is loopback, Gym's default.
        key: the deployment's own key; ``None`` if not configured.
        field: name of the setting with the key, for the error.
        others: whether clients have keys of their own.

    Raises:
        CallerError: the host is not loopback and there is no key, or the key is not printable ASCII without spaces.
    """
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise CallerError("must be a non-empty word of ASCII characters", field=field)
    if key is None and not others and not is_loopback(host):
        raise CallerError(
            f"the server would listen on {host} for everybody: set a key, or listen on 127.0.0.1", field=field
        )


def is_loopback(host: str | None) -> bool:
    """Return whether ``host`` is ``localhost``, a loopback address, or ``None``, for which Gym uses loopback."""
    if host in (None, "localhost"):
        return True
    try:
        return ip_address(str(host)).is_loopback
    except ValueError:
        return False


_UNAUTHORIZED = ProblemError(
    401,
    "unauthorized",
    "send `Authorization: Bearer KEY` with the server's control_token, or a key of a client",
    headers={"WWW-Authenticate": "Bearer"},
)


def _scope_missing(caller: Caller, needed: Scope) -> ProblemError:
    has = ", ".join(sorted(caller.scopes))
    return ProblemError(403, "not-allowed", f"the key of {caller.name} has the scopes {has}; this needs {needed}")
