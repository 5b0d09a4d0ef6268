# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Any :class:`~nemo_gym_prorl.tasks.task.Task` as a Gym resources server.

This is wiring: HTTP in, :class:`~nemo_gym_prorl.tasks.sessions.Sessions` does the work. An environment's server adds
its own settings and says what its task is:

    class MyConfig(TaskServerConfig):
        my_setting: int = 3

    class MyServer(TaskServer):
        config: MyConfig

        def make_task(self) -> MyTask:
            return MyTask(self.config.my_setting)

A failure of ours is HTTP 500 with a problem document and the failure kind in a header, so that an agent server never
takes it for an observation or a reward; a row that is wrong is 422 with its field, and one on which nobody could be
graded is 422 with the kind in that header.
"""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, Self

from fastapi import Body, FastAPI, Request
from fastapi.responses import PlainTextResponse
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.sandbox.config import resolve_provider_config
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from nemo_gym_prorl.agent.gym_http import LEASE_HEADER, RENEW_S
from nemo_gym_prorl.background import BackgroundLoops
from nemo_gym_prorl.failures import CallerError, InfrastructureError, suggest
from nemo_gym_prorl.http.access import KeyGuard, check_exposure
from nemo_gym_prorl.http.applications import health_router
from nemo_gym_prorl.http.problems import add_problem_handlers
from nemo_gym_prorl.http.process import end_with_starter, raise_open_file_limit
from nemo_gym_prorl.rollout.checkpoints import CHECKPOINT_FOLDER, ORPHAN_S
from nemo_gym_prorl.sandbox.factory import StartedSandbox
from nemo_gym_prorl.sandbox.images.builder import KERNEL
from nemo_gym_prorl.sandbox.snapshots import is_named
from nemo_gym_prorl.servers.server_config import ServerConfig
from nemo_gym_prorl.servers.task_sandboxes import OURS, TaskSandboxes
from nemo_gym_prorl.tasks.sessions import SessionLimits, Sessions
from nemo_gym_prorl.tasks.task import TOOL_NUMBERS, TOOL_USE, HasEnd, SandboxNeeds, Task
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits


RELEASE_PATH = "/release_session"
CHECKPOINT_PATH = "/checkpoint_session"
CLOSE_PATH = "/close_session"
LEASE_PATH = "/renew_leases"
SHUTDOWN_TIMEOUT_S = 30.0
SNAPSHOT_SWEEP_S = 60.0


class TaskServerConfig(BaseResourcesServerConfig, ServerConfig):
    """Settings of every environment; ``resources_servers/prorl_code/configs/prorl_code.yaml`` has a comment on each.

    ``sandbox_provider: null`` is for environments none of whose rows needs a sandbox.
    """

    sandbox_provider: str | dict[str, Any] | None = "sandbox"
    image: str | None = None
    sandbox_root: str = Field(default="/sandbox", pattern=r"^/[\w./-]+$")
    max_sandbox_starts: int = Field(default=4, ge=1)
    tool_timeout_s: float = Field(default=30.0, gt=0)
    max_tool_timeout_s: float = Field(default=120.0, gt=0)
    tool_silence_s: float = Field(default=10.0, gt=0)
    max_output_bytes: int = Field(default=16_000, ge=1000, le=1_000_000)
    session_ttl_s: float = Field(default=3600.0, gt=0)
    control_token: str | None = None

    @property
    def tool_limits(self) -> ToolLimits:
        """Bounds of one call of a workbench's tool."""
        return ToolLimits(self.tool_timeout_s, self.max_tool_timeout_s, self.tool_silence_s, self.max_output_bytes)

    @model_validator(mode="after")
    def _one_worker(self) -> Self:
        if (self.num_workers or 1) > 1:
            raise ValueError("num_workers must be 1: sessions live in the memory of one process")
        return self


class SessionCheckpoint(BaseModel):
    """What ``/checkpoint_session`` answered."""

    model_config = ConfigDict(extra="forbid")

    state: dict[str, Any]
    lost: list[str]
    snapshot: str | None
    size: int


class ResumeRequest(BaseModel):
    """Body of ``/checkpoint_session/resume``."""

    row: dict[str, Any]
    checkpoint: SessionCheckpoint


class SnapshotsRequest(BaseModel):
    """Body of ``/checkpoint_session/forget`` and of ``/checkpoint_session/renew``."""

    snapshots: list[str]


class TaskVerifyRequest(BaseVerifyRequest):
    """A row with what the policy answered."""

    model_config = ConfigDict(extra="allow")


class TaskVerifyResponse(BaseVerifyResponse):
    """That row, and what it earned and why; a task may add fields of its own."""

    model_config = ConfigDict(extra="allow")

    passed: bool
    verdict: str
    verdict_detail: str


class TaskServer(SimpleResourcesServer):
    """See the module's description."""

    config: TaskServerConfig
    rows_name_images: ClassVar[bool] = False
    """Every row names an image of its own, so the server needs no default image."""
    own_image: ClassVar[str] = KERNEL
    """Which of :data:`.default.SHIPPED` rows have that name none; built when the server starts."""

    _task: Task[Any, Any] = PrivateAttr()
    _sandboxes: TaskSandboxes | None = PrivateAttr(default=None)
    _sessions: Sessions[Any, Any] = PrivateAttr()
    _loops: BackgroundLoops = PrivateAttr(default_factory=BackgroundLoops)

    @abstractmethod
    def make_task(self) -> Task[Any, Any]:
        """The environment's task, by the settings in ``self.config``. Called once."""

    def model_post_init(self, context: Any) -> None:
        """Refuse what no session could be had with, before any rollout."""
        config = self.config
        if config.sandbox_provider is not None:
            everything = self.server_client.global_config_dict
            provider = resolve_provider_config(config.sandbox_provider, everything)
            if (folder := everything.get(CHECKPOINT_FOLDER)) is not None and OURS in provider:
                provider = {OURS: {**(provider[OURS] or {}), "snapshots": str(folder)}}
            self._sandboxes = TaskSandboxes(
                provider, config.image, rows_name_images=self.rows_name_images, own_image=self.own_image
            )
        self._task = self.make_task()
        limits = SessionLimits(max_sandbox_starts=config.max_sandbox_starts, session_ttl_s=config.session_ttl_s)
        fetch_image = self._sandboxes.fetch_image if self._sandboxes is not None else None
        self._sessions = Sessions(self._task, self._start_sandbox, limits, fetch_image)

    @classmethod
    def run_webserver(cls) -> Any:
        """Gym's start of the server, which ends with that Gym from now on, also while it waits for Gym's Ray."""
        end_with_starter()
        return super().run_webserver()

    def setup_webserver(self) -> FastAPI:
        """Gym's routes, ours, and one for each tool."""
        raise_open_file_limit()
        check_exposure(self.config.host, self.config.control_token)
        app: FastAPI = super().setup_webserver()
        for schema in self._task.tools.schemas:
            name = schema["name"]
            app.post(f"/{name}", response_class=PlainTextResponse)(self._tool_route(name, schema["description"]))
        app.post(RELEASE_PATH)(self.release_session)
        app.post(LEASE_PATH)(self.renew_leases)
        if self._resumes:
            app.post(CHECKPOINT_PATH)(self.checkpoint_session)
            app.post(f"{CHECKPOINT_PATH}/resume")(self.resume_session)
            app.post(f"{CHECKPOINT_PATH}/forget")(self.forget_checkpoints)
            app.post(f"{CHECKPOINT_PATH}/renew")(self.renew_checkpoints)
        if not any(getattr(route, "path", None) == CLOSE_PATH for route in app.routes):
            app.post(CLOSE_PATH)(self.close_resources_session)  # Gym has the route since 0.7
        app.router.lifespan_context = self._lifespan(app.router.lifespan_context)
        app.include_router(health_router(self._loops))
        add_problem_handlers(app)
        app.add_middleware(KeyGuard, key=self.config.control_token)
        return app

    async def seed_session(self, request: Request, body: dict[str, Any] = Body()) -> dict[str, str]:
        """Begin a session for the row. An Environment Server's envelope around the row is understood too."""
        named = body.get("resources_session_id")
        row = body.get("task_data") if named else body
        if named:
            request.session[SESSION_ID_KEY] = named
        lease = None if named else request.headers.get(LEASE_HEADER)
        row = row if isinstance(row, dict) else {}
        self._check_tools(row)
        await _while_connected(request, self._sessions.seed(_key(request), row, once=bool(named), lease=lease))
        return {"resources_session_id": named} if named else self._paths(lease)

    async def checkpoint_session(self, request: Request) -> dict[str, Any]:
        """Keep the session as it is, between two calls: what ``/resume`` is told."""
        return await self._sessions.checkpoint(_key(request), self._kept_as)

    async def resume_session(self, request: Request, body: ResumeRequest) -> dict[str, str]:
        """Begin a session for a row that goes on from the checkpoint of another one."""
        self._check_tools(body.row)
        lease, kept = request.headers.get(LEASE_HEADER), body.checkpoint.model_dump()
        await _while_connected(request, self._sessions.seed(_key(request), body.row, checkpoint=kept, lease=lease))
        return self._paths(lease)

    async def renew_leases(self, leases: set[str] = Body(embed=True)) -> dict[str, str]:
        """Keep the sessions with these leases: rollouts work in them still."""
        self._sessions.renew(leases)
        return {}

    async def forget_checkpoints(self, body: SnapshotsRequest) -> dict[str, int]:
        """Erase what was kept for these."""
        for name in body.snapshots:
            if self._sandboxes is not None and is_named(name, self._kept_as):
                await self._sandboxes.delete_snapshot(name)
        return {"forgotten": len(body.snapshots)}

    async def renew_checkpoints(self, body: SnapshotsRequest) -> dict[str, int]:
        """Go on keeping what was kept for these: rollouts have it still."""
        for name in body.snapshots:
            if self._sandboxes is not None and is_named(name, self._kept_as):
                await self._sandboxes.renew_snapshot(name)
        return {"renewed": len(body.snapshots)}

    def _check_tools(self, row: Mapping[str, Any]) -> None:
        """Refuse a row that offers the policy a tool which this environment does not have.

        Raises:
            CallerError: names the tool, and those that there are.
        """
        params = row.get("responses_create_params")
        offered = params.get("tools") if isinstance(params, dict) else None
        known = [str(schema["name"]) for schema in self._task.tools.schemas]
        for place, tool in enumerate(offered if isinstance(offered, list) else ()):
            if isinstance(tool, dict) and isinstance(name := tool.get("name"), str) and name not in known:
                field = f"responses_create_params.tools.{place}.name"
                raise CallerError(f"this environment has no tool {name}{suggest(name, known)}", field=field)

    def _paths(self, lease: str | None) -> dict[str, str]:
        """What a session's caller may ask for beyond Gym's routes."""
        paths = {"release_path": RELEASE_PATH} | ({"checkpoint_path": CHECKPOINT_PATH} if self._resumes else {})
        return paths | ({"lease_path": LEASE_PATH} if lease else {})

    @property
    def _resumes(self) -> bool:
        ours = self._sandboxes is None or self._sandboxes.keeps_files
        return ours and self._sessions.resumes

    @property
    def _kept_as(self) -> str:
        """The beginning of the names of what is kept: none but this server's own are erased."""
        return re.sub(r"[^A-Za-z0-9_.-]", "-", f"checkpoint-{self.config.name}")[:80]

    async def release_session(self, request: Request) -> dict[str, bool]:
        """Take out what is to be graded and destroy the agent's sandbox; answers when it is gone."""
        await self._sessions.release(_key(request))
        return {"released": True}

    async def close_resources_session(
        self, request: Request, body: dict[str, Any] = Body(default={})
    ) -> dict[str, str]:
        """Drop everything of the session."""
        named = body.get("resources_session_id")
        await self._sessions.close(named or _key(request), once=bool(named))
        return {"resources_session_id": named} if named else {}

    async def verify(self, request: Request, body: TaskVerifyRequest) -> TaskVerifyResponse:
        """Grade the session, in fresh sandboxes if that takes any."""
        row = body.model_dump()
        grade = await self._sessions.verify(_key(request), row["response"])
        why = {"passed": grade.passed, "verdict": grade.verdict, "verdict_detail": grade.detail}
        used = self._sessions.tool_use(_key(request))
        why |= {TOOL_USE: used} | {
            f"tool_{number}": sum(counts.get(number, 0) for counts in used.values()) for number in TOOL_NUMBERS
        }
        return TaskVerifyResponse(**row | dict(grade.fields) | why | {"reward": grade.reward})

    def _tool_route(self, tool: str, description: str) -> Any:
        async def call(request: Request) -> PlainTextResponse:
            try:
                arguments = await request.json()
            except (ValueError, RecursionError):
                arguments = None
            return PlainTextResponse(await self._sessions.call(_key(request), tool, arguments))

        call.__doc__ = description
        return call

    async def _start_sandbox(self, needs: SandboxNeeds, snapshot: str | None = None) -> StartedSandbox:
        if self._sandboxes is None:
            raise InfrastructureError("there is none, and the row needs a sandbox", field="sandbox_provider")
        return await self._sandboxes.start(needs, snapshot)

    def _lifespan(self, inner: Any) -> Any:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            if self._sandboxes is not None:
                await self._sandboxes.get_ready()
                self._loops.start("snapshot-sweeper", self._sweep_snapshots, delay_s=SNAPSHOT_SWEEP_S)
            self._loops.start("session-sweeper", self._sweep, delay_s=RENEW_S)
            async with inner(app) as state:
                yield state
            await self._loops.aclose()
            with suppress(TimeoutError):
                async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                    await self._sessions.aclose()
                    if isinstance(self._task, HasEnd):
                        await self._task.aclose()
                    if self._sandboxes is not None:
                        await self._sandboxes.aclose()

        return lifespan

    async def _sweep(self) -> float:
        self._sessions.sweep()
        return RENEW_S

    async def _sweep_snapshots(self) -> float:
        assert self._sandboxes is not None
        await self._sandboxes.delete_old_snapshots(self._kept_as, ORPHAN_S)
        return SNAPSHOT_SWEEP_S


async def _while_connected(request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Do some work, unless the caller hangs up. Behind Gym's middleware ``is_disconnected`` never knows that."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        leaving.cancel()


def _key(request: Request) -> str:
    return str(request.session[SESSION_ID_KEY])
