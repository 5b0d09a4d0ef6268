# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The stage engine: how close it comes to the bottleneck, and how many rollouts a second it carries.

(a) Jobs with drawn stage times: the bound over the makespan, against one semaphore around the whole rollout, which is
    how Gym's in-tree agents bound concurrency. And against the same order of jobs played without a clock, where
    nothing but the work takes time: who serves jobs as they come cannot know that the last one will be long.
(b) Rollouts a second: the pipeline with a handler that does nothing; and ``/run`` of ``prorl_agent`` against Gym's
    ``simple_agent``, one worker each, on the same instant model and environment.
(c) What the journal costs: two ``prorl_agent``, one with a journal on this disk, take the same rounds in turn, by
    ``/run`` and by the job API; of each round the one's rate over the other's, and the median of those. And how long
    the service takes, with what is in the journal, until it would answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from operator import truediv
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.report import Figure, publish
from nemo_gym_prorl.failures import Failure, Stage
from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.rollout.handler import Environments
from nemo_gym_prorl.rollout.job import Job, JobState, Outcome, Trajectory, Verdict, failure_state
from nemo_gym_prorl.rollout.journal import Journal
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import Cursor, JobRequest, row_digest
from nemo_gym_prorl.rollout.scheduler import PoolSizes, StageScheduler, Start
from nemo_gym_prorl.rollout.schemas import TokenForm
from nemo_gym_prorl.rollout.settings import PipelineSettings


REPO = Path(__file__).parents[1]
POOLS = PoolSizes(init=2, ready=4, run=8, eval=3)
MEANS = {Stage.INIT: 0.08, Stage.RUN: 0.4, Stage.EVAL: 0.12}
"""Seconds; 1/100 of a small coding task's. RUN is the bottleneck, as it is where a policy thinks."""


class SleepingHandler:
    """Sleeps in each stage for as long as the row says."""

    name = "sleeping"

    async def init(self, job: Job) -> None:
        await _spend(job.row, Stage.INIT)

    async def run(self, job: Job, session: None) -> Trajectory:
        await _spend(job.row, Stage.RUN)
        return Trajectory({})

    async def release(self, job: Job, session: None) -> None:
        pass

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        await _spend(job.row, Stage.EVAL)
        return Verdict(1.0, {})

    def on_failure(self, job: Job, stage: Stage | None, failure: Failure) -> Outcome:
        return Outcome(failure_state(failure), {}, failure=failure)


async def _spend(row: dict[str, Any], stage: Stage) -> None:
    if row:
        await asyncio.sleep(row[stage])


def draw(jobs: int) -> list[dict[Stage, float]]:
    """Log-normal stage times, the same ones in every run."""
    generator = random.Random(7)
    return [{stage: mean * generator.lognormvariate(-0.08, 0.4) for stage, mean in MEANS.items()} for _ in range(jobs)]


def bound(times: list[dict[Stage, float]], pools: PoolSizes) -> float:
    """No schedule ends earlier: per stage, all its work over its slots, behind the shortest way in and before the
    shortest way out."""
    stages = list(Stage)
    bounds = []
    for at, stage in enumerate(stages):
        way_in = min(sum(row[before] for before in stages[:at]) for row in times)
        way_out = min(sum(row[after] for after in stages[at + 1 :]) for row in times)
        bounds.append(way_in + sum(row[stage] for row in times) / pools.of(stage) + way_out)
    return max(bounds)


async def staged(times: list[dict[Stage, float]]) -> float:
    """Makespan of the pipeline, seconds."""
    pipeline = Pipeline(Environments.of(SleepingHandler()), PipelineSettings(stages=POOLS))
    started = time.perf_counter()
    jobs = [pipeline.submit(JobRequest({stage.value: spent for stage, spent in row.items()})) for row in times]
    await pipeline.drain()
    assert all(job.outcome and job.outcome.reward == 1.0 for job in jobs)
    return time.perf_counter() - started


async def one_semaphore(times: list[dict[Stage, float]], slots: int) -> float:
    """Makespan with one semaphore around init, run and eval; the single stages are not bounded, in its favour."""
    semaphore = asyncio.Semaphore(slots)

    async def rollout(row: dict[Stage, float]) -> None:
        async with semaphore:
            for stage in Stage:
                await asyncio.sleep(row[stage])

    started = time.perf_counter()
    await asyncio.gather(*(rollout(row) for row in times))
    return time.perf_counter() - started


def without_overhead(times: list[dict[Stage, float]], pools: PoolSizes) -> float:
    """Makespan of the scheduler's own decisions where every one is carried out at once, seconds."""
    scheduler, ends, now = StageScheduler(pools), list[tuple[float, int, Stage]](), 0.0

    def begin(starts: list[Start]) -> None:
        for start in starts:
            index = int(start.job_id)
            heapq.heappush(ends, (now + times[index][start.stage], index, start.stage))

    for index in range(len(times)):
        begin(scheduler.submit(str(index), "default", 0))
    follows = {Stage.INIT: Stage.RUN, Stage.RUN: Stage.EVAL, Stage.EVAL: None}
    while ends:
        now, index, stage = heapq.heappop(ends)
        begin(scheduler.worked(str(index), follows[stage]))
    return now


async def instant_jobs(jobs: int) -> float:
    """Rollouts a second through the pipeline alone."""
    pipeline = Pipeline(Environments.of(SleepingHandler()), PipelineSettings(stages=POOLS))
    started = time.perf_counter()
    for _ in range(jobs):
        pipeline.submit(JobRequest({}))
    await pipeline.drain()
    return jobs / (time.perf_counter() - started)


# -- /run against simple_agent -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agent:
    """An agent server: its name in the table, its folder, and its settings."""

    name: str
    app: Path
    settings: dict[str, Any]


def _gym_folder(part: str) -> Path:
    spec = find_spec("nemo_gym")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1] / part


AGENTS = [
    Agent("simple_agent", _gym_folder("responses_api_agents/simple_agent"), {}),
    Agent(
        "prorl_agent",
        REPO / "responses_api_agents" / "prorl_agent",
        {"stages": {"init": 64, "ready": 64, "run": 64, "eval": 64}},
    ),
]


@contextlib.asynccontextmanager
async def process(command: list[str], url: str, env: dict[str, str] | None = None) -> AsyncIterator[None]:
    """A server process that answers at ``url``."""
    child = await asyncio.create_subprocess_exec(
        *command, env=env, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(120), aiohttp.ClientSession() as http:
            while True:
                try:
                    async with http.get(url):
                        break
                except aiohttp.ClientError:
                    if child.returncode is not None:
                        raise RuntimeError(f"{command[1]} ended with status {child.returncode}") from None
                    await asyncio.sleep(0.2)
        yield
    finally:
        child.terminate()
        await child.wait()


@contextlib.asynccontextmanager
async def agent_server(agent: Agent, instant_port: int) -> AsyncIterator[str]:
    """An agent's ``app.py``, started as Gym starts it: with the merged configuration in its environment."""
    port = _free_port()
    instant = {"entrypoint": "app.py", "host": "127.0.0.1", "port": instant_port}
    config = {
        "agent": {
            "responses_api_agents": {
                agent.app.name: {
                    "entrypoint": "app.py",
                    "host": "127.0.0.1",
                    "port": port,
                    "num_workers": 1,
                    "resources_server": {"type": "resources_servers", "name": "instant_environment"},
                    "model_server": {"type": "responses_api_models", "name": "instant_model"},
                    **agent.settings,
                }
            }
        },
        "instant_environment": {"resources_servers": {"instant": {**instant, "domain": "other"}}},
        "instant_model": {"responses_api_models": {"instant": instant}},
        "head_server": {"host": "127.0.0.1", "port": _free_port()},
        "dry_run": False,
    }
    env = os.environ | {
        "NEMO_GYM_CONFIG_DICT": json.dumps(config),
        "NEMO_GYM_CONFIG_PATH": "agent",
        "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]),
        "RAY_AUTH_MODE": "disabled",
    }
    url = f"http://127.0.0.1:{port}"
    async with process([sys.executable, str(agent.app / "app.py")], url, env):
        yield url


async def post_runs(url: str, rollouts: int, in_flight: int = 64) -> float:
    """Rollouts a second through ``/run``."""
    todo = iter(range(rollouts))
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def caller() -> None:
            for index in todo:
                row = {
                    "responses_create_params": {"input": [{"role": "user", "content": "What is the answer?"}]},
                    "_ng_task_index": index,
                    "_ng_rollout_index": 0,
                }
                async with http.post(f"{url}/run", data=orjson.dumps(row), headers=headers) as response:
                    result = orjson.loads(await response.read())
                    assert response.ok, result
                    assert result["reward"] == 1.0

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(caller())
        return rollouts / (time.perf_counter() - started)


async def submit_jobs(url: str, rollouts: int, in_flight: int = 64) -> float:
    """Rollouts a second through the job API."""
    todo = iter(range(rollouts))
    row = {"responses_create_params": {"input": [{"role": "user", "content": "What is the answer?"}]}}
    run = os.urandom(4).hex()
    async with RolloutClient(url) as client:

        async def caller() -> None:
            for index in todo:
                job = await client.submit(row, id=f"{run}-{index}")
                done = await client.get(job.id, wait=60, tokens=TokenForm.PACKED)
                assert done.reward == 1.0

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(caller())
        return rollouts / (time.perf_counter() - started)


async def journal_cost(rollouts: int, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Rates without and with a journal, round by round, by how rollouts come."""
    rates: dict[str, tuple[list[float], list[float]]] = {"/run": ([], []), "the job API": ([], [])}
    async with contextlib.AsyncExitStack() as stack:
        port = _free_port()
        script = str(Path(__file__).with_name("instant_servers.py"))
        await stack.enter_async_context(process([sys.executable, script, str(port)], f"http://127.0.0.1:{port}"))
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=REPO))
        ours = AGENTS[-1]
        with_journal = replace(ours, settings={**ours.settings, "journal": folder})
        urls = [await stack.enter_async_context(agent_server(agent, port)) for agent in (ours, with_journal)]
        for round_ in range(rounds + 1):
            for way, drive in (("/run", post_runs), ("the job API", submit_jobs)):
                for which in (0, 1) if round_ % 2 else (1, 0):
                    rate = await drive(urls[which], rollouts)
                    if round_:  # the first one warms up
                        rates[way][which].append(rate)
    return rates


async def start_with_journal(ended: int, live: int) -> tuple[float, float]:
    """Seconds from nothing to a pipeline that has taken a new rollout on and told of an outcome, and to one that has
    taken on again all that was accepted."""
    with tempfile.TemporaryDirectory(dir=REPO) as folder:
        journal = Journal(folder, 1e9, 2**40)
        row = {"text": "x" * 2000} | {stage.value: 1e6 for stage in Stage}

        def job(name: str) -> Job:
            return Job(name, row, row_digest(row), SleepingHandler.name, SleepingHandler.name, time.time())

        for first in range(0, ended, 500):
            jobs = [job(f"ended-{number}") for number in range(first, min(first + 500, ended))]
            for each in jobs:
                each.pack()
            outcome = Outcome(JobState.SUCCEEDED, {"text": "x" * 2000}, reward=1.0)
            await asyncio.gather(*(journal.ended(each, outcome, time.time()) for each in jobs))
        for first in range(0, live, 500):
            names = [f"live-{number}" for number in range(first, min(first + 500, live))]
            await asyncio.gather(*(journal.accepted(job(name)) for name in names))
        await journal.close()
        started = time.perf_counter()
        journal = Journal(folder, 1e9, 2**40)
        pipeline = Pipeline(Environments.of(SleepingHandler()), PipelineSettings(stages=POOLS), journal=journal)
        pipeline.start()
        await pipeline.accept(JobRequest(row))
        await pipeline.store.ended_after(Cursor(pipeline.store.epoch, 0), 1000, content=True)
        serves = time.perf_counter() - started
        await pipeline.store.all_here()
        took = time.perf_counter() - started
        assert len(pipeline.store.live()) == live + 1
        assert journal.end == ended
        await pipeline.close()
        return serves, took


async def compare_agents(rollouts: int, rounds: int) -> dict[str, float]:
    """Best rate of each agent over several rounds that alternate between them."""
    rates: dict[str, float] = {}
    async with contextlib.AsyncExitStack() as stack:
        port = _free_port()
        script = str(Path(__file__).with_name("instant_servers.py"))
        await stack.enter_async_context(process([sys.executable, script, str(port)], f"http://127.0.0.1:{port}"))
        urls = {agent.name: await stack.enter_async_context(agent_server(agent, port)) for agent in AGENTS}
        for name, url in urls.items():
            await post_runs(url, min(rollouts, 64))
            rates[name] = 0.0
        for _ in range(rounds):
            for name, url in urls.items():
                rates[name] = max(rates[name], await post_runs(url, rollouts))
    return rates


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer jobs; under a minute; writes nothing")
    quick = parser.parse_args().quick

    times = draw(100 if quick else 500)
    least = bound(times, POOLS)
    ours = least / await staged(times)
    # With more slots than POOLS.run it would have more rollouts in RUN than the bound allows.
    peers = {
        f"one semaphore of {POOLS.run}": least / await one_semaphore(times, POOLS.run),
        "the same order without overhead": least / without_overhead(times, POOLS),
    }
    rate = await instant_jobs(2_000 if quick else 10_000)
    agents = await compare_agents(200 if quick else 1_500, 1 if quick else 3)
    cost = await journal_cost(200 if quick else 1_500, 2 if quick else 9)
    ended, live = (2_000, 2_000) if quick else (100_000, 100_000)
    serves, took = await start_with_journal(ended, live)
    figures = [
        Figure(f"bound over makespan, {len(times)} drawn jobs", ours, "", goal=">= 0.97", peers=peers),
        Figure("pipeline with an instant handler", rate, "rollouts/s"),
        Figure(
            "/run on an instant model and environment, 2 turns and 1 tool call",
            agents["prorl_agent"],
            "rollouts/s",
            goal=">= 3",
            goal_value=agents["prorl_agent"] / agents["simple_agent"],
            peers={"Gym's simple_agent": agents["simple_agent"]},
        ),
        *(
            Figure(
                f"{way} with a journal",
                statistics.median(there),
                "rollouts/s",
                goal=">= 0.95",
                goal_value=statistics.median(map(truediv, there, here)),
                peers={"without": statistics.median(here)},
            )
            for way, (here, there) in cost.items()
        ),
        Figure(f"start with {ended} outcomes and {live} accepted in the journal", took, "s", goal="<= 2"),
        Figure("until it takes a new rollout on and tells of outcomes", serves, "s"),
    ]
    publish("pipeline", figures, packages=("nemo-gym", "aiohttp", "fastapi"), quick=quick)


if __name__ == "__main__":
    asyncio.run(main())
