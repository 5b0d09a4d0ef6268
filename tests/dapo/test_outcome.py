# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a sampler is told of a rollout, and what it may be asked for."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_gym_prorl.dapo.contract import SamplerConfig
from nemo_gym_prorl.dapo.outcome import Outcome, outcome_of
from nemo_gym_prorl.failures import CallerError, Stage
from nemo_gym_prorl.rollout.job import JobState, StageTime
from nemo_gym_prorl.rollout.schemas import JobView


def job(result: dict[str, Any], reward: float, *, evaluated: bool = True, finish_reason: str = "stop") -> JobView:
    worked = StageTime(waited_s=0.0, worked_s=1.0, attempts=1)
    return JobView(
        **{"id": "j", "state": JobState.SUCCEEDED, "environment": "e", "handler": "h", "group": "g", "client": "c"},
        **{"priority": 0, "submitted_at": 0.0, "finished_at": 1.0, "turns": 1, "tool_calls": 0, "failure": None},
        timings={stage: worked for stage in (Stage.INIT, Stage.RUN, *((Stage.EVAL,) if evaluated else ()))},
        finish_reason=finish_reason,
        failed_attempts=[],
        reward=reward,
        result=result,
    )


def test_a_time_out_that_counts_as_0_needs_no_field_of_a_verdict() -> None:
    late = job({"question": "q", "accuracy": 1.0}, 0.0, evaluated=False, finish_reason="timeout")
    assert outcome_of(late, "accuracy") == Outcome(0.0, 0.0, False)
    for_its_siblings = job({"question": "q", "reward": 0.0}, 0.0, finish_reason="timeout")
    assert outcome_of(for_its_siblings, "accuracy") == Outcome(0.0, 0.0, False)
    scored = job({"accuracy": 1.0, "reward": 0.7}, 0.7, finish_reason="timeout")
    assert outcome_of(scored, "accuracy") == Outcome(0.7, 1.0, False)


def test_a_verdict_without_its_field_is_an_error_that_names_it() -> None:
    with pytest.raises(CallerError, match="filter_on: a verdict has no number 'accuracy'"):
        outcome_of(job({"reward": 0.0}, 0.0), "accuracy")


def test_how_bad_ends_count_may_be_said_by_its_word() -> None:
    assert SamplerConfig(1, 2, agent_failures="mask").agent_failures == "mask"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("agent_failures", "maks"),
        ("group_size", 2.5),
        ("group_size", "8"),
        ("max_staleness", -1),
        ("reference_share", "x"),
        ("reference_share", 1.5),
    ],
)
def test_what_a_sampler_cannot_do_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(CallerError, match=f"^{field}: "):
        SamplerConfig(**{"groups_per_batch": 1, "group_size": 2, field: value})
