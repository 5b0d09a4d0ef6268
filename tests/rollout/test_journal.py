# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a service knows after its end, however that came: each accepted rollout has one outcome, and only one ever."""

import asyncio
import contextlib
import resource
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gym_prorl import filesystems
from nemo_gym_prorl.failures import CallerError, JobCancelled
from nemo_gym_prorl.rollout import service as service_module
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView, TokenForm, job_json
from nemo_gym_prorl.rollout.job import Job, JobState
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import Cursor, CursorExpired, JobConflict, JobRequest, RolloutForgotten
from nemo_gym_prorl.rollout.settings import PipelineSettings
from nemo_gym_prorl.rollout.storage import journal as journal_module
from nemo_gym_prorl.rollout.storage.journal import Journal, JournalUnavailable
from nemo_gym_prorl.rollout.storage.journal_records import Unfinished
from tests.rollout.handlers import Act, Bench, FastSettings
from tests.rollout.standalone import standalone
from tests.rollout.virtual_time import run_in_virtual_time


START = Cursor.parse("0")
WEEK = 7 * 24 * 3600.0
TOKEN = "open-sesame"


def opened(place: Path | str, keep_s: float = WEEK, keep_bytes: int = 2**30) -> Journal:
    return Journal(str(place), keep_s, keep_bytes)


@contextlib.asynccontextmanager
async def life(
    place: Path | str, settings_: PipelineSettings | None = None, **keep: Any
) -> AsyncIterator[tuple[Pipeline, Bench]]:
    """One life of a service."""
    bench = Bench(settings_ or FastSettings())
    pipeline = bench.pipeline(opened(place, **keep))
    pipeline.start()
    try:
        yield pipeline, bench
    finally:
        await pipeline.close()


async def run(pipeline: Pipeline, job_id: str, row: dict[str, Any] | None = None, **wishes: Any) -> Job:
    job = await pipeline.accept(JobRequest(row or {}, id=job_id, **wishes))
    assert await pipeline.wait(job, 60)
    return job


async def log_of(pipeline: Pipeline, after: Cursor = START) -> list[str]:
    jobs, _ = await pipeline.store.ended_after(after, 10_000, content=True)
    return [job.id for job in jobs]


def changed(folder: Path, statement: str, *given: Any) -> None:
    """Change the database of a service that does not run."""
    with contextlib.closing(sqlite3.connect(folder / "journal.sqlite")) as connection, connection:
        connection.execute(statement, given)


def told(job: Job) -> bytes:
    """All that anybody is told of a job."""
    with_tokens = job_json(job, with_result=True, tokens=TokenForm.PACKED)
    return orjson.dumps([with_tokens, job_json(job, with_result=True), job.row])


# -- whenever it ends -------------------------------------------------------------------------------------------------

acts = st.builds(
    lambda how, seconds: {"how": how, "seconds": seconds},
    st.sampled_from(["ok", "ok", "ok", "infrastructure", "agent", "defect"]),
    st.sampled_from([0.0, 1.0, 5.0]),
)
plans = st.fixed_dictionaries(
    {}, optional={name: st.lists(acts, min_size=1, max_size=2) for name in ("init", "run", "eval")}
)
arrivals = st.lists(
    st.tuples(plans, st.sampled_from([0.0, 0.5]), st.none() | st.sampled_from([0.0, 2.0]), st.booleans()),
    min_size=1,
    max_size=6,
)


class Told:
    """What the world outside knows of a service, at some moment and since."""

    def __init__(self) -> None:
        self.accepted: set[str] = set()
        self.log: list[str] = []
        self.outcomes: dict[str, bytes] = {}

    def copy(self) -> "Told":
        other = Told()
        other.accepted, other.log, other.outcomes = {*self.accepted}, [*self.log], {**self.outcomes}
        return other


class Crashes:
    """Copies of a journal's folder as ``kill -9`` would leave it, with what had been told by then."""

    def __init__(self, folder: Path, copies: Path, known: Told) -> None:
        self._folder, self._copies, self._known = folder, copies, known
        self.points: list[tuple[Path, Told]] = []

    def here(self) -> None:
        known = self._known.copy()
        copy = self._copies / str(len(self.points))
        shutil.copytree(self._folder, copy)
        self.points.append((copy, known))

    @contextlib.contextmanager
    def at_every_write(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """Before and behind each transaction, and in it, when all is written but the commit."""
        writing = Journal._writing

        @contextlib.contextmanager
        def writing_(journal: Journal) -> Iterator[Any]:
            self.here()
            with writing(journal) as connection:
                yield connection
                self.here()
            self.here()

        with patch.context() as patched:
            patched.setattr(Journal, "_writing", writing_)
            yield


@given(arrivals, st.randoms(use_true_random=False))
@settings(max_examples=8, deadline=None)
def test_whenever_a_service_dies_each_accepted_rollout_has_one_outcome_in_one_order(
    schedule: list[tuple[dict[str, Any], float, float | None, bool]], draw: Any
) -> None:
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        folder, known = Path(made, "journal"), Told()
        crashes = Crashes(folder, Path(made), known)

        async def first_life() -> None:
            async with life(folder) as (pipeline, _):

                def ended(job: Job) -> None:
                    known.log.append(job.id)
                    if not job.attached:
                        known.outcomes[job.id] = told(job)

                pipeline.on_finish.append(ended)
                with crashes.at_every_write(patch):
                    for number, (plan, pause, cancel_after, held) in enumerate(schedule):
                        await asyncio.sleep(pause)
                        request = JobRequest({"plan": plan, "text": "x" * 500}, id=f"r{number}")
                        if held:
                            job = pipeline.submit(JobRequest(request.row, attached=True), bounded=False)
                        else:
                            job = await pipeline.accept(request)
                            known.accepted.add(job.id)
                        if cancel_after is not None:
                            loop = asyncio.get_running_loop()
                            loop.call_later(cancel_after, pipeline.request_cancel, job, JobCancelled("not wanted"))
                    assert await pipeline.drain()
                    await asyncio.sleep(1)

        run_in_virtual_time(first_life())

        async def next_life(copy: Path, before: Told) -> None:
            async with life(copy) as (pipeline, _):
                store = pipeline.store
                begun = await log_of(pipeline)
                assert begun[: len(before.log)] == before.log, "what was told stays as it was told"
                for job_id, outcome in before.outcomes.items():
                    job = await store.fetch(job_id)
                    assert job is not None
                    assert told(job) == outcome
                assert await pipeline.drain()
                after = [job_id for job_id in await log_of(pipeline) if job_id.startswith("r")]
                assert len(after) == len({*after}), "one outcome each"
                assert {*after} >= before.accepted, "of all that were accepted"

        for copy, before in draw.sample(crashes.points, min(5, len(crashes.points))):
            run_in_virtual_time(next_life(copy, before))


async def test_a_disk_that_is_full_loses_nothing(tmp_path: Path) -> None:
    plan = {"run": [{"how": "ok", "seconds": 1.0}]}
    row = {"responses_create_params": {"input": "hi"}, "plan": plan}
    async with (
        standalone(TOKEN, str(tmp_path)) as there,
        RolloutClient(there.url, TOKEN, patience_s=0) as client,
    ):
        await client.submit(row, id="a")
        _, most = resource.prlimit(there.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(there.pid, resource.RLIMIT_FSIZE, (4096, most))
        for _ in range(2):
            with pytest.raises(ApiError, match=f"the journal at {tmp_path} cannot be written") as refused:
                await client.submit(row, id="b")
            assert refused.value.problem.type.endswith(":journal-fails")
            assert refused.value.problem.status == 503
        assert (await client.status()).journal
        waiting = await client.get("a", wait=1.5)
        assert not waiting.state.terminal, "nobody is told what is not on disk"
        assert not (await client.ended("0")).rollouts
        resource.prlimit(there.pid, resource.RLIMIT_FSIZE, (most, most))
        assert (await client.wait("a")).state is JobState.SUCCEEDED
        await client.submit(row, id="b")
        assert (await client.wait("b")).state is JobState.SUCCEEDED
        assert [job.id for job in (await client.ended("0")).rollouts] == ["a", "b"]
        assert (await client.status()).journal is None


class Breaking:
    """Lets as many commits of a journal fail as it is told, each after it has hung."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commits = 0
        self.hangs, self.may = threading.Event(), threading.Event()
        """A commit hangs; it may fail."""
        self.may.set()
        writing = Journal._writing

        @contextlib.contextmanager
        def breaking(journal: Journal) -> Iterator[Any]:
            with writing(journal) as connection:
                yield connection
                if self.commits:
                    self.commits -= 1
                    self.hangs.set()
                    assert self.may.wait(30)
                    raise OSError("the disk failed")

        monkeypatch.setattr(Journal, "_writing", breaking)


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> Breaking:
    return Breaking(monkeypatch)


async def test_a_commit_that_fails_refuses_new_jobs_and_writes_outcomes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaking: Breaking
) -> None:
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.05)
    async with life(tmp_path) as (pipeline, bench):
        job = await pipeline.accept(JobRequest({"plan": {"run": [Act("held")]}}, id="a"))
        for name in ("b", "never again"):
            breaking.commits = 1
            with pytest.raises(JournalUnavailable, match="the disk failed"):
                await pipeline.accept(JobRequest({}, id=name))
            await asyncio.sleep(1.2)
        await asyncio.sleep(0.2)
        breaking.commits = 2
        bench.handler.let_go.set()
        assert await pipeline.wait(job, 30)
        await run(pipeline, "b", {"another": "row"})
        assert await log_of(pipeline) == ["a", "b"]
        await pipeline.accept(JobRequest({"plan": {"run": [Act("ok", 60.0)]}}, id="c"))
    async with life(tmp_path) as (pipeline, _):
        assert await log_of(pipeline) == ["a", "b"]
        await pipeline.store.wait_for_recovery()
        assert [job.id for job in pipeline.store.live()] == ["c"], "what was refused is not begun"


async def test_a_commit_holds_more_jobs_than_an_old_sqlite_takes_in_a_statement(tmp_path: Path) -> None:
    ids = [f"r{number}" for number in range(600)]
    async with life(tmp_path) as (pipeline, _):
        journal = pipeline.store.journal
        assert journal is not None
        journal._writer.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 999)  # as on RHEL 8
        jobs = await asyncio.gather(*(pipeline.accept(JobRequest({"text": each}, id=each)) for each in ids))
        for job in jobs:
            assert await pipeline.wait(job, 60)
        told_before = [told(job) for job in jobs]
    async with life(tmp_path) as (pipeline, _):
        assert sorted(await log_of(pipeline)) == sorted(ids)
        found = await pipeline.store.fetch_all(ids)
        assert [told(found[each]) for each in ids] == told_before


async def test_who_holds_a_connection_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaking: Breaking
) -> None:
    """Of what it is told nothing is kept but that it was; a journal that hangs would hang a trainer's step."""
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.05)
    row = {"plan": {"run": [Act("ok", 0.3)]}}
    async with life(tmp_path) as (pipeline, _):
        kept = await pipeline.accept(JobRequest(row, id="kept"))
        journal = pipeline.store.journal
        assert journal is not None
        journal.failing = "no space left"
        held = [pipeline.submit(JobRequest(row, id="a", attached=True))]  # of which nothing is written ahead
        with pytest.raises(JournalUnavailable):
            pipeline.submit(JobRequest(row, id="another"))
        journal.failing = None
        breaking.may.clear()
        breaking.commits = 1
        assert await asyncio.to_thread(breaking.hangs.wait, 30), "it hangs"
        await asyncio.wait_for(asyncio.shield(pipeline.answered(held[0])), 10)
        assert (JobView.of(held[0]).reward, kept.outcome) == (None, None), "others are told what is on the disk"
        for job in held:
            assert job.outcome is not None
            assert job.outcome.reward == 1.0
            pipeline.store.deliver(job)
            if len(held) == 1:  # the id is free
                held.append(pipeline.submit(JobRequest(row, id="a", attached=True)))
                await asyncio.wait_for(asyncio.shield(pipeline.answered(held[1])), 10)
        await asyncio.wait_for(pipeline.cancel(held[1]), 10)
        assert not await pipeline.drain(0.1)
        breaking.may.set()
        assert await pipeline.drain(30)
        log = await log_of(pipeline)
        assert sorted(log) == ["a", "a", "kept"]
        assert [job.state for job in (*held, kept)] == [JobState.SUCCEEDED] * 3
        assert +pipeline.store.states == {JobState.SUCCEEDED: 3}
        assert pipeline.store.retained_bytes == sum(job.size for job in (*held, kept)), "theirs are small"
    async with life(tmp_path) as (pipeline, _):
        assert await log_of(pipeline) == log


def test_nobody_else_may_read_it_whoever_made_the_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    journal = opened(tmp_path)
    modes = {path.name: path.stat().st_mode & 0o077 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm"), 0)
    asyncio.run(journal.close())


async def test_one_that_is_damaged_holds_up_no_other(tmp_path: Path) -> None:
    async with life(tmp_path) as (pipeline, _):
        for name in "abc":
            await pipeline.accept(JobRequest({"plan": {"run": [Act("held")]}}, id=name))
    changed(tmp_path, "UPDATE jobs SET row = x'00' WHERE id = 'b'")
    async with life(tmp_path) as (pipeline, bench):
        bench.handler.let_go.set()
        async with asyncio.timeout(10):
            assert await pipeline.store.fetch("b") is None
        await run(pipeline, "b", {"n": "another"})
        assert await pipeline.drain(30)
        assert sorted(await log_of(pipeline)) == ["a", "b", "c"]


async def test_an_outcome_that_is_damaged_is_trained_on_by_nobody_and_the_others_are_read(tmp_path: Path) -> None:
    async with life(tmp_path) as (pipeline, _):
        for name in "abc":
            await run(pipeline, name, {"n": name * (1 + ord(name) % 3)})
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as connection:
        contents = dict(connection.execute("SELECT id, content FROM outcomes"))
    content = contents["b"]
    for wrong in (content[:20] + bytes([content[20] ^ 1]) + content[21:], b"nothing", contents["c"]):
        changed(tmp_path, "UPDATE outcomes SET content = ? WHERE id = 'b'", wrong)
        async with life(tmp_path) as (pipeline, _):
            jobs, _ = await pipeline.store.ended_after(START, 10, content=True)
            assert [job.id for job in jobs] == [*"abc"]
            for job in jobs:
                assert job.outcome is not None
                assert job.outcome.masked is (job.id == "b")
                assert (job.outcome.reward is None) is (job.id == "b")
            one = await pipeline.store.fetch("b")
            assert one is not None
            assert one.state is JobState.FAILED
            assert "is damaged" in JobView.of(one).failure.reason  # type: ignore[union-attr]


# -- lives that end as they should ------------------------------------------------------------------------------------


async def test_a_shutdown_is_no_end_of_a_rollout(tmp_path: Path) -> None:
    async with life(tmp_path) as (pipeline, bench):
        kept = await pipeline.accept(JobRequest({"plan": {"run": [Act("held")]}}, id="kept"))
        held = pipeline.submit(JobRequest({"plan": {"run": [Act("held")]}}, attached=True))
        while len(bench.handler.sessions) < 2:
            await asyncio.sleep(0.01)
    assert not bench.handler.sessions, "its sandbox is gone"
    assert kept.outcome is None
    assert held.outcome is not None, "its caller is told"
    async with life(tmp_path) as (pipeline, bench):
        assert await log_of(pipeline) == [held.id]
        bench.handler.let_go.set()
        again = await pipeline.store.fetch("kept")
        assert again is not None
        assert await pipeline.wait(again, 60)
        assert again.state is JobState.SUCCEEDED
        assert await pipeline.store.fetch(held.id) is None, "its caller has it, or none of what there was"


@pytest.fixture
def slow_reading(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A journal of which nothing is found before the event is set, and that breaks once then."""
    may, found, broke = threading.Event(), Journal.found, False

    def slow(journal: Journal, ids: Sequence[str]) -> list[Unfinished]:
        nonlocal broke
        assert may.wait(60)
        if not broke:
            broke = True
            raise OSError("the disk failed")
        return found(journal, ids)

    monkeypatch.setattr(Journal, "found", slow)
    monkeypatch.setattr(service_module, "_RETRY_S", 0.05)
    return may


async def test_jobs_of_an_earlier_life_are_waited_for_while_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_reading: threading.Event
) -> None:
    """And nothing else is: a service of which a hundred thousand were accepted serves at once."""
    monkeypatch.setattr(service_module, "_RECOVERY_BATCH", 3)
    slow_reading.set()
    names = [f"job-{number}" for number in range(10)]
    async with life(tmp_path) as (pipeline, _):
        for name in names:
            await pipeline.accept(JobRequest({"plan": {"run": [Act("held")]}}, id=name, group="g"))
    slow_reading.clear()
    async with life(tmp_path) as (pipeline, bench):
        bench.handler.let_go.set()
        new = await pipeline.accept(JobRequest({}))
        assert await pipeline.wait(new, 30)
        assert await log_of(pipeline) == [new.id]
        another = await pipeline.accept(JobRequest({}, id="another"))
        assert await pipeline.wait(another, 30), "it is none of them"
        assert not await pipeline.drain(0.1)
        pipeline.resume()
        asked = [
            asyncio.ensure_future(each)
            for each in (
                pipeline.store.fetch("job-9"),
                pipeline.store.in_group("g"),
                pipeline.store.page(state=None, group=None, after=0, limit=100, content=False),
                pipeline.accept(JobRequest({"plan": {"run": [Act("held")]}}, id="job-9", group="g")),
                pipeline.drain(),
            )
        ]
        done, _ = await asyncio.wait(asked, timeout=0.3)
        assert not done
        slow_reading.set()
        job, group, page, again, drained = await asyncio.wait_for(asyncio.gather(*asked), 30)
        assert job is again
        assert {each.id for each in group} == {*names}
        assert {each.id for each in page} == {*names, new.id, "another"}
        assert drained
        assert sorted(await log_of(pipeline)) == sorted([*names, new.id, "another"]), "each once"


async def test_ids_are_known_whatever_memory_has(tmp_path: Path) -> None:
    small = PipelineSettings(retain_bytes=1)
    async with life(tmp_path, small) as (pipeline, _):
        await run(pipeline, "a", {"n": 1})
        assert pipeline.store.get("a") is None
        first = await pipeline.store.fetch("a")
        assert first is not None
        assert (await pipeline.accept(JobRequest({"n": 1}, id="a"))).state is JobState.SUCCEEDED
        with pytest.raises(JobConflict, match="another row"):
            await pipeline.accept(JobRequest({"n": 2}, id="a"))
        twice = [pipeline.accept(JobRequest({"n": 1}, id="b")) for _ in range(2)]
        one, other = await asyncio.gather(*twice)
        assert one is other
    async with life(tmp_path, small) as (pipeline, _):
        again = await pipeline.store.fetch("a")
        assert again is not None
        assert told(again) == told(first)
        page = await pipeline.store.page(state=None, group=None, after=0, limit=10, content=False)
        assert [job.id for job in page] == ["a", "b"]


async def test_the_oldest_are_forgotten_and_stay_known(tmp_path: Path) -> None:
    none_kept = PipelineSettings(retain_bytes=1)
    async with life(tmp_path, none_kept, keep_bytes=5000) as (pipeline, _):
        start = pipeline.store.cursor
        for number in range(30):
            await run(pipeline, f"r{number}", {"n": number})
        journal = pipeline.store.journal
        assert journal is not None
        with pytest.raises(CursorExpired):
            await pipeline.store.ended_after(start, 10)
    assert journal.bytes < 8000
    assert 0 < journal.end - journal.first < 30
    async with life(tmp_path, none_kept) as (pipeline, _):
        with pytest.raises(RolloutForgotten):
            await pipeline.accept(JobRequest({"n": 0}, id="r0"))
        with pytest.raises(RolloutForgotten):
            await pipeline.store.fetch("r0")
        assert await pipeline.store.fetch("r29") is not None


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "said"),
    [("here", "relative"), ("/proc/nowhere", "cannot be opened")],
)
def test_a_place_that_is_none_says_so(place: str, said: str) -> None:
    with pytest.raises(CallerError, match=said) as refused:
        opened(place)
    assert refused.value.field == "journal"


def test_a_shared_disk_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = f"21 1 0:20 / {tmp_path} rw - nfs4 server:/home rw\n"
    assert filesystems.filesystem_type_in(mounts, str(tmp_path / "a")) == "nfs4"
    monkeypatch.setattr(filesystems, "filesystem_type", lambda path: "lustre")
    with pytest.raises(CallerError, match="this machine's own disk"):
        opened(tmp_path)


async def test_what_cannot_be_read_is_not_begun_with(tmp_path: Path) -> None:
    for name, statement in (
        ("old", "CREATE TABLE prorl_meta (name VARCHAR PRIMARY KEY, value VARCHAR)"),
        ("new", "ALTER TABLE outcomes ADD COLUMN more"),
    ):
        folder = tmp_path / name
        if name == "new":
            await opened(folder).close()
        folder.mkdir(exist_ok=True)
        changed(folder, statement)
        for _ in range(2):
            with pytest.raises(CallerError, match="was written by another version") as refused:
                opened(folder)
            assert "\n" not in str(refused.value)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "journal.sqlite").write_bytes(b"no database at all, whatever it says" * 100)
    with pytest.raises(CallerError, match="file is not a database"):
        opened(broken)
