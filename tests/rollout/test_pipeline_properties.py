# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""DESIGN §5, invariants 1 to 3, over random jobs, faults, budgets and cancellations, in virtual time."""

import asyncio
from dataclasses import asdict
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gym_prorl.failures import FailureKind, Stage
from nemo_gym_prorl.rollout.job import Budgets, Job, JobState, Progress
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.scheduler import PoolSizes
from nemo_gym_prorl.rollout.schemas import job_json
from nemo_gym_prorl.rollout.service import PipelineSettings
from tests.rollout.handlers import (
    ENDINGS,
    RETURNS_OF_EVAL,
    RETURNS_OF_ON_FAILURE,
    RETURNS_OF_RUN,
    Act,
    Bench,
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
sizes = st.builds(PoolSizes, st.integers(1, 3), st.integers(0, 2), st.integers(1, 3), st.integers(1, 2))
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
            PipelineSettings(
                stages=pools, budgets=BUDGETS, release_s=RELEASE_S, cancel_grace_s=GRACE_S, retry_delay_s=0.1
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


def finished(row: dict[str, Any], settings_: PipelineSettings | None = None) -> Job:
    """The job of one row, when it is over."""

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


@pytest.mark.parametrize("turns", [10**400, 2**64, -(10**400), -1, True, "3", None])
def test_progress_that_nobody_could_be_told_is_bounded(turns: Any) -> None:
    told = asdict(Progress.of(Progress(turns=turns, tool_calls=turns)))
    assert 0 <= told["turns"] < 2**63
    orjson.dumps(told)


@pytest.mark.parametrize("how", ["interrupts", "generator's exit", "no text", "odd kind", "group", "defect"])
def test_odd_exceptions_are_failures_that_everybody_can_read(how: str) -> None:
    job = finished({"plan": {"run": [Act(how)]}})
    assert job.outcome is not None
    failure = job.outcome.failure
    assert failure is not None
    orjson.dumps([failure.reason, failure.kind.value, failure.traceback])
    assert (failure.traceback is None) == (how in ("odd kind", "group"))
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


class Waiting(PlannedHandler):
    """Its agent waits for a backend through the first seconds of each RUN."""

    waits_s = 0.0

    async def waited(self, job: Job) -> float:
        return self.waits_s


@pytest.mark.parametrize(("waits_s", "state"), [(30.0, JobState.SUCCEEDED), (10.0, JobState.TIMED_OUT)])
def test_what_an_agent_waits_for_a_backend_is_not_its_time(waits_s: float, state: JobState) -> None:
    async def play() -> None:
        handler = Waiting()
        handler.waits_s = waits_s
        pipeline = Bench(PipelineSettings(budgets=BUDGETS), handler).pipeline()
        job = pipeline.submit(JobRequest({"plan": {"run": [Act("ok", 45.0)]}}))
        assert await pipeline.drain()
        assert job.state is state
        assert job.times[Stage.RUN].waited_s == pytest.approx(waits_s)
        assert job.times[Stage.RUN].worked_s == pytest.approx(15.0 if state is JobState.SUCCEEDED else BUDGETS.run)

    run_in_virtual_time(play())


def test_an_agent_that_waits_for_a_backend_can_be_cancelled() -> None:
    async def play() -> None:
        handler = Waiting()
        handler.waits_s = 1e9
        pipeline = Bench(PipelineSettings(budgets=BUDGETS), handler).pipeline()
        job = pipeline.submit(JobRequest({"plan": {"run": [Act("ok", 1e6)]}}))
        assert not await pipeline.wait(job, 500.0)
        await pipeline.cancel(job)
        assert job.state is JobState.CANCELLED

    run_in_virtual_time(play())
