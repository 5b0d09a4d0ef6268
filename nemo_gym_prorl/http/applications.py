# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of our servers' applications: embedded serving, a second port with TLS, routes without middlewares, and
health.

Gym starts its servers on plain HTTP and checks them by plain HTTP, so a TLS-only server would never count as started.
:func:`serve_tls` serves the same application at a second port with TLS.

Gym's application puts two middlewares around every request: they run the rest in another task, stream the body, and
sign a session cookie. FastAPI then resolves dependencies. :class:`DirectRoutes` answers the routes of each rollout
before both middlewares, reads their bodies, and turns errors into problem documents. The application keeps its routes
of the same paths for its OpenAPI document.

``/healthz`` answers 503 while a background loop fails, and a counter counts restarts.
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
    """A uvicorn server without signal handlers: the embedding process handles Ctrl-C."""

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
    """Serve an application; yields the base URL.

    Args:
        app: the application; its owner runs its lifespan.
        host: address to listen on; empty for all interfaces.
        port: TCP port; 0 takes a free one.
        certificate: files of the certificate and its key, for TLS.
        keep_alive_s: seconds for which an idle connection stays open.

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
    """Drop uvicorn's messages about requests that are cancelled at shutdown."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError) and "timeout graceful shutdown" not in record.getMessage()


def check_certificate(cert: Path, key: Path) -> None:
    """Check a certificate before the server starts.

    Raises:
        CallerError: the files are no certificate and its key.
    """
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key)
    except OSError as error:  # ssl.SSLError is an OSError
        said = f"{cert} and {key} must be a certificate and its key, as PEM: {error}"
        raise CallerError(said, field="tls_cert") from error


@contextlib.asynccontextmanager
async def serve_tls(app: ASGIApp, cert: Path, key: Path, port: int) -> AsyncIterator[None]:
    """Serve an application with TLS at a second port on all interfaces.

    Args:
        app: the application.
        cert: certificate chain.
        key: key of the certificate.
        port: TCP port.

    Raises:
        CallerError: the port is taken.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(served(app, "", port, certificate=(cert, key), keep_alive_s=30))
        except OSError as error:
            raise CallerError(f"cannot listen on port {port}: {error.strerror}", field="tls_port") from error
        yield


LOGGER = logging.getLogger(__name__)


class DirectRoutes:
    """ASGI application: answers POST to its routes, and passes every other request on.

    Args:
        app: application for all other requests.
        routes: handlers by path.
        around: middleware for these routes only.
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
        ours = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._routes
        await (self._direct if ours else self._app)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._routes[scope["path"]](Request(scope, receive))
        except ClientDisconnect:
            return  # the client disconnected: drop the reply
        except KNOWN_ERRORS as error:
            response = answer_to(error)
        except Exception as error:  # defects become an answer here
            LOGGER.exception("POST %s failed", scope["path"])
            response = ProblemError(500, "http-500", repr(error)).response()
        await response(scope, receive, send)


def wrap_outermost(app: FastAPI, wrap: Callable[[ASGIApp], ASGIApp]) -> None:
    """Wrap the application outside all of its middlewares, later ones included."""
    build_stack = app.build_middleware_stack
    app.build_middleware_stack = lambda: wrap(build_stack())  # type: ignore[method-assign]


def require_running(*loops: BackgroundLoops) -> None:
    """Raise while a background loop of the server or process fails.

    Raises:
        ProblemError: names each failing loop. The route is open, so only the log has the exception's message.
    """
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
    """Return the route ``/healthz`` of a server with these loops."""
    router = APIRouter(route_class=ProblemRoute)

    @router.get("/healthz", tags=["service"], responses=problem_responses(503))
    async def healthz() -> dict[str, str]:
        """Return 200 while the event loop runs and no background loop fails."""
        require_running(*loops)
        return {"status": "ok"}

    return router


class LoopMetrics(Collector):
    """Collector of restarts of background loops."""

    def __init__(self, loops: BackgroundLoops) -> None:
        self._loops = loops

    def collect(self) -> Iterable[Metric]:
        restarts = CounterMetricFamily(
            "prorl_background_restarts", "Restarts of background loops after an exception.", labels=["loop"]
        )
        for name, count in (self._loops.restarts + PROCESS_LOOPS.restarts).items():
            restarts.add_metric([name], count)
        yield restarts
