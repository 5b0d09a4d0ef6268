# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a trainer's log says of rollouts: whether tools were called, how they ended, and what they earned."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_gym_prorl.dapo.outcome import WINDOW, RolloutMetrics
from nemo_gym_prorl.failures import FailureKind, Origin
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.schemas import FailureView, JobView


def job(**fields: Any) -> JobView:
    known = {"id": "g:0:0", "environment": "math", "handler": "h", "group": "g", "client": "c", "priority": 0}
    told = {"state": JobState.SUCCEEDED, "turns": 1, "tool_calls": 0, "finish_reason": "stop", "reward": 0.0}
    times = {"submitted_at": 0.0, "finished_at": 1.0, "timings": {}, "failure": None, "failed_attempts": []}
    return JobView(**{**known, **told, **times, **fields})


def failed(kind: FailureKind, **fields: Any) -> JobView:
    failure = FailureView(kind=kind, origin=Origin.AGENT, stage=None, reason="")
    return job(state=JobState.FAILED, failure=failure, reward=None, finish_reason=None, **fields)


def test_nothing_is_said_of_nothing() -> None:
    assert RolloutMetrics().metrics() == {}


def test_what_rollouts_were_like() -> None:
    outcomes = RolloutMetrics()
    outcomes.add(job(turns=3, tool_calls=4, reward=1.0))
    outcomes.add(job(turns=2, tool_calls=1, reward=0.5, finish_reason="max_steps"))
    outcomes.add(job(turns=1, environment="swe", finish_reason="timeout"))
    outcomes.add(failed(FailureKind.AGENT_TIMEOUT, turns=2, environment="swe"))
    # Neither is anything that a policy did.
    outcomes.add(job(state=JobState.CANCELLED, turns=9, reward=None))
    outcomes.add(failed(FailureKind.PROVIDER_UNAVAILABLE, turns=0))
    outcomes.train([True, True, True, False])
    assert outcomes.metrics() == {
        "prorl/turns": 2.0,
        "prorl/tool_calls": 1.25,
        "prorl/finish/stop": 0.25,
        "prorl/finish/max_steps": 0.25,
        "prorl/finish/timeout": 0.5,
        "prorl/reward/math": 0.75,
        "prorl/reward/swe": 0.0,
        "prorl/without_loss_share": 0.25,
    }


def test_no_time_out_is_said_as_well() -> None:
    outcomes = RolloutMetrics()
    outcomes.add(job())
    assert outcomes.metrics()["prorl/finish/timeout"] == 0


def test_what_was_long_ago_does_not_hide_today() -> None:
    outcomes = RolloutMetrics()
    for turns in (1, 5):
        for _ in range(WINDOW):
            outcomes.add(job(turns=turns))
    assert outcomes.metrics()["prorl/turns"] == pytest.approx(5)
