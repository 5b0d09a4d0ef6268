# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A machine whose disk is full, while agents work and while their work is graded: no reward, and none of 0 either."""

import asyncio
from pathlib import Path

import pytest

from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.schemas import JobView
from tests.gym.families import Families, masked, solved


pytestmark = [
    *(pytest.mark.gym, pytest.mark.sandbox, pytest.mark.timeout(600)),
    pytest.mark.asyncio(loop_scope="package"),
]


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
