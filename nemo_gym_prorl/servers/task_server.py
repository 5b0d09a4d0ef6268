# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Serve any :class:`~nemo_gym_prorl.tasks.task.Task` as a Gym resources server.

This module connects HTTP routes to :class:`~nemo_gym_prorl.tasks.sessions.Sessions`. An environment's server defines
its settings and its task (``cli/new_environment/app.py`` is an example).

An infrastructure failure is HTTP 500 with a problem document and the failure kind in a header, so an agent server
never treats the failure as an observation or reward. An invalid row is 422 with the wrong field. A row that cannot be
graded for any policy is 422 with the failure kind in that header.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, Self
from urllib.parse import unquote

from fastapi import Body, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.sandbox.config import resolve_provider_config
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter, ValidationError, model_validator
from pydantic_core import to_json
from starlette.requests import ClientDisconnect

from nemo_gym_prorl.agent.gym_http import HARNESS_HEADER, LEASE_HEADER, RENEW_S
from nemo_gym_prorl.async_tasks import BackgroundLoops
from nemo_gym_prorl.failures import AgentError, CallerError, suggest
from nemo_gym_prorl.harness.bundles import find_bundles
from nemo_gym_prorl.harness.specification import BUNDLE_FOLDER, Harness, Launch, Libc, load_harness
from nemo_gym_prorl.http.applications import DirectRoutes, health_router, wrap_outermost
from nemo_gym_prorl.http.key_guard import KeyGuard, check_exposure
from nemo_gym_prorl.http.problems import add_problem_handlers, invalid_body
from nemo_gym_prorl.http.server_process import raise_open_file_limit, tune_garbage_collection
from nemo_gym_prorl.rollout.storage.checkpoints import CHECKPOINT_FOLDER, ORPHAN_S
from nemo_gym_prorl.sandbox.images.builder import KERNEL
from nemo_gym_prorl.sandbox.snapshots import is_named
from nemo_gym_prorl.servers.server_base import ServerBase, ServerConfig
from nemo_gym_prorl.servers.task_sandboxes import OWN_PROVIDER, TaskSandboxes, run_program
from nemo_gym_prorl.tasks.sessions import Sessions
from nemo_gym_prorl.tasks.task import EGRESS, TOOL_NUMBERS, TOOL_USE, AsyncCloseable, Task
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits


RELEASE_PATH = "/release_session"
CHECKPOINT_PATH = "/checkpoint_session"
PROGRAM_PATH = "/run_program"
CLOSE_PATH = "/close_session"
LEASE_PATH = "/renew_leases"
SHUTDOWN_TIMEOUT_S = 30.0  # to end all sessions; afterwards the process exits with sessions open
SNAPSHOT_SWEEP_S = 60.0  # interval of renewing snapshots; a small fraction of ORPHAN_S


class TaskServerConfig(BaseResourcesServerConfig, ServerConfig):
    """Settings of every environment; ``resources_servers/prorl_code/configs/prorl_code.yaml`` explains each.
    ``sandbox_provider: null`` is for environments whose rows need no sandbox."""

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
        """Limits of a workbench tool call."""
        return ToolLimits(self.tool_timeout_s, self.max_tool_timeout_s, self.tool_silence_s, self.max_output_bytes)

    @model_validator(mode="after")
    def _one_worker(self) -> Self:
        if (self.num_workers or 1) > 1:
            raise ValueError("num_workers must be 1: sessions live in the memory of one process")
        return self


class SessionCheckpoint(BaseModel):
    """Reply of ``/checkpoint_session``; see :meth:`.Sessions.checkpoint`."""

    model_config = ConfigDict(extra="forbid")

    state: dict[str, Any]
    lost: list[str]
    snapshot: str | None
    size: int


class ResumeRequest(BaseModel):
    """Body of ``/checkpoint_session/resume``."""

    row: dict[str, Any]
    checkpoint: SessionCheckpoint


class ProgramRequest(BaseModel):
    """Body of ``/run_program``: a harness and its task, the policy's URL and key, and a time limit."""

    model_config = ConfigDict(extra="forbid")

    harness: Harness
    prompt: str
    model: str
    context: int
    url: str
    key: str
    timeout_s: float = Field(gt=0)

    def launch(self, *, origin: str, home: str, libc: Libc) -> Launch:
        find_bundles(self.harness, libc=libc)
        task = {"prompt": self.prompt, "model": self.model}
        return self.harness.launch(**task, context=self.context, origin=origin, home=home, libc=libc)


class SnapshotsRequest(BaseModel):
    """Body of ``/checkpoint_session/forget`` and of ``/checkpoint_session/renew``."""

    snapshots: list[str]


class TaskVerifyRequest(BaseVerifyRequest):
    """A row with the policy's response."""

    model_config = ConfigDict(extra="allow")


class TaskVerifyResponse(BaseVerifyResponse):
    """The row with its reward and verdict (see :class:`.Grade`); a task may add fields."""

    model_config = ConfigDict(extra="allow")

    passed: bool
    verdict: str
    verdict_detail: str


logger = logging.getLogger(__name__)

BLOCKED_S = 5.0
"""Shortest blocking of the event loop that is logged, in seconds: the interval at which clients renew leases."""


class TaskServer(ServerBase, SimpleResourcesServer):
    """Base class of the resources servers; a subclass defines :meth:`make_task`."""

    config: TaskServerConfig
    rows_name_images: ClassVar[bool] = False
    """Whether all rows name an image, so that the server builds no default image."""
    own_image: ClassVar[str] = KERNEL
    """Default image, one of :data:`.BUILTIN_IMAGES`; built at the server's start if required and missing."""

    _task: Task[Any, Any] = PrivateAttr()
    _sandboxes: TaskSandboxes | None = PrivateAttr(default=None)
    _sessions: Sessions[Any, Any] = PrivateAttr()
    _loops: BackgroundLoops = PrivateAttr(default_factory=BackgroundLoops)

    @abstractmethod
    def make_task(self) -> Task[Any, Any]:
        """Create the environment's task from ``self.config``. Called once."""

    def model_post_init(self, context: Any) -> None:
        """Create the task, its sandboxes and its sessions, so an invalid configuration raises before any rollout."""
        config = self.config
        if config.sandbox_provider is not None:
            everything = self.server_client.global_config_dict
            provider = resolve_provider_config(config.sandbox_provider, everything)
            if (folder := everything.get(CHECKPOINT_FOLDER)) is not None and OWN_PROVIDER in provider:
                provider = {OWN_PROVIDER: {**(provider[OWN_PROVIDER] or {}), "snapshots": str(folder)}}
            self._sandboxes = TaskSandboxes(
                provider, config.image, rows_name_images=self.rows_name_images, own_image=self.own_image
            )
        self._task = self.make_task()
        self._sessions = Sessions(
            self._task, self._sandboxes, max_starts=config.max_sandbox_starts, ttl_s=config.session_ttl_s
        )

    def setup_webserver(self) -> FastAPI:
        """Return the application with Gym's routes, the session routes and one route per tool."""
        raise_open_file_limit()
        check_exposure(self.config.host, self.config.control_token)
        app: FastAPI = super().setup_webserver()
        tools = {f"/{schema['name']}": self._tool_route(schema) for schema in self._schemas}
        for path, route in tools.items():
            app.post(path, response_class=PlainTextResponse)(route)
        app.post(RELEASE_PATH)(self.release_session)
        app.post(LEASE_PATH)(self.renew_leases)
        if self._sessions.resumes:
            app.post(CHECKPOINT_PATH)(self.checkpoint_session)
            app.post(f"{CHECKPOINT_PATH}/resume")(self.resume_session)
            app.post(f"{CHECKPOINT_PATH}/forget")(self.forget_checkpoints)
            app.post(f"{CHECKPOINT_PATH}/renew")(self.renew_checkpoints)
        app.post(PROGRAM_PATH)(self.run_program)
        if not any(getattr(route, "path", None) == CLOSE_PATH for route in app.routes):
            app.post(CLOSE_PATH)(self.close_resources_session)  # Gym has the route since 0.7
        app.router.lifespan_context = self._lifespan(app.router.lifespan_context)
        app.include_router(health_router(self._loops))
        add_problem_handlers(app)
        direct = {path: _direct_route(call) for path, call in tools.items()} | {
            "/seed_session": _direct_route(self.seed_session, TypeAdapter(dict[str, Any])),
            RELEASE_PATH: _direct_route(self.release_session),
            PROGRAM_PATH: _direct_route(self.run_program, TypeAdapter(ProgramRequest)),
            "/verify": _direct_route(self.verify, TypeAdapter(TaskVerifyRequest)),
        }
        key = self.config.control_token
        wrap_outermost(app, lambda rest: KeyGuard(DirectRoutes(rest, direct, self.in_session), key))
        tune_garbage_collection()
        return app

    async def seed_session(self, request: Request, body: dict[str, Any] = Body()) -> dict[str, Any]:
        """Start a session for a row. The body is the row, or Gym's envelope with ``task_data`` and a session id."""
        named = body.get("resources_session_id")
        row = body.get("task_data") if named else body
        if named:
            request.session[SESSION_ID_KEY] = named
        lease = None if named else request.headers.get(LEASE_HEADER)
        row = row if isinstance(row, dict) else {}
        self._check_tools(row)
        key, binds = _key(request), _bundle_binds(request.headers.get(HARNESS_HEADER))
        await _while_connected(request, self._sessions.seed(key, row, once=bool(named), lease=lease, binds=binds))
        return {"resources_session_id": named} if named else self._offers(lease, row)

    async def run_program(self, request: Request, body: ProgramRequest) -> dict[str, Any]:
        """Run an agent program in the session's sandbox until the program ends or the client disconnects; return
        ``exit_code``, ``seconds`` and ``output``."""
        lease = request.headers.get(LEASE_HEADER)
        using = self._sessions.use(_key(request), lease, lambda tools, sandbox: run_program(tools, sandbox, body))
        try:
            end = await _while_connected(request, using)
        except AgentError as error:
            end = {"exit_code": None, "seconds": None, "output": error.reason}
        if end is None:
            raise ClientDisconnect
        return end

    async def checkpoint_session(self, request: Request) -> dict[str, Any]:
        """Save the session between two tool calls; return the checkpoint, from which ``/resume`` starts a session."""
        return await self._sessions.checkpoint(_key(request), self.snapshot_prefix)

    async def resume_session(self, request: Request, body: ResumeRequest) -> dict[str, Any]:
        self._check_tools(body.row)
        lease, checkpoint = request.headers.get(LEASE_HEADER), body.checkpoint.model_dump()
        await _while_connected(
            request, self._sessions.seed(_key(request), body.row, checkpoint=checkpoint, lease=lease)
        )
        return self._offers(lease, body.row)

    async def renew_leases(self, leases: set[str] = Body(embed=True)) -> dict[str, str]:
        self._sessions.renew(leases)
        return {}

    async def forget_checkpoints(self, body: SnapshotsRequest) -> dict[str, int]:
        for name in body.snapshots:
            if self._sandboxes is not None and is_named(name, self.snapshot_prefix):
                await self._sandboxes.delete_snapshot(name)
        return {"forgotten": len(body.snapshots)}

    async def renew_checkpoints(self, body: SnapshotsRequest) -> dict[str, int]:
        for name in body.snapshots:
            if self._sandboxes is not None and is_named(name, self.snapshot_prefix):
                await self._sandboxes.renew_snapshot(name)
        return {"renewed": len(body.snapshots)}

    def _check_tools(self, row: Mapping[str, Any]) -> None:
        params = row.get("responses_create_params")
        offered = params.get("tools") if isinstance(params, dict) else None
        known = [str(schema["name"]) for schema in self._schemas]
        for index, tool in enumerate(offered if isinstance(offered, list) else ()):
            if isinstance(tool, dict) and isinstance(name := tool.get("name"), str) and name not in known:
                field = f"responses_create_params.tools.{index}.name"
                raise CallerError(f"this environment has no tool {name}{suggest(name, known)}", field=field)

    def _offers(self, lease: str | None, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the paths of the routes that Gym's servers lack, and the row's time limit."""
        offers: dict[str, Any] = {"release_path": RELEASE_PATH}
        if self._sessions.resumes:
            offers["checkpoint_path"] = CHECKPOINT_PATH
        time_limit_s = getattr(self._task, "time_limit_s", None)
        if time_limit_s is not None and (limit_s := time_limit_s(row)):
            offers["time_limit_s"] = limit_s
        if lease and self._sandboxes is not None:
            offers["program_path"] = PROGRAM_PATH
        return offers | ({"lease_path": LEASE_PATH} if lease else {})

    @property
    def _schemas(self) -> Sequence[Mapping[str, Any]]:
        return self._task.tools.schemas

    @property
    def snapshot_prefix(self) -> str:
        """Name prefix of this server's snapshots; the server deletes no other snapshots."""
        return re.sub(r"[^A-Za-z0-9_.-]", "-", f"checkpoint-{self.config.name}")[:80]

    async def release_session(self, request: Request) -> dict[str, bool]:
        """Extract the artefacts and destroy the agent's sandbox; return after the sandbox has ended."""
        await self._sessions.release(_key(request))
        return {"released": True}

    async def close_resources_session(
        self, request: Request, body: dict[str, Any] = Body(default={})
    ) -> dict[str, str]:
        named = body.get("resources_session_id")
        await self._sessions.close(named or _key(request), once=bool(named))
        return {"resources_session_id": named} if named else {}

    async def verify(self, request: Request, body: TaskVerifyRequest) -> TaskVerifyResponse:
        row = body.model_dump()
        grade = await self._sessions.verify(_key(request), row["response"])
        why = {"passed": grade.passed, "verdict": grade.verdict, "verdict_detail": grade.detail}
        used, egress = self._sessions.usage(_key(request))
        why |= {TOOL_USE: used} | {
            f"tool_{number}": sum(counts.get(number, 0) for counts in used.values()) for number in TOOL_NUMBERS
        }
        why |= {EGRESS: egress} if egress else {}
        return TaskVerifyResponse(**row | dict(grade.fields) | why | {"reward": grade.reward})

    def _tool_route(self, schema: Mapping[str, Any]) -> Callable[[Request], Awaitable[PlainTextResponse]]:
        tool = schema["name"]

        async def call(request: Request) -> PlainTextResponse:
            try:
                arguments = await request.json()
            except (ValueError, RecursionError):
                arguments = None
            return PlainTextResponse(await self._sessions.call(_key(request), tool, arguments))

        call.__doc__ = schema["description"]
        return call

    def _lifespan(self, inner: Any) -> Any:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            if self._sandboxes is not None:
                await self._sandboxes.get_ready()
                self._loops.start("snapshot-sweeper", self._sweep_snapshots, delay_s=SNAPSHOT_SWEEP_S)
            self._loops.start("session-sweeper", self._sweep, delay_s=RENEW_S)
            self._loops.start("blocked-loop-watch", self._watch_event_loop)
            async with inner(app) as state:
                yield state
            await self._loops.aclose()
            with suppress(TimeoutError):
                async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                    await self._sessions.aclose()
                    if isinstance(self._task, AsyncCloseable):
                        await self._task.aclose()
                    if self._sandboxes is not None:
                        await self._sandboxes.aclose()

        return lifespan

    async def _sweep(self) -> float:
        self._sessions.sweep()
        return RENEW_S

    async def _watch_event_loop(self) -> float:
        """Log that the environment's code, or a suspended or overloaded machine, blocked the event loop."""
        begin = time.monotonic()
        await asyncio.sleep(pause_s := BLOCKED_S / 10)
        if (blocked_s := time.monotonic() - begin - pause_s) >= BLOCKED_S:
            hint = "no session or time limit went on; code that takes time must run in `await asyncio.to_thread(...)`"
            logger.warning("the event loop of %s was blocked for %.0f s: %s", self.config.name, blocked_s, hint)
        return 0.0

    async def _sweep_snapshots(self) -> float:
        assert self._sandboxes is not None
        for name in self._sessions.snapshots:
            await self._sandboxes.renew_snapshot(name)
        await self._sandboxes.delete_old_snapshots(self.snapshot_prefix, ORPHAN_S)
        return SNAPSHOT_SWEEP_S


def _bundle_binds(harness: str | None) -> list[str] | None:
    """Return the binds of a harness's bundles, one per C library, since the image's is unknown before the start.

    Args:
        harness: the harness's URL-quoted name; empty if the harness has no bundle, ``None`` if no program runs.
    """
    if not harness:
        return None if harness is None else []
    found = find_bundles(load_harness(unquote(harness)), unquote(harness))
    return [f"{path}:{BUNDLE_FOLDER}/{libc}:ro" for libc, path in found.items()]


async def _while_connected[T](request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Run ``work``; return its result, or ``None`` if the client disconnected first and ``work`` was cancelled.
    ``Request.is_disconnected`` does not work behind Gym's middleware."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


def _key(request: Request) -> str:
    return str(request.session[SESSION_ID_KEY])


def _direct_route(
    handle: Callable[..., Awaitable[Any]], body: TypeAdapter[Any] | None = None
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a route's function as a handler for :class:`.DirectRoutes`; ``body`` validates a JSON body, if any."""

    async def route(request: Request) -> Response:
        try:
            given = [] if body is None else [body.validate_json(await request.body())]
        except ValidationError as error:
            raise invalid_body(error) from None
        answer = await handle(request, *given)
        return answer if isinstance(answer, Response) else Response(to_json(answer), media_type="application/json")

    return route
