# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""An application on a real socket of the loopback interface, for as long as a test needs it, and waits of tests."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp


GRACE_S = 0.2


@asynccontextmanager
async def serve(app: ASGIApp, port: int = 0, grace_s: float = GRACE_S) -> AsyncIterator[str]:
    """Yield the base URL.

    Uvicorn's own ``serve`` looks several times at its end, a tenth of a second apart, whether nothing is left: with
    three servers before each other that takes longer than what most tests look at.

    Args:
        app: to be served.
        port: of the loopback interface; by default a free one.
        grace_s: what requests may still take at the end.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup([listener])
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for accepting in server.servers:
            accepting.close()
        for connection in [*server.server_state.connections]:
            connection.shutdown()
        if working := {*server.server_state.tasks}:
            _, late = await asyncio.wait(working, timeout=grace_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await server.lifespan.shutdown()
        listener.close()


async def until(condition: Callable[[], Any]) -> None:
    """Wait for it; a minute is for ever."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
