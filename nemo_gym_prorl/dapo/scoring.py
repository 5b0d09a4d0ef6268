# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Scores of ended rollouts for the sampler, and the rollouts' metrics for the trainer's logger. Pure.

DAPO's filter compares *accuracies*. A shaped reward (by length or by turns) varies even in a group in which no rollout
succeeded, and such a group would train on the shaping alone. A reward of 0 or 1 is an accuracy; for any other reward
``filter_on`` must name the verdict field with the accuracy.

A policy that never manages to call a tool, or agents that always exceed their time limit, do not stop training. Only
:class:`RolloutMetrics` shows such a fault of the deployment.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from nemo_gym_prorl.dapo.group import Usage
from nemo_gym_prorl.failures import CallerError, FailureKind, Origin, Stage
from nemo_gym_prorl.rollout.api.schemas import JobView
from nemo_gym_prorl.rollout.gym_rows import is_masked
from nemo_gym_prorl.rollout.job import JobState


@dataclass(frozen=True, slots=True)
class Score:
    """Score of a rollout.

    Attributes:
        reward: raw reward of the environment.
        accuracy: value that the variance filter compares.
        masked: whether the rollout gets no loss and does not enter the baseline of its group.
    """

    reward: float
    accuracy: float
    masked: bool


def score_of(job: JobView, filter_on: str | None) -> Score | Origin:
    """Return the score of an ended job, or the origin of its failure; a cancellation counts as infrastructure.

    Args:
        job: ended job with its result.
        filter_on: verdict field that is the accuracy; ``None``: the reward, which must be 0 or 1.

    Raises:
        CallerError: the verdict has no finite number in ``filter_on``; or ``filter_on`` is ``None``, and the reward is
            neither 0 nor 1.
    """
    result = job.result or {}
    if job.state is JobState.SUCCEEDED and job.reward is not None:
        verified = (time := job.timings.get(Stage.EVAL)) is not None and time.attempts
        # A timeout that counts as 0 has only the row's own fields in its result: the rollout was not verified, or was
        # verified only because its siblings are scored together.
        unscored = job.finish_reason == "timeout" and (not verified or (not job.reward and filter_on not in result))
        accuracy = 0.0 if unscored else _accuracy(result, job.reward, filter_on)
        return Score(job.reward, accuracy, is_masked(result))
    if job.state is JobState.CANCELLED or job.failure is None:
        return Origin.INFRASTRUCTURE
    return job.failure.origin


def inherited_turns(job: JobView) -> int:
    """Return the number of first turns that a forked job inherited from another rollout; 0 for other jobs."""
    return job.forked_from.turn if job.forked_from else 0


def usage_of(job: JobView) -> Usage:
    """Return the seconds of work of all stages on a job, and the number of sampled tokens without inherited turns."""
    tokens = sum(turn.length for turn in (job.tokens or ())[inherited_turns(job) :])
    return Usage(sum(timing.worked_s for timing in job.timings.values()), float(tokens))


def _accuracy(result: Mapping[str, Any], reward: float, filter_on: str | None) -> float:
    if filter_on is None:
        if reward not in (0.0, 1.0):
            raise CallerError(
                f"the reward {reward} is neither 0 nor 1 and so is no accuracy; name the verdict field that is one "
                "(filter_on: accuracy), or filter on the reward itself (filter_on: reward)",
                field="filter_on",
            )
        return reward
    value = result.get(filter_on, reward if filter_on == "reward" else None)
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        known = ", ".join(sorted(name for name, field in result.items() if isinstance(field, bool | int | float)))
        raise CallerError(
            f"the verdict has no number {filter_on!r}; name one of its numbers: {known or 'none'}", field="filter_on"
        )
    return float(value)


WINDOW = 1024
"""Number of latest rollouts in shares and means, which so describe the current policy."""


@dataclass(frozen=True, slots=True)
class _Ended:
    environment: str
    turns: int
    tool_calls: int
    finish: str
    reward: float | None
    token_in_rate: float | None


class RolloutMetrics:
    """Metrics over the latest rollouts that reached their policy, whether trained on or not."""

    def __init__(self) -> None:
        self._ended: deque[_Ended] = deque(maxlen=WINDOW)
        self._trained: deque[bool] = deque(maxlen=WINDOW)

    def add(self, job: JobView) -> None:
        """Count an ended rollout, unless it was cancelled or never reached its policy."""
        if job.state is JobState.CANCELLED or not (job.turns or job.reward is not None):
            return
        failure = job.failure.kind if job.failure else None
        timed_out = failure is FailureKind.AGENT_TIMEOUT or job.finish_reason == "timeout"
        finish = "timeout" if timed_out else job.finish_reason or (failure.value if failure else "none")
        self._ended.append(_Ended(job.environment, job.turns, job.tool_calls, finish, job.reward, job.token_in_rate))

    def train(self, with_loss: Iterable[bool]) -> None:
        """Count rollouts that go to the trainer, by whether each gets a loss."""
        self._trained.extend(with_loss)

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        if self._trained:
            found["prorl/without_loss_share"] = 1 - fmean(self._trained)
        if not self._ended:
            return found
        found["prorl/turns"] = fmean(one.turns for one in self._ended)
        found["prorl/tool_calls"] = fmean(one.tool_calls for one in self._ended)
        for finish, count in ({"timeout": 0} | Counter(one.finish for one in self._ended)).items():
            found[f"prorl/finish/{finish}"] = count / len(self._ended)
        if rates := [one.token_in_rate for one in self._ended if one.token_in_rate is not None]:
            found["prorl/token_in_rate"] = fmean(rates)
        rewards = defaultdict(list)
        for one in self._ended:
            if one.reward is not None:
                rewards[one.environment].append(one.reward)
        return found | {f"prorl/reward/{name}": fmean(values) for name, values in rewards.items()}
