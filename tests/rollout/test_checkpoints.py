# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""CheckpointStore: how long they are kept, what other services find of them in a shared folder, and forks."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.failures import CallerError, FailureKind, Stage
from nemo_gym_prorl.rollout.api.schemas import ForkRequest
from nemo_gym_prorl.rollout.gym_rows import row_digest
from nemo_gym_prorl.rollout.job import Checkpoint, Job, ResumePoint, Trajectory
from nemo_gym_prorl.rollout.request import JobConflict, JobRequest
from nemo_gym_prorl.rollout.settings import Budgets, PipelineSettings
from nemo_gym_prorl.rollout.storage.checkpoints import ORPHAN_S, RENEW_S, CheckpointStore, SharedCheckpoints
from tests.rollout.handlers import Act, Bench, PlannedHandler
from tests.rollout.serving import until
from tests.rollout.virtual_time import run_in_virtual_time


class Shelf:
    """A store of them, its clock, and what it had erased."""

    def __init__(self, max_bytes: int = 100, keep_s: float = 10.0) -> None:
        self.now = 0.0
        self.erased: list[Checkpoint] = []
        self.store = CheckpointStore(max_bytes, keep_s, lambda _, some: self.erased.extend(some), lambda: self.now)

    def job(self, *turns: int, size: int = 10) -> Job:
        job = Job("job", {}, row_digest({}), "planned", "planned", 0.0, checkpoint_store=self.store)
        for turn in turns:
            self.store.add(job, Checkpoint(turn, None, size))
        return job

    def turns(self) -> list[int]:
        return [checkpoint.turn for checkpoint in self.erased]


def test_the_latest_of_who_goes_on_is_kept_whatever_it_takes() -> None:
    checkpoint_store = Shelf(max_bytes=50)
    one, other = checkpoint_store.job(1, 2, 3), checkpoint_store.job(4, 5, 6)
    assert checkpoint_store.turns() == [1, 2], "the earliest of the job that began first"
    checkpoint_store.job(7, 8, size=1000)
    assert [*one.checkpoints, *other.checkpoints] == [3, 6]
    assert 8 not in checkpoint_store.turns()


def test_what_has_ended_goes_first_and_by_age() -> None:
    checkpoint_store = Shelf(max_bytes=50)
    ended, later, live = checkpoint_store.job(1, 2), checkpoint_store.job(3), checkpoint_store.job(4)
    checkpoint_store.store.ended(ended, keep=True)
    checkpoint_store.store.ended(later, keep=True)
    assert checkpoint_store.turns() == []
    checkpoint_store.store.add(live, Checkpoint(5, None, 10))
    assert checkpoint_store.turns() == []
    checkpoint_store.store.add(live, Checkpoint(6, None, 10))
    assert checkpoint_store.turns() == [1, 2]
    assert checkpoint_store.store.bytes == 40
    checkpoint_store.now = 10.0
    checkpoint_store.store.tidy()
    assert checkpoint_store.turns() == [1, 2, 3]
    assert live.latest_checkpoint is not None


def test_one_that_is_shared_counts_once_and_goes_with_the_last() -> None:
    checkpoint_store = Shelf()
    parent = checkpoint_store.job(1, 2)
    [shared] = [checkpoint for turn, checkpoint in parent.checkpoints.items() if turn == 2]
    children = [checkpoint_store.job() for _ in range(3)]
    for child in children:
        checkpoint_store.store.add(child, shared)
    assert checkpoint_store.store.bytes == 20
    for job in (parent, *children[:2]):
        checkpoint_store.store.ended(job, keep=False)
    assert checkpoint_store.turns() == [1]
    children[2].drop_checkpoint(shared)
    assert checkpoint_store.turns() == [1, 2]
    assert checkpoint_store.store.bytes == 0


def test_an_attempt_that_goes_on_has_spent_what_the_first_had() -> None:
    checkpoint_store = Shelf()
    job = checkpoint_store.job()
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
        await job.keep_checkpoint(Checkpoint(job.row.get("turn", 1), None, 1))
        return await super().run(job, session)

    async def forget(self, checkpoints: Sequence[Checkpoint]) -> None:
        self.forgotten += [checkpoint.turn for checkpoint in checkpoints]

    async def renew(self, checkpoints: Sequence[Checkpoint]) -> None:
        now = asyncio.get_running_loop().time()
        self.renewed += [(now, checkpoint.turn) for checkpoint in checkpoints]

    def unpack(self, packed: bytes) -> None:
        raise AssertionError("there is no other service")


def test_what_rollouts_have_is_renewed_as_long_as_they_have_it() -> None:
    """While one works, for days, and while one that has ended may be forked."""

    async def play() -> None:
        handler = Keeping()
        settings = PipelineSettings(budgets=Budgets(run=6e5), checkpoint_s=2 * ORPHAN_S)
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


ROW = {"task": 1}


@dataclass(frozen=True)
class State:
    """What a handler goes on from."""

    text: str

    def pack(self) -> bytes:
        return self.text.encode()


def unpack(packed: bytes) -> State:
    if packed.startswith(b"odd"):
        raise KeyError("turns")
    return State(packed.decode())


class Service:
    """One of the services of a folder."""

    def __init__(self, folder: Path) -> None:
        self.shared = SharedCheckpoints(folder)
        self.erased: list[Checkpoint] = []
        self.checkpoint_store = CheckpointStore(
            1 << 20, 60.0, lambda _, some: self.erased.extend(some), lambda: 0.0, self.shared
        )

    def job(self, name: str, begin: ResumePoint | None = None, row: Any = None) -> Job:
        asked = JobRequest(row or ROW, resume_point=begin)
        job = Job(name, asked.row, asked.digest(), "e", "h", 0.0, checkpoint_store=self.checkpoint_store)
        return replace(job, resume_point=begin, forked_from=asked.forked_from)

    async def keep(self, job: Job, *turns: int, text: str | None = None) -> None:
        for turn in turns:
            state = State(text or f"{job.id} {turn}")
            await job.keep_checkpoint(Checkpoint(turn, state, 10, turn / 2, ("kernel",)))

    async def went_on(self, name: str, *tries: str, row: Any = None) -> Job:
        job = self.job(name, ResumePoint(tries), row)
        await self.shared.restore(job, unpack)
        return job


@pytest.fixture
def services(tmp_path: Path) -> Iterator[tuple[Service, Service]]:
    return Service(tmp_path), Service(tmp_path)


def latest(job: Job) -> tuple[int, str]:
    checkpoint = job.latest_checkpoint
    assert checkpoint is not None
    return checkpoint.turn, checkpoint.state.text


def files(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "rollouts").rglob("*") if path.is_file())


async def test_another_service_goes_on_from_the_latest_turn(services: tuple[Service, Service], tmp_path: Path) -> None:
    one, other = services
    await one.keep(one.job("try-1"), 1, 2, 3)
    job = await other.went_on("try-2", "try-0", "try-1")
    checkpoint = job.latest_checkpoint
    assert checkpoint is not None
    assert (latest(job), checkpoint.spent_s, checkpoint.lost) == ((3, "try-1 3"), 1.5, ("kernel",))
    assert (checkpoint.borrowed, job.failures, other.checkpoint_store.bytes) == ("try-1", [], 0)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(tmp_path))


async def test_its_next_try_has_all_turns_that_led_there_and_none_besides(services: tuple[Service, Service]) -> None:
    one, other = services
    first = one.job("try-1")
    await one.keep(first, 1, 2, 3)
    second = await other.went_on("try-2", "try-1")
    await one.keep(first, 4, 5)  # it was only cut off
    await other.keep(second, 4)
    assert await one.shared.turns("try-2") == [1, 2, 3, 4]
    assert latest(await one.went_on("try-3", "try-2", "try-1")) == (4, "try-2 4")
    fork = one.job("fork", ResumePoint(parents=("try-2", "try-1"), turn=2, parent="r"))
    await one.shared.restore(fork, unpack)
    assert latest(fork) == (2, "try-1 2")
    assert fork.forked_from == {"id": "r", "turn": 2, "lost": ["kernel"]}


async def test_who_ends_erases_its_own_and_not_what_it_has_borrowed(
    services: tuple[Service, Service], tmp_path: Path
) -> None:
    one, other = services
    await one.keep(one.job("try-1"), 1, 2)
    second = await other.went_on("try-2", "try-1")
    await other.keep(second, 3)
    other.checkpoint_store.ended(second, keep=False)
    await other.shared.erase(other.erased)
    assert [path.name for path in files(tmp_path)] == ["1", "2"]
    assert await one.shared.turns("try-2") == []


@pytest.mark.parametrize("how", ["changed", "of another version"])
async def test_one_that_is_damaged_is_passed_over(how: str, services: tuple[Service, Service], tmp_path: Path) -> None:
    one, other = services
    text = secrets.token_hex(4000)
    await one.keep(one.job("try-1"), 1, 2, text=text)
    [last] = [path for path in files(tmp_path) if path.name == "2"]
    content = last.read_bytes()
    if how == "changed":
        last.write_bytes(content[:2000] + bytes([content[2000] ^ 1]) + content[2001:])
    else:
        await one.keep(one.job("try-1b"), 2, text="odd")
        [odd] = [path for path in files(tmp_path) if path.parent != last.parent]
        odd.rename(last)
    assert latest(await other.went_on("try-2", "try-1")) == (1, text)
    for path in files(tmp_path):
        path.write_bytes(b"nothing")
    job = await other.went_on("try-3", "try-1")
    assert job.latest_checkpoint is None
    assert [failure.kind for failure in job.failures] == [FailureKind.SESSION_LOST]
    assert "restarts from its row" in job.failures[0].reason
    with pytest.raises(CallerError, match="is lost"):
        await other.shared.restore(other.job("fork", ResumePoint(parents=("try-1",), turn=1)), unpack)


async def test_nobody_goes_on_with_another_row_or_with_what_another_client_had_under_the_id(
    services: tuple[Service, Service],
) -> None:
    one, other = services
    await one.keep(one.job("r"), 1)
    assert (await other.went_on("try-2", "r", row={"task": 2})).latest_checkpoint is None
    for client, there in (("default", True), ("bob", False)):
        job = replace(other.job("r", ResumePoint(("r",), client=client)), client=client)
        await other.shared.restore(job, unpack)
        assert bool(job.checkpoints) is there


async def test_what_was_left_under_an_id_is_no_part_of_another_rollout(services: tuple[Service, Service]) -> None:
    one, _ = services
    await one.keep(one.job("r"), 1, 2, 3)
    again = one.job("r")
    await one.keep(again, 1, text="anew")
    assert await one.shared.turns("r") == [1]
    mine = ResumePoint(("r",))
    restarted = one.job("r", mine)
    await one.shared.restore(restarted, unpack)
    await one.keep(restarted, 2)
    assert await one.shared.turns("r") == [1, 2], "but one that is taken up again has what it had"


async def test_of_its_own_id_only_what_it_has_left_itself_is_gone_on_from(services: tuple[Service, Service]) -> None:
    """Another one of that id and row, of a service with another journal, is another sample."""
    one, other = services
    await one.keep(one.job("r"), 1, 2)
    again = other.job("r", ResumePoint(("r",)))
    await other.shared.restore(again, unpack)
    assert latest(again) == (2, "r 2"), "its service was restarted"
    another = replace(other.job("r", ResumePoint(("r",))), submitted_at=1.0)
    await other.shared.restore(another, unpack)
    assert another.latest_checkpoint is None


async def test_only_what_no_service_renews_goes_by_age(services: tuple[Service, Service], tmp_path: Path) -> None:
    one, other = services
    owned, borrower = one.job("owned"), one.job("borrower", ResumePoint(("lent",)))
    await one.keep(owned, 1)
    await one.keep(one.job("left"), 1)
    await other.keep(other.job("lent"), 1)
    await one.shared.restore(borrower, unpack)
    for path in files(tmp_path):
        os.utime(path.parent, (time.time() - ORPHAN_S - 60,) * 2)
    await one.shared.renew([*owned.checkpoints.values(), *borrower.checkpoints.values()])
    third = Service(tmp_path)
    await third.keep(third.job("mine"), 1)
    kept = {rollout: await one.shared.turns(rollout) for rollout in ("owned", "lent", "left", "mine")}
    assert kept == {"owned": [1], "lent": [1], "left": [], "mine": [1]}


async def test_a_write_that_fails_costs_no_rollout(services: tuple[Service, Service], tmp_path: Path) -> None:
    one, _ = services
    job = one.job("try-1")
    (tmp_path / "rollouts").rename(tmp_path / "away")
    (tmp_path / "rollouts").write_text("no folder")
    await one.keep(job, 1)
    assert latest(job) == (1, "try-1 1")


def test_a_folder_that_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (Path(os.path.relpath(tmp_path)), tmp_path / "none", file, Path("/proc")):
        with pytest.raises(CallerError) as error:
            SharedCheckpoints(path)
        assert (error.value.field, str(path) in str(error.value)) == ("checkpoint_folder", True)


async def test_a_fork_that_is_refused_leaves_those_of_another_alone() -> None:
    pipeline = Bench(PipelineSettings(checkpoint_s=1e-3), Keeping()).pipeline()
    pipeline.start()
    parent = await pipeline.accept(JobRequest({"plan": {"run": [Act("held")]}}, id="parent"))
    await until(lambda: parent.checkpoints)

    async def fork(*ids: str) -> list[Job]:
        return await pipeline.fork(parent, 1, ForkRequest(ids=[*ids]).to_requests(parent, len(ids)))

    [first] = await fork("a")
    await pipeline.accept(JobRequest({"another": "row"}, id="taken"))
    with pytest.raises(JobConflict):
        await fork("a", "new", "taken")
    await asyncio.sleep(0.1)
    assert not first.state.terminal
    assert await fork("a") == [first], "asked for again it is the same one"
    assert pipeline.store.get("new") is None, "none of them was begun"
    await pipeline.close()
