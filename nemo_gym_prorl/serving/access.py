# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Who may call a server of ours: whoever has its key, or, where none is set, whoever is on this machine.

A rollout service runs code on behalf of its callers and hands out what others sampled. So there are two safe settings,
and a server takes one of them or does not start: it listens on loopback, or it has a key. With a key *every* route
needs it, except the one by which a balancer asks whether the server lives.

The key is the bearer token of ``control_token`` in a server's configuration. Our servers read each other's keys from
the merged configuration of their deployment; Gym's own client sends none, unless
:func:`~nemo_gym_prorl.gym.client.send_keys` was called in its process.
"""

from __future__ import annotations

import hmac
from ipaddress import ip_address

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.serving.keys import authorization
from nemo_gym_prorl.serving.problems import ProblemError


OPEN_PATHS = frozenset({"/healthz"})
"""Routes that tell nothing but that the server lives."""


class KeyGuard:
    """ASGI middleware: refuses what comes without the key, before any route or body is looked at.

    Args:
        app: what is guarded.
        key: the key; ``None`` lets everything pass.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._expected = authorization(key).get("Authorization", "").encode() if key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] in ("http", "websocket") and not self._may_pass(scope):
            await _UNAUTHORIZED.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if self._expected is None or scope["path"] in OPEN_PATHS:
            return True
        given = HTTPConnection(scope).headers.get("authorization", "")
        return hmac.compare_digest(given.encode("latin-1"), self._expected)


def check_exposure(host: str | None, key: str | None, *, field: str = "control_token") -> None:
    """Refuse a server that others could reach and that has no key.

    Args:
        host: the address to listen on; ``None`` is loopback, as with Gym.
        key: the server's key.
        field: where the key is set, for the message.

    Raises:
        CallerError: the host is no loopback address and there is no key, or the key is empty or no ASCII.
    """
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise CallerError("must be a non-empty word of ASCII characters", field=field)
    if key is None and not is_loopback(host):
        raise CallerError(
            f"the server would listen on {host} for everybody: set a key, or listen on 127.0.0.1", field=field
        )


def is_loopback(host: str | None) -> bool:
    """Whether nobody else's machine can be meant by it; ``None`` is what Gym listens on."""
    if host in (None, "localhost"):
        return True
    try:
        return ip_address(str(host)).is_loopback
    except ValueError:
        return False


_UNAUTHORIZED = ProblemError(
    401,
    "unauthorized",
    "send `Authorization: Bearer <control_token>`",
    headers={"WWW-Authenticate": "Bearer"},
)
