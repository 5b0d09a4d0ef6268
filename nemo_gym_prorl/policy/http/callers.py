# SPDX-License-Identifier: Apache-2.0
"""Who asks for a turn, and whether they are still there.

A turn's work is small beside what a web framework does around it: models of request and answer, dependencies,
middlewares with a task each. So routes of turns stand in front of all that
(:mod:`nemo_gym_prorl.serving.direct_routes`), and do what they need of it themselves: a session's cookie, an end when
a caller hangs up, errors as documents.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import itsdangerous
from starlette.datastructures import Headers
from starlette.requests import Request, cookie_parser
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym_prorl.policy.header_text import header_text
from nemo_gym_prorl.serving.problems import KNOWN_ERRORS, answer_to


_SESSION_S = 14 * 24 * 60 * 60
"""How long a session's cookie holds, as in Starlette's middleware."""
DEFERRAL = "X-Rollout-Tokens"


@dataclass(frozen=True, slots=True)
class Caller:
    """What a request says of its rollout.

    Attributes:
        rollout: its name.
        group: of its siblings, if it is told.
        run: whose backends may sample it; ``None`` for those of no run.
        deferred: answers are to have no tokens.
    """

    rollout: str
    group: str | None
    run: str | None
    deferred: bool


def caller_of(headers: Headers, session: str) -> Caller:
    """Who says so in these headers, or else has this session."""
    group = headers.get("x-rollout-group")
    return Caller(
        header_text(headers.get("x-rollout-id", "")) or session,
        None if group is None else header_text(group),
        header_text(headers.get("x-rollout-run", "")) or None,
        headers.get(DEFERRAL) == "deferred",
    )


class Sessions:
    """Gym's session cookie, read and renewed as Starlette's ``SessionMiddleware`` does it.

    Args:
        name: of the cookie, which is also the key that signs it.
        field: where in a session its id is.
    """

    def __init__(self, name: str, field: str) -> None:
        self._signer = itsdangerous.TimestampSigner(name)
        self._name = name
        self._field = field

    def read(self, cookies: str) -> str | None:
        """The session id that a caller shows, if it is one of ours."""
        shown = cookie_parser(cookies).get(self._name) if self._name in cookies else None
        if shown is None:
            return None
        try:
            session = json.loads(b64decode(self._signer.unsign(shown, max_age=_SESSION_S)))
        except (itsdangerous.BadSignature, ValueError):
            return None
        known = session.get(self._field) if isinstance(session, dict) else None
        return known if isinstance(known, str) else None

    def cookie(self, session: str) -> bytes:
        """The header that renews it."""
        signed = self._signer.sign(b64encode(json.dumps({self._field: session}).encode())).decode()
        return f"{self._name}={signed}; path=/; Max-Age={_SESSION_S}; httponly; samesite=lax".encode("latin-1")

    def route(
        self, answer: Callable[[Request, Caller, bytes], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A route that answers turns: with the caller's name, or else its session, which a new caller is given. It is
        cancelled when its caller hangs up."""

        async def route(request: Request) -> Response:
            headers = request.headers
            session = self.read(headers.get("cookie", ""))
            if session is None and not headers.get("x-rollout-id"):
                session = str(uuid.uuid4())
            caller = caller_of(headers, session or "")
            body = await request.body()
            try:
                response = await _while_listened(answer(request, caller, body), request.receive)
            except _HungUp:
                return Response(status_code=499)
            except KNOWN_ERRORS as error:
                response = answer_to(error)
            if session is not None:
                response.raw_headers.append((b"set-cookie", self.cookie(session)))
            return response

        return route


class EndsWithCaller:
    """ASGI middleware that does the same for all other routes: those of Gym's application, that is.

    Nobody reads an answer then, but middleware further out takes it for a defect if there is none.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        read: list[Message] = []
        while not read or (read[-1]["type"] == "http.request" and read[-1].get("more_body")):
            read.append(await receive())

        async def again() -> Message:
            return read.pop(0) if read else await receive()

        answered = False

        async def answer(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await _while_listened(self._app(scope, again, answer), receive)
        except _HungUp:
            if not answered:
                await Response(status_code=499)(scope, receive, send)


class _HungUp(Exception):
    """Nobody waits for the answer any more."""


async def _while_listened[T](work: Awaitable[T], receive: Receive) -> T:
    """The result of some work, which is cancelled when the caller hangs up.

    Raises:
        _HungUp: it did.
    """
    task = asyncio.current_task()
    assert task is not None
    hung_up = False

    def over(listener: asyncio.Task[Message]) -> None:
        nonlocal hung_up
        if not listener.cancelled():
            hung_up = True
            task.cancel()

    listener: asyncio.Task[Message] = asyncio.ensure_future(receive())
    listener.add_done_callback(over)
    try:
        return await work
    except asyncio.CancelledError:
        if hung_up and not task.uncancel():
            raise _HungUp from None
        raise
    finally:
        listener.remove_done_callback(over)
        listener.cancel()
