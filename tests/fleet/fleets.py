# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Fleets of real services on loopback, whose handler acts as rows say, and of which tests tell who comes and goes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from nemo_gym_prorl.fleet.gateway import SETTINGS, FleetGateway, gateway_app
from nemo_gym_prorl.fleet.placement import NodeJoined, NodeLeft
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.settings import PoolSizes, ServiceSettings
from tests.rollout.handlers import Bench, FastSettings, PlannedHandler, application
from tests.rollout.serving import serve, until


SMALL = PoolSizes(init=1, ready=1, run=2, eval=2)
"""A window of 4."""


class Changing:
    """NodeSource that come and go as a test says."""

    def __init__(self, present: Sequence[NodeJoined] = ()) -> None:
        self.present = [*present]
        self._changes: asyncio.Queue[NodeJoined | NodeLeft] = asyncio.Queue()

    def tell(self, change: NodeJoined | NodeLeft) -> None:
        self._changes.put_nowait(change)

    async def changes(self) -> AsyncIterator[NodeJoined | NodeLeft]:
        while True:
            yield await self._changes.get()


class Service:
    def __init__(self, handler: PlannedHandler) -> None:
        self.handler = handler
        self.pipeline: Pipeline = Bench(FastSettings(stages=SMALL), handler).pipeline()
        self.url = ""

    @property
    def joined(self) -> NodeJoined:
        return NodeJoined(f"node-{self.url.rsplit(':', 1)[1]}", RolloutClient(self.url))


@asynccontextmanager
async def service(handler: PlannedHandler | None = None) -> AsyncIterator[Service]:
    it = Service(handler or PlannedHandler())
    async with serve(application(it.pipeline)) as it.url:
        yield it
        await it.pipeline.close()


class Fleet:
    """A gateway, a client of it, and what is behind it."""

    def __init__(self, services: list[Service], nodes: Changing, settings: ServiceSettings) -> None:
        self.services, self.nodes = services, nodes
        self.said: list[str] = []
        self.gateway = FleetGateway(nodes, settings, self.said.append)
        self.client: RolloutClient
        self.url = ""

    @property
    def handlers(self) -> list[PlannedHandler]:
        return [it.handler for it in self.services]


@asynccontextmanager
async def fleet(
    count: int,
    settings: ServiceSettings = SETTINGS,
    joined: int | None = None,
    key: str | None = None,
    clients: Path | None = None,
) -> AsyncIterator[Fleet]:
    """Start a gateway and services, the first ``joined`` of which are its nodes; by default all."""
    async with AsyncExitStack() as stack:
        services = [await stack.enter_async_context(service()) for _ in range(count)]
        there = [it.joined for it in services[: count if joined is None else joined]]
        it = Fleet(services, Changing(there), settings)
        app = gateway_app(it.gateway, key=key, clients=clients)
        await it.gateway.start()
        it.url = await stack.enter_async_context(serve(app))
        it.client = await stack.enter_async_context(RolloutClient(it.url, key))
        await until(lambda: len(it.gateway.dispatcher.statuses) == len(there))
        yield it
        await it.gateway.close()
