# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Prefix sampling on the simulated clock of :mod:`benchmarks.dapo`: what it saves, and by what it is biased.

The policy of these worlds is the luck of turns: the gradient is that of the chance to be right by it, with advantages
as GRPO's. Dynamic sampling's is the same in all turns; that of forks is 0 in those that they took over.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report import Figure
from benchmarks.schedules import PROMPTS, RUN, SLOTS, Run, World, drive
from nemo_gym_prorl.dapo.contract import Decision, SamplerConfig
from nemo_gym_prorl.dapo.group import Usage
from nemo_gym_prorl.dapo.prefixes import NOTHING_KEPT, Kept, Prefix
from nemo_gym_prorl.dapo.prompts import Epochs
from nemo_gym_prorl.dapo.sampler import DynamicSampler


TURNS = 12
ROWS = 512
SIZE = 8
TRIES = 3
SLOWNESS = 0.4
"""Of the spread of a rollout's luck, what slow ones lack."""
SKEWED, HOPELESS = (1.88, 0.0), (0.0, 6.5)
"""How far from even prompts are, and the spread of that, in spreads of a rollout's luck. A fifth of groups vary in
either; whether anybody ever helps the others is the difference."""
WORKLOADS = {
    "light tail, prompts 3% or 97% right": (0.4, SKEWED),
    "heavy tail, prompts 3% or 97% right": (2.0, SKEWED),
    "light tail, most prompts always or never right": (0.4, HOPELESS),
}
UNBIASED = 0.03
"""What bench-dapo calls so."""


@dataclass(frozen=True)
class Walk(World):
    """A workload of turns.

    Attributes:
        ease: of prompts.
        begun: rollouts that are forks, and where they begin.
        prompts: places in the stream of groups' prompts, where it is not the group's number.
    """

    ease: tuple[float, float] = (0.0, 1.0)
    begun: dict[str, Prefix] = field(default_factory=dict, compare=False, repr=False)
    prompts: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    def _outcome(self, rollout: str) -> tuple[float, float]:
        seconds, spent = self._seconds(rollout)
        if spent + seconds > self.budget_s:
            return max(self.budget_s - spent, 0.0), 0.0
        drawn, (skew, spread) = random.Random(f"{self.seed}:ease:{self._prompt(rollout)}"), self.ease
        ease = drawn.choice((-skew, skew)) + drawn.gauss(0, spread)
        return seconds, float(ease + sum(self.luck(rollout)) > 0)

    def _seconds(self, rollout: str) -> tuple[float, float]:
        """Its own, and those of the turns that it took over."""
        drawn = self._drawn(self._prompt(rollout), _sample(rollout))
        if (prefix := self.begun.get(rollout)) is None:
            return drawn, 0.0
        own, before = (TURNS - prefix.turn) / TURNS, self._drawn(self._prompt(rollout), _sample(prefix.rollout))
        return drawn * own, before * (1 - own)

    def _prompt(self, rollout: str) -> int:
        number = int(rollout.split(":")[1])
        return self.prompts.get(number, number) % ROWS

    def true(self, prompts: int) -> tuple[float, float]:
        """Of groups that began at their prompt."""
        at_prefixes = {int(rollout.split(":")[1]) for rollout in self.begun}
        groups = [self.first_tries(number) for number in range(prompts) if number not in at_prefixes]
        outcomes = [one for group in groups if len({reward for _, reward in group}) > 1 for one in group]
        seconds, rewards = zip(*outcomes, strict=True)
        return statistics.fmean(seconds), statistics.fmean(rewards)

    def luck(self, rollout: str) -> list[float]:
        """Of each turn."""
        prefix = self.begun.get(rollout)
        slowness = random.Random(f"{self.seed}:{_sample(rollout)}").gauss(0, 1)
        drawn = random.Random(f"{self.seed}:luck:{_sample(rollout)}")
        spread = math.sqrt((1 - SLOWNESS**2) / TURNS)
        own = [drawn.gauss(0, spread) - SLOWNESS * slowness / TURNS for _ in range(TURNS)]
        return own if prefix is None else self.luck(prefix.rollout)[: prefix.turn] + own[prefix.turn :]


class WithPrefixes(DynamicSampler):
    """Ours, with a service that keeps each turn of what began at a prompt."""

    def __init__(self, world: Walk, staleness: int, tries: int) -> None:
        config = SamplerConfig(PROMPTS, SIZE, SLOTS, staleness, prefix_tries=tries, max_fruitless=10**9)
        super().__init__(config, Epochs([{}] * ROWS, seed=None), run=RUN)
        self._world = world

    def scored(self, rollout: str, reward: float, usage: Usage = Usage(), **more: Any) -> None:
        kept = NOTHING_KEPT if rollout in self._world.begun else Kept(None, range(1, TURNS))
        super().scored(rollout, reward, usage, kept=kept)

    def decide(self) -> Decision:
        decision = super().decide()
        for one in decision.submit:
            self._world.prompts[int(one.group.split(":")[1])] = one.prompt
            if one.prefix is not None:
                self._world.begun[one.rollout] = one.prefix
        return decision


def figures(seeds: Sequence[int], steps: int) -> list[Figure]:
    """With against without, on each workload and with two bounds of staleness."""
    made = []
    for (name, (variation, ease)), staleness in itertools.product(WORKLOADS.items(), (1, 4)):
        runs: dict[int, list[tuple[Walk, Run]]] = {0: [], TRIES: []}
        for seed, tries in itertools.product(seeds, runs):
            world = Walk(seed, variation, 0.0, SIZE, ease=ease)
            runs[tries].append((world, drive(world, steps, WithPrefixes(world, staleness, tries))))
        plain, ours = runs[0], runs[TRIES]
        label = f"prefixes, {name}, staleness {staleness}"
        steps_s = [[run.step_s for _, run in each] for each in (ours, plain)]
        ratio = statistics.fmean(steps_s[1]) / statistics.fmean(steps_s[0])
        bias = [[run.bias(world) for world, run in each] for each in (ours, plain)]
        alone = [_at_prompts(world, run).bias(world) for world, run in ours]
        of_turns = [[_first_half(world, run) for world, run in each] for each in (ours, plain)]
        shares_begun = [statistics.fmean(group[0] in world.begun for group in run.groups) for world, run in ours]
        made += [
            Figure.of(f"{label}: seconds per step", steps_s[0], "s", peers={"without": steps_s[1]}),
            Figure(f"{label}: without over with", ratio, "times", ">= 1.5"),
            Figure.of(f"{label}: groups that began at a prefix", shares_begun, ""),
            *(
                _biased(f"{label}: bias, {what}, of groups that began at their prompt", [one[place] for one in alone])
                for place, what in enumerate(("length", "reward"))
            ),
            *(
                Figure.of(
                    f"{label}: bias, {what}, of all groups",
                    [one[place] for one in bias[0]],
                    "",
                    peers={"without": [one[place] for one in bias[1]]},
                )
                for place, what in enumerate(("length", "reward"))
            ),
            Figure.of(
                f"{label}: gradient on the first half of turns, of all",
                of_turns[0],
                "",
                peers={"without": of_turns[1]},
            ),
        ]
    return [*made, _own_prefix(seeds)]


def _biased(name: str, values: list[float]) -> Figure:
    told = Figure.of(name, values, "", f"<= {UNBIASED}")
    told.goal_value = abs(statistics.fmean(values) - 1)
    return told


def _at_prompts(world: Walk, run: Run) -> Run:
    """What was trained on of groups that began at their prompt."""
    numbers = {int(group[0].split(":")[1]) for group in run.groups if group[0] not in world.begun}
    return Run(trained=[one for one in run.trained if one[0] in numbers], prompts=run.prompts)


def _first_half(world: Walk, run: Run) -> float:
    gradient = [0.0] * TURNS
    for group in run.groups:
        rewards = [world.outcome(rollout)[1] for rollout in group]
        mean, spread = statistics.fmean(rewards), statistics.stdev(rewards)
        for rollout, reward in zip(group, rewards, strict=True):
            prefix = world.begun.get(rollout)
            for turn, luck in enumerate(world.luck(rollout)):
                if prefix is None or turn >= prefix.turn:
                    gradient[turn] += (reward - mean) / spread * luck
    return sum(gradient[: TURNS // 2]) / sum(gradient)


def _own_prefix(seeds: Sequence[int]) -> Figure:
    """Why nobody of the group itself helps: forks in the middle of one of it, against as many tries at the prompt."""
    helped: dict[str, list[bool]] = {"middle": [], "prompt": []}
    for seed in seeds:
        world = Walk(seed, 0.4, 0.0, SIZE, ease=SKEWED)
        for number in range(ROWS):
            if len({reward for _, reward in world.first_tries(number)}) > 1:
                continue
            for where, turn in (("middle", TURNS // 2), ("prompt", 0)):
                ids = [f"{RUN}:{number}:{place}:{1 + (turn > 0)}" for place in range(SIZE)]
                if turn:
                    world.begun.update((one, Prefix(f"{RUN}:{number}:0:0", turn, None)) for one in ids)
                helped[where].append(len({world.outcome(one)[1] for one in ids}) > 1)
    shares = {where: statistics.fmean(found) for where, found in helped.items()}
    name = (
        "prefixes, prompts 3% or 97% right: groups without variance that have it from the middle of one of their own"
    )
    return Figure(name, shares["middle"], "", peers={"from the prompt": shares["prompt"]})


def _sample(rollout: str) -> str:
    return rollout.partition(":")[2]
