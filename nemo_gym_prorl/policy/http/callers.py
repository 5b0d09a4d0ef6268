# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Who asks for a turn, and whether they are still there.

A caller says which rollout it is in a header, or in the URL that it was given (Gym's harness agents know nothing but
their base URL); who says neither is told by a session.

A turn's work is small beside what a web framework does around it: models of request and answer, dependencies,
middlewares with a task each. So routes of turns stand in front of all that
(:mod:`nemo_gym_prorl.http.applications`), with what they need of it: a session's cookie, errors as documents, an
end when a caller hangs up. The last is for routes of Gym's own as well.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.http.problems import ProblemError, answer_to
from nemo_gym_prorl.policy.turns import TurnRequest


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

    def asking(self, request: TurnRequest, **more: Any) -> TurnRequest:
        """A request as this caller's, with what more there is to say of it."""
        return replace(request, rollout=self.rollout, group=self.group, run=self.run, **more)


def header_text(value: str) -> str:
    """A header whose value may be any text: percent-encoded, or as the bytes of UTF-8 or Latin-1.

    Args:
        value: its bytes, read as Latin-1.
    """
    if value.isascii() and "%" not in value:
        return value
    with suppress(UnicodeDecodeError):
        value = value.encode("latin-1").decode()
    return unquote(value)


def caller_of(headers: Headers, session: str) -> Caller:
    """Who says so in these headers, or else has this session."""
    group = headers.get("x-rollout-group")
    return Caller(
        header_text(headers.get("x-rollout-id", "")) or session,
        None if group is None else header_text(group),
        header_text(headers.get("x-rollout-run", "")) or None,
        headers.get(DEFERRAL) == "deferred",
    )


def route_of_callers(
    answer: Callable[[Request, Caller, bytes], Awaitable[Response]], field: str
) -> Callable[[Request], Awaitable[Response]]:
    """A route that answers turns: with the caller's name, or else its session, which a new caller is given.

    Args:
        answer: to a request, of whom, with its body.
        field: where in a session its id is.
    """

    async def route(request: Request) -> Response:
        session = request.session.get(field)
        if session is None and not request.headers.get("x-rollout-id"):
            session = str(uuid.uuid4())
        if session is not None:
            request.session[field] = session  # what is set is sent again: so it does not run out
        return await answer(request, caller_of(request.headers, session or ""), await request.body())

    return route


_PREFIX = "/ng-rollout/"
_OF_A_ROLLOUT = re.compile(
    rf"(?P<prefix>{_PREFIX}(?P<rollout>[A-Za-z0-9][A-Za-z0-9._-]{{0,199}})(?:/training-token-capture)?)"
    r"/(?!ng-rollout/).*[^/]"
)

_CONTROL = ("/v1/backends", "/v1/rollouts", "/metrics")
"""Routes that are no rollout's, and what they begin with."""


class RolloutUrls:
    """ASGI middleware: the rollout of a URL ``/ng-rollout/<id>/v1/…``, as Gym writes it, is named in the header, too.

    So what stands behind it is told in one way. The id is a word of Gym's own kind: one that is escaped in a path may
    be another one to whoever reads it next. The routes by which the server is steered do not answer there: who is
    handed the URL of a rollout, as agents are, is not handed them.

    Args:
        app: gets the request.
        whole: leave the URL as it is, for an application that takes it apart itself.
    """

    def __init__(self, app: ASGIApp, *, whole: bool) -> None:
        self._app = app
        self._whole = whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and scope["path"].startswith(_PREFIX):
            try:
                scope = self._named(scope)
            except (CallerError, ProblemError) as error:
                await answer_to(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _named(self, scope: Scope) -> Scope:
        read = _OF_A_ROLLOUT.fullmatch(scope["raw_path"].decode("latin-1"))
        if read is None:
            raise CallerError(
                "must be /ng-rollout/ID/v1/… without a slash at its end, with an ID of at most 200 letters, digits, "
                "dots, dashes and underscores that begins with a letter or digit",
                field="URL",
            )
        prefix, rollout = read["prefix"], read["rollout"]
        if scope["path"].removeprefix(prefix).startswith(_CONTROL):
            raise ProblemError(404, "http-404", "it does not answer below the URL of a rollout")
        for header in map(header_text, Headers(scope=scope).getlist("x-rollout-id")):
            if header not in ("", rollout):
                raise CallerError(f"{header!r} is not {rollout!r} of the URL: leave it out", field="X-Rollout-Id")
        others = [(name, value) for name, value in scope["headers"] if name != b"x-rollout-id"]
        named = {**scope, "headers": [*others, (b"x-rollout-id", rollout.encode())]}
        if not self._whole:
            named["path"] = scope["path"].removeprefix(prefix)
            named["raw_path"] = scope["raw_path"].removeprefix(prefix.encode())
        return named


class EndsWithCaller:
    """ASGI middleware: what is done for a caller is cancelled when that hangs up.

    Nobody reads an answer then, but Gym's middlewares further out take it for a defect if there is none.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self._app(scope, receive, send)
            return
        read: list[Message] = []
        while not read or (read[-1]["type"] == "http.request" and read[-1].get("more_body")):
            read.append(await receive())

        async def again() -> Message:
            return read.pop(0) if read else await receive()

        answered = hung_up = False

        async def answer(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        def over(listener: asyncio.Task[Message]) -> None:
            nonlocal hung_up
            if not listener.cancelled():
                hung_up = True
                task.cancel()

        listener: asyncio.Task[Message] = asyncio.ensure_future(receive())
        listener.add_done_callback(over)
        try:
            await self._app(scope, again, answer)
        except asyncio.CancelledError:
            if not hung_up or task.uncancel():
                raise
            if not answered:
                await Response(status_code=499)(scope, receive, send)
        finally:
            listener.remove_done_callback(over)
            listener.cancel()
