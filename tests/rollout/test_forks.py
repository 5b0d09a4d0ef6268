# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Forks of a rollout are taken on all or none; who asks again finds what the first time began, and nothing else."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.rollout.checkpoints import Checkpoint
from nemo_gym_prorl.rollout.handler import Environments
from nemo_gym_prorl.rollout.job import Job, JobState, Trajectory
from nemo_gym_prorl.rollout.journal import Journal, JournalFails
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import CheckpointsForgotten, JobConflict, JobRequest, QueueFull
from nemo_gym_prorl.rollout.scheduler import PoolSizes
from nemo_gym_prorl.rollout.schemas import ForkRequest
from nemo_gym_prorl.rollout.service import PipelineSettings
from tests.rollout.handlers import Act, PlannedHandler


HELD: dict[str, Any] = {"plan": {"run": [Act("held")]}}
ONE = PoolSizes(init=1, ready=1, run=1, eval=1)


class Keeps(PlannedHandler):
    """Takes a checkpoint after its first turn."""

    async def run(self, job: Job, session: int) -> Trajectory:
        await job.keep_checkpoint(Checkpoint(1, object(), 10))
        return await super().run(job, session)

    async def forget(self, checkpoints: Any) -> None:
        """Of which there is nothing."""


async def parent_at(stages: PoolSizes, max_queued: int = 100, journal: Journal | None = None) -> tuple[Pipeline, Job]:
    settings = PipelineSettings(stages=stages, max_queued=max_queued, checkpoint_s=0.0)
    pipeline = Pipeline(Environments.of(Keeps()), settings, journal=journal)
    pipeline.start()
    parent = await pipeline.accept(JobRequest(dict(HELD), id="parent"))
    async with asyncio.timeout(30):
        while not parent.checkpoints:
            await asyncio.sleep(0.01)
    return pipeline, parent


async def fork(pipeline: Pipeline, parent: Job, *ids: str) -> list[Job]:
    return await pipeline.fork(parent, 1, ForkRequest(ids=[*ids]).to_requests(parent, len(ids)))


async def test_a_fork_that_is_refused_leaves_those_of_another_alone() -> None:
    pipeline, parent = await parent_at(PoolSizes())
    [first] = await fork(pipeline, parent, "a")
    await pipeline.accept(JobRequest({"another": "row"}, id="taken"))
    with pytest.raises(JobConflict):
        await fork(pipeline, parent, "a", "new", "taken")
    await asyncio.sleep(0.1)
    assert not first.state.terminal
    assert await fork(pipeline, parent, "a") == [first], "asked for again it is the same one"
    assert pipeline.store.get("new") is None, "none of them was begun"
    await pipeline.close()


async def test_a_fork_for_which_there_is_no_room_is_as_good_as_new_the_next_time() -> None:
    pipeline, parent = await parent_at(ONE, max_queued=3)
    others = [await pipeline.accept(JobRequest(dict(HELD), id=name)) for name in "xyz"]
    with pytest.raises(QueueFull):
        await fork(pipeline, parent, "a", "b")
    assert pipeline.store.get("a") is None
    for other in others:
        await pipeline.cancel(other)
    assert [job.state for job in await fork(pipeline, parent, "a", "b")] == [JobState.QUEUED] * 2
    await pipeline.close()


async def test_a_fork_that_could_not_be_written_keeps_nothing_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, parent = await parent_at(PoolSizes(), journal=Journal(str(tmp_path)))

    async def full(*_: Any, **__: Any) -> bool:
        raise JournalFails("the disk is full")

    monkeypatch.setattr(Journal, "accepted", full)
    with pytest.raises(JournalFails):
        await fork(pipeline, parent, "a")
    await pipeline.cancel(parent)
    assert pipeline.checkpoints.bytes == 0
    await pipeline.close()


async def test_a_fork_of_what_is_erased_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, parent = await parent_at(PoolSizes(), journal=Journal(str(tmp_path)))
    find = Journal.find

    async def slow(journal: Journal, ids: Any) -> Any:
        await pipeline.cancel(parent)
        return await find(journal, ids)

    monkeypatch.setattr(Journal, "find", slow)
    with pytest.raises(CheckpointsForgotten):
        await fork(pipeline, parent, "a")
    assert pipeline.store.get("a") is None
    await pipeline.close()
