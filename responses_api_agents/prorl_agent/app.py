# SPDX-License-Identifier: Apache-2.0
"""Gym agent whose ``/run`` is a job of the rollout service; the job API stands beside Gym's own routes."""

from contextlib import asynccontextmanager
from typing import Any, ClassVar

from fastapi import FastAPI, Request, Response
from nemo_gym.base_resources_server import AggregateMetrics, AggregateMetricsRequest
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from pydantic import PrivateAttr

from nemo_gym_prorl import open_files
from nemo_gym_prorl.handlers.agent_service import AgentService, ServiceConfig


class ProRLAgentConfig(BaseResponsesAPIAgentConfig, ServiceConfig):
    """Gym's references to the servers that a rollout uses, and the service's own settings."""

    resources_server: ResourcesServerRef
    model_server: ModelServerRef


class ProRLAgent(SimpleResponsesAPIAgent):
    """Thin: everything happens in :class:`~nemo_gym_prorl.handlers.agent_service.AgentService`."""

    config: ProRLAgentConfig
    ray_enabled: ClassVar[bool] = False
    _service: AgentService = PrivateAttr()

    def setup_webserver(self) -> FastAPI:
        """Gym's routes, and the service's."""
        open_files.raise_limit()
        self._service = AgentService.from_gym(
            self.config,
            self.server_client.global_config_dict,
            resources=self.config.resources_server.name,
            model=self.config.model_server.name,
        )
        app = super().setup_webserver()
        app.include_router(self._service.router())
        app.add_middleware(open_files.FileGuard)
        app.router.lifespan_context = self._lifespan
        return app

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> Any:
        yield
        await self._service.close()

    async def run(self, request: Request) -> Response:
        """One rollout, start to reward. Never fails: a rollout that does answers with a masked row that says why."""
        return await self._service.run(request)

    async def responses(self, request: Request) -> Response:
        """The tool loop alone, in a session that the caller seeded."""
        return await self._service.responses(request)

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        """What the resources server makes of the finished rollouts."""
        return AggregateMetrics.model_validate(await self._service.aggregate_metrics(body.model_dump()))


if __name__ == "__main__":
    ProRLAgent.run_webserver()
