# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a job's end leaves behind: nothing, also while nobody looks for cycles of objects."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from typing import Any

import pytest

from nemo_gym_prorl.failures import Stage
from nemo_gym_prorl.rollout.job import Budgets, Job
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.service import PipelineSettings
from tests.rollout.handlers import ENDINGS, Act, Bench, PlannedHandler


class Local:
    """What a call of the handler works on: rows and responses of megabytes, mostly."""


class Working(PlannedHandler):
    """Its calls hold something while they run."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[weakref.ref[Local]] = []

    async def _act(self, job: Job, stage: Stage) -> str:
        local = Local()
        self.held.append(weakref.ref(local))
        how: str = await super()._act(job, stage)
        del local
        return how


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("how", [*ENDINGS, "ok", "used up", "cancelled"])
async def test_what_a_call_worked_on_goes_with_its_job(
    how: str, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """The collector comes rarely to this service: what failed jobs left in cycles would fill the memory."""
    caplog.set_level(logging.CRITICAL)  # what is captured is kept
    acts: list[Any] = [Act("ok", 30.0) if how in ("used up", "cancelled") else Act(how)]
    budget = Budgets(init=0.1, run=0.1, eval=0.1) if how == "used up" else Budgets()
    bench = Bench(PipelineSettings(budgets=budget, max_attempts=1, cancel_grace_s=1.0), Working())
    pipeline = bench.pipeline()
    gc.disable()
    try:
        job = pipeline.submit(JobRequest({"plan": {str(stage): acts}}))
        if how == "cancelled":
            while not bench.handler.inside[stage]:
                await asyncio.sleep(0.001)
            await pipeline.cancel(job, "no longer wanted")
        await pipeline.wait(job)
        await asyncio.sleep(0.01)
        assert isinstance(bench.handler, Working)
        assert bench.handler.held
        assert not [one for one in bench.handler.held if one() is not None]
    finally:
        gc.enable()
        await pipeline.close()
