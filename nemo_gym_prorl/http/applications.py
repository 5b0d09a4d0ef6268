# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of our servers' applications: embedded serving, a second port with TLS, routes without middlewares, health.

Gym starts its servers on plain HTTP and asks each by plain HTTP whether it is up; a server that only spoke TLS would
never count as started. So the address that Gym knows stays as it is, on loopback if it is for this machine alone, and
the same application answers at a port of its own with TLS (:func:`serve_tls`).

Gym's application puts two middlewares around every request that run the rest in a task of its own and pass its body
through a stream, and signs a session cookie; FastAPI then resolves dependencies. :class:`DirectRoutes` answers the
routes that are called for each rollout in front of all that: they read their body, and errors become problem documents
there. The application keeps its own routes of the same paths, for its OpenAPI document.

``/healthz`` answers 503 while a background loop fails, and a counter tells of restarts.
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

from nemo_gym_prorl.background import LONGEST_PAUSE_S, PROCESS_LOOPS, BackgroundLoops
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.http.problems import KNOWN_ERRORS, ProblemError, ProblemRoute, answer_to, problem_responses


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
async def serve_tls(app: ASGIApp, cert: Path, key: Path, port: int) -> AsyncIterator[None]:
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


LOGGER = logging.getLogger(__name__)


class DirectRoutes:
    """ASGI application: answers POST to its routes, and passes everything else on.

    Args:
        app: gets what is not ours.
        routes: by path, what answers.
        around: a middleware for these alone.
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
        """One request."""
        ours = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._routes
        await (self._direct if ours else self._app)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._routes[scope["path"]](Request(scope, receive))
        except ClientDisconnect:
            return  # gone before its body was here
        except KNOWN_ERRORS as error:
            response = answer_to(error)
        except Exception as error:  # the border at which a defect of ours becomes an answer
            LOGGER.exception("defect in POST %s", scope["path"])
            response = ProblemError(500, "http-500", repr(error)).response()
        await response(scope, receive, send)


def wrap_outermost(app: FastAPI, wrap: Callable[[ASGIApp], ASGIApp]) -> None:
    """Have every request go through what ``wrap`` makes of the application, before all of its middlewares: also those
    that are added later."""
    build_stack = app.build_middleware_stack
    app.build_middleware_stack = lambda: wrap(build_stack())  # type: ignore[method-assign]


def require_running(*loops: BackgroundLoops) -> None:
    """Raise while a background loop of a server, or one of the process, fails.

    Raises:
        ProblemError: names each failing loop. The route is open, so the message of the exception is in the log only.
    """
    failing = {name: error for each in (*loops, PROCESS_LOOPS) for name, error in each.failing.items()}
    if failing:
        names = ", ".join(failing)
        raise ProblemError(
            503,
            "background-loop-failing",
            f"background loops that failed and are restarted: {names}; the log has the traceback",
            errors=[{"field": name, "message": f"the last pass ended with {kind}"} for name, kind in failing.items()],
            headers={"Retry-After": str(int(LONGEST_PAUSE_S))},
        )


def health_router(*loops: BackgroundLoops) -> APIRouter:
    """Return the route ``/healthz`` of a server with these loops."""
    router = APIRouter(route_class=ProblemRoute)

    @router.get("/healthz", tags=["service"], responses=problem_responses(503))
    async def healthz() -> dict[str, str]:
        """Answers while the event loop turns and no background loop fails."""
        require_running(*loops)
        return {"status": "ok"}

    return router


class LoopMetrics(Collector):
    """Restarts of background loops, for a Prometheus registry."""

    def __init__(self, loops: BackgroundLoops) -> None:
        self._loops = loops

    def collect(self) -> Iterable[Metric]:
        restarts = CounterMetricFamily(
            "prorl_background_restarts", "Restarts of background loops after an exception.", labels=["loop"]
        )
        for name, count in (self._loops.restarts + PROCESS_LOOPS.restarts).items():
            restarts.add_metric([name], count)
        yield restarts
