# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Identification of the rollout of a request, and cancellation when the client disconnects.

A client names its rollout in a header, or in the URL (Gym's harness agents know only their base URL). A program in a
sandbox has a capability key instead. Other clients are identified by their session cookie.

A turn needs little of a web framework: no request and answer models, no dependencies, no middleware tasks. Routes of
turns therefore run in front of FastAPI (:mod:`nemo_gym_prorl.http.applications`). This module adds the session
cookie, errors as problem documents, and cancellation on disconnect. Gym's own routes use the cancellation too.
"""

from __future__ import annotations

import asyncio
import math
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
from nemo_gym_prorl.policy.calls import DEAD_KEY, KEY_PREFIX, LEFT_OUT, CallGrant
from nemo_gym_prorl.policy.http.programs import program_error
from nemo_gym_prorl.policy.turns import TurnRequest


TOKENS_HEADER = "X-Rollout-Tokens"
"""Header with which a client asks for answers without tokens (``deferred``); answers repeat the header."""


@dataclass(frozen=True, slots=True)
class RolloutCaller:
    """Rollout of a request.

    Attributes:
        rollout: name of the rollout.
        group: name of the rollout's group, if given.
        run: training run whose backends may sample the rollout; ``None`` if the request names no run.
        deferred: whether answers omit tokens.
        streams: whether the answer is a stream.
        grant: permissions of the request's capability key, if the request has one.
    """

    rollout: str
    group: str | None
    run: str | None
    deferred: bool
    streams: bool = False
    grant: CallGrant | None = None

    def complete(self, request: TurnRequest, **more: Any) -> TurnRequest:
        """Return a request with this caller's rollout, group, run and granted parameters; refuse a too long prompt."""
        if self.grant is not None:
            self.grant.check_length(more.get("messages", request.messages), request.instructions, request.tools)
            more["sampling"] = request.sampling.overridden(self.grant.sampling)
            more["template_variables"] = {**request.template_variables, **self.grant.template_variables}
        return replace(request, rollout=self.rollout, group=self.group, run=self.run, **more)


def decode_header(value: str) -> str:
    """Decode a header (percent-encoded, UTF-8 or Latin-1) whose bytes were read as Latin-1."""
    if value.isascii() and "%" not in value:
        return value
    with suppress(UnicodeDecodeError):
        value = value.encode("latin-1").decode()
    return unquote(value)


_GRANT = "prorl.grant"
"""Name of the ASGI scope's entry with the permissions (:class:`CallGrant`) of the request's capability key."""


def caller_of(request: Request, session: str) -> RolloutCaller:
    """Return the rollout that the capability key or the headers name, by default the rollout with the session's id."""
    grant: CallGrant | None = request.scope.get(_GRANT)
    if grant is not None:
        return RolloutCaller(grant.rollout, grant.group, grant.run, deferred=True, grant=grant)
    headers = request.headers
    group = headers.get("x-rollout-group")
    return RolloutCaller(
        decode_header(headers.get("x-rollout-id", "")) or session,
        None if group is None else decode_header(group),
        decode_header(headers.get("x-rollout-run", "")) or None,
        headers.get(TOKENS_HEADER) == "deferred",
    )


def turn_route(
    answer: Callable[[Request, RolloutCaller, bytes], Awaitable[Response]], field: str
) -> Callable[[Request], Awaitable[Response]]:
    """Return a route that calls ``answer`` with caller and body; the caller is identified by its headers, or by the
    session cookie's ``field``.
    """

    async def route(request: Request) -> Response:
        session = request.session.get(field)
        if session is None and not request.headers.get("x-rollout-id") and _GRANT not in request.scope:
            session = str(uuid.uuid4())
        if session is not None:
            request.session[field] = session  # setting the field renews the cookie
        return await answer(request, caller_of(request, session or ""), await request.body())

    return route


_PREFIX = "/ng-rollout/"
_ROLLOUT_PATH = re.compile(
    rf"(?P<prefix>{_PREFIX}(?P<rollout>[A-Za-z0-9][A-Za-z0-9._-]{{0,199}})(?:/training-token-capture)?)"
    r"/(?!ng-rollout/).*[^/]"
)

_CONTROL = ("/v1/backends", "/v1/rollouts", "/metrics")
"""Prefixes of control routes, which are not for agents."""


class RolloutUrlMiddleware:
    """ASGI middleware that copies the rollout of a URL ``/ng-rollout/<id>/v1/…`` (Gym's form) into ``X-Rollout-Id``.

    Later handlers read only this header. Ids are limited to Gym's characters, because parsers may unescape other ids
    differently. Control routes do not answer below such a URL, because agents receive the URL of their rollout. With
    ``whole`` the URL keeps its prefix, for an application that parses such URLs itself.
    """

    def __init__(self, app: ASGIApp, *, whole: bool) -> None:
        self._app = app
        self._whole = whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = scope["type"] == "http" and scope["path"].startswith(_PREFIX)
        LEFT_OUT.set(set() if named or _GRANT in scope else None)
        if named:
            try:
                scope = self._named(scope)
            except (CallerError, ProblemError) as error:
                await answer_to(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _named(self, scope: Scope) -> Scope:
        read = _ROLLOUT_PATH.fullmatch(scope["raw_path"].decode("latin-1"))
        if read is None:
            raise CallerError(
                "must be /ng-rollout/ID/v1/… without a slash at its end, with an ID of at most 200 letters, digits, "
                "dots, dashes and underscores that begins with a letter or digit",
                field="URL",
            )
        prefix, rollout = read["prefix"], read["rollout"]
        if scope["path"].removeprefix(prefix).startswith(_CONTROL):
            raise ProblemError(404, "http-404", "control routes do not answer below the URL of a rollout")
        for header in map(decode_header, Headers(scope=scope).getlist("x-rollout-id")):
            if header not in ("", rollout):
                raise CallerError(
                    f"{header!r} differs from {rollout!r} in the URL: leave the header out", field="X-Rollout-Id"
                )
        others = [(name, value) for name, value in scope["headers"] if name != b"x-rollout-id"]
        named = {**scope, "headers": [*others, (b"x-rollout-id", rollout.encode())]}
        if not self._whole:
            named["path"] = scope["path"].removeprefix(prefix)
            named["raw_path"] = scope["raw_path"].removeprefix(prefix.encode())
        return named


_KEY = re.compile(rf"(?i:Bearer +)?({KEY_PREFIX}.*)")
_OPEN_TO_KEYS = re.compile("POST /v1/(responses|chat/completions|messages(/count_tokens)?)|GET /v1/models(/.+)?")
MAX_BODY_BYTES = 8 << 20
"""Maximum size of a program's request in bytes; a context of a million tokens has half as many bytes."""
_NOT_FROM_PROGRAMS = (b"x-rollout-", b"authorization", b"x-api-key", b"cookie")


class CapabilityKeyMiddleware:
    """ASGI middleware that restricts requests with a capability key to the model API of the key's rollout.

    Other requests go to ``guarded``, which requires the server's own key. ``find`` returns ``None`` for a dead key.
    """

    def __init__(self, guarded: ASGIApp, model_api: ASGIApp, find: Callable[[str], CallGrant | None]) -> None:
        self._guarded, self._model_api, self._find = guarded, model_api, find

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] in ("http", "websocket") else {}
        given = [_KEY.fullmatch(value) for name in ("authorization", "x-api-key") if (value := headers.get(name))]
        key = next((found[1] for found in given if found), None)
        grant = self._find(key) if key is not None else None
        if key is None:
            await self._guarded(scope, receive, send)
        elif grant is None:
            await program_error(ProblemError(*DEAD_KEY))(scope, receive, send)
        elif _OPEN_TO_KEYS.fullmatch(f"{scope.get('method')} {scope['path']}") is None:
            detail = "a capability key opens /v1/responses, /v1/chat/completions, /v1/messages and /v1/models"
            await program_error(ProblemError(404, "http-404", detail))(scope, receive, send)
        else:
            try:
                receive = await _with_body(receive, MAX_BODY_BYTES)
            except ProblemError as error:
                await program_error(error)(scope, receive, send)
                return
            kept = [(name, value) for name, value in scope["headers"] if not name.startswith(_NOT_FROM_PROGRAMS)]
            await self._model_api({**scope, "headers": kept, _GRANT: grant}, receive, send)


async def _with_body(receive: Receive, limit: float = math.inf) -> Receive:
    """Read a request's body of at most ``limit`` bytes; return a ``receive`` that first yields the body's messages."""
    read: list[Message] = []
    while not read or (read[-1]["type"] == "http.request" and read[-1].get("more_body")):
        read.append(await receive())
        limit -= len(read[-1].get("body", b""))
        if limit < 0:
            detail = f"a request must have at most {MAX_BODY_BYTES} bytes"
            raise ProblemError(413, "body-too-long", detail, headers={"Connection": "close"})

    async def again() -> Message:
        return read.pop(0) if read else await receive()

    return again


class CancelOnDisconnect:
    """ASGI middleware that cancels a request when its client disconnects.

    The middleware still answers (499), because Gym's outer middlewares treat a missing answer as a bug.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self._app(scope, receive, send)
            return
        again = await _with_body(receive)
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
