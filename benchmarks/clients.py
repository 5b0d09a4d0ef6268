# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Two clients with keys of their own at one service, with shares of 1 and 3; one floods it with 10,000 rollouts.

Over real sockets, with 32 slots of RUN and a handler that sleeps (INIT 10 ms, RUN a second in the mean, log-normal,
EVAL 5 ms), so that slots are what bounds it. The flood is there first. The other keeps 1.5 times as many rollouts on
their way as its share has slots, so it always has some that wait, and submits the next as one ends. Slots are counted
from the service's own events, from the other's 40th start to its last but 50. How long it waits is what its rollouts
tell of all queues; alone is a service that has its share of the slots of every stage and nobody else.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from benchmarks.pipeline import SleepingHandler
from benchmarks.real_engines import server
from benchmarks.report import Figure, publish
from nemo_gym_prorl.failures import Stage
from nemo_gym_prorl.rollout.api import rollout_router
from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.rollout.handler import Environments
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.keys_file import Client, Clients, KeysFile, hash_of, new_key, write_clients
from nemo_gym_prorl.rollout.metrics import PipelineMetrics
from nemo_gym_prorl.rollout.ownership import ROUTES
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.scheduler import PoolSizes
from nemo_gym_prorl.rollout.settings import PipelineSettings
from nemo_gym_prorl.serving.access import KeyGuard, RouteScopes
from nemo_gym_prorl.serving.keys import Scope


SHARES = {"one": 1.0, "three": 3.0}
SLOTS = 32
FLOOD, QUICK_FLOOD = 10_000, 3_000
BUSY = 1_000
"""Rollouts of the other, of which it has its share."""
AFTER, BEFORE = 40, 50
"""Rollouts of the other that begin before it is measured, and that end after it."""


def rows(jobs: int, seed: int) -> list[dict[str, Any]]:
    """Rows whose handler sleeps as they say."""
    rng = random.Random(seed)
    return [
        {
            "responses_create_params": {"input": "sleep"},
            Stage.INIT.value: 0.01,
            Stage.RUN.value: 1.0 * rng.lognormvariate(-0.08, 0.4),
            Stage.EVAL.value: 0.005,
        }
        for _ in range(jobs)
    ]


def serve(port: int, keys_file: str, share: float) -> None:
    """The service, with so much of the slots."""
    stages = PoolSizes(init=round(16 * share), ready=round(8 * share), run=round(SLOTS * share), eval=round(8 * share))
    pipeline = Pipeline(Environments.of(SleepingHandler()), PipelineSettings(stages=stages))
    keys = KeysFile(Path(keys_file), pipeline.share)
    app = FastAPI()
    app.include_router(rollout_router(pipeline, PipelineMetrics(pipeline)))

    @app.get("/up")
    async def up() -> str:
        return "up"

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        await (app if scope.get("path") == "/up" else guard)(scope, receive, send)

    guard = KeyGuard(app, None, keys.caller, RouteScopes(ROUTES))
    uvicorn.run(guarded, host="127.0.0.1", port=port, log_level="warning", timeout_keep_alive=60)


async def keep_busy(client: RolloutClient, work: list[dict[str, Any]], at_once: int) -> list[float]:
    """Run all, so many at once; how long each waited, in the order in which they began."""
    free, waits = asyncio.Semaphore(at_once), [0.0] * len(work)

    async def one(number: int, row: dict[str, Any]) -> None:
        async with free:
            job = await client.submit(row, id=f"busy-{number}")
            done = await client.wait(job.id)
        waits[number] = sum(spent.waited_s for spent in done.timings.values())

    await asyncio.gather(*(one(number, row) for number, row in enumerate(work)))
    return waits


async def flood(client: RolloutClient, work: list[dict[str, Any]]) -> None:
    """Submit all as fast as it goes."""
    at_once = asyncio.Semaphore(64)

    async def one(number: int, row: dict[str, Any]) -> None:
        async with at_once:
            await client.submit(row, id=f"flood-{number}")

    await asyncio.gather(*(one(number, row) for number, row in enumerate(work)))


class Slots:
    """What each client has had of RUN's slots, from a service's events."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, float, float]] = []
        self._busy: list[float] = []

    async def follow(self, client: RolloutClient) -> None:
        """Goes on until it is cancelled."""
        began = dict[str, float]()
        async for event in client.events(after="0"):
            if event.state is JobState.RUNNING:
                began[event.id] = event.at
                if event.id.startswith("busy-"):
                    self._busy.append(event.at)
            elif event.state is JobState.EVALUATING:
                self._spans.append((event.client, began.pop(event.id), event.at))

    def shares(self) -> dict[str, float]:
        """From when the busy one's first rollouts have begun until its last begin, while all its slots are taken."""
        first, last = self._busy[AFTER], self._busy[-BEFORE]
        spent = Counter[str]()
        for name, start, end in self._spans:
            spent[name] += max(0.0, min(end, last) - max(start, first))
        return {name: spent[name] / spent.total() for name in SHARES}


def keys_of(path: Path) -> dict[str, str]:
    """Keys of the clients, and of one who watches; their file is made."""
    keys = {name: new_key() for name in (*SHARES, "watch")}
    clients = [Client(name=name, hash=hash_of(keys[name]), share=share) for name, share in SHARES.items()]
    clients.append(Client(name="watch", hash=hash_of(keys["watch"]), scopes=[Scope.ADMIN]))
    write_clients(path, Clients(clients=clients))
    return keys


async def measure(flooding: str, size: int) -> list[Figure]:
    """One of them floods."""
    busy = next(name for name in SHARES if name != flooding)
    share = SHARES[busy] / sum(SHARES.values())
    at_once = round(1.5 * SLOTS * share)
    work = rows(round(BUSY * share), 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "keys.json")
        keys = keys_of(path)
        waits = dict[str, list[float]]()
        for how, of_slots in (("alone", share), ("beside", 1.0)):
            slots = Slots()
            async with (
                server("benchmarks.clients", "service", str(path), str(of_slots)) as (url, _),
                RolloutClient(url, keys[busy]) as client,
                RolloutClient(url, keys[flooding]) as other,
                RolloutClient(url, keys["watch"]) as watch,
                asyncio.TaskGroup() as group,
            ):
                watching = group.create_task(slots.follow(watch))
                if how == "beside":
                    await flood(other, rows(size, 2))
                waits[how] = await keep_busy(client, work, at_once)
                await asyncio.sleep(1)
                watching.cancel()
    shares = slots.shares()[busy]
    p99 = {how: sorted(times[AFTER:])[int(0.99 * len(times[AFTER:]))] for how, times in waits.items()}
    name = f"{flooding!r} floods with {size}"
    return [
        Figure(
            f"{name}: share of the slots of {busy!r}, which has {share:g}",
            shares,
            "",
            goal="<= 0.05",
            goal_value=abs(shares / share - 1),
        ),
        Figure(
            f"{name}: p99 wait of {busy!r}",
            p99["beside"],
            "s",
            goal="<= 1",
            goal_value=p99["beside"] / p99["alone"],
            peers={"alone with its share": p99["alone"]},
        ),
    ]


async def both(size: int) -> list[Figure]:
    """Each floods once."""
    return [figure for flooding in SHARES for figure in await measure(flooding, size)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller flood")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        _, port, keys_file, share = arguments.serve
        serve(int(port), keys_file, float(share))
        return
    publish("clients", asyncio.run(both(QUICK_FLOOD if arguments.quick else FLOOD)), quick=arguments.quick)


if __name__ == "__main__":
    main()
