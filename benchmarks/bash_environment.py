# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym resources server with a ``bash`` tool over Gym's ``apptainer`` provider: the peer's environment of ``stack``.

A session has a container from its seed to its verification. Containers are stopped in the background, since the
provider takes 10 s to stop one.
"""

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.sandbox.providers.apptainer import ApptainerProvider
from nemo_gym.sandbox.providers.base import SandboxSpec
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import BaseModel, PrivateAttr


class BashEnvironmentConfig(BaseResourcesServerConfig):
    """Settings: image of the containers, and number of commands that the provider runs concurrently."""

    image: str
    concurrency: int


class Command(BaseModel):
    """Arguments of the tool ``bash``."""

    command: str


class BashEnvironment(SimpleResourcesServer):
    """Resources server with one container per session."""

    config: BashEnvironmentConfig
    _provider: ApptainerProvider = PrivateAttr()
    _handles: dict[str, Any] = PrivateAttr(default_factory=dict)
    _stops: set[asyncio.Task[None]] = PrivateAttr(default_factory=set)

    def setup_webserver(self) -> FastAPI:
        self._provider = ApptainerProvider(
            create={"extra_start_args": ["--writable-tmpfs"]}, exec={"concurrency": self.config.concurrency}
        )
        app = super().setup_webserver()
        app.post("/bash", response_class=PlainTextResponse)(self.bash)
        return app

    async def seed_session(self, request: Request, body: BaseSeedSessionRequest) -> BaseSeedSessionResponse:
        handle = await self._provider.create(SandboxSpec(image=self.config.image))
        self._handles[request.session[SESSION_ID_KEY]] = handle
        return BaseSeedSessionResponse()

    async def bash(self, request: Request, body: Command) -> str:
        done = await self._provider.exec(self._handles[request.session[SESSION_ID_KEY]], body.command)
        return f"{done.stdout}{done.stderr or ''}[exit code: {done.return_code}]"

    async def verify(self, request: Request, body: BaseVerifyRequest) -> BaseVerifyResponse:
        """Stop the session's container in the background; return reward 1 for every rollout."""
        stop = asyncio.create_task(self._provider.close(self._handles.pop(request.session[SESSION_ID_KEY])))
        self._stops.add(stop)
        stop.add_done_callback(self._stops.discard)
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)


if __name__ == "__main__":
    BashEnvironment.run_webserver()
