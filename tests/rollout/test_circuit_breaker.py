# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Whole outages in virtual time: no rollout is burned on a dead server."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from nemo_gym_prorl.failures import FailureKind, InfrastructureError, Stage
from nemo_gym_prorl.rollout.api.routes import PipelineMetrics
from nemo_gym_prorl.rollout.handler import Environment, Environments
from nemo_gym_prorl.rollout.job import FAILED_STATES, Job, JobState, Trajectory, Verdict
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.settings import PipelineSettings, PoolSizes
from tests.rollout.handlers import Bench, PlannedHandler
from tests.rollout.virtual_time import run_in_virtual_time


class Deployment(PlannedHandler):
    """Uses a resources server in INIT and EVAL, and a model server in RUN; each can be taken down."""

    def __init__(self) -> None:
        super().__init__()
        self.down: dict[str, FailureKind] = {}
        self.made = 0

    def _use(self, server: str) -> None:
        if (kind := self.down.get(server)) is not None:
            raise InfrastructureError(f"{server} cannot be reached", kind=kind, server=server)

    async def init(self, job: Job) -> int:
        self._use("resources")
        self.made += 1
        return await super().init(job)

    async def run(self, job: Job, session: int) -> Trajectory:
        self._use("model")
        await asyncio.sleep(5)
        self._use("model")
        return await super().run(job, session)

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        self._use("resources")
        return await super().eval(job, trajectory)


class Probed(Deployment):
    """It can tell which of its servers answer."""

    async def unreachable(self) -> Mapping[str, Sequence[Stage]]:
        return {server: [*Stage] for server, kind in self.down.items() if kind is FailureKind.TRANSPORT_UNREACHABLE}


class Hanging(Deployment):
    """Its servers do not die: they keep whoever calls them waiting, and answer no question."""

    NEEDED: ClassVar = {"resources": [*Stage], "model": [Stage.RUN]}

    def __init__(self) -> None:
        super().__init__()
        self.hangs: dict[str, asyncio.Event] = {}

    async def _wait_for(self, server: str) -> None:
        if server in self.hangs:
            await self.hangs[server].wait()

    async def init(self, job: Job) -> int:
        await self._wait_for("resources")
        return await super().init(job)

    async def run(self, job: Job, session: int) -> Trajectory:
        trajectory = await super().run(job, session)
        await self._wait_for("model")
        await self._wait_for("resources")
        return trajectory

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        await self._wait_for("resources")
        return await super().eval(job, trajectory)

    async def unreachable(self) -> Mapping[str, Sequence[Stage]]:
        return {server: self.NEEDED[server] for server in self.hangs}

    def hang(self, server: str) -> None:
        self.hangs[server] = asyncio.Event()

    def go_on(self, server: str) -> None:
        self.hangs.pop(server).set()


UNREACHABLE = FailureKind.TRANSPORT_UNREACHABLE
SETTINGS = PipelineSettings(stages=PoolSizes(init=4, ready=4, run=8, eval=4))


@pytest.mark.parametrize("kind_of_handler", [Probed, Deployment])
@pytest.mark.parametrize("server", ["resources", "model"])
def test_jobs_wait_out_a_dead_server_and_all_succeed(kind_of_handler: type[Deployment], server: str) -> None:
    async def play() -> None:
        handler = kind_of_handler()
        pipeline = Bench(SETTINGS, handler).pipeline()
        metrics = PipelineMetrics(pipeline)
        jobs = [pipeline.submit(JobRequest({})) for _ in range(200)]
        await asyncio.sleep(12)
        handler.down[server] = UNREACHABLE
        await asyncio.sleep(300)
        assert not any(job.state.terminal and job.state is not JobState.SUCCEEDED for job in jobs)
        if kind_of_handler is Probed:
            status = pipeline.status()
            assert [*status.held] == [server]
            assert "cannot be reached" in status.held[server].reason
            told = f'prorl_server_unreachable{{environment="planned",server="{server}"}} 1.0'
            assert told.encode() in metrics.render()
        del handler.down[server]
        assert await pipeline.drain(timeout=3000)
        assert {job.state for job in jobs} == {JobState.SUCCEEDED}
        if kind_of_handler is Probed:
            assert handler.made <= len(jobs) * 1.2, "sandboxes"
        assert not pipeline.status().held
        assert b"prorl_server_unreachable{" not in metrics.render()

    run_in_virtual_time(play())


@pytest.mark.parametrize("kind_of_handler", [Probed, Deployment])
@pytest.mark.parametrize("server", ["resources", "model"])
def test_a_server_that_stays_out_fails_its_jobs_after_a_stated_time(
    kind_of_handler: type[Deployment], server: str
) -> None:
    async def play() -> None:
        handler = kind_of_handler()
        pipeline = Bench(SETTINGS, handler).pipeline()
        handler.down[server] = UNREACHABLE
        jobs = [pipeline.submit(JobRequest({})) for _ in range(30)]
        await asyncio.sleep(SETTINGS.unreachable_s - 10)
        assert not any(job.state.terminal for job in jobs)
        assert await pipeline.drain(timeout=200)
        for job in jobs:
            assert job.state is JobState.FAILED
            assert job.outcome is not None
            assert job.outcome.failure is not None
            assert job.outcome.failure.kind is UNREACHABLE
            assert server in job.outcome.failure.reason
        if kind_of_handler is Probed:
            assert handler.made <= 40
            assert sum(len(job.failures) for job in jobs) <= 8, "nobody is sent to a server that does not answer"
        assert not handler.sessions, "every session was released"
        assert pipeline.scheduler.sessions == 0
        await pipeline.close()

    run_in_virtual_time(play())


@pytest.mark.parametrize("kind_of_handler", [Probed, Deployment])
@pytest.mark.parametrize("server", ["resources", "model"])
def test_the_dead_server_of_one_environment_holds_up_no_other(kind_of_handler: type[Deployment], server: str) -> None:
    """Its rows come first, fill every pool and READY when it dies, and none of the others waits for them."""

    async def play() -> None:
        dead, alive = kind_of_handler(), kind_of_handler()
        pipeline = of_two(dead, alive)
        stuck = [pipeline.submit(JobRequest({"data_source": "dead"}, priority=9)) for _ in range(100)]
        await asyncio.sleep(7)
        dead.down[server] = UNREACHABLE
        jobs = [pipeline.submit(JobRequest({"data_source": "alive"})) for _ in range(80)]
        # 80 runs of 10 s in 8 slots, and what was under way when the server died
        await asyncio.sleep(120)
        assert {job.state for job in jobs} == {JobState.SUCCEEDED}
        assert alive.made == len(jobs)
        if kind_of_handler is Probed:
            assert pipeline.status().held[server].environments == ["dead"]
        assert not any(job.state in FAILED_STATES for job in stuck)
        del dead.down[server]
        assert await pipeline.drain(timeout=3000)
        assert {job.state for job in stuck} == {JobState.SUCCEEDED}
        assert not pipeline.outages

    run_in_virtual_time(play())


def of_two(dead: Deployment, alive: Deployment) -> Pipeline:
    environments = Environments(
        [
            Environment("dead", "planned", lambda: dead, frozenset({"dead"})),
            Environment("alive", "planned", lambda: alive, frozenset({"alive"})),
        ],
        default=None,
    )
    return Pipeline(environments, SETTINGS, clock=asyncio.get_running_loop().time)


@pytest.mark.parametrize("server", ["resources", "model"])
def test_a_server_that_hangs_keeps_no_slot_from_another_environment_and_costs_its_own_nothing(server: str) -> None:
    """Its rows come first, fill every pool and hang for longer than their budgets; they go on where they were."""

    async def play() -> None:
        dead, alive = Hanging(), Deployment()
        pipeline = of_two(dead, alive)
        stuck = [
            pipeline.submit(JobRequest({"data_source": "dead"}, priority=9, budgets={stage: 60.0 for stage in Stage}))
            for _ in range(100)
        ]
        await asyncio.sleep(7)
        dead.hang(server)
        jobs = [pipeline.submit(JobRequest({"data_source": "alive"})) for _ in range(80)]
        # 80 runs of 5 s in 8 slots, and until it was noticed
        await asyncio.sleep(80)
        assert {job.state for job in jobs} == {JobState.SUCCEEDED}
        assert pipeline.status().held[server].environments == ["dead"]
        await asyncio.sleep(600)
        assert not any(job.state in FAILED_STATES for job in stuck)
        made = dead.made
        dead.go_on(server)
        assert await pipeline.drain(timeout=3000)
        assert {job.state for job in stuck} == {JobState.SUCCEEDED}
        assert dead.made - made <= len(stuck) - made, "none began anew"
        assert {job.times[stage].attempts for job in stuck for stage in Stage} == {1}
        assert max(job.times[stage].worked_s for job in stuck for stage in Stage) < 60
        assert not pipeline.outages

    run_in_virtual_time(play())


def test_a_call_dropped_by_a_server_that_answers_is_an_attempt_of_its_job() -> None:
    """Else one poisonous row would hold everybody up, and take the server down for a quarter of an hour."""

    async def play() -> None:
        handler = Probed()
        pipeline = Bench(SETTINGS, handler).pipeline()
        handler.down["resources"] = FailureKind.TRANSPORT_PEER_DROP
        job = pipeline.submit(JobRequest({}))
        assert await pipeline.drain(timeout=60)
        assert job.state is JobState.FAILED
        assert job.times[Stage.INIT].attempts == 3
        assert not pipeline.outages

    run_in_virtual_time(play())


def test_jobs_held_up_can_be_cancelled_and_the_service_closed() -> None:
    async def play() -> None:
        handler = Probed()
        pipeline = Bench(SETTINGS, handler).pipeline()
        jobs: list[Any] = [pipeline.submit(JobRequest({})) for _ in range(20)]
        await asyncio.sleep(1)
        handler.down = {"resources": UNREACHABLE, "model": UNREACHABLE}
        await asyncio.sleep(20)
        assert "model" in {outage.server for outage in pipeline.outages}
        await pipeline.cancel(jobs[-1])
        assert jobs[-1].state is JobState.CANCELLED
        await pipeline.close()
        assert all(job.state.terminal for job in jobs)
        assert not handler.sessions

    run_in_virtual_time(play())
