# SPDX-License-Identifier: Apache-2.0
"""What an application cannot do for itself: notice that its caller has hung up, and put headers on an answer that
somebody else builds.

A request whose caller has hung up is cancelled, so that its engine stops sampling for nobody. ASGI servers tell an
application that its client is gone only when it asks for more of the request, which a handler that waits for an engine
does not do. :class:`CancelOnDisconnect` asks all the time.

Gym calls a model server's handlers in different ways from release to release, and not always with a response on which
a header could be set. :func:`put_header` names it in the request's scope, :class:`AnswerHeaders` puts it there.
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


_STATE = "nemo_gym_prorl.answer_headers"


class CancelOnDisconnect:
    """ASGI middleware that cancels the application when the client disconnects.

    Nobody reads an answer then, but middleware further out takes it for a defect if there is none.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        inbox: asyncio.Queue[Message] = asyncio.Queue()
        answered = False

        async def answer(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        handler = asyncio.ensure_future(self._app(scope, inbox.get, answer))

        async def listen() -> None:
            while True:
                message = await receive()
                inbox.put_nowait(message)
                if message["type"] == "http.disconnect":
                    handler.cancel()
                    return

        listener = asyncio.ensure_future(listen())
        try:
            await asyncio.wait([handler])
        finally:
            listener.cancel()
            if not handler.done():
                handler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await handler
        if not answered:
            await Response(status_code=499)(scope, receive, send)


class AnswerHeaders:
    """ASGI middleware that puts on an answer what its handler named with :func:`put_header`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Made here and not by the handler: a middleware in between may hand on a copy of the scope.
        named: dict[str, str] = scope.setdefault("state", {}).setdefault(_STATE, {})

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and named:
                MutableHeaders(scope=message).update(named)
            await send(message)

        await self._app(scope, receive, answer)


def put_header(request: HTTPConnection, name: str, value: str) -> None:
    """Have the answer to a request carry a header, where :class:`AnswerHeaders` is in force."""
    request.scope.setdefault("state", {}).setdefault(_STATE, {})[name] = value
