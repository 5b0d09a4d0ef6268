# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Peers of ``DynamicSampler``: reimplementations of published schedules with the same interface."""

from __future__ import annotations

from collections import deque

from benchmarks.sampling_clock import PROMPTS, RUN, SLOTS
from nemo_gym_prorl.dapo.contract import Batch, BatchRollout, Decision, Submission
from nemo_gym_prorl.dapo.group import OutcomeTotals, RolloutOutcome, Usage


class Replenished:
    """Base of the peers: a batch is the first groups that are complete and have variance, in any order of prompts."""

    def __init__(self, size: int) -> None:
        self.outcomes = OutcomeTotals()
        self._size = size
        self._asked = self._emitted = self._version = self._fresh = 0
        self._tries: dict[int, int] = {}
        self._begun: dict[int, int] = {}
        """Weight version at the start of each running group."""
        self._scores: dict[int, dict[str, tuple[float, Usage]]] = {}
        self._ready: list[int] = []
        self._decision = Decision()

    def ask(self) -> None:
        self._asked += 1

    def weights(self, version: int) -> None:
        self._version = version

    def scored(self, rollout: str, reward: float, usage: Usage) -> None:
        number = int(rollout.split(":")[1])
        group = self._scores[number]
        group[rollout] = (reward, usage)
        if len(group) < self._size:
            return
        if len({reward for reward, _ in group.values()}) > 1:
            self._ready.append(number)
        else:
            self._end(number, RolloutOutcome.NO_VARIANCE)

    def cancelled(self, rollout: str, usage: Usage) -> None:
        self.outcomes.add(RolloutOutcome.CANCELLED, usage)

    def _begin(self, number: int) -> None:
        self._tries[number] = tries = self._tries.get(number, -1) + 1
        self._begun[number], self._scores[number] = self._version, {}
        self._fresh = max(self._fresh, number + 1)
        self._decision.submit += [
            Submission(f"{RUN}:{number}:{member}:{tries}", f"{RUN}:{number}", number, self._version, False)
            for member in range(self._size)
        ]

    def _end(self, number: int, outcome: RolloutOutcome) -> None:
        del self._begun[number]
        for _, usage in self._scores.pop(number).values():
            self.outcomes.add(outcome, usage)

    def _batch(self) -> Batch | None:
        if self._emitted == self._asked or len(self._ready) < PROMPTS:
            return None
        batch = Batch(self._emitted, self._emitted, {})
        for number in self._ready[:PROMPTS]:
            batch.groups[number] = [
                BatchRollout(rollout, reward, self._begun[number])
                for rollout, (reward, _) in self._scores[number].items()
            ]
            self._end(number, RolloutOutcome.EMITTED)
        del self._ready[:PROMPTS]
        self._emitted += 1
        return batch

    def _decided(self) -> Decision:
        decision, self._decision = self._decision, Decision()
        return decision


class EarlyTermination(Replenished):
    """Early termination as in ProRL's paper (section 3.4) and verl's DAPO recipes: a complete batch cancels all other
    rollouts. Incomplete prompts come first in the next step, which begins with the next weights."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._first: deque[int] = deque()

    def decide(self) -> Decision:
        if (batch := self._batch()) is not None:
            self._decision.batches.append(batch)
            left = [number for number in self._begun if number not in self._ready]
            for number in left:
                tries = self._tries[number]
                rollouts = [f"{RUN}:{number}:{member}:{tries}" for member in range(self._size)]
                self._decision.cancel += [rollout for rollout in rollouts if rollout not in self._scores[number]]
            for number in [*left, *self._ready]:
                self._end(number, RolloutOutcome.STALE)
            self._ready = []
            self._first.extendleft(sorted(left, reverse=True))
        elif self._emitted < self._asked:
            while len(self._begun) - len(self._ready) < SLOTS // self._size:
                self._begin(self._first.popleft() if self._first else self._fresh)
        return self._decided()


class Rounds(Replenished):
    """Synchronous rounds as in NeMo RL's dynamic sampling: a round starts ``multiplier`` batches of prompts and ends
    when all are scored. Once enough groups have variance, the first are the batch and all others are discarded.

    Args:
        size: rollouts of a group.
        multiplier: batches of prompts per round.
    """

    def __init__(self, size: int, multiplier: int) -> None:
        super().__init__(size)
        self._multiplier = multiplier

    def decide(self) -> Decision:
        if len(self._begun) == len(self._ready) and self._emitted < self._asked:
            self._ready.sort()
            if (batch := self._batch()) is not None:
                self._decision.batches.append(batch)
                for number in self._ready:
                    self._end(number, RolloutOutcome.STALE)
                self._ready = []
            else:
                for _ in range(self._multiplier * PROMPTS):
                    self._begin(self._fresh)
        return self._decided()
