# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Bases of our Gym servers and their configurations. A server ends with Gym's process, and has Gym's two middlewares
without further tasks and queues.

Gym writes its middlewares in Starlette's decorator form, which runs the rest of the application in another task and
streams each body through a queue. Here the same is done in place.
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
    """Base of our Gym servers, before Gym's own class."""

    ray_enabled: ClassVar[bool] = False  # else each server of Gym 0.7 connects to Ray at its start

    @classmethod
    def run_webserver(cls) -> Any:
        """Start the server, and end it with the Gym process that started it, also while Gym 0.4 waits for its Ray."""
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        exit_with_starter()
        return super().run_webserver()

    def in_session(self, app: ASGIApp) -> ASGIApp:
        """Return the application behind Gym's session cookie, from which each request has a session id."""
        key = self.get_session_middleware_key()  # the cookie's name, and the key that signs it
        return SessionMiddleware(_SessionId(app), secret_key=key, session_cookie=key)

    def setup_session_middleware(self, app: FastAPI) -> None:
        app.add_middleware(self.in_session)

    def setup_exception_middleware(self, app: FastAPI) -> None:
        app.add_middleware(_AnswerDefects)


class _SessionId:
    """Middleware that gives each session an id, in a cookie of each answer, since Gym's agents take it from there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            session = scope["session"]
            session[SESSION_ID_KEY] = session.get(SESSION_ID_KEY) or str(uuid.uuid4())
        await self._app(scope, receive, send)


class _AnswerDefects:
    """Middleware that answers an exception without a handler by a problem document of status 500."""

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
    """Mixin for a server's configuration, to be listed after Gym's class; refuses unknown keys, unlike Gym's."""

    model_config = ConfigDict(extra="forbid")

    # Keys for the installed version of Gym and its registry, which no server reads.
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
