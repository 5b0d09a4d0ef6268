# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl backends``: list, add and drain the inference engines of running model servers.

Model servers are found as services are: by ``--url``, else by asking Gym's head server which of its servers are
``prorl_model``. A change goes to each of them, since each places rollouts on its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from urllib.parse import quote

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from nemo_gym_prorl.commands.jobs import DEFAULT_HEAD, find_servers
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.client import RolloutClient


class BackendView(BaseModel):
    """An engine as a model server sees it."""

    id: str
    url: str
    run: str | None
    health: str
    draining: bool
    paused: bool
    weight_version: str | None
    live_rollouts: int
    in_flight: int
    limit: int | None


class BackendsView(BaseModel):
    """All engines of a model server, and how many turns wait for one."""

    backends: list[BackendView]
    waiting: int


class DrainView(BaseModel):
    """An engine that gets no new rollouts."""

    id: str
    draining: bool


class ModelClient(RolloutClient):
    """Client of one ``prorl_model``."""

    async def backends(self) -> BackendsView:
        """All its engines."""
        return await self._call(BackendsView, "GET", "/v1/backends")

    async def add(self, url: str, run: str | None, weight_version: str | None, api_key: str | None) -> BackendView:
        """Have it place rollouts on one more engine."""
        asked = {"url": url, "run": run, "weight_version": weight_version, "api_key": api_key}
        body = {name: value for name, value in asked.items() if value is not None}
        return await self._call(BackendView, "POST", "/v1/backends", body)

    async def drain_backend(self, engine: str) -> list[str]:
        """Have it place no new rollouts on an engine, by id or address; those that it has go on. Return the ids."""
        known = (await self.backends()).backends
        # Each model server has ids of its own; an address may be there once for each run.
        ids = [one.id for one in known if engine.rstrip("/") in (one.id, one.url)]
        for each in ids:
            await self._call(DrainView, "DELETE", f"/v1/backends/{quote(each, safe='')}", query={"drain": "true"})
        return ids


async def show(url: str | None, token: str | None) -> None:
    """Print the engines of each model server."""
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    for client, found in await _at_each(url, token, ModelClient.backends):
        table = Table(box=None, pad_edge=False)
        for column in ("id", "url", "run", "health", "rollouts", "turns", "limit", "weights"):
            table.add_column(column, overflow="fold")
        for one in found.backends:
            states = [one.health, *(["draining"] if one.draining else []), *(["paused"] if one.paused else [])]
            numbers = str(one.live_rollouts), str(one.in_flight), str(one.limit or "")
            table.add_row(one.id, one.url, one.run or "", ", ".join(states), *numbers, one.weight_version or "")
        console.print(f"{client.url}: {len(found.backends)} engines, {found.waiting} turns wait", markup=False)
        if found.backends:
            console.print(table)


async def add(
    url: str | None, token: str | None, engine: str, run: str | None, weight_version: str | None, key: str | None
) -> None:
    """Add an engine to each model server."""
    for client, added in await _at_each(url, token, lambda model: model.add(engine, run, weight_version, key)):
        print(f"{client.url}: {added.id} at {added.url}")


async def drain(url: str | None, token: str | None, engine: str) -> None:
    """Drain an engine at each model server that has it.

    Raises:
        CallerError: none has it.
    """
    drained = await _at_each(url, token, lambda model: model.drain_backend(engine))
    if not any(ids for _, ids in drained):
        raise CallerError(f"no model server has an engine {engine}; prorl backends lists them", field="ENGINE")
    for client, ids in drained:
        for each in ids:
            print(f"{client.url}: {each} gets no new rollouts")


async def _at_each[T](
    url: str | None, token: str | None, call: Callable[[ModelClient], Awaitable[T]]
) -> list[tuple[ModelClient, T]]:
    """Ask every model server.

    Raises:
        CallerError: the deployment has no ``prorl_model``.
        InfrastructureError: one does not answer.
        ApiError: one refuses.
    """
    if url is None:
        head = os.environ.get("PRORL_HEAD", DEFAULT_HEAD)
        urls = [*(await find_servers(head, token, "prorl_model")).values()]
        if not urls:
            raise CallerError(f"{head} knows no prorl_model; name one, or that of a node of the fleet", field="--url")
    else:
        urls = [one for one in map(str.strip, url.split(",")) if one]

    async def ask(client: ModelClient) -> tuple[ModelClient, T]:
        async with client:
            return client, await call(client)

    return await asyncio.gather(*(ask(ModelClient(one, token)) for one in urls))
