# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym agent whose ``/run`` is a job of the rollout service; the job API stands beside Gym's own routes."""

from contextlib import asynccontextmanager
from typing import Any, ClassVar

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from nemo_gym.base_resources_server import AggregateMetrics
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator
from starlette.types import ASGIApp

from nemo_gym_prorl.agent.agent_service import SCOPES, AgentService
from nemo_gym_prorl.agent.gym_environments import ServiceConfig
from nemo_gym_prorl.http.applications import DirectRoutes, wrap_outermost
from nemo_gym_prorl.http.key_guard import check_exposure
from nemo_gym_prorl.http.problems import Declared, add_problem_handlers, invalid_body
from nemo_gym_prorl.http.server_process import exit_with_starter, raise_open_file_limit, tune_garbage_collection
from nemo_gym_prorl.rollout.gym_rows import CreateParams, Row, read_json
from nemo_gym_prorl.servers.server_config import ServerConfig


class VerifiedRollout(BaseModel):
    """A row that ``/run`` answered with, as Gym sends it back: what its profiler cannot do without."""

    model_config = ConfigDict(extra="allow")

    task_index: int = Field(alias="_ng_task_index")
    rollout_index: int = Field(alias="_ng_rollout_index")
    reward: float = Field(allow_inf_nan=False)
    response: dict[str, Any] = Field(default_factory=dict)


class VerifiedRollouts(BaseModel):
    """Gym's request for metrics. Gym's own model takes any objects, and its profiler fails on most of them."""

    verify_responses: list[VerifiedRollout]

    @field_validator("verify_responses")
    @classmethod
    def _different(cls, rollouts: list[VerifiedRollout]) -> list[VerifiedRollout]:
        if len({(rollout.task_index, rollout.rollout_index) for rollout in rollouts}) < len(rollouts):
            raise ValueError("two rollouts have the same indices")
        return rollouts


_GYM_ROUTES = {
    "/run": Declared((403, 409, 500, 503), Row),
    "/v1/responses": Declared((403, 500, 503, 504), CreateParams),
    "/aggregate_metrics": Declared((403, 500, 503), VerifiedRollouts),
}


class ProRLAgentConfig(BaseResponsesAPIAgentConfig, ServiceConfig, ServerConfig):
    """Gym's references to the servers that a rollout uses, and the service's own settings."""

    model_server: ModelServerRef


class ProRLAgent(SimpleResponsesAPIAgent):
    """Thin: everything happens in :class:`~nemo_gym_prorl.agent.agent_service.AgentService`."""

    config: ProRLAgentConfig
    ray_enabled: ClassVar[bool] = False
    _service: AgentService = PrivateAttr()

    @classmethod
    def run_webserver(cls) -> Any:
        """Gym's start of the server, which ends with that Gym from now on, also while it waits for Gym's Ray."""
        exit_with_starter()
        return super().run_webserver()

    def setup_webserver(self) -> FastAPI:
        """Gym's routes, and the service's.

        Raises:
            CallerError: the server would listen beyond loopback without a key, or a setting cannot work.
        """
        has_keys_file = self.config.keys_file is not None
        for host in (self.config.host, None if self.config.tls_port is None else "all interfaces (tls_port)"):
            check_exposure(host, self.config.control_token, others=has_keys_file)
        raise_open_file_limit()
        self._service = AgentService(
            self.config, self.server_client.global_config_dict, model=self.config.model_server.name
        )
        app: FastAPI = super().setup_webserver()
        _only_served(app)
        app.include_router(self._service.router())
        has_keys = self.config.control_token is not None or has_keys_file
        add_problem_handlers(app, _GYM_ROUTES, SCOPES.needs if has_keys else None)
        wrap_outermost(app, self._guarded)
        app.router.lifespan_context = self._lifespan
        tune_garbage_collection()
        return app

    def _guarded(self, app: ASGIApp) -> ASGIApp:
        direct = DirectRoutes(app, {"/run": self.run, "/v1/responses": self.responses})
        return self._service.guarded(direct)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> Any:
        self._service.start()
        async with self._service.tls(app):
            yield
        await self._service.close()

    async def run(self, request: Request) -> Response:
        """One rollout, start to reward. One that fails is a masked row that says why, or for a trainer an error."""
        return await self._service.run(request)

    async def responses(self, request: Request) -> Response:
        """The tool loop alone, in a session that the caller seeded."""
        return await self._service.responses(request)

    async def aggregate_metrics(self, request: Request) -> AggregateMetrics:
        """What the resources servers make of the finished rollouts."""
        try:
            asked = VerifiedRollouts.model_validate(read_json(await request.body()))
        except ValidationError as error:
            raise invalid_body(error) from None
        sent = asked.model_dump(by_alias=True, exclude_unset=True)
        return AggregateMetrics.model_validate(await self._service.aggregate_metrics(sent))


def _only_served(app: FastAPI) -> None:
    """Take away routes of recent Gyms that would answer 500, and keep from the document what it cannot describe."""
    for route in [route for route in app.router.routes if isinstance(route, APIRoute)]:
        if route.path.startswith("/v1/agent_sessions"):  # episodes whose sessions an agent keeps
            app.router.routes.remove(route)
        elif route.path.startswith("/ng-rollout/"):  # /v1/responses once more, below an id that is not declared
            route.include_in_schema = False
