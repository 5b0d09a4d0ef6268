# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a rollout has waited is charged to no budget, also where those who know are too busy to say so at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.rollout.job import Budgets, Job, JobState
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.service import PipelineSettings
from tests.rollout.handlers import Act, Bench, PlannedHandler
from tests.rollout.virtual_time import run_in_virtual_time


WAITED_S, BUDGET_S, WORK_S = 3000.0, 60.0, 50.0


class Waiting(PlannedHandler):
    """Says what it has waited, after it was asked so often in vain."""

    def __init__(self, vain: float, instead: Callable[[], Any]) -> None:
        super().__init__()
        self.asked, self.vain, self.instead = 0, vain, instead

    async def waited(self, job: Job) -> float:
        self.asked += 1
        if self.asked <= self.vain:
            await self.instead()
        return WAITED_S


async def unreachable() -> None:
    raise InfrastructureError("busy", kind=FailureKind.TRANSPORT_PEER_DROP)


async def hang() -> None:
    await asyncio.sleep(1e6)


def rollout(handler: Waiting) -> tuple[Job, float]:
    """One that waits and works for so long, and how long that took."""

    async def work() -> tuple[Job, float]:
        settings = PipelineSettings(budgets=Budgets(run=BUDGET_S), max_attempts=1)
        pipeline = Bench(settings, handler).pipeline()
        loop = asyncio.get_running_loop()
        began = loop.time()
        job = pipeline.submit(JobRequest({"plan": {"run": [Act("ok", WAITED_S + WORK_S)]}}))
        await pipeline.wait(job)
        took = loop.time() - began
        await pipeline.close()
        return job, took

    return run_in_virtual_time(work())


@pytest.mark.parametrize("instead", [unreachable, hang])
@pytest.mark.parametrize("vain", [0, 1, 20])
def test_who_cannot_say_at_once_is_asked_again(vain: int, instead: Callable[[], Any]) -> None:
    job, _ = rollout(Waiting(vain, instead))
    assert job.state is JobState.SUCCEEDED
    assert [(time.attempts, time.waited_s, time.worked_s) for stage, time in job.times.items() if stage == "run"] == [
        (1, pytest.approx(WAITED_S), pytest.approx(WORK_S))
    ]


@pytest.mark.parametrize("instead", [unreachable, hang])
def test_who_never_says_holds_a_budget_up_for_minutes_only(instead: Callable[[], Any]) -> None:
    job, took = rollout(Waiting(float("inf"), instead))
    assert job.state is JobState.TIMED_OUT
    assert took < BUDGET_S + 200.0
