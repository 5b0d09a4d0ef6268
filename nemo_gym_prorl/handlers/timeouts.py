# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a used-up RUN budget means for a rollout. Its environment's settings say it."""

from __future__ import annotations

from enum import StrEnum

from nemo_gym_prorl.rollout.job import Job, Trajectory, Verdict


class OnTimeout(StrEnum):
    """What becomes of a rollout whose RUN budget is used up, if its turns so far are there with their tokens. Where
    not a single turn was complete it fails, whatever is asked for: there is nothing to train on."""

    MASK = "mask"
    """It fails as ``agent_timeout``: a masked row that keeps its turns."""
    SCORE = "score"
    """It is scored as it is."""
    ZERO = "zero"
    """Its reward is 0, and it counts like any other."""


def after_timeout(wanted: OnTimeout, job: Job, *, settled: bool) -> Trajectory | Verdict | None:
    """What is asked for, where there is something to train on.

    Args:
        wanted: the environment's choice.
        job: whose RUN budget is used up; its ``finish_reason`` says so unless it fails.
        settled: the tokens of its turns are there.

    Returns:
        What EVAL is to score, or a verdict without EVAL; ``None`` for a failure.
    """
    if wanted is OnTimeout.MASK or job.trajectory is None or not (settled and job.progress.turns):
        return None
    job.progress.finish_reason = "timeout"
    if wanted is OnTimeout.ZERO:
        return Verdict(0.0, {**job.row, "response": job.trajectory.response, "reward": 0.0})
    return job.trajectory
