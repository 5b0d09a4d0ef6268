# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""An application served inside the current event loop, by a process that is about something else besides; also as a
second door of a server, with TLS.

Gym starts its servers on plain HTTP and asks each by plain HTTP whether it is up; one that only spoke TLS would never
count as started. So the address that Gym knows stays as it is, on loopback if nobody else is to use it, and the same
application answers at a port of its own to those who come from elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from nemo_gym_prorl.failures import CallerError


class _Server(uvicorn.Server):
    """Leaves the process's signal handlers alone: who embeds the server decides what Ctrl-C means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def served(
    app: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    certificate: tuple[Path, Path] | None = None,
    keep_alive_s: int = 5,
) -> AsyncIterator[str]:
    """Serve it; yields the base URL.

    Args:
        app: the application; its lifespan is its owner's business.
        host: address to listen on; empty for all interfaces.
        port: TCP port; 0 takes a free one.
        certificate: its file, and that of its key, for TLS.
        keep_alive_s: for how long an idle connection stays open.

    Raises:
        OSError: the port is taken.
    """
    cert, key = certificate or (None, None)
    config = uvicorn.Config(
        app,
        ssl_certfile=cert,
        ssl_keyfile=key,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=1,
    )
    listener = socket.create_server((host, port), backlog=2048)
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"{'https' if certificate else 'http'}://{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


def _is_news(record: logging.LogRecord) -> bool:
    """False for what uvicorn says of a request that waits while the server ends: it is cancelled after a second."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError) and "timeout graceful shutdown" not in record.getMessage()


def check_certificate(cert: Path, key: Path) -> None:
    """Look before a server starts at what it is to show.

    Raises:
        CallerError: the files are no certificate and its key.
    """
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key)
    except OSError as error:  # ssl.SSLError is one
        said = f"{cert} and {key} must be PEM, and belong together: {error}"
        raise CallerError(said, field="tls_cert") from error


@contextlib.asynccontextmanager
async def also_by_tls(app: ASGIApp, cert: Path, key: Path, port: int) -> AsyncIterator[None]:
    """Serve an application at a port of all interfaces, besides where it is served already.

    Args:
        app: it.
        cert: its certificate, with those between it and the authority's.
        key: of the certificate.
        port: where to listen.

    Raises:
        CallerError: the port is taken.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(served(app, "", port, certificate=(cert, key), keep_alive_s=30))
        except OSError as error:
            raise CallerError(f"port {port}: {error.strerror}", field="tls_port") from error
        yield
