# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A second door of a server, with TLS.

Gym starts its servers on plain HTTP and asks each by plain HTTP whether it is up; one that only spoke TLS would never
count as started. So the address that Gym knows stays as it is, on loopback if nobody else is to use it, and the same
application answers at a port of its own to those who come from elsewhere.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from starlette.types import ASGIApp

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.serving.embedded import served


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
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(served(app, "", port, certificate=(cert, key), keep_alive_s=30))
        except OSError as error:
            raise CallerError(f"port {port}: {error.strerror}", field="tls_port") from error
        yield
