# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A front over HTTP: the job API, its nodes, and what Gym's head server would tell, so that ``prorl`` finds it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fastapi import APIRouter, Depends, FastAPI, Request
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field

from nemo_gym_prorl.rollout.api import rollout_router
from nemo_gym_prorl.rollout.fleet.dispatcher import NodeView
from nemo_gym_prorl.rollout.fleet.front import Front
from nemo_gym_prorl.rollout.json_route import JsonRoute
from nemo_gym_prorl.rollout.keys_file import KeysFile
from nemo_gym_prorl.rollout.metrics import ServiceMetrics
from nemo_gym_prorl.rollout.ownership import ROUTES
from nemo_gym_prorl.serving.access import KeyGuard, RouteScopes
from nemo_gym_prorl.serving.keys import Scope
from nemo_gym_prorl.serving.problems import add_problem_handlers, no_other_parameters, problem_responses


class DrainNode(BaseModel):
    """Which node is to get nothing new."""

    model_config = ConfigDict(extra="forbid")

    node: str
    drain: bool = Field(default=True, description="False: give it rollouts again.")


class _Nodes(Collector):
    def __init__(self, front: Front) -> None:
        self._front = front

    def collect(self) -> Iterable[Metric]:
        nodes = self._front.dispatcher.views()
        family = GaugeMetricFamily("prorl_fleet_nodes", "Nodes of the fleet.", labels=["usable"])
        for usable in (True, False):
            count = sum(node.usable is usable for node in nodes)
            family.add_metric([str(usable).lower()], count)
        yield family
        waiting = self._front.dispatcher.waiting
        yield GaugeMetricFamily("prorl_fleet_waiting", "Rollouts that are at no node yet.", value=waiting)
        lost = self._front.lost_nodes
        yield GaugeMetricFamily("prorl_fleet_lost_tries", "Tries that ended with their node.", value=lost)


SCOPES = RouteScopes({**ROUTES, ("GET", "/server_instances"): Scope.READ})


def front_app(front: Front, *, key: str | None, clients: Path | None = None) -> FastAPI:
    """The application of a front.

    Args:
        front: started and closed by the caller.
        key: its own, which every route but ``/healthz`` wants; ``None`` for none.
        clients: a file of those with keys of their own besides.

    Raises:
        CallerError: that cannot be read, or is wrong.
    """
    keys = None if clients is None else KeysFile(clients, front.share)
    app = FastAPI(title="nemo-gym-prorl fleet")
    add_problem_handlers(app)
    app.add_middleware(KeyGuard, key=key, clients=keys.caller if keys else None, scopes=SCOPES)
    app.include_router(rollout_router(front, ServiceMetrics(front, _Nodes(front))))
    router = APIRouter(route_class=JsonRoute, dependencies=[Depends(no_other_parameters)])

    @router.get("/v1/nodes", tags=["service"], responses=problem_responses())
    async def nodes() -> list[NodeView]:
        """The fleet's nodes."""
        return front.dispatcher.views()

    @router.post("/v1/nodes/drain", tags=["service"], responses=problem_responses(422))
    async def drain(body: DrainNode) -> list[NodeView]:
        """Give a node nothing new; what it has goes on."""
        front.dispatcher.drain(body.node, body.drain)
        return front.dispatcher.views()

    @router.get("/server_instances", tags=["service"], responses=problem_responses())
    async def server_instances(request: Request) -> list[dict[str, str]]:
        """As Gym's head server lists its servers: here, by the address that the caller has."""
        url = str(request.base_url).rstrip("/")
        return [{"process_name": "fleet", "name": "prorl_agent", "server_type": "responses_api_agents", "url": url}]

    app.include_router(router)
    return app
