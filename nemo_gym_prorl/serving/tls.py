# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A second door of a server, with TLS.

Gym starts its servers on plain HTTP and asks each by plain HTTP whether it is up; one that only spoke TLS would never
count as started. So the address that Gym knows stays as it is, on loopback if nobody else is to use it, and the same
application answers at a port of its own to those who come from elsewhere.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from nemo_gym_prorl.failures import CallerError


_GRACE_S = 1


class _Beside(uvicorn.Server):
    """Signals are the first server's, which ends this one."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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


@asynccontextmanager
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
    try:
        listener = socket.create_server(("", port), backlog=2048)
    except OSError as error:
        raise CallerError(f"port {port}: {error.strerror}", field="tls_port") from error
    server = _Beside(
        uvicorn.Config(
            app,
            ssl_certfile=cert,
            ssl_keyfile=key,
            lifespan="off",
            log_level="warning",
            timeout_keep_alive=30,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving
