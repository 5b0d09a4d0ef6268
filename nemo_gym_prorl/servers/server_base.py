# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Base classes of our Gym servers and their configurations. A server exits with the Gym process that started it.

Gym's two middlewares (session id and unexpected errors) use Starlette's decorator form, which runs the inner
application in another task and streams each body through a queue. Here plain ASGI middlewares replace both.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable
from typing import Any, ClassVar

from fastapi import FastAPI
from nemo_gym.config_types import BaseRunServerTypeConfig
from nemo_gym.server_utils import SESSION_ID_KEY, SimpleServer
from pydantic import BaseModel, ConfigDict, model_validator
from starlette.middleware.sessions import SessionMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym_prorl.http.problems import ProblemError
from nemo_gym_prorl.http.server_process import exit_with_starter


LOGGER = logging.getLogger(__name__)


class ServerBase(SimpleServer):
    """Base class of our Gym servers, to be listed before Gym's class."""

    ray_enabled: ClassVar[bool] = False  # otherwise each server connects to Ray at its start, from Gym 0.7 on

    @classmethod
    def run_webserver(cls) -> Any:
        """Run the server. The server exits with the Gym process that started it, even while Gym 0.4 waits for Ray."""
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        exit_with_starter()
        return super().run_webserver()

    def in_session(self, app: ASGIApp) -> ASGIApp:
        """Wrap an application in Gym's session cookie, from which each request gets its session id."""
        key = self.get_session_middleware_key()  # Gym uses one text as the cookie's name and its signing key
        return SessionMiddleware(_SessionId(app), secret_key=key, session_cookie=key)

    def setup_session_middleware(self, app: FastAPI) -> None:
        app.add_middleware(self.in_session)

    def setup_exception_middleware(self, app: FastAPI) -> None:
        app.add_middleware(_UnexpectedErrors)


class _SessionId:
    """Middleware that puts a session id into the session cookie, which Gym's agents read from each response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            session = scope["session"]
            session[SESSION_ID_KEY] = session.get(SESSION_ID_KEY) or str(uuid.uuid4())
        await self._app(scope, receive, send)


class _UnexpectedErrors:
    """Middleware that responds to an exception without a handler with a problem document of status 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, answer)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            LOGGER.exception("%s %s failed", scope["method"], scope["path"])
            await ProblemError(500, "http-500", repr(error)).response()(scope, receive, send)


class ServerConfig(BaseModel):
    """Mixin for a server's configuration, listed after Gym's class. Refuses unknown keys, except ``ignored_keys``."""

    model_config = ConfigDict(extra="forbid")

    # Keys that Gym's command line and registry read, but no server; they differ between versions of Gym.
    ignored_keys: ClassVar[Iterable[str]] = frozenset(
        {*BaseRunServerTypeConfig.model_fields, "description", "license", "value", "verified", "verified_url"}
    )

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        ignored = {*cls.ignored_keys} - cls.model_fields.keys()
        return {key: value for key, value in given.items() if key not in ignored}
