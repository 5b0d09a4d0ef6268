# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym agent server ``prorl_agent``: Gym's routes and the job API over one rollout service."""

from contextlib import asynccontextmanager
from typing import Any

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
from nemo_gym_prorl.http.server_process import raise_open_file_limit, tune_garbage_collection
from nemo_gym_prorl.rollout.gym_rows import CreateParams, Row, read_json
from nemo_gym_prorl.servers.server_base import ServerBase, ServerConfig


class VerifiedRollout(BaseModel):
    """Finished row of ``/run``, as Gym sends it back for metrics; declares the fields that Gym's profiler requires."""

    model_config = ConfigDict(extra="allow")

    task_index: int = Field(alias="_ng_task_index")
    rollout_index: int = Field(alias="_ng_rollout_index")
    reward: float = Field(allow_inf_nan=False)
    response: dict[str, Any] = Field(default_factory=dict)


class VerifiedRollouts(BaseModel):
    """Body of ``/aggregate_metrics``; stricter than Gym's model, because Gym's profiler fails on incomplete rows."""

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
    """Settings of the agent server: Gym's server references and the settings of the rollout service."""

    model_server: ModelServerRef


class ProRLAgent(ServerBase, SimpleResponsesAPIAgent):
    """Gym's server class over :class:`~nemo_gym_prorl.agent.agent_service.AgentService`."""

    config: ProRLAgentConfig
    _service: AgentService = PrivateAttr()

    def setup_webserver(self) -> FastAPI:
        """Return the application with Gym's routes and the service's routes.

        Raises:
            CallerError: the server would listen beyond loopback without a key, or a setting is invalid.
        """
        has_keys_file = self.config.keys_file is not None
        for host in (self.config.host, None if self.config.tls_port is None else "all interfaces (tls_port)"):
            check_exposure(host, self.config.control_token, others=has_keys_file)
        raise_open_file_limit()
        self._service = AgentService(
            self.config, self.server_client.global_config_dict, model=self.config.model_server.name
        )
        app: FastAPI = super().setup_webserver()
        _remove_unserved_routes(app)
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
        """Run one rollout from seed to reward. A failed rollout is returned as a masked row (200) to Gym's collector;
        a trainer may get 422 or 503 instead."""
        return await self._service.run(request)

    async def responses(self, request: Request) -> Response:
        """Run only the tool loop, in a session that the caller has seeded."""
        return await self._service.responses(request)

    async def aggregate_metrics(self, request: Request) -> AggregateMetrics:
        """Return the metrics that the resources servers compute over finished rollouts."""
        try:
            rollouts = VerifiedRollouts.model_validate(read_json(await request.body()))
        except ValidationError as error:
            raise invalid_body(error) from None
        body = rollouts.model_dump(by_alias=True, exclude_unset=True)
        return AggregateMetrics.model_validate(await self._service.aggregate_metrics(body))


def _remove_unserved_routes(app: FastAPI) -> None:
    """Remove Gym's routes that this agent does not implement, and hide routes that OpenAPI cannot describe."""
    for route in [route for route in app.router.routes if isinstance(route, APIRoute)]:
        if route.path.startswith("/v1/agent_sessions"):  # multi-call episodes, which this agent does not support
            app.router.routes.remove(route)
        elif route.path.startswith("/ng-rollout/"):  # an alias of /v1/responses with an undeclared path parameter
            route.include_in_schema = False
