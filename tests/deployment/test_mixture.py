# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The mixture of all four families as Gym's command line starts it: what it says, and what goes wrong in one."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.tasks.stem import problems as stem
from scripts.scripted_turns.stem import script_for
from tests.deployment.families import (
    FAMILIES,
    MIXTURE,
    NULL,
    ORACLE,
    Families,
    ended,
    masked,
    rows_of,
    solved,
)
from tests.deployment.gym_command import server_process
from tests.faulty_family.app import ANSWERS


pytestmark = [
    *(pytest.mark.gym, pytest.mark.sandbox, pytest.mark.timeout(900)),
    pytest.mark.long("starts ten servers through Gym's command line"),
    pytest.mark.asyncio(loop_scope="package"),
]

ORGANELLE = "Which organelle makes most of the ATP?"


def judged(question: str) -> dict[str, Any]:
    """A row of science whose answer is text, answered in other words."""
    problem = stem.problem_of(stem.row_for(question, "mitochondria"))
    script = script_for(problem, "oracle")
    script["turns"][-1]["content"] = "The answer is \\boxed{the mitochondrion}."
    return {**stem.row_for(question, "mitochondria", script=script), "data_source": "stem"}


def faulty(fault: str) -> dict[str, Any]:
    script = orjson.dumps({"turns": [{"content": "Done.", "tool_calls": []}]}).decode()
    params = {"input": [{"role": "user", "content": "Go."}], "metadata": {"script": script}}
    return {"responses_create_params": params, "data_source": "faulty", "fault": fault}


@contextmanager
def stopped(families: Families, server: str) -> Iterator[None]:
    """A server that takes connections and answers none."""
    pid = server_process(families.gym.cli.mark, server)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_it_earns_what_it_should(families: Families, tmp_path: Path) -> None:
    rows = [row for family in FAMILIES for variant in (ORACLE, NULL) for row in rows_of(family, variant, 1)]
    sent = [{**row, "variant": row["data_source"]} for row in rows]
    done = await families.collect(sent, tmp_path, "--agent", MIXTURE)
    sources = {row["data_source"] for row in rows}
    assert {"code", "math", "stem"} <= sources
    assert Counter((row["rollout"]["environment"], row["reward"]) for row in done) == {
        (family, reward): 1 for family in sources for reward in (0.0, 1.0)
    }
    [metrics] = orjson.loads((tmp_path / "results_aggregate_metrics.json").read_bytes())
    assert {metrics["agent_metrics"][f"{family}/mean/reward"] for family in sources} == {0.5}


async def test_verifiers_that_fail_are_no_reward(client: RolloutClient) -> None:
    faults = [*ANSWERS, "hangs"]
    jobs = dict(zip(faults, await ended(client, *map(faulty, faults)), strict=True))
    assert {masked(job) for job in jobs.values()} == {"verifier_error"}
    tries = {fault: job.timings["eval"].attempts for fault, job in jobs.items()}
    assert tries == {"error": 3, "no JSON": 3, "hangs": 3, "no object": 1, "no reward": 1, "no number": 1, "truth": 1}
    assert {job.timings["run"].attempts for job in jobs.values()} == {1}
    assert (await client.status()).environments["faulty"].budgets["eval"] == 2


async def test_judges_that_fail_are_no_reward(families: Families, client: RolloutClient) -> None:
    honest, hanging, failing = await ended(
        client, judged(ORGANELLE), judged(f"{ORGANELLE} (hang)"), judged(f"{ORGANELLE} (fail)")
    )
    assert honest.reward == 1.0, honest
    assert [masked(job) for job in (hanging, failing)] == ["verifier_error"] * 2
    assert [job.timings["eval"].attempts for job in (hanging, failing)] == [3, 3]
    with stopped(families, "judge_model"):
        [unanswered] = await ended(client, judged(ORGANELLE))
    assert masked(unanswered) == "verifier_error"


async def test_a_server_that_hangs_holds_up_its_own(families: Families, client: RolloutClient) -> None:
    with stopped(families, "prorl_math"):
        stuck = [await client.submit(row) for row in rows_of("math", ORACLE, 3)]
        others = await ended(client, *rows_of("code", ORACLE, 2), *rows_of("stem", ORACLE, 2))
        assert {job.reward for job in others} == {1.0}
        async with asyncio.timeout(60):
            while "prorl_math" not in (status := await client.status()).held:
                await asyncio.sleep(0.2)
        assert status.held["prorl_math"].environments == ["math"]
    assert {(await client.wait(job.id)).reward for job in stuck} == {1.0}
    assert not (await client.status()).held


# A machine whose disk is full


def fill(disk: Path) -> None:
    """Until nothing more fits."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def empty(disk: Path) -> None:
    (disk / "filler").unlink()


def sleeping(source: str) -> str:
    """Right, but leaves time to fill a disk."""
    return f"import time\ntime.sleep(2)\n{source}"


def writing(source: str) -> str:
    """Right, but needs room for a file."""
    return f"open('notes', 'wb').write(bytes(2 << 20))\n{source}"


async def when(client: RolloutClient, job: JobView, state: JobState) -> None:
    async with asyncio.timeout(60):
        while (await client.get(job.id)).state is not state:
            await asyncio.sleep(0.02)


async def test_a_full_disk_is_no_reward(families: Families) -> None:
    if not (disk := families.disk):
        pytest.skip("no small file system can be made")
    async with RolloutClient(families.gym.url("prorl_code_agent")) as client:

        async def all_is_well() -> None:
            job = await client.submit(solved(writing))
            assert (await client.wait(job.id)).reward == 1.0

        async def when_full(job: JobView) -> JobView:
            await asyncio.to_thread(fill, disk)
            try:
                return await client.wait(job.id)
            finally:
                empty(disk)

        await all_is_well()

        # While the policy thinks about its first turn: what it then writes by a shell is not there in the end.
        job = await client.submit(solved(first_s=3, by_shell=True))
        await when(client, job, JobState.RUNNING)
        await asyncio.sleep(1)
        assert masked(await when_full(job)) == "session_lost"
        await all_is_well()

        # While the program is tested, which needs room: not its fault.
        job = await client.submit(solved(lambda source: sleeping(writing(source))))
        await when(client, job, JobState.EVALUATING)
        assert masked(await when_full(job)) in ("verifier_error", "provider_unavailable")
        await all_is_well()

        # Before the sandbox of its grading is started: the one slot has another one's.
        first, second = [await client.submit(solved(sleeping)) for _ in range(2)]
        await when(client, first, JobState.EVALUATING)
        await when(client, second, JobState.EVALUATING)
        last = await when_full(second)
        assert 0.0 not in (last.reward, (await client.wait(first.id)).reward)
        await all_is_well()
        assert (await client.status()).sessions == 0
