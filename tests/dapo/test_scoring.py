# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Scores of ended rollouts, and metrics of many rollouts."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_gym_prorl.dapo.contract import SamplerConfig
from nemo_gym_prorl.dapo.scoring import WINDOW, RolloutMetrics, Score, score_of
from nemo_gym_prorl.failures import CallerError, FailureKind, Origin, Stage
from nemo_gym_prorl.rollout.api.schemas import FailureView, JobView
from nemo_gym_prorl.rollout.job import JobState, StageTime


def job(**fields: Any) -> JobView:
    known = {"id": "g:0:0", "environment": "math", "handler": "h", "group": "g", "client": "c", "priority": 0}
    told = {"state": JobState.SUCCEEDED, "turns": 1, "tool_calls": 0, "finish_reason": "stop", "reward": 0.0}
    times = {"submitted_at": 0.0, "finished_at": 1.0, "timings": {}, "failure": None, "failed_attempts": []}
    return JobView(**{**known, **told, **times, **fields})


def scored(result: dict[str, Any], reward: float, *, evaluated: bool = True, finish_reason: str = "stop") -> JobView:
    worked = StageTime(waited_s=0.0, worked_s=1.0, attempts=1)
    stages = (Stage.INIT, Stage.RUN, *((Stage.EVAL,) if evaluated else ()))
    return job(timings=dict.fromkeys(stages, worked), finish_reason=finish_reason, reward=reward, result=result)


def test_a_time_out_that_counts_as_0_needs_no_field_of_a_verdict() -> None:
    late = scored({"question": "q", "accuracy": 1.0}, 0.0, evaluated=False, finish_reason="timeout")
    assert score_of(late, "accuracy") == Score(0.0, 0.0, False)
    for_its_siblings = scored({"question": "q", "reward": 0.0}, 0.0, finish_reason="timeout")
    assert score_of(for_its_siblings, "accuracy") == Score(0.0, 0.0, False)
    whole = scored({"accuracy": 1.0, "reward": 0.7}, 0.7, finish_reason="timeout")
    assert score_of(whole, "accuracy") == Score(0.7, 1.0, False)


def test_a_verdict_without_its_field_is_an_error_that_names_it() -> None:
    with pytest.raises(CallerError, match="filter_on: the verdict has no number 'accuracy'"):
        score_of(scored({"reward": 0.0}, 0.0), "accuracy")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("agent_failures", "maks"),
        ("group_size", 2.5),
        ("group_size", 0),
        ("groups_per_batch", 0),
        ("max_in_flight", 1),  # less than a group
        ("max_staleness", -1),
        ("reference_share", "x"),
        ("reference_share", 1.5),
    ],
)
def test_what_a_sampler_cannot_do_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(CallerError, match=f"^{field}: "):
        SamplerConfig(**{"groups_per_batch": 1, "group_size": 2, field: value})


def failed(kind: FailureKind, **fields: Any) -> JobView:
    failure = FailureView(kind=kind, origin=Origin.AGENT, stage=None, reason="")
    return job(state=JobState.FAILED, failure=failure, reward=None, finish_reason=None, **fields)


def test_what_rollouts_were_like() -> None:
    outcomes = RolloutMetrics()
    outcomes.add(job(turns=3, tool_calls=4, reward=1.0, token_in_rate=1.0))
    outcomes.add(job(turns=2, tool_calls=1, reward=0.5, finish_reason="max_steps", token_in_rate=0.5))
    outcomes.add(job(turns=1, environment="swe", finish_reason="timeout"))
    outcomes.add(failed(FailureKind.AGENT_TIMEOUT, turns=2, environment="swe"))
    # These two never reached their policy.
    outcomes.add(job(state=JobState.CANCELLED, turns=9, reward=None))
    outcomes.add(failed(FailureKind.PROVIDER_UNAVAILABLE, turns=0))
    outcomes.train([True, True, True, False])
    assert outcomes.metrics() == {
        "prorl/turns": 2.0,
        "prorl/tool_calls": 1.25,
        "prorl/token_in_rate": 0.75,
        "prorl/finish/stop": 0.25,
        "prorl/finish/max_steps": 0.25,
        "prorl/finish/timeout": 0.5,
        "prorl/reward/math": 0.75,
        "prorl/reward/swe": 0.0,
        "prorl/without_loss_share": 0.25,
    }


def test_what_was_long_ago_does_not_hide_today() -> None:
    outcomes = RolloutMetrics()
    for turns in (1, 5):
        for _ in range(WINDOW):
            outcomes.add(job(turns=turns))
    assert outcomes.metrics()["prorl/turns"] == pytest.approx(5)
