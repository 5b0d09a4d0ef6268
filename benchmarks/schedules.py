# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Schedules of dynamic sampling beside ``DynamicSampler``, told and asked as it is, and a simulated clock for all.

Both are the ideas of others, written again here. :mod:`benchmarks.synchronous` has the rounds.
"""

from __future__ import annotations

import functools
import heapq
import math
import random
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from nemo_gym_prorl.dapo.contract import Batch, Decision, Scored, Submission
from nemo_gym_prorl.dapo.group import Fate, Fates, Usage


RUN = "bench"
"""Begins all ids; the last part counts the tries, from 0."""
SLOTS = 256
PROMPTS = 32
MEAN_S = 60.0
WARM_UP = 5
"""Steps that are not counted: the first ones begin with empty engines."""


@dataclass(frozen=True)
class World:
    """A workload: a prompt's first try is the same for all schedules of one seed.

    Attributes:
        seed: of everything.
        variation: coefficient of variation of durations, before the budget.
        informative: share of prompts that are solved by some rollouts and not by others; the shorter half of them is
            right with 0.7, the longer one with 0.3.
        group_size: rollouts of a prompt.
        cut: share of rollouts whose time is used up before they end; their reward is 0.
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
        """Seconds of RUN."""
        drawn = sorted(self._drawn(prompt, f"{prompt}:budget:0") for prompt in range(5_000))
        return drawn[int((1 - self.cut) * len(drawn))]

    def _drawn(self, prompt: int, sample: str) -> float:
        """Half of the logarithm's variance is the prompt's."""
        spread = math.sqrt(self._variance)
        of_prompt = random.Random(f"{self.seed}:{prompt}").gauss(0, spread)
        of_rollout = random.Random(f"{self.seed}:{sample}").gauss(0, spread)
        is_long = random.Random(f"{self.seed}:long:{prompt}").random() < self.long
        return MEAN_S * math.exp(of_prompt + of_rollout - self._variance) * (10 if is_long else 1)

    def outcome(self, rollout: str) -> tuple[float, float]:
        """Seconds and reward of a try: ``run:prompt:place:try``."""
        if rollout not in self._known:
            self._known[rollout] = self._outcome(rollout)
        return self._known[rollout]

    def _outcome(self, rollout: str) -> tuple[float, float]:
        _, number, place, tries = rollout.split(":")
        prompt, sample = int(number), f"{number}:{place}:{tries}"
        drawn = self._drawn(prompt, sample)
        if drawn > self.budget_s:
            return self.budget_s, 0.0
        kind = random.Random(f"{self.seed}:kind:{prompt}").random()
        if kind >= self.informative:
            return drawn, float(kind < (1 + self.informative) / 2)
        short = random.Random(f"{self.seed}:{sample}").gauss(0, 1) < 0
        return drawn, float(random.Random(f"{self.seed}:reward:{sample}").random() < (0.7 if short else 0.3))

    def first_tries(self, prompt: int) -> list[tuple[float, float]]:
        """Outcomes of a group, as the policy samples it."""
        return [self.outcome(f"{RUN}:{prompt}:{place}:0") for place in range(self.group_size)]

    def true(self, prompts: int) -> tuple[float, float]:
        """Mean seconds and reward of the groups with variance among the first prompts."""
        groups = [group for group in map(self.first_tries, range(prompts)) if len({reward for _, reward in group}) > 1]
        seconds, rewards = zip(*(outcome for group in groups for outcome in group), strict=True)
        return statistics.fmean(seconds), statistics.fmean(rewards)

    @functools.cached_property
    def bound_s(self) -> float:
        """Seconds of generation per step if all engines are always busy, and every rollout is of use."""
        groups = [self.first_tries(number) for number in range(10**6, 10**6 + 1000)]
        varies = statistics.fmean(len({reward for _, reward in group}) > 1 for group in groups)
        mean_s = statistics.fmean(seconds for group in groups for seconds, _ in group)
        return PROMPTS / varies * self.group_size * mean_s / SLOTS

    @property
    def training_s(self) -> float:
        """Seconds of training per step."""
        return self.bound_s / 2


class Schedule(Protocol):
    """What ``DynamicSampler`` and the others have in common."""

    fates: Fates

    def ask(self) -> None: ...
    def weights(self, version: int) -> None: ...
    def scored(self, rollout: str, reward: float, usage: Usage) -> None: ...
    def cancelled(self, rollout: str, usage: Usage) -> None: ...
    def decide(self) -> Decision: ...


@dataclass(slots=True)
class Run:
    """What a schedule did.

    Attributes:
        steps: times at which batches were trained.
        trained: prompt, seconds and reward of each rollout that was trained on.
        groups: rollouts of each group that was trained on.
        lags: versions that they were behind.
        prompts: numbers of those of batches, at most.
        used_s: seconds that went into rollouts of batches, and of groups without variance.
    """

    steps: list[float] = field(default_factory=list)
    trained: list[tuple[int, float, float]] = field(default_factory=list)
    groups: list[list[str]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    prompts: int = 0
    used_s: float = 0.0

    @property
    def step_s(self) -> float:
        """After the warm-up."""
        return (self.steps[-1] - self.steps[WARM_UP]) / (len(self.steps) - 1 - WARM_UP)

    @property
    def lost(self) -> float:
        """Share of the engines' time that was idle, or went into rollouts that were of no use."""
        return 1 - self.used_s / (SLOTS * self.steps[-1])

    def bias(self, world: World, end: int | None = None) -> tuple[float, float]:
        """Mean seconds and reward of what was trained on, over what the policy samples for the same prompts."""
        end = self.prompts if end is None else end
        _, seconds, rewards = zip(*(one for one in self.trained if one[0] < end), strict=True)
        true_s, true_reward = world.true(end)
        return statistics.fmean(seconds) / true_s, statistics.fmean(rewards) / true_reward


def drive(world: World, steps: int, schedule: Schedule) -> Run:
    """A schedule over engines with so many slots, and a trainer with devices of its own, in simulated time."""
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
    run.used_s = schedule.fates[Fate.EMITTED].seconds + schedule.fates[Fate.NO_VARIANCE].seconds
    return run


class Replenished:
    """Groups in place of those that end, and a batch of the first that are complete with variance: what is common to
    asynchronous schedules that do not look at the order of prompts."""

    def __init__(self, size: int) -> None:
        self.fates = Fates()
        self._size = size
        self._asked = self._emitted = self._version = self._fresh = 0
        self._tries: dict[int, int] = {}
        self._begun: dict[int, int] = {}
        """Versions of groups that run."""
        self._scores: dict[int, dict[str, tuple[float, Usage]]] = {}
        self._ready: list[int] = []
        self._decision = Decision()

    def ask(self) -> None:
        """The trainer is ready for a batch."""
        self._asked += 1

    def weights(self, version: int) -> None:
        """What is sampled from now on."""
        self._version = version

    def scored(self, rollout: str, reward: float, usage: Usage) -> None:
        """A rollout ended."""
        number = int(rollout.split(":")[1])
        group = self._scores[number]
        group[rollout] = (reward, usage)
        if len(group) < self._size:
            return
        if len({reward for reward, _ in group.values()}) > 1:
            self._ready.append(number)
        else:
            self._end(number, Fate.NO_VARIANCE)

    def cancelled(self, rollout: str, usage: Usage) -> None:
        """It was called off."""
        self.fates.add(Fate.CANCELLED, usage)

    def _begin(self, number: int) -> None:
        self._tries[number] = tries = self._tries.get(number, -1) + 1
        self._begun[number], self._scores[number] = self._version, {}
        self._fresh = max(self._fresh, number + 1)
        self._decision.submit += [
            Submission(f"{RUN}:{number}:{place}:{tries}", f"{RUN}:{number}", number, self._version, False)
            for place in range(self._size)
        ]

    def _end(self, number: int, fate: Fate) -> None:
        del self._begun[number]
        for _, usage in self._scores.pop(number).values():
            self.fates.add(fate, usage)

    def _batch(self) -> Batch | None:
        if self._emitted == self._asked or len(self._ready) < PROMPTS:
            return None
        batch = Batch(self._emitted, self._emitted, {})
        for number in self._ready[:PROMPTS]:
            batch.groups[number] = [
                Scored(rollout, reward, self._begun[number]) for rollout, (reward, _) in self._scores[number].items()
            ]
            self._end(number, Fate.EMITTED)
        del self._ready[:PROMPTS]
        self._emitted += 1
        return batch

    def _decided(self) -> Decision:
        decision, self._decision = self._decision, Decision()
        return decision


class EarlyTermination(Replenished):
    """As in ProRL's paper (section 3.4) and verl's DAPO recipes: a complete batch ends what runs; prompts that were
    not complete come first in the next step, which begins with the next weights."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._first: deque[int] = deque()

    def decide(self) -> Decision:
        """What follows."""
        if (batch := self._batch()) is not None:
            self._decision.batches.append(batch)
            left = [number for number in self._begun if number not in self._ready]
            for number in left:
                tries = self._tries[number]
                rollouts = [f"{RUN}:{number}:{place}:{tries}" for place in range(self._size)]
                self._decision.cancel += [rollout for rollout in rollouts if rollout not in self._scores[number]]
            for number in [*left, *self._ready]:
                self._end(number, Fate.STALE)
            self._ready = []
            self._first.extendleft(sorted(left, reverse=True))
        elif self._emitted < self._asked:
            while len(self._begun) - len(self._ready) < SLOTS // self._size:
                self._begin(self._first.popleft() if self._first else self._fresh)
        return self._decided()


class FirstComplete(Replenished):
    """Admission as AReaL's: as many groups as may still be trained on, each counted as one with variance; nothing is
    ever called off, however many versions behind it is.

    Args:
        staleness: versions.
    """

    def __init__(self, size: int, staleness: int) -> None:
        super().__init__(size)
        self._staleness = staleness

    def decide(self) -> Decision:
        """What follows."""
        while (batch := self._batch()) is not None:
            self._decision.batches.append(batch)
        while len(self._begun) < PROMPTS * (self._staleness + 1 + self._version - self._emitted):
            self._begin(self._fresh)
        return self._decided()
