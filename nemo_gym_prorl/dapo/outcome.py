# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a rollout that ended means: to the sampler, and to the trainer's logger. Pure.

DAPO's filter looks at *accuracy*: a reward that was shaped (by length, by turns) varies in a group in which nothing
was solved, and what such a group teaches is the shaping. A reward of 0 or 1 is an accuracy; of any other it has to be
said which field of the verdict is one.

A deployment whose policy never gets to call a tool, or whose agents run out of time, trains all the same; only
:class:`RolloutMetrics` show it.
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
class Outcome:
    """A rollout that was scored.

    Attributes:
        reward: raw, as its environment gave it.
        accuracy: what the filter looks at.
        masked: whether it gets no loss, and does not enter the baseline of its group.
    """

    reward: float
    accuracy: float
    masked: bool


def outcome_of(job: JobView, filter_on: str | None) -> Outcome | Origin:
    """What became of a job that ended, or who is to blame that it has no outcome.

    Args:
        job: with its result.
        filter_on: the field of the verdict that is the accuracy; by default the reward, where it is 0 or 1.

    Raises:
        CallerError: the verdict does not say how good the rollout was.
    """
    result = job.result or {}
    if job.state is JobState.SUCCEEDED and job.reward is not None:
        verified = (time := job.timings.get(Stage.EVAL)) is not None and time.attempts
        # Out of time, where that counts as 0: the result has the row's own fields only. Nobody verified it, or it was
        # for the sake of siblings that are scored together.
        in_vain = job.finish_reason == "timeout" and (not verified or (not job.reward and filter_on not in result))
        accuracy = 0.0 if in_vain else _accuracy(result, job.reward, filter_on)
        return Outcome(job.reward, accuracy, is_masked(result))
    if job.state is JobState.CANCELLED or job.failure is None:
        return Origin.INFRASTRUCTURE
    return job.failure.origin


def inherited(job: JobView) -> int:
    """Turns that it has of the rollout from which it was forked."""
    return job.forked_from.turn if job.forked_from else 0


def usage_of(job: JobView) -> Usage:
    """Seconds of work in all stages, and tokens that the policy wrote, but for those that it took over."""
    tokens = sum(turn.length for turn in (job.tokens or ())[inherited(job) :])
    return Usage(sum(timing.worked_s for timing in job.timings.values()), float(tokens))


def _accuracy(result: Mapping[str, Any], reward: float, filter_on: str | None) -> float:
    if filter_on is None:
        if reward not in (0.0, 1.0):
            raise CallerError(
                f"a reward of {reward} does not say whether the rollout was right: name the field of the verdict that "
                "does (filter_on: accuracy), or filter on the reward as it is (filter_on: reward)",
                field="filter_on",
            )
        return reward
    value = result.get(filter_on, reward if filter_on == "reward" else None)
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        known = ", ".join(sorted(name for name, field in result.items() if isinstance(field, bool | int | float)))
        raise CallerError(f"a verdict has no number {filter_on!r}; it has these: {known or 'none'}", field="filter_on")
    return float(value)


WINDOW = 1024
"""Shares and means are of so many rollouts, the latest ones: what an untrained policy did is not to hide today's."""


@dataclass(frozen=True, slots=True)
class _Ended:
    environment: str
    turns: int
    tool_calls: int
    finish: str
    reward: float | None


class RolloutMetrics:
    """Of rollouts that ran, whatever the sampler made of them."""

    def __init__(self) -> None:
        self._ended: deque[_Ended] = deque(maxlen=WINDOW)
        self._trained: deque[bool] = deque(maxlen=WINDOW)

    def add(self, job: JobView) -> None:
        """A rollout ended. One that was cancelled, or never came to its policy, says nothing of it."""
        if job.state is JobState.CANCELLED or not (job.turns or job.reward is not None):
            return
        failure = job.failure.kind if job.failure else None
        timed_out = failure is FailureKind.AGENT_TIMEOUT or job.finish_reason == "timeout"
        finish = "timeout" if timed_out else job.finish_reason or (failure.value if failure else "none")
        self._ended.append(_Ended(job.environment, job.turns, job.tool_calls, finish, job.reward))

    def train(self, with_loss: Iterable[bool]) -> None:
        """Rollouts go to the trainer; some have no tokens that can be trusted, and get no loss."""
        self._trained.extend(with_loss)

    def metrics(self) -> dict[str, float]:
        """By name; without what there is nothing of yet."""
        found: dict[str, float] = {}
        if self._trained:
            found["prorl/without_loss_share"] = 1 - fmean(self._trained)
        if not self._ended:
            return found
        found["prorl/turns"] = fmean(one.turns for one in self._ended)
        found["prorl/tool_calls"] = fmean(one.tool_calls for one in self._ended)
        for finish, count in ({"timeout": 0} | Counter(one.finish for one in self._ended)).items():
            found[f"prorl/finish/{finish}"] = count / len(self._ended)
        rewards = defaultdict(list)
        for one in self._ended:
            if one.reward is not None:
                rewards[one.environment].append(one.reward)
        return found | {f"prorl/reward/{name}": fmean(values) for name, values in rewards.items()}
