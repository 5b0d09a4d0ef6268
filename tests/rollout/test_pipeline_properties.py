# SPDX-License-Identifier: Apache-2.0
"""DESIGN §5, invariants 1 to 3, over random jobs, faults, budgets and cancellations, in virtual time."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gym_prorl.failures import Stage
from nemo_gym_prorl.rollout.job import Budgets, Job, JobState
from nemo_gym_prorl.rollout.request import JobRequest, PipelineSettings
from nemo_gym_prorl.rollout.stages import PoolSizes
from tests.rollout.handlers import ENDINGS, Act, Bench
from tests.rollout.virtual_time import run_in_virtual_time


BUDGETS = Budgets(init=10.0, run=20.0, eval=10.0)
GRACE_S = 1.0
RELEASE_S = 5.0

acts = st.builds(Act, st.sampled_from(["ok", "ok", "ok", "deaf", *ENDINGS]), st.sampled_from([0.0, 1.0, 9.0, 30.0]))
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
    st.sampled_from(["answer", "answer", "raise"]),
)
sizes = st.builds(PoolSizes, st.integers(1, 3), st.integers(0, 2), st.integers(1, 3), st.integers(1, 2))
arrivals = st.lists(
    st.tuples(requests, st.sampled_from([0.0, 0.5, 7.0]), st.none() | st.sampled_from([0.0, 1.5, 12.0, 40.0])),
    min_size=1,
    max_size=12,
)


@given(sizes, arrivals)
@settings(max_examples=100, deadline=None)
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
        deaf = any(act.how == "deaf" for job in jobs for acts_ in job.row["plan"].values() for act in acts_)
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
@settings(max_examples=15, deadline=None)
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
