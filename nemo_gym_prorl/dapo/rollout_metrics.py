# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What rollouts were like, for a trainer's logger: a deployment whose policy never gets to call a tool, or whose
agents run out of time, trains all the same, and only these numbers show it.

Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from nemo_gym_prorl.failures import FailureKind
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.schemas import JobView


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
