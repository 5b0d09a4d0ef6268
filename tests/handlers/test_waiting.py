# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Far more rollouts than the policy takes at a time: each ends once, and none by waiting."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_gym_prorl.rollout.job import JobState
from tests.handlers.crowd import TURNS, crowd, in_thread, model_server, row


@pytest.mark.parametrize(
    ("rollouts", "limit", "turn_s", "budget_s"),
    [(32, 4, 0.25, 3.0), pytest.param(2048, 256, 16.0, 240.0, marks=pytest.mark.long("2,048 rollouts"))],
)
async def test_rollouts_wait_for_one_backend_as_long_as_it_takes(
    rollouts: int, limit: int, turn_s: float, budget_s: float, tmp_path: Path
) -> None:
    """The last ones wait longer than their budget, and than anybody waits for a server that is gone."""
    stages = {"init": rollouts, "ready": rollouts, "run": rollouts, "eval": 64}
    policy = {"limit": limit, "unreachable_s": 4 * turn_s}
    budgets = {"run": budget_s}
    with model_server(tmp_path, **policy) as model:
        async with crowd(model, stages=stages, budgets=budgets) as at:
            engine = at.engine("own", delay_s=turn_s)
            with in_thread(engine) as url:
                assert (await model.ask("POST", "/v1/backends", {"url": url}))[0] == 201
                for number in range(rollouts):
                    await at.service.submit(row(), id=f"r{number}")
                jobs = await at.ended(rollouts)
    assert {job.state for job in jobs} == {JobState.SUCCEEDED}
    assert len({job.id for job in jobs}) == len(jobs) == rollouts
    assert {job.timings["run"].attempts for job in jobs} == {1}
    assert not any(job.failed_attempts for job in jobs)
    assert (at.asked["seed_session"], at.asked["verify"]) == (rollouts, rollouts)
    assert engine.prompts.total() == rollouts * TURNS
    assert engine.most <= limit
