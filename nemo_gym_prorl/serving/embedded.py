# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""An application served inside the current event loop, by a process that is about something else besides."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp


class _Server(uvicorn.Server):
    """Leaves the process's signal handlers alone: who embeds the server decides what Ctrl-C means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def served(app: ASGIApp, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve it; yields the base URL.

    Args:
        app: the application; its lifespan is its owner's business.
        host: address to listen on.
        port: TCP port; 0 takes a free one.

    Raises:
        OSError: the port is taken.
    """
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    listener = socket.create_server((host, port), backlog=2048)
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()
