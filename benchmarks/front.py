# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""One front before a thousand nodes: jobs a second, what a job costs the front, and its memory.

Nodes have everything but work: each is a real pipeline behind the real job API on a port of its own, all in another
process, whose handler waits for a moment and answers with a result of about 20 kB and 8 turns of tokens. Rollouts come
in groups of 8 from a client in a third process, which reads every result. What the front uses is the kernel's account
of its process. The figures on paper take that CPU per job and rollouts of ten minutes on nodes with 100 slots.

Run with ``python -m benchmarks.front [--quick]``; quick takes 100 nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from benchmarks import processes
from benchmarks.report import Figure, publish
from nemo_gym_prorl.failures import Failure, Stage
from nemo_gym_prorl.rollout.api import rollout_router
from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.rollout.fleet.front import Front, front_app
from nemo_gym_prorl.rollout.fleet.nodes import NodeList
from nemo_gym_prorl.rollout.handler import Environments
from nemo_gym_prorl.rollout.job import Job, Outcome, Trajectory, Verdict, failure_state
from nemo_gym_prorl.rollout.metrics import PipelineMetrics
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.scheduler import PoolSizes
from nemo_gym_prorl.rollout.settings import PipelineSettings
from nemo_gym_prorl.serving import open_files
from nemo_gym_prorl.serving.embedded import served


NODES, QUICK_NODES = 1000, 100
JOBS_PER_NODE = 10
SIBLINGS = 8
WORK_S = 1.0
SLOTS = 4
TURNS = 8
ROLLOUT_S, NODE_SLOTS = 600.0, 100


class Waiting:
    """A handler that waits."""

    name = "waiting"

    async def init(self, job: Job) -> int:
        """Nothing."""
        return 0

    async def run(self, job: Job, session: int) -> Trajectory:
        """Wait, and answer at some length."""
        await asyncio.sleep(WORK_S)
        sequence, output = [5] * 500, list[dict[str, Any]]()
        for turn in range(TURNS):
            sampled = [9_000 + turn] * 100
            tokens = {
                "prompt_token_ids": sequence,
                "generation_token_ids": sampled,
                "generation_log_probs": [-0.5] * 100,
            }
            output.append({"type": "message", "role": "assistant", "content": "said " * 300, **tokens})
            output.append({"type": "function_call_output", "call_id": "c", "output": "seen " * 200})
            sequence = sequence + sampled + [8_000] * 50
        return Trajectory({"output": output})

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        """A reward."""
        return Verdict(1.0, {"reward": 1.0, "response": trajectory.response})

    async def release(self, job: Job, session: int) -> None:
        """Nothing."""

    def on_failure(self, job: Job, stage: Stage | None, failure: Failure) -> Outcome:
        """A failure."""
        return Outcome(failure_state(failure), {}, failure=failure)


def _nodes(count: int, told: Connection) -> None:
    async def main() -> None:
        open_files.raise_limit()
        apps: dict[int, FastAPI] = {}
        listeners = []
        settings = PipelineSettings(stages=PoolSizes(init=SLOTS, ready=SLOTS, run=SLOTS, eval=SLOTS))
        for _ in range(count):
            listener = socket.create_server(("127.0.0.1", 0), backlog=64)
            listeners.append(listener)
            pipeline = Pipeline(Environments.of(Waiting()), settings)
            app = FastAPI(openapi_url=None)
            app.include_router(rollout_router(pipeline, PipelineMetrics(pipeline)))
            apps[listener.getsockname()[1]] = app

        async def by_port(scope: Scope, receive: Receive, send: Send) -> None:
            await apps[scope["server"][1]](scope, receive, send)

        told.send([*apps])
        await uvicorn.Server(uvicorn.Config(by_port, log_level="warning", lifespan="off")).serve(listeners)

    asyncio.run(main())


def _front(ports: list[int], told: Connection) -> None:
    async def main() -> None:
        open_files.raise_limit()
        front = Front(NodeList([RolloutClient(f"http://127.0.0.1:{port}") for port in ports]))
        await front.start()
        async with served(front_app(front, key=None)) as url:
            while len(front.dispatcher.statuses) < len(ports):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            told.send(url)
            await asyncio.Event().wait()

    asyncio.run(main())


async def _play(url: str, jobs: int) -> float:
    """Seconds for so many jobs, each of whose results is read."""
    started = time.monotonic()
    async with RolloutClient(url) as client:
        gate = asyncio.Semaphore(64)

        async def submit(number: int) -> None:
            async with gate:
                row = {"responses_create_params": {"input": "x" * 2000}}
                await client.submit(row, id=f"{started:.3f}-{number}", group=f"{started:.3f}-{number // SIBLINGS}")

        cursor = (await client.list(limit=1)).cursor
        submitting = asyncio.gather(*map(submit, range(jobs)))
        left = jobs
        while left:
            page = await client.ended(cursor, wait=10, results=True, limit=200)
            cursor = page.cursor
            assert all(job.reward == 1.0 and not job.failed_attempts for job in page.rollouts), "all succeed"
            left -= len(page.rollouts)
        await submitting
    return time.monotonic() - started


@contextlib.contextmanager
def _process(target: Any, *arguments: Any) -> Any:
    """A process, and what it tells first."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(*arguments, there), daemon=True)
    process.start()
    try:
        yield process.pid, here.recv()
    finally:
        process.kill()
        process.join()


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    count = QUICK_NODES if quick else NODES
    jobs = count * JOBS_PER_NODE
    with _process(_nodes, count) as (_, ports), _process(_front, ports) as (pid, url):
        asyncio.run(_play(url, count))  # connections are there, code is warm
        idle = processes.precise_core_seconds(pid)
        time.sleep(20)
        idle = (processes.precise_core_seconds(pid) - idle) / 20
        before, memory = processes.precise_core_seconds(pid), processes.memory_mib([pid])
        seconds = asyncio.run(_play(url, jobs))
        used = processes.precise_core_seconds(pid) - before
        grown = processes.memory_mib([pid]) - memory
    per_job = (used - idle * seconds) / jobs
    busy = jobs * WORK_S / SLOTS / count
    sandboxes = 100_000
    publish(
        "front",
        [
            Figure(f"jobs a second through one front, {count} nodes", jobs / seconds, "1/s"),
            Figure("the same, of what the nodes' slots allow", busy / seconds, "share"),
            Figure("front's CPU per job", per_job * 1e3, "ms"),
            Figure(f"front's CPU for {count} idle nodes", idle, "cores"),
            Figure(f"front's memory with {count} nodes", memory, "MiB"),
            Figure("memory that an ended job keeps, its result included", grown / jobs * 1024, "KiB"),
            Figure(
                f"on paper: {sandboxes} sandboxes, rollouts of {ROLLOUT_S:g} s, front's CPU",
                sandboxes / ROLLOUT_S * per_job + idle * sandboxes / NODE_SLOTS / count,
                "cores",
            ),
        ],
        quick=quick,
    )


if __name__ == "__main__":
    main()
