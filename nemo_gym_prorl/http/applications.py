# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Building blocks of the servers' applications: embedded server, TLS port, routes without middlewares, health route.

Gym starts its servers on plain HTTP and checks them by plain HTTP, so a TLS-only server would never count as started.
:func:`serve_tls` serves the same application at a second port with TLS.

Two middlewares of Gym's application run each handler in another task, stream the body and sign a session cookie; then
FastAPI resolves dependencies. :class:`DirectRoutes` handles the requests of a rollout before both middlewares, and
turns errors into problem documents. The application also declares these routes, for its OpenAPI document.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym_prorl.async_tasks import LONGEST_PAUSE_S, PROCESS_LOOPS, BackgroundLoops
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.http.problems import KNOWN_ERRORS, ProblemError, ProblemRoute, answer_to, problem_responses


class _Server(uvicorn.Server):
    """uvicorn server without signal handlers: the embedding process handles SIGINT and SIGTERM."""

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
    """Serve an application until the block ends; yield the base URL.

    Args:
        app: ASGI application; the caller runs its lifespan.
        host: address to listen on; empty for all interfaces.
        port: TCP port; 0 selects a free port.
        certificate: PEM files of a certificate chain and of its private key; ``None`` serves plain HTTP.
        keep_alive_s: seconds for which an idle connection stays open.

    Raises:
        OSError: the server cannot listen, for example because the port is taken.
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
    logging.getLogger("uvicorn.error").addFilter(_is_relevant)
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"{'https' if certificate else 'http'}://{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


def _is_relevant(record: logging.LogRecord) -> bool:
    """Logging filter that drops uvicorn's messages about requests that are cancelled at shutdown."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError) and "timeout graceful shutdown" not in record.getMessage()


def check_certificate(cert: Path, key: Path) -> None:
    """Check a certificate before the server starts.

    Raises:
        CallerError: a file cannot be read, or the files are not a certificate chain and its private key as PEM.
    """
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key)
    except OSError as error:  # ssl.SSLError is an OSError
        reason = f"{cert} and {key} must be a certificate and its key, as PEM: {error}"
        raise CallerError(reason, field="tls_cert") from error


@contextlib.asynccontextmanager
async def serve_tls(app: ASGIApp, cert: Path, key: Path, port: int) -> AsyncIterator[None]:
    """Serve an application with TLS at a second port on all interfaces, until the block ends.

    Args:
        app: ASGI application; the caller runs its lifespan.
        cert: PEM file of the certificate chain.
        key: PEM file of the certificate's private key.
        port: TCP port.

    Raises:
        CallerError: the server cannot listen at the port.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(served(app, "", port, certificate=(cert, key), keep_alive_s=30))
        except OSError as error:
            raise CallerError(f"cannot listen on port {port}: {error.strerror}", field="tls_port") from error
        yield


LOGGER = logging.getLogger(__name__)


class DirectRoutes:
    """ASGI application that handles POST requests to some paths, and passes every other request to ``app``.

    Args:
        app: application for all other requests.
        routes: handlers by exact path.
        around: wraps the handlers in a middleware; by default none.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Mapping[str, Callable[[Request], Awaitable[Response]]],
        around: Callable[[ASGIApp], ASGIApp] = lambda answer: answer,
    ) -> None:
        self._app = app
        self._routes = routes
        self._direct = around(self._answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_direct = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._routes
        await (self._direct if is_direct else self._app)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._routes[scope["path"]](Request(scope, receive))
        except ClientDisconnect:
            return
        except KNOWN_ERRORS as error:
            response = answer_to(error)
        except Exception as error:  # Gym's handler of unexpected errors is one of the bypassed middlewares
            LOGGER.exception("POST %s failed", scope["path"])
            response = ProblemError(500, "http-500", repr(error)).response()
        await response(scope, receive, send)


def wrap_outermost(app: FastAPI, wrap: Callable[[ASGIApp], ASGIApp]) -> None:
    """Wrap an application outside all of its middlewares, including middlewares that are added later."""
    build_stack = app.build_middleware_stack
    app.build_middleware_stack = lambda: wrap(build_stack())  # type: ignore[method-assign]


def require_running(*loops: BackgroundLoops) -> None:
    """Raise :class:`.ProblemError` (503) while one of ``loops`` or :data:`.PROCESS_LOOPS` is failing. The problem
    names each failing loop and its exception's type. The health route needs no key, so only the log has the
    exception's message."""
    failing = {name: error for each in (*loops, PROCESS_LOOPS) for name, error in each.failing.items()}
    if failing:
        names = ", ".join(failing)
        raise ProblemError(
            503,
            "background-loop-failing",
            f"failing background loops, to be restarted: {names}; the log has the traceback",
            errors=[{"field": name, "message": f"the last pass ended with {kind}"} for name, kind in failing.items()],
            headers={"Retry-After": str(int(LONGEST_PAUSE_S))},
        )


def health_router(*loops: BackgroundLoops) -> APIRouter:
    """Return a router with the route ``/healthz``, which checks ``loops`` and :data:`.PROCESS_LOOPS`."""
    router = APIRouter(route_class=ProblemRoute)

    @router.get("/healthz", tags=["service"], responses=problem_responses(503))
    async def healthz() -> dict[str, str]:
        """Return 200 while no background loop is failing, else 503."""
        require_running(*loops)
        return {"status": "ok"}

    return router


class LoopMetrics(Collector):
    """Prometheus counter of restarts of background loops, by name of the loop."""

    def __init__(self, loops: BackgroundLoops) -> None:
        self._loops = loops

    def collect(self) -> Iterable[Metric]:
        restarts = CounterMetricFamily(
            "prorl_background_restarts", "Restarts of background loops after an exception.", labels=["loop"]
        )
        for name, count in (self._loops.restarts + PROCESS_LOOPS.restarts).items():
            restarts.add_metric([name], count)
        yield restarts
