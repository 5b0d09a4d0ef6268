# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Routes that are called for each rollout, in front of an application's middlewares.

Gym's application puts two middlewares around every request that run the rest in a task of its own and pass its body
through a stream, and signs a session cookie; FastAPI then resolves dependencies that such a route has not. What these
routes need of it, they do themselves: they read their body, and errors become problem documents here.

The application keeps its own routes of the same paths, for its OpenAPI document.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym_prorl.serving.problems import KNOWN_ERRORS, ProblemError, answer_to


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


def put_in_front(app: FastAPI, wrap: Callable[[ASGIApp], ASGIApp]) -> None:
    """Have every request go through what ``wrap`` makes of the application, before all of its middlewares: also those
    that are added later."""
    build_stack = app.build_middleware_stack
    app.build_middleware_stack = lambda: wrap(build_stack())  # type: ignore[method-assign]
