# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How long checkpoints are kept, and when they are erased."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

from nemo_gym_prorl.failures import Stage
from nemo_gym_prorl.rollout.checkpoints import ORPHAN_S, RENEW_S, Checkpoint, Checkpoints
from nemo_gym_prorl.rollout.job import Budgets, Job, Trajectory
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.rows import row_digest
from nemo_gym_prorl.rollout.service import PipelineSettings
from tests.rollout.handlers import Act, Bench, PlannedHandler
from tests.rollout.virtual_time import run_in_virtual_time


class Shelf:
    """A store of them, its clock, and what it had erased."""

    def __init__(self, most_bytes: int = 100, keep_s: float = 10.0) -> None:
        self.now = 0.0
        self.erased: list[Checkpoint] = []
        self.store = Checkpoints(most_bytes, keep_s, lambda _, some: self.erased.extend(some), lambda: self.now)

    def job(self, *turns: int, size: int = 10) -> Job:
        job = Job("job", {}, row_digest({}), "planned", "planned", 0.0, shelf=self.store)
        for turn in turns:
            self.store.add(job, Checkpoint(turn, None, size))
        return job

    def turns(self) -> list[int]:
        return [checkpoint.turn for checkpoint in self.erased]


def test_the_latest_of_who_goes_on_is_kept_whatever_it_takes() -> None:
    shelf = Shelf(most_bytes=50)
    one, other = shelf.job(1, 2, 3), shelf.job(4, 5, 6)
    assert shelf.turns() == [1, 2], "the earliest of the job that began first"
    shelf.job(7, 8, size=1000)
    assert [*one.checkpoints, *other.checkpoints] == [3, 6]
    assert 8 not in shelf.turns()


def test_what_has_ended_goes_first_and_by_age() -> None:
    shelf = Shelf(most_bytes=50)
    ended, later, live = shelf.job(1, 2), shelf.job(3), shelf.job(4)
    shelf.store.ended(ended, keep=True)
    shelf.store.ended(later, keep=True)
    assert shelf.turns() == []
    shelf.store.add(live, Checkpoint(5, None, 10))
    assert shelf.turns() == []
    shelf.store.add(live, Checkpoint(6, None, 10))
    assert shelf.turns() == [1, 2]
    assert shelf.store.bytes == 40
    shelf.now = 10.0
    shelf.store.tidy()
    assert shelf.turns() == [1, 2, 3]
    assert live.latest_checkpoint is not None


def test_what_nobody_will_ask_for_is_erased_at_once() -> None:
    shelf = Shelf()
    job = shelf.job(1, 2)
    shelf.store.ended(job, keep=False)
    assert shelf.turns() == [1, 2]
    assert (shelf.store.bytes, job.checkpoints) == (0, {})


def test_one_that_is_shared_counts_once_and_goes_with_the_last() -> None:
    shelf = Shelf()
    parent = shelf.job(1, 2)
    [shared] = [checkpoint for turn, checkpoint in parent.checkpoints.items() if turn == 2]
    children = [shelf.job() for _ in range(3)]
    for child in children:
        shelf.store.add(child, shared)
    assert shelf.store.bytes == 20
    for job in (parent, *children[:2]):
        shelf.store.ended(job, keep=False)
    assert shelf.turns() == [1]
    children[2].drop_checkpoint(shared)
    assert shelf.turns() == [1, 2]
    assert shelf.store.bytes == 0


def test_an_attempt_that_goes_on_has_spent_what_the_first_had() -> None:
    shelf = Shelf()
    job = shelf.job()
    job.forked_from = {"id": "parent", "turn": 3, "lost": []}
    job.resume_at(Checkpoint(3, None, 1, spent_s=7.0, lost=("kernel",)))
    assert (job.spent_s, job.resumed) == (7.0, [])
    job.times[Stage.INIT].attempts = 2
    job.resume_at(Checkpoint(3, None, 1, spent_s=7.0, lost=("kernel",)))
    assert job.resumed == [{"turn": 3, "lost": ["kernel"]}]


class Keeping(PlannedHandler):
    """Its rollouts take a checkpoint and work on."""

    def __init__(self) -> None:
        super().__init__()
        self.renewed: list[tuple[float, int]] = []
        self.forgotten: list[int] = []

    async def run(self, job: Job, session: int) -> Trajectory:
        await job.keep_checkpoint(Checkpoint(job.row["turn"], None, 1))
        return await super().run(job, session)

    async def forget(self, checkpoints: Sequence[Checkpoint]) -> None:
        self.forgotten += [checkpoint.turn for checkpoint in checkpoints]

    async def renew(self, checkpoints: Sequence[Checkpoint]) -> None:
        now = asyncio.get_running_loop().time()
        self.renewed += [(now, checkpoint.turn) for checkpoint in checkpoints]


def test_what_rollouts_have_is_renewed_as_long_as_they_have_it() -> None:
    """While one works, for days, and while one that has ended may be forked."""

    async def play() -> None:
        handler = Keeping()
        settings = PipelineSettings(budgets=Budgets(run=1e6), checkpoint_s=2 * ORPHAN_S)
        pipeline = Bench(settings, handler).pipeline()
        for turn, seconds in ((1, 3 * ORPHAN_S), (2, 0.0)):
            pipeline.submit(JobRequest({"turn": turn, "plan": {"run": [Act("ok", seconds)]}}))
        await asyncio.sleep(2 * ORPHAN_S - RENEW_S)
        for turn in (1, 2):
            times = [at for at, renewed in handler.renewed if renewed == turn]
            apart = [later - earlier for earlier, later in pairwise([0.0, *times, 2 * ORPHAN_S - RENEW_S])]
            assert max(apart) < ORPHAN_S / 4
        assert not handler.forgotten
        await pipeline.close()

    run_in_virtual_time(play())
