# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Cost of the journal: rollouts per second with and without a journal, and the start of a service from a full journal.

Two ``prorl_agent`` over the same instant servers, one with a journal on the repository's disk, run the same rounds
alternately, by ``/run`` and by the job API. A ratio is the median over the rounds, which are short because the speed
of a shared machine changes within seconds. The start is measured in this process: until the pipeline accepts a new job
and lists outcomes, and until all accepted jobs run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time

from benchmarks.pipeline import STAGES, SleepingHandler, new_pipeline, post_runs, submit_jobs
from benchmarks.report import Row, median, parser, publish
from benchmarks.servers import AGENT, REPO, agent_server, instant_servers
from nemo_gym_prorl.failures import Stage
from nemo_gym_prorl.rollout.gym_rows import row_digest
from nemo_gym_prorl.rollout.job import Job, JobState, Outcome
from nemo_gym_prorl.rollout.request import Cursor, JobRequest
from nemo_gym_prorl.rollout.storage.journal import Journal


WITHOUT = "the same service without"
APIS = {"/run": post_runs, "the job API": submit_jobs}


async def throughput(rollouts: int, rounds: int) -> list[Row]:
    rates: dict[str, tuple[list[float], list[float]]] = {api: ([], []) for api in APIS}
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(instant_servers())
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=REPO))
        urls = [
            await stack.enter_async_context(agent_server(AGENT, port, **STAGES, **journal))
            for journal in ({}, {"journal": folder})
        ]
        for turn in range(rounds + 1):
            for api, drive in APIS.items():
                for which in (0, 1) if turn % 2 else (1, 0):
                    rate = await drive(urls[which], rollouts)
                    if turn:  # the first round warms up
                        rates[api][which].append(rate)
    rows = []
    for api, (without, with_journal) in rates.items():
        ratio = median([there / here for here, there in zip(without, with_journal, strict=True)])
        here = median(without)
        rows.append(Row(f"rollouts through {api} with a journal", "1/s", ratio * here, here, WITHOUT, ">= 0.95"))
    return rows


async def start(ended: int, live: int) -> list[Row]:
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
        pipeline = new_pipeline(journal=journal)
        pipeline.start()
        await pipeline.accept(JobRequest(row))
        await pipeline.store.ended_after(Cursor(pipeline.store.epoch, 0), 1000, content=True)
        serves_s = time.perf_counter() - started
        await pipeline.store.wait_for_recovery()
        whole_s = time.perf_counter() - started
        assert len(pipeline.store.live()) == live + 1
        assert journal.end == ended
        await pipeline.close()
    title = f"start with {ended:,} outcomes and {live:,} accepted jobs"
    return [Row(f"{title}: serves", "s", serves_s), Row(f"{title}: all jobs are back", "s", whole_s)]


async def measure(*, quick: bool) -> list[Row]:
    rollouts, rounds, jobs = (100, 2, 2_000) if quick else (400, 25, 100_000)
    return [*await throughput(rollouts, rounds), *await start(jobs, jobs)]


def main() -> None:
    quick = parser(__doc__).parse_args().quick
    publish("journal", asyncio.run(measure(quick=quick)), packages=("nemo-gym", "aiohttp", "fastapi"), quick=quick)


if __name__ == "__main__":
    main()
