# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Simulation of dynamic sampling in virtual time: workloads, and the run of a schedule over engines and a trainer."""

from __future__ import annotations

import functools
import heapq
import math
import random
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_prorl.dapo.contract import Decision
from nemo_gym_prorl.dapo.group import Usage


RUN = "bench"
"""Prefix of all rollout ids, which are ``run:prompt:member:try``, all but the first counted from 0."""
SLOTS = 256
PROMPTS = 32
MEAN_S = 60.0
WARM_UP = 5
"""Steps that are not counted, since the engines are empty at first."""


@dataclass(frozen=True)
class World:
    """Workload; a try of a rollout has the same outcome under all schedules with the same seed.

    Attributes:
        seed: seed of all random numbers.
        variation: coefficient of variation of durations, before the budget.
        informative: share of prompts whose rollouts differ in reward: the shorter half is right with probability 0.7,
            the longer half with 0.3.
        group_size: rollouts of a prompt.
        cut: share of rollouts that exceed their time budget; their reward is 0.
        long: share of prompts that take ten times as long as the others.
    """

    seed: int
    variation: float
    informative: float
    group_size: int
    cut: float = 0.007
    long: float = 0.0
    _known: dict[str, tuple[float, float]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def _variance(self) -> float:
        return math.log1p(self.variation**2) / 2

    @functools.cached_property
    def budget_s(self) -> float:
        drawn = sorted(self._drawn(prompt, f"{prompt}:budget:0") for prompt in range(5_000))
        return drawn[int((1 - self.cut) * len(drawn))]

    def _drawn(self, prompt: int, sample: str) -> float:
        """Return the seconds of a try without a budget; half of the variance of their logarithm is the prompt's."""
        spread = math.sqrt(self._variance)
        of_prompt = random.Random(f"{self.seed}:{prompt}").gauss(0, spread)
        of_rollout = random.Random(f"{self.seed}:{sample}").gauss(0, spread)
        is_long = random.Random(f"{self.seed}:long:{prompt}").random() < self.long
        return MEAN_S * math.exp(of_prompt + of_rollout - self._variance) * (10 if is_long else 1)

    def outcome(self, rollout: str) -> tuple[float, float]:
        """Return the seconds and the reward of a try by its id."""
        if rollout not in self._known:
            self._known[rollout] = self._outcome(rollout)
        return self._known[rollout]

    def _outcome(self, rollout: str) -> tuple[float, float]:
        _, number, member, tries = rollout.split(":")
        prompt, sample = int(number), f"{number}:{member}:{tries}"
        drawn = self._drawn(prompt, sample)
        if drawn > self.budget_s:
            return self.budget_s, 0.0
        kind = random.Random(f"{self.seed}:kind:{prompt}").random()
        if kind >= self.informative:
            return drawn, float(kind < (1 + self.informative) / 2)
        short = random.Random(f"{self.seed}:{sample}").gauss(0, 1) < 0
        return drawn, float(random.Random(f"{self.seed}:reward:{sample}").random() < (0.7 if short else 0.3))

    def first_tries(self, prompt: int) -> list[tuple[float, float]]:
        """Return the outcomes of the first tries of a prompt's group."""
        return [self.outcome(f"{RUN}:{prompt}:{member}:0") for member in range(self.group_size)]

    def true(self, prompts: int) -> tuple[float, float]:
        """Return the mean seconds and reward of first tries, over the groups with variance among the first prompts."""
        groups = [group for group in map(self.first_tries, range(prompts)) if len({reward for _, reward in group}) > 1]
        seconds, rewards = zip(*(outcome for group in groups for outcome in group), strict=True)
        return statistics.fmean(seconds), statistics.fmean(rewards)

    @functools.cached_property
    def bound_s(self) -> float:
        """Seconds of generation per step if no engine ever idles and no rollout is wasted."""
        groups = [self.first_tries(number) for number in range(10**6, 10**6 + 1000)]
        varies = statistics.fmean(len({reward for _, reward in group}) > 1 for group in groups)
        mean_s = statistics.fmean(seconds for group in groups for seconds, _ in group)
        return PROMPTS / varies * self.group_size * mean_s / SLOTS

    @property
    def training_s(self) -> float:
        return self.bound_s / 2


@dataclass(slots=True)
class Run:
    """Result of a schedule.

    Attributes:
        steps: times at which batches were trained, in seconds.
        trained: prompt, seconds and reward of each rollout that was trained on.
        groups: rollouts of each group that was trained on.
        lags: staleness of each rollout that was trained on, in weight versions.
        prompts: one more than the largest prompt in a batch.
    """

    steps: list[float] = field(default_factory=list)
    trained: list[tuple[int, float, float]] = field(default_factory=list)
    groups: list[list[str]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    prompts: int = 0

    @property
    def step_s(self) -> float:
        """Seconds per step after the warm-up."""
        return (self.steps[-1] - self.steps[WARM_UP]) / (len(self.steps) - 1 - WARM_UP)

    def bias(self, world: World, end: int | None = None) -> tuple[float, float]:
        """Return the mean seconds and reward of trained rollouts, each divided by the mean of first tries. ``end``:
        only prompts below this number count; ``None`` for all prompts in batches."""
        end = self.prompts if end is None else end
        _, seconds, rewards = zip(*(one for one in self.trained if one[0] < end), strict=True)
        true_s, true_reward = world.true(end)
        return statistics.fmean(seconds) / true_s, statistics.fmean(rewards) / true_reward


def drive(world: World, steps: int, schedule: Any) -> Run:
    """Run a schedule with the interface of ``DynamicSampler`` over engines with :data:`SLOTS` slots and a trainer."""
    run = Run()
    now, trained = 0.0, 0
    waiting: deque[str] = deque()
    began: dict[str, float] = {}
    ended: dict[str, tuple[float, float]] = {}
    events: list[tuple[float, str]] = []
    batches: deque[int] = deque()
    training = ""
    schedule.ask()
    while len(run.steps) <= steps + WARM_UP:
        decision = schedule.decide()
        for rollout in decision.cancel:
            if rollout in began:
                schedule.cancelled(rollout, Usage(now - began.pop(rollout)))
            else:
                waiting.remove(rollout)
                schedule.cancelled(rollout, Usage())
        for batch in decision.batches:
            batches.append(batch.number)
            run.groups += [[scored.rollout for scored in group] for group in batch.groups.values()]
            run.prompts = max(run.prompts, *(number + 1 for number in batch.groups))
            for number, scored in ((number, scored) for number, group in batch.groups.items() for scored in group):
                run.trained.append((number, *ended.pop(scored.rollout)))
                run.lags.append(batch.version - scored.version)
        waiting.extend(submission.rollout for submission in decision.submit)
        while waiting and len(began) < SLOTS:
            rollout = waiting.popleft()
            began[rollout] = now
            heapq.heappush(events, (now + world.outcome(rollout)[0], rollout))
        if batches and not training:
            training = f"train:{batches.popleft()}"
            heapq.heappush(events, (now + world.training_s, training))
        if decision != Decision():
            continue
        now, event = heapq.heappop(events)
        if event == training:
            training = ""
            trained += 1
            run.steps.append(now)
            schedule.weights(trained)
            schedule.ask()
        elif event in began:
            began.pop(event)
            ended[event] = seconds, reward = world.outcome(event)
            schedule.scored(event, reward, Usage(seconds, seconds))
    return run
