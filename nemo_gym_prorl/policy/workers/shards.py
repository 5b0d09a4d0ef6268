# SPDX-License-Identifier: Apache-2.0
"""Which worker has a rollout, told from the head of a request (pure).

A rollout's tokens live in one process, so each of its requests must reach that one, whichever connection it comes on.
A rollout is named as in ``prorl_model``: by the path of ``/v1/rollouts/{id}``, else by the header ``X-Rollout-Id``,
else by the session in Gym's cookie. The name's checksum says the worker. Whoever has no name yet may be served
anywhere: the worker gives it a session whose name leads back to it (:class:`OwnSessions`).

The session is read from the cookie without checking its signature. A forged one leads to a worker that refuses it.
"""

from __future__ import annotations

import uuid
from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes, urlsplit
from zlib import crc32

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym_prorl.policy.header_text import header_text


_ROLLOUTS = b"/v1/rollouts/"


@dataclass(frozen=True, slots=True)
class Shard:
    """One worker's part of all rollouts: ``index`` of ``count``."""

    index: int
    count: int

    def has(self, rollout: str) -> bool:
        """Whether the rollout is this worker's."""
        return shard_of(rollout, self.count) == self.index

    def new_id(self) -> str:
        """A random id that is this worker's."""
        while not self.has(candidate := str(uuid.uuid4())):
            pass
        return candidate


def shard_of(rollout: str, count: int) -> int:
    """The worker that has a rollout, of ``count``."""
    return crc32(rollout.encode(errors="surrogatepass")) % count


def rollout_of(target: bytes, headers: Mapping[bytes, bytes], cookie: str, session_key: str) -> str | None:
    """The name of the rollout that a request is about; ``None`` if it has none.

    Args:
        target: of the request line.
        headers: by lower-case name.
        cookie: name of the session's cookie.
        session_key: under which the session has its id.
    """
    path = target if target.startswith(b"/") else urlsplit(target).path
    # What is decoded here was decoded before it was matched there.
    path = unquote_to_bytes(path.partition(b"?")[0])
    if path.startswith(_ROLLOUTS):
        return path[len(_ROLLOUTS) :].partition(b"/")[0].decode(errors="replace")
    if given := headers.get(b"x-rollout-id"):
        return header_text(given.decode("latin-1"))
    if cookies := headers.get(b"cookie"):
        return _session_id(cookies, cookie.encode(), session_key)
    return None


def _session_id(cookies: bytes, cookie: bytes, session_key: str) -> str | None:
    for pair in cookies.split(b";"):
        name, _, value = pair.strip().partition(b"=")
        if name == cookie:
            with suppress(ValueError, AttributeError):
                session = orjson.loads(b64decode(value.strip(b'"').partition(b".")[0]))
                return str(session.get(session_key)) if session.get(session_key) else None
    return None


class OwnSessions:
    """ASGI middleware, inside of that which gives each request a session: one that has just begun, or whose cookie was
    not believed, gets an id of this worker's.

    Args:
        app: what is served.
        shard: which rollouts are this worker's.
        session_key: under which a session has its id.
    """

    def __init__(self, app: ASGIApp, shard: Shard, session_key: str) -> None:
        self._app = app
        self._shard = shard
        self._key = session_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        session = scope.get("session")
        # With a name of its own a request is here because of that one, and its session is none of ours.
        if session and not any(name == b"x-rollout-id" for name, _ in scope["headers"]):
            given = session.get(self._key)
            if given is not None and not self._shard.has(given):
                session[self._key] = self._shard.new_id()
        await self._app(scope, receive, send)
