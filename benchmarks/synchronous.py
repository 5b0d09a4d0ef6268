# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Synchronous rounds, as NeMo RL's dynamic sampling makes them, told and asked like ``DynamicSampler``.

A round is so many batches of prompts, all submitted at once; nothing else is until all of it is scored. If there are
enough groups with variance the first ones are the batch and the surplus is discarded, else another round follows.
"""

from __future__ import annotations

from nemo_gym_prorl.dapo.contract import Batch, Decision, Scored, Submission
from nemo_gym_prorl.dapo.group import Fate, Fates, Usage


class Rounds:
    """The schedule.

    Args:
        groups: prompts of a batch.
        size: rollouts of each.
        multiplier: batches of prompts per round.
        run: begins all ids, which are those of ``DynamicSampler``.
    """

    def __init__(self, groups: int, size: int, multiplier: int, run: str) -> None:
        self.fates = Fates()
        self.submitted = 0
        self._wanted, self._size, self._multiplier, self._run = groups, size, multiplier, run
        self._owed = 0
        """Batches that were asked for."""
        self._emitted = 0
        self._version = 0
        self._prompt = 0
        self._running: dict[str, int] = {}
        """The number of its prompt."""
        self._round: dict[int, dict[str, tuple[float, Usage]]] = {}
        self._ready: dict[int, dict[str, tuple[float, Usage]]] = {}

    @property
    def in_flight(self) -> int:
        """Rollouts submitted that have no outcome."""
        return len(self._running)

    @property
    def held(self) -> int:
        """Scored rollouts that wait for their round, or for their batch."""
        return sum(len(group) for groups in (self._round, self._ready) for group in groups.values())

    def ask(self) -> None:
        """The trainer is ready for a batch."""
        self._owed += 1

    def weights(self, version: int) -> None:
        """What is sampled from now on."""
        self._version = version

    def scored(self, rollout: str, reward: float, usage: Usage) -> None:
        """A rollout ended."""
        self._round[self._running.pop(rollout)][rollout] = (reward, usage)

    def cancelled(self, rollout: str, usage: Usage) -> None:
        """Nothing ever is."""
        raise AssertionError(f"{rollout} was cancelled")

    def decide(self) -> Decision:
        """What follows."""
        decision = Decision()
        if self._running or not self._owed:
            return decision
        for number, group in self._round.items():
            if len({reward for reward, _ in group.values()}) > 1:
                self._ready[number] = group
            else:
                self._end(group, Fate.NO_VARIANCE)
        self._round = {}
        if len(self._ready) < self._wanted:
            self._begin_round(decision)
            return decision
        batch = Batch(self._emitted, self._version, {})
        for place, (number, group) in enumerate(self._ready.items()):
            if place < self._wanted:
                batch.groups[number] = [Scored(name, reward, self._version) for name, (reward, _) in group.items()]
            self._end(group, Fate.EMITTED if place < self._wanted else Fate.STALE)
        self._ready = {}
        self._owed -= 1
        self._emitted += 1
        decision.batches.append(batch)
        return decision

    def _begin_round(self, decision: Decision) -> None:
        for number in range(self._prompt, self._prompt + self._multiplier * self._wanted):
            self._round[number] = {}
            for place in range(self._size):
                rollout = f"{self._run}:{number}:{place}:0"
                self._running[rollout] = number
                decision.submit.append(Submission(rollout, f"{self._run}:{number}", number, self._version, False))
        self._prompt += self._multiplier * self._wanted
        self.submitted += len(decision.submit)

    def _end(self, group: dict[str, tuple[float, Usage]], fate: Fate) -> None:
        for _, usage in group.values():
            self.fates.add(fate, usage)
