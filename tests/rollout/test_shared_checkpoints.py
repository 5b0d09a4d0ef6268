# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a folder of several services: what one writes another reads, whatever became of the first."""

import asyncio
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.failures import CallerError, FailureKind
from nemo_gym_prorl.rollout.checkpoints import ORPHAN_S, Begin, Checkpoint, Checkpoints, SharedCheckpoints
from nemo_gym_prorl.rollout.job import Job
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.rows import row_digest


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
        self.shelf = Checkpoints(1 << 20, 60.0, lambda _, some: self.erased.extend(some), lambda: 0.0, self.shared)

    def job(self, name: str, begin: Begin | None = None, row: Any = None) -> Job:
        asked = JobRequest(row or ROW, begin=begin)
        forked = asked.forked_from
        return Job(name, asked.row, asked.digest(), "e", "h", 0.0, shelf=self.shelf, begin=begin, forked_from=forked)

    async def keep(self, job: Job, *turns: int, text: str | None = None) -> None:
        for turn in turns:
            state = State(text or f"{job.id} {turn}")
            await job.keep_checkpoint(Checkpoint(turn, state, 10, turn / 2, ("kernel",)))

    async def went_on(self, name: str, *tries: str, row: Any = None) -> Job:
        job = self.job(name, Begin(tries), row)
        await self.shared.give(job, unpack)
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
    assert (checkpoint.borrowed, job.failures, other.shelf.bytes) == ("try-1", [], 0)
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
    fork = one.job("fork", Begin(parents=("try-2", "try-1"), turn=2, parent="r"))
    await one.shared.give(fork, unpack)
    assert latest(fork) == (2, "try-1 2")
    assert fork.forked_from == {"id": "r", "turn": 2, "lost": ["kernel"]}


async def test_who_ends_erases_its_own_and_not_what_it_has_borrowed(
    services: tuple[Service, Service], tmp_path: Path
) -> None:
    one, other = services
    await one.keep(one.job("try-1"), 1, 2)
    second = await other.went_on("try-2", "try-1")
    await other.keep(second, 3)
    other.shelf.ended(second, keep=False)
    await other.shared.erase(other.erased)
    assert [path.name for path in files(tmp_path)] == ["1", "2"]
    assert await one.shared.turns("try-2") == []


@pytest.mark.parametrize("how", ["cut", "emptied", "changed", "of another version", "a pipe", "gone"])
async def test_one_that_is_damaged_is_passed_over(how: str, services: tuple[Service, Service], tmp_path: Path) -> None:
    one, other = services
    text = secrets.token_hex(4000)
    await one.keep(one.job("try-1"), 1, 2, text=text)
    [last] = [path for path in files(tmp_path) if path.name == "2"]
    content = last.read_bytes()
    match how:
        case "cut":
            last.write_bytes(content[:-5])
        case "emptied":
            last.write_bytes(b"")
        case "changed":
            last.write_bytes(content[:2000] + bytes([content[2000] ^ 1]) + content[2001:])
        case "of another version":
            await one.keep(one.job("try-1b"), 2, text="odd")
            [odd] = [path for path in files(tmp_path) if path.parent != last.parent]
            odd.rename(last)
        case "a pipe":
            last.unlink()
            os.mkfifo(last)
        case _:
            last.unlink()
    assert latest(await other.went_on("try-2", "try-1")) == (1, text)
    for path in files(tmp_path):
        path.write_bytes(b"nothing")
    job = await other.went_on("try-3", "try-1")
    assert job.latest_checkpoint is None
    assert [failure.kind for failure in job.failures] == [FailureKind.SESSION_LOST]
    assert "begins anew" in job.failures[0].reason
    with pytest.raises(CallerError, match="is gone"):
        await other.shared.give(other.job("fork", Begin(parents=("try-1",), turn=1)), unpack)


async def test_what_is_no_file_is_no_turn_and_no_way_to_one(services: tuple[Service, Service], tmp_path: Path) -> None:
    one, other = services
    await one.keep(one.job("try-1"), 1, 2)
    await other.keep(await other.went_on("try-2", "try-1"), 3)
    assert await one.shared.turns("try-2") == [1, 2, 3]
    [after] = [path for path in files(tmp_path) if path.name == "after"]
    (after.parent / "4").mkdir()
    assert await one.shared.turns("try-2") == [1, 2, 3]
    for odd in (["x", "p"], [2, None], [2, 5], {}, 7):
        after.write_text(json.dumps(odd))
        assert await one.shared.turns("try-2") == [3]
    after.unlink()
    os.mkfifo(after)
    assert await asyncio.wait_for(one.shared.turns("try-2"), 10) == [3]


async def test_nobody_goes_on_with_another_row(services: tuple[Service, Service]) -> None:
    one, other = services
    await one.keep(one.job("try-1"), 1)
    assert (await other.went_on("try-2", "try-1", row={"task": 2})).latest_checkpoint is None


async def test_nobody_goes_on_with_what_another_client_had_under_the_id(services: tuple[Service, Service]) -> None:
    one, other = services
    await one.keep(one.job("r"), 1)
    for client, there in (("default", True), ("bob", False)):
        job = replace(other.job("r", Begin(("r",), client=client)), client=client)
        await other.shared.give(job, unpack)
        assert bool(job.checkpoints) is there


async def test_what_was_left_under_an_id_is_no_part_of_another_rollout(services: tuple[Service, Service]) -> None:
    one, _ = services
    await one.keep(one.job("r"), 1, 2, 3)
    again = one.job("r")
    await one.keep(again, 1, text="anew")
    assert await one.shared.turns("r") == [1]
    mine = Begin(("r",))
    restarted = one.job("r", mine)
    await one.shared.give(restarted, unpack)
    await one.keep(restarted, 2)
    assert await one.shared.turns("r") == [1, 2], "but one that is taken up again has what it had"


async def test_of_its_own_id_only_what_it_has_left_itself_is_gone_on_from(services: tuple[Service, Service]) -> None:
    """Another one of that id and row, of a service with another journal, is another sample."""
    one, other = services
    await one.keep(one.job("r"), 1, 2)
    again = other.job("r", Begin(("r",)))
    await other.shared.give(again, unpack)
    assert latest(again) == (2, "r 2"), "its service was restarted"
    another = replace(other.job("r", Begin(("r",))), submitted_at=1.0)
    await other.shared.give(another, unpack)
    assert another.latest_checkpoint is None


async def test_only_what_no_service_renews_goes_by_age(services: tuple[Service, Service], tmp_path: Path) -> None:
    one, other = services
    owned, borrower = one.job("owned"), one.job("borrower", Begin(("lent",)))
    await one.keep(owned, 1)
    await one.keep(one.job("left"), 1)
    await other.keep(other.job("lent"), 1)
    await one.shared.give(borrower, unpack)
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


def test_a_folder_is_known_by_any_path(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (tmp_path / "link").symlink_to(here)
    name = SharedCheckpoints(here).identity
    assert SharedCheckpoints(tmp_path / "link").identity == name
    assert SharedCheckpoints(there).identity != name


def test_a_fork_under_an_id_is_another_job() -> None:
    plain, fork = JobRequest(ROW), JobRequest(ROW, begin=Begin(("a",), ("p",), 2))
    assert plain.digest() == JobRequest(ROW, begin=Begin(("a",))).digest() == row_digest(ROW)
    assert fork.digest() != plain.digest()
