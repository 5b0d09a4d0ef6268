# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Policies for rollouts that exceed the RUN time budget."""

from enum import StrEnum

from nemo_gym_prorl.rollout.job import Job, Trajectory, Verdict


class OnTimeout(StrEnum):
    """Policy for rollouts that exceed the RUN time budget.

    A rollout without a complete turn, or whose tokens cannot be fetched, fails under every policy: there is nothing to
    train on.
    """

    MASK = "mask"
    """Fail the rollout as ``agent_timeout``: a masked row that keeps its turns."""
    SCORE = "score"
    """Score the rollout in its current state."""
    ZERO = "zero"
    """Reward the rollout with 0, without EVAL."""


def after_timeout(policy: OnTimeout, job: Job, *, has_tokens: bool) -> Trajectory | Verdict | None:
    """Apply the policy to a rollout that exceeded its RUN budget, and set its ``finish_reason`` unless it fails.

    Args:
        policy: the environment's policy.
        job: the rollout.
        has_tokens: whether the tokens of the rollout's turns have been fetched.

    Returns:
        A trajectory for EVAL to score, a verdict that needs no EVAL, or ``None`` if the rollout fails.
    """
    if policy is OnTimeout.MASK or job.trajectory is None or not (has_tokens and job.progress.turns):
        return None
    job.progress.finish_reason = "timeout"
    if policy is OnTimeout.ZERO:
        return Verdict(0.0, {**job.row, "response": job.trajectory.response, "reward": 0.0})
    return job.trajectory
