# SPDX-License-Identifier: Apache-2.0
"""HumanEval in sandboxes, as a Gym resources server.

This file is wiring: HTTP in, ``nemo_gym_prorl.tasks.code`` does the work. A failure of ours is HTTP 500 with a problem
document and the failure kind in a header, so that an agent server never takes it for an observation or a reward.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import Body, FastAPI, Request
from fastapi.responses import PlainTextResponse
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.sandbox import SandboxSpec
from nemo_gym.sandbox.config import resolve_provider_config
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from nemo_gym_prorl import open_files
from nemo_gym_prorl.access import KeyGuard, check_exposure
from nemo_gym_prorl.problems import add_problem_handlers
from nemo_gym_prorl.sandbox import started
from nemo_gym_prorl.sandbox.gym import spec as gym_spec
from nemo_gym_prorl.sandbox.images.building.default import ensure_default_image, ensure_kernel_image
from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime
from nemo_gym_prorl.server_config import ServerConfig
from nemo_gym_prorl.tasks.code.grading import GradingLimits
from nemo_gym_prorl.tasks.code.session import CodeLimits, CodeSessions
from nemo_gym_prorl.tasks.code.tools import TOOLS
from nemo_gym_prorl.tasks.code.workspace import ToolLimits


logger = logging.getLogger(__name__)

RELEASE_PATH = "/release_session"
LOCAL_PROVIDERS = frozenset({"apptainer", "singularity"})
"""Providers that run Apptainer on this machine, and so can use the image that set-up builds."""
SHUTDOWN_TIMEOUT_S = 30.0


class ProRLCodeConfig(BaseResourcesServerConfig, ServerConfig):
    """Configuration of the server; see the comments in ``configs/prorl_code.yaml``."""

    sandbox_provider: str | dict[str, Any] = "sandbox"
    image: str | None = None
    sandbox_root: str = Field(default="/sandbox", pattern=r"^/[\w./-]+$")
    max_sandbox_starts: int = Field(default=4, ge=1)
    tool_timeout_s: float = Field(default=30.0, gt=0)
    max_tool_timeout_s: float = Field(default=120.0, gt=0)
    tool_silence_s: float = Field(default=10.0, gt=0)
    max_output_bytes: int = Field(default=16_000, ge=1000, le=1_000_000)
    grading_timeout_s: float = Field(default=20.0, gt=0)
    grading_memory_mib: int = Field(default=1024, ge=64)
    session_ttl_s: float = Field(default=3600.0, gt=0)
    control_token: str | None = None

    @model_validator(mode="after")
    def _one_worker(self) -> "ProRLCodeConfig":
        if (self.num_workers or 1) > 1:
            raise ValueError("num_workers must be 1: sessions live in the memory of one process")
        return self


class CodeVerifyRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")


class CodeVerifyResponse(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")

    passed: bool
    verdict: str
    verdict_detail: str


class ProRLCodeServer(SimpleResourcesServer):
    """See the module's description."""

    config: ProRLCodeConfig
    _provider: dict[str, Any] = PrivateAttr()
    _sessions: CodeSessions = PrivateAttr()
    _image: str | None = PrivateAttr(default=None)
    _starter: started.Starter | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        config = self.config
        self._provider = resolve_provider_config(config.sandbox_provider, self.server_client.global_config_dict)
        if "singularity" in self._provider:
            gym_spec.settings(self._provider["singularity"] or {})  # refuses what every sandbox would be refused for
        if config.image is None and not LOCAL_PROVIDERS & self._provider.keys():
            raise ValueError(f"image: name one, the sandbox provider {next(iter(self._provider))!r} has no default")
        limits = CodeLimits(
            tools=ToolLimits(
                config.tool_timeout_s, config.max_tool_timeout_s, config.tool_silence_s, config.max_output_bytes
            ),
            grading=GradingLimits(config.grading_timeout_s, config.grading_memory_mib),
            max_sandbox_starts=config.max_sandbox_starts,
            session_ttl_s=config.session_ttl_s,
        )
        self._sessions = CodeSessions(self._start_sandbox, config.sandbox_root, limits)

    def setup_webserver(self) -> FastAPI:
        open_files.raise_limit()
        check_exposure(self.config.host, self.config.control_token)
        app = super().setup_webserver()
        for tool in TOOLS:
            app.post(f"/{tool}", response_class=PlainTextResponse)(self._tool_route(tool))
        app.post(RELEASE_PATH)(self.release_session)
        if not any(getattr(route, "path", None) == "/close_session" for route in app.routes):
            app.post("/close_session")(self.close_resources_session)  # Gym has the route since 0.7
        app.router.lifespan_context = self._lifespan(app.router.lifespan_context)
        add_problem_handlers(app)
        app.add_middleware(KeyGuard, key=self.config.control_token)
        return app

    async def seed_session(self, request: Request, body: dict[str, Any] = Body()) -> dict[str, str]:
        """Start a sandbox for the row. An Environment Server's envelope around the row is understood too."""
        named = body.get("resources_session_id")
        row = body.get("task_data") if named else body
        if named:
            request.session[SESSION_ID_KEY] = named
        async with _hang_up(request) as hung_up:
            await self._sessions.seed(_key(request), row if isinstance(row, dict) else {}, once=bool(named))
            if hung_up():
                await self._sessions.close(_key(request))
        return {"resources_session_id": named} if named else {"release_path": RELEASE_PATH}

    async def release_session(self, request: Request) -> dict[str, bool]:
        """Take the solution out of the agent's sandbox and destroy it; answers when it is gone."""
        await self._sessions.release(_key(request))
        return {"released": True}

    async def close_resources_session(
        self, request: Request, body: dict[str, Any] = Body(default={})
    ) -> dict[str, str]:
        """Drop everything of the session."""
        named = body.get("resources_session_id")
        await self._sessions.close(named or _key(request), once=bool(named))
        return {"resources_session_id": named} if named else {}

    async def verify(self, request: Request, body: CodeVerifyRequest) -> CodeVerifyResponse:
        """Grade the session's solution in a fresh sandbox."""
        verdict = await self._sessions.verify(_key(request))
        return CodeVerifyResponse(
            **body.model_dump(),
            reward=verdict.reward,
            passed=verdict.passed,
            verdict=verdict.reason.value,
            verdict_detail=verdict.detail,
        )

    def _tool_route(self, tool: str) -> Any:
        async def call(request: Request) -> PlainTextResponse:
            try:
                arguments = await request.json()
            except (ValueError, RecursionError):
                arguments = None
            return PlainTextResponse(await self._sessions.call(_key(request), tool, arguments))

        call.__doc__ = TOOLS[tool].__doc__
        return call

    async def _start_sandbox(self) -> started.StartedSandbox:
        image = await self._ensure_image()
        if self._starter is None:
            self._starter = started.Starter(self._provider)
        # Shell and kernel start in the working folder: one that no agent can remove.
        return await self._starter.start(SandboxSpec(image=image, workdir="/"))

    async def _ensure_image(self) -> str:
        if self._image is None:
            if LOCAL_PROVIDERS & self._provider.keys():
                require_runtime().activate()
            if self.config.image is None:
                # Kernels are for the provider that has them.
                ensure = ensure_kernel_image if "singularity" in self._provider else ensure_default_image
                self._image = str(await asyncio.to_thread(ensure, logger.info))
            else:
                self._image = self.config.image
        return self._image

    def _lifespan(self, inner: Any) -> Any:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            await self._ensure_image()
            sweeper = asyncio.create_task(self._sweep())
            async with inner(app) as state:
                yield state
            sweeper.cancel()
            with suppress(TimeoutError):
                async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                    await self._sessions.aclose()
                    if self._starter is not None:
                        await self._starter.aclose()

        return lifespan

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(60.0, self.config.session_ttl_s / 4))
            await self._sessions.sweep()


@asynccontextmanager
async def _hang_up(request: Request) -> AsyncIterator[Callable[[], bool]]:
    """Whether the caller has gone. Starlette's ``is_disconnected`` never knows it behind Gym's middleware."""
    listener = asyncio.ensure_future(request.receive())
    try:
        yield lambda: listener.done() and listener.result()["type"] == "http.disconnect"
    finally:
        listener.cancel()


def _key(request: Request) -> str:
    return str(request.session[SESSION_ID_KEY])


if __name__ == "__main__":
    ProRLCodeServer.run_webserver()
