# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The stage pipeline: utilisation of the bottleneck, and rollouts per second compared with Gym's ``simple_agent``.

(a) Jobs with random stage times: lower bound of the makespan over the makespan. The peer is one semaphore around the
    whole rollout, as Gym's in-tree agents limit concurrency. An online schedule cannot reach the bound.
(b) ``/run`` of ``prorl_agent`` and ``simple_agent``, one worker each, over the same instant model and environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from typing import Any

import aiohttp
import orjson

from benchmarks.report import Row, median, parser, publish
from benchmarks.servers import AGENT, PEER_AGENT, agent_server, instant_servers
from nemo_gym_prorl.failures import Failure, Stage
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.rollout.api.schemas import TokenForm
from nemo_gym_prorl.rollout.handler import Environments
from nemo_gym_prorl.rollout.job import Job, Outcome, Trajectory, Verdict, failure_state
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.settings import PipelineSettings, PoolSizes


POOLS = PoolSizes(init=2, ready=4, run=8, eval=3)
MEANS = {Stage.INIT: 0.08, Stage.RUN: 0.4, Stage.EVAL: 0.12}
"""Mean seconds per stage, a hundredth of those of a small coding task; RUN is the bottleneck."""
IN_FLIGHT = 64
STAGES = {"stages": {"init": 64, "ready": 64, "run": 64, "eval": 64}}
"""Settings of ``prorl_agent``: as many slots as rollouts in flight."""
PARAMS = {"input": [{"role": "user", "content": "What is the answer?"}]}


class SleepingHandler:
    """Handler that sleeps in each stage for the row's seconds."""

    name = "sleeping"

    async def init(self, job: Job) -> None:
        await _sleep(job.row, Stage.INIT)

    async def run(self, job: Job, session: None) -> Trajectory:
        await _sleep(job.row, Stage.RUN)
        return Trajectory({})

    async def release(self, job: Job, session: None) -> None:
        pass

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        await _sleep(job.row, Stage.EVAL)
        return Verdict(1.0, {})

    def on_failure(self, job: Job, stage: Stage | None, failure: Failure) -> Outcome:
        return Outcome(failure_state(failure), {}, failure=failure)


async def _sleep(row: dict[str, Any], stage: Stage) -> None:
    if row:
        await asyncio.sleep(row[stage])


def new_pipeline(**settings: Any) -> Pipeline:
    return Pipeline(Environments.of(SleepingHandler()), PipelineSettings(stages=POOLS), **settings)


def draw(jobs: int) -> list[dict[Stage, float]]:
    """Return log-normal stage times, the same in every run."""
    rng = random.Random(7)
    return [{stage: mean * rng.lognormvariate(-0.08, 0.4) for stage, mean in MEANS.items()} for _ in range(jobs)]


def bound(times: list[dict[Stage, float]]) -> float:
    """Return a lower bound of the makespan in seconds, the largest over the stages: a stage's total work divided by
    its slots, plus the shortest time before the stage and the shortest time after it."""
    stages, bounds = list(Stage), []
    for at, stage in enumerate(stages):
        way_in = min(sum(row[before] for before in stages[:at]) for row in times)
        way_out = min(sum(row[after] for after in stages[at + 1 :]) for row in times)
        bounds.append(way_in + sum(row[stage] for row in times) / POOLS.of(stage) + way_out)
    return max(bounds)


async def staged(times: list[dict[Stage, float]]) -> float:
    pipeline, started = new_pipeline(), time.perf_counter()
    jobs = [pipeline.submit(JobRequest({stage.value: spent for stage, spent in row.items()})) for row in times]
    await pipeline.drain()
    assert all(job.outcome and job.outcome.reward == 1.0 for job in jobs)
    return time.perf_counter() - started


async def one_semaphore(times: list[dict[Stage, float]]) -> float:
    """Return the makespan with a semaphore of RUN's slots around each whole rollout and no other limit."""
    semaphore = asyncio.Semaphore(POOLS.run)

    async def rollout(row: dict[Stage, float]) -> None:
        async with semaphore:
            for stage in Stage:
                await asyncio.sleep(row[stage])

    started = time.perf_counter()
    await asyncio.gather(*map(rollout, times))
    return time.perf_counter() - started


async def post_runs(url: str, rollouts: int) -> float:
    todo = iter(range(rollouts))
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def caller() -> None:
            for index in todo:
                row = {"responses_create_params": PARAMS, "_ng_task_index": index, "_ng_rollout_index": 0}
                async with http.post(f"{url}/run", data=orjson.dumps(row), headers=headers) as response:
                    result = orjson.loads(await response.read())
                    assert response.ok, result
                    assert result["reward"] == 1.0

        return await _rate(caller, rollouts)


async def submit_jobs(url: str, rollouts: int) -> float:
    """Return the rollouts per second through the job API."""
    todo, run = iter(range(rollouts)), os.urandom(4).hex()
    async with RolloutClient(url) as client:

        async def caller() -> None:
            for index in todo:
                job = await client.submit({"responses_create_params": PARAMS}, id=f"{run}-{index}")
                done = await client.get(job.id, wait=60, tokens=TokenForm.PACKED)
                assert done.reward == 1.0

        return await _rate(caller, rollouts)


async def _rate(caller: Any, rollouts: int) -> float:
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(caller())
    return rollouts / (time.perf_counter() - started)


async def compare_agents(rollouts: int, rounds: int) -> Row:
    """Return the row of ``/run``; its ratio is the median over the rounds, which are short because the speed of a
    shared machine changes within seconds."""
    rates: dict[str, list[float]] = {AGENT: [], PEER_AGENT: []}
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(instant_servers())
        urls = {
            AGENT: await stack.enter_async_context(agent_server(AGENT, port, **STAGES)),
            PEER_AGENT: await stack.enter_async_context(agent_server(PEER_AGENT, port)),
        }
        for url in urls.values():
            await post_runs(url, min(rollouts, IN_FLIGHT))
        for turn in range(rounds):
            for kind in rates if turn % 2 == 0 else reversed(rates):
                rates[kind].append(await post_runs(urls[kind], rollouts))
    ratio, peer = median([ours / peer for ours, peer in zip(*rates.values(), strict=True)]), median(rates[PEER_AGENT])
    return Row("rollouts through /run", "1/s", ratio * peer, peer, PEER_AGENT, ">= 3")


async def measure(*, quick: bool) -> list[Row]:
    times = draw(60 if quick else 500)
    least = bound(times)
    ours, semaphore = least / await staged(times), least / await one_semaphore(times)
    makespan = Row("bound over makespan", "", ours, semaphore, f"one semaphore of {POOLS.run}", ">= 1.48")
    return [makespan, await compare_agents(150 if quick else 400, 1 if quick else 11)]


def main() -> None:
    quick = parser(__doc__).parse_args().quick
    publish("pipeline", asyncio.run(measure(quick=quick)), packages=("nemo-gym", "aiohttp", "fastapi"), quick=quick)


if __name__ == "__main__":
    main()
