# SPDX-License-Identifier: Apache-2.0
"""A request whose caller has hung up is cancelled, so that its engine stops sampling for nobody.

ASGI servers tell an application that its client is gone only when it asks for more of the request, which a handler
that waits for an engine does not do. This middleware asks all the time.
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CancelOnDisconnect:
    """ASGI middleware that cancels the application when the client disconnects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        inbox: asyncio.Queue[Message] = asyncio.Queue()
        handler = asyncio.ensure_future(self._app(scope, inbox.get, send))

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
