# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The pipeline in virtual time: its invariants over random schedules, who is blamed for a failure, and what a job is
charged for."""

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gym_prorl.failures import FailureKind, InfrastructureError, Stage
from nemo_gym_prorl.rollout.api.schemas import job_json
from nemo_gym_prorl.rollout.job import IllegalTransition, Job, JobState
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.settings import Budgets, PipelineSettings, PoolSizes
from tests.rollout.handlers import (
    ENDINGS,
    RETURNS_OF_EVAL,
    RETURNS_OF_ON_FAILURE,
    RETURNS_OF_RUN,
    Act,
    Bench,
    FastSettings,
    PlannedHandler,
)
from tests.rollout.virtual_time import run_in_virtual_time


BUDGETS = Budgets(init=10.0, run=20.0, eval=10.0)
GRACE_S = 1.0
RELEASE_S = 5.0

faults = [*ENDINGS, *RETURNS_OF_RUN, *RETURNS_OF_EVAL]
acts = st.builds(
    Act,
    st.sampled_from(["ok"] * len(faults) + ["deaf"] * 3 + faults),
    st.sampled_from([0.0, 1.0, 9.0, 30.0]),
)
plans = st.fixed_dictionaries(
    {}, optional={name: st.lists(acts, min_size=1, max_size=3) for name in ("init", "run", "eval", "release")}
)
requests = st.builds(
    lambda plan, client, priority, on_failure: JobRequest(
        {"plan": plan, "on_failure": on_failure}, client=client, priority=priority
    ),
    plans,
    st.sampled_from("ab"),
    st.integers(0, 1),
    st.sampled_from(["answer"] * 5 + ["raise", "exit", *RETURNS_OF_ON_FAILURE]),
)
sizes = st.builds(
    PoolSizes, init=st.integers(1, 3), ready=st.integers(0, 2), run=st.integers(1, 3), eval=st.integers(1, 2)
)
arrivals = st.lists(
    st.tuples(requests, st.sampled_from([0.0, 0.5, 7.0]), st.none() | st.sampled_from([0.0, 1.5, 12.0, 40.0])),
    min_size=1,
    max_size=12,
)


@given(sizes, arrivals)
@settings(max_examples=100)
def test_every_job_has_one_outcome_and_no_bound_is_broken(
    pools: PoolSizes, schedule: list[tuple[JobRequest, float, float | None]]
) -> None:
    async def play() -> None:
        bench = Bench(
            FastSettings(
                stages=pools,
                budgets=BUDGETS,
                release_timeout_s=RELEASE_S,
                cancel_grace_s=GRACE_S,
            )
        )
        pipeline, handler = bench.pipeline(), bench.handler
        ended: list[str] = []
        pipeline.on_finish.append(lambda job: 1 / 0)  # type: ignore[arg-type, return-value]
        pipeline.on_finish.append(lambda job: ended.append(job.id))
        jobs: list[Job] = []
        cancellations: list[asyncio.Task[None]] = []

        async def cancel(job: Job, after: float) -> None:
            await asyncio.sleep(after)
            await pipeline.cancel(job)
            assert job.state.terminal, "cancel answers when the job is over"

        for request, pause, cancel_after in schedule:
            await asyncio.sleep(pause)
            job = pipeline.submit(request)
            jobs.append(job)
            if cancel_after is not None:
                cancellations.append(asyncio.create_task(cancel(job, cancel_after)))
        assert await pipeline.drain()
        await asyncio.gather(*cancellations)
        await asyncio.sleep(300)  # whatever was abandoned comes back by then

        # 1: exactly one terminal outcome each, and it agrees with the state
        assert sorted(ended) == sorted(job.id for job in jobs)
        for job in jobs:
            assert job.outcome is not None
            assert job.outcome.state is job.state
            assert (job.outcome.reward is not None) == (job.state is JobState.SUCCEEDED)
            assert (job.outcome.failure is None) == (job.state is JobState.SUCCEEDED)
        # 2: pools are never exceeded (an abandoned call is no longer the pool's) and all slots are back
        deaf = any(act["how"] == "deaf" for job in jobs for acts_ in job.row["plan"].values() for act in acts_)
        for stage in Stage:
            assert deaf or handler.most_inside[stage] <= pools.of(stage)
            assert pipeline.scheduler.working(stage) == pipeline.scheduler.waiting(stage) == 0
        assert deaf or handler.most_sessions <= pools.run + pools.ready
        assert pipeline.scheduler.sessions == 0
        # every session was released, once
        assert all(count == 1 for count in handler.releases.values())
        # 3: the clock runs only while a stage works: no job is charged for more than its own attempts
        for job in jobs:
            for stage, spent in job.times.items():
                assert spent.worked_s <= spent.attempts * (BUDGETS.of(stage) + GRACE_S) + 1e-6

    run_in_virtual_time(play())


@given(st.integers(2, 20), st.sampled_from([Stage.INIT, Stage.RUN, Stage.EVAL]))
@settings(max_examples=15)
def test_waiting_costs_nothing(crowd: int, bottleneck: Stage) -> None:
    """Each job works just under its budget; with one slot the last one waits many budgets long, and succeeds."""

    async def play() -> None:
        pools = PoolSizes(**{**{"init": 9, "ready": 9, "run": 9, "eval": 9}, bottleneck.value: 1})
        bench = Bench(PipelineSettings(stages=pools, budgets=BUDGETS))
        pipeline = bench.pipeline()
        work = BUDGETS.of(bottleneck) - 0.5
        jobs = [pipeline.submit(JobRequest({"plan": {bottleneck.value: [Act("ok", work)]}})) for _ in range(crowd)]
        assert await pipeline.drain()
        assert {job.state for job in jobs} == {JobState.SUCCEEDED}
        waited = max(sum(spent.waited_s for spent in job.times.values()) for job in jobs)
        assert waited >= (crowd - 1) * work - 1e-6

    run_in_virtual_time(play())


def test_a_transition_that_the_table_lacks_is_refused() -> None:
    job = Job("r", {}, b"", "planned", "planned", 0.0)
    with pytest.raises(IllegalTransition):
        job.move(JobState.SUCCEEDED)
    assert job.state is JobState.QUEUED


def finished(row: dict[str, Any], settings_: PipelineSettings | None = None) -> Job:
    async def play() -> Job:
        pipeline = Bench(settings_ or PipelineSettings()).pipeline()
        job = pipeline.submit(JobRequest(row))
        assert await pipeline.drain(timeout=1000), "the job ends"
        assert not any(pipeline.scheduler.working(stage) for stage in Stage), "its slot is back"
        return job

    return run_in_virtual_time(play())


@pytest.mark.parametrize(
    ("stage", "how"), [*(("run", how) for how in RETURNS_OF_RUN), *(("eval", how) for how in RETURNS_OF_EVAL)]
)
def test_what_a_stage_may_not_return_fails_the_job_and_says_who_did_it(stage: str, how: str) -> None:
    job = finished({"plan": {stage: [Act(how)]}})
    assert job.state is JobState.FAILED
    assert job.outcome is not None
    assert job.outcome.failure is not None
    assert job.outcome.failure.kind is {"run": FailureKind.AGENT_RUN_ERROR, "eval": FailureKind.VERIFIER_ERROR}[stage]
    assert f"{stage} of handler 'planned' returned" in job.outcome.failure.reason


@pytest.mark.parametrize("how", [*RETURNS_OF_ON_FAILURE, "raise", "exit"])
def test_whatever_on_failure_does_the_job_fails_as_it_failed(how: str) -> None:
    job = finished({"plan": {"run": [Act("agent")]}, "on_failure": how})
    assert job.state is JobState.FAILED
    assert job.outcome is not None
    assert job.outcome.failure is not None
    assert job.outcome.failure.kind is FailureKind.AGENT_RUN_ERROR
    assert "the agent gave up" in job.outcome.failure.reason
    assert "on_failure of handler 'planned'" in job.outcome.failure.reason
    orjson.loads(orjson.dumps(job_json(job, with_result=True)))  # whoever lists or follows jobs is sent it


@pytest.mark.parametrize("how", ["interrupts", "generator's exit", "no text", "odd text", "group", "defect"])
def test_odd_exceptions_are_failures_that_everybody_can_read(how: str) -> None:
    job = finished({"plan": {"run": [Act(how)]}})
    assert job.outcome is not None
    failure = job.outcome.failure
    assert failure is not None
    orjson.dumps([failure.reason, failure.kind.value, failure.traceback])
    assert (failure.traceback is None) == (how in ("odd text", "group"))
    if how == "group":
        assert failure.reason == "the sandbox is gone"
    if how == "defect":
        assert "KeyError: 'a bug'" in (failure.traceback or "")


def test_an_evaluation_whose_session_is_lost_is_a_whole_new_attempt() -> None:
    job = finished({"plan": {"eval": [Act("session lost"), Act()]}})
    assert job.state is JobState.SUCCEEDED
    assert [job.times[stage].attempts for stage in Stage] == [2, 2, 2]
    job = finished({"plan": {"eval": [Act("session lost")]}})
    assert job.state is JobState.FAILED
    assert [job.times[stage].attempts for stage in Stage] == [3, 3, 3]


HANG, DEAF = Act("ok", 3600.0), Act("deaf", 4.0)
UNAVAILABLE, AGENT, VERIFIER = (
    FailureKind.PROVIDER_UNAVAILABLE,
    FailureKind.AGENT_RUN_ERROR,
    FailureKind.VERIFIER_ERROR,
)
OWN_KIND = (UNAVAILABLE, AGENT, VERIFIER)
BLAME: list[tuple[Act, tuple[FailureKind, FailureKind, FailureKind], tuple[int, int, int]]] = [
    (Act("infrastructure"), (UNAVAILABLE,) * 3, (2, 2, 2)),
    (Act("agent"), (AGENT,) * 3, (1, 1, 1)),
    (Act("defect"), OWN_KIND, (2, 2, 2)),
    (Act("exit"), OWN_KIND, (2, 2, 2)),
    (Act("cancels itself"), (AGENT,) * 3, (2, 2, 2)),
    (HANG, (UNAVAILABLE, FailureKind.AGENT_TIMEOUT, VERIFIER), (2, 1, 2)),
    (DEAF, (UNAVAILABLE, FailureKind.AGENT_TIMEOUT, VERIFIER), (2, 1, 2)),
]
"""Fault → kind of the failure and number of tries, in INIT, RUN and EVAL, where two tries are allowed."""


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize(
    ("act", "kinds", "tries"), BLAME, ids=["hang" if act is HANG else act.how for act, *_ in BLAME]
)
def test_who_is_blamed_for_a_fault_and_whether_it_is_tried_again(
    act: Act, kinds: tuple[FailureKind, ...], tries: tuple[int, ...], stage: Stage
) -> None:
    """And a neighbour that shares the pools does not notice."""

    async def play() -> None:
        budgets = Budgets(init=1.0, run=1.0, eval=1.0)
        settings_ = PipelineSettings(
            budgets=budgets, cancel_grace_s=0.1, max_attempts=2, stages=PoolSizes(init=2, ready=1, run=2, eval=2)
        )
        bench = Bench(settings_)
        pipeline = bench.pipeline()
        bad = pipeline.submit(JobRequest({"plan": {stage.value: [act]}}))
        neighbours = [pipeline.submit(JobRequest({}, client="other")) for _ in range(3)]
        assert await pipeline.drain()
        kind, count = kinds[[*Stage].index(stage)], tries[[*Stage].index(stage)]
        assert bad.outcome is not None
        assert bad.outcome.failure is not None
        assert (bad.outcome.failure.kind, bad.outcome.failure.stage, bad.outcome.reward) == (kind, stage, None)
        assert bad.state is (JobState.TIMED_OUT if act in (HANG, DEAF) else JobState.FAILED)
        spent = bad.times[stage]
        assert spent.attempts == count
        assert spent.worked_s <= count * 1.1 + 1e-6, "charged for its own tries"
        assert pipeline.abandoned == (count if act is DEAF else 0)
        if stage is not Stage.INIT:
            assert bad.outcome.result == {"partial": {"output": ["so far"]}}, "what was sampled is kept"
        assert {job.state for job in neighbours} == {JobState.SUCCEEDED}
        await asyncio.sleep(10.0)
        assert not bench.handler.sessions, "a session that comes up after its cancellation is released"

    run_in_virtual_time(play())


@pytest.mark.parametrize("stage", Stage)
def test_what_a_stage_has_worked_so_far_is_said_while_it_works(stage: Stage) -> None:
    async def play() -> None:
        pipeline = Bench(PipelineSettings()).pipeline()
        job = pipeline.submit(JobRequest({"plan": {stage.value: [Act("ok", 30.0)]}}))
        for seconds in (10.0, 20.0, 30.0):
            await asyncio.sleep(10)
            assert job_json(job, with_result=False)["timings"][stage]["worked_s"] == pytest.approx(seconds)
        await pipeline.wait(job)
        assert job.timings() == job.times

    run_in_virtual_time(play())


@pytest.mark.parametrize("cancel_after_s", [None, 0.5, 4.0])
@pytest.mark.parametrize("stage", Stage)
def test_a_retry_comes_after_a_pause_that_holds_no_slot_and_can_be_cancelled(
    stage: Stage, cancel_after_s: float | None
) -> None:
    """An outage of a second, or of five, of what a stage needs costs no rollout."""

    async def play() -> None:
        now = asyncio.get_running_loop().time
        pipeline = Bench(PipelineSettings(stages=PoolSizes(init=1, ready=0, run=1, eval=1))).pipeline()
        job = pipeline.submit(JobRequest({"plan": {stage.value: [Act("infrastructure")] * 2 + [Act()]}}))
        if cancel_after_s is not None:
            await asyncio.sleep(cancel_after_s)
            neighbour = pipeline.submit(JobRequest({}))
            await pipeline.wait(neighbour)
            assert (neighbour.state, now()) == (JobState.SUCCEEDED, cancel_after_s), "the slot was free"
            await pipeline.cancel(job)
            assert (job.state, now()) == (JobState.CANCELLED, cancel_after_s)
            return
        await pipeline.wait(job)
        assert (job.state, job.times[stage].attempts) == (JobState.SUCCEEDED, 3)
        assert 0.8 * (1 + 5) <= now() <= 1.2 * (1 + 5)
        assert sum(spent.waited_s for spent in job.times.values()) == pytest.approx(now()), "the pause is waiting"

    run_in_virtual_time(play())


def test_a_release_that_hangs_fails_the_attempt_and_nothing_is_scored() -> None:
    """Scoring while the agent may still act would be wrong: the attempt is lost, the slot is not."""
    job = finished(
        {"plan": {"release": [Act("deaf", 1000.0)]}}, PipelineSettings(max_attempts=1, release_timeout_s=5.0)
    )
    assert job.outcome is not None
    assert job.outcome.failure is not None
    assert (job.state, job.outcome.failure.kind) == (JobState.FAILED, FailureKind.SESSION_RELEASE_FAILED)
    assert job.times[Stage.EVAL].attempts == 0


# -- waiting is charged to no budget ------------------------------------------------------------------------------


class Waiting(PlannedHandler):
    """Its agent waits for a backend through the first seconds of each RUN, and says so after it was asked in vain."""

    def __init__(self, waits_s: float, vain: float = 0, instead: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.waits_s, self.asked, self.vain, self.instead = waits_s, 0, vain, instead

    async def waited(self, job: Job) -> float:
        self.asked += 1
        if self.asked <= self.vain and self.instead is not None:
            await self.instead()
        return self.waits_s


async def unreachable() -> None:
    raise InfrastructureError("busy", kind=FailureKind.TRANSPORT_PEER_DROP)


async def hang() -> None:
    await asyncio.sleep(1e6)


def waited(handler: Waiting, seconds: float) -> Job:
    """A rollout whose RUN takes so long."""

    async def work() -> Job:
        pipeline = Bench(PipelineSettings(budgets=BUDGETS, max_attempts=1), handler).pipeline()
        job = pipeline.submit(JobRequest({"plan": {"run": [Act("ok", seconds)]}}))
        await pipeline.wait(job)
        await pipeline.close()
        return job

    return run_in_virtual_time(work())


@pytest.mark.parametrize(
    ("handler", "state"),
    [
        (lambda: Waiting(3000.0), JobState.SUCCEEDED),
        (lambda: Waiting(3000.0, 20, unreachable), JobState.SUCCEEDED),
        (lambda: Waiting(3000.0, 20, hang), JobState.SUCCEEDED),
        (lambda: Waiting(100.0), JobState.TIMED_OUT),
    ],
    ids=["said at once", "unreachable at first", "hangs at first", "too little"],
)
def test_what_an_agent_waits_for_a_backend_is_not_its_time(handler: Callable[[], Waiting], state: JobState) -> None:
    waiting = handler()
    job = waited(waiting, 3015.0)
    assert job.state is state
    assert job.times[Stage.RUN].waited_s == pytest.approx(waiting.waits_s)
    assert job.times[Stage.RUN].worked_s == pytest.approx(15.0 if state is JobState.SUCCEEDED else BUDGETS.run)


@pytest.mark.parametrize("instead", [unreachable, hang])
def test_a_server_that_never_says_holds_a_budget_up_for_minutes_only(instead: Callable[[], Any]) -> None:
    job = waited(Waiting(0.0, float("inf"), instead), 1e7)
    assert job.state is JobState.TIMED_OUT
    assert job.times[Stage.RUN].worked_s + job.times[Stage.RUN].waited_s < BUDGETS.run + 200.0
