# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling on a simulated clock: seconds per step, and bias of the trained rollouts.

Engines run 256 rollouts at a time; a batch is 32 prompts with variance, in groups of 8. Durations are log-normal by
prompt and by rollout, with a mean of 60 s and a coefficient of variation of 2. A time budget cuts off 0.7 % of the
rollouts (15 % in rows that say so), with reward 0. Half of the prompts are informative: of their rollouts, the shorter
half is right with probability 0.7, the longer half with 0.3. The bound is the generation time of a step if no engine
idles and no rollout is wasted. Training takes half of the bound.

Ours is ``DynamicSampler``. Peers: synchronous rounds as in NeMo RL, of 1 to 4 batches of prompts (the best counts),
and early termination as in ProRL's paper. The length bias is the mean duration of trained rollouts over that of first
tries of the same prompts. A row shows the distance of the length bias from 1 (no bias).

Prefix sampling is compared with the same sampler without prefixes. A rollout has 12 turns, and is right if the ease of
its prompt plus the luck of its turns exceeds 0. A fork inherits the first turns of another rollout.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report import Row, parser, publish
from benchmarks.sampling_clock import PROMPTS, RUN, SLOTS, Run, World, drive
from benchmarks.schedules import EarlyTermination, Rounds
from nemo_gym_prorl.dapo.contract import Decision, SamplerConfig
from nemo_gym_prorl.dapo.group import NO_CHECKPOINTS, CheckpointRef, Prefix, Usage
from nemo_gym_prorl.dapo.prompts import Epochs
from nemo_gym_prorl.dapo.sampler import DynamicSampler


STALENESS = (0, 1, 4, 8)
SIZE = 8
ROUNDS, EARLY = "best rounds", "early termination"
ROUNDS_GOAL, BOUND_GOAL, BIAS_GOAL, PREFIX_GOAL = "<= 0.25", "<= 1.1", "<= 0.2", "<= 0.667"
TURNS, DATASET, TRIES = 12, 512, 3
"""Prefix sampling: turns of a rollout, prompts, and tries of forks."""
SLOWNESS = 0.4
"""Correlation of a rollout's slowness with bad luck."""
EASE = 1.88
"""Ease of a prompt, with either sign, in standard deviations of luck: its rollouts are right with 3 % or 97 %."""


def sampler(world: World, staleness: int, *, prompts: int = PROMPTS) -> DynamicSampler:
    config = SamplerConfig(prompts, world.group_size, SLOTS, staleness, max_fruitless=10**9)
    return DynamicSampler(config, Epochs([{}] * 100_000, seed=None), run=RUN)


def mean_step_s(runs: Sequence[Run]) -> float:
    return statistics.fmean(run.step_s for run in runs)


def distance(runs: Sequence[Run], worlds: Sequence[World]) -> float:
    return abs(statistics.fmean(run.bias(world)[0] for run, world in zip(runs, worlds, strict=True)) - 1)


def compare(
    label: str, worlds: Sequence[World], steps: int, staleness: Sequence[int], *, is_main: bool = True
) -> list[Row]:
    """Return the rows of all schedules on one workload; only the main workload has goals for bound and bias."""
    rounds = [[drive(world, steps, Rounds(SIZE, multiplier)) for world in worlds] for multiplier in (1, 2, 3, 4)]
    early = [drive(world, steps, EarlyTermination(SIZE)) for world in worlds]
    best, bound, rows = min(map(mean_step_s, rounds)), worlds[0].bound_s, []
    for versions in staleness:
        runs = [drive(world, steps, sampler(world, versions)) for world in worlds]
        biased = BIAS_GOAL if is_main and versions == 4 else None
        name, step_s = f"{label}, staleness {versions}", mean_step_s(runs)
        goal, near = (ROUNDS_GOAL, BOUND_GOAL if is_main else None) if versions >= 4 else (None, None)
        rows += [
            Row(f"seconds per step, {name}", "s", step_s, best, ROUNDS, goal),
            Row(f"seconds per step, {name}", "s", step_s, mean_step_s(early), EARLY),
            Row(f"seconds per step, {name}", "s", step_s, bound, "bound", near),
            Row(f"length bias less 1, {name}", "", distance(runs, worlds), distance(early, worlds), EARLY, biased),
        ]
    return rows


@dataclass(frozen=True)
class Walk(World):
    """Workload whose rollouts consist of turns, so that they can be forked.

    Attributes:
        begun: prefix of each fork, by rollout.
        prompts: index of the prompt by number of the group, for groups where the two differ.
    """

    begun: dict[str, Prefix] = field(default_factory=dict, compare=False, repr=False)
    prompts: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    def _outcome(self, rollout: str) -> tuple[float, float]:
        prompt = int(rollout.split(":")[1])
        prompt = self.prompts.get(prompt, prompt) % DATASET
        seconds, before_s = self._drawn(prompt, _sample(rollout)), 0.0
        if (prefix := self.begun.get(rollout)) is not None:
            own = (TURNS - prefix.turn) / TURNS
            seconds, before_s = seconds * own, self._drawn(prompt, _sample(prefix.rollout)) * (1 - own)
        if before_s + seconds > self.budget_s:
            return max(self.budget_s - before_s, 0.0), 0.0
        ease = random.Random(f"{self.seed}:ease:{prompt}").choice((-EASE, EASE))
        return seconds, float(ease + sum(self.luck(rollout)) > 0)

    def luck(self, rollout: str) -> list[float]:
        prefix = self.begun.get(rollout)
        slowness = random.Random(f"{self.seed}:{_sample(rollout)}").gauss(0, 1)
        drawn = random.Random(f"{self.seed}:luck:{_sample(rollout)}")
        spread = math.sqrt((1 - SLOWNESS**2) / TURNS)
        own = [drawn.gauss(0, spread) - SLOWNESS * slowness / TURNS for _ in range(TURNS)]
        return own if prefix is None else self.luck(prefix.rollout)[: prefix.turn] + own[prefix.turn :]


class WithPrefixes(DynamicSampler):
    """``DynamicSampler`` over a service that keeps a checkpoint of each turn of rollouts without a prefix."""

    def __init__(self, world: Walk, staleness: int, tries: int) -> None:
        config = SamplerConfig(PROMPTS, SIZE, SLOTS, staleness, prefix_tries=tries, max_fruitless=10**9)
        super().__init__(config, Epochs([{}] * DATASET, seed=None), run=RUN)
        self._world = world

    def scored(self, rollout: str, reward: float, usage: Usage = Usage(), **more: Any) -> None:
        checkpoints = NO_CHECKPOINTS if rollout in self._world.begun else CheckpointRef(None, range(1, TURNS))
        super().scored(rollout, reward, usage, checkpoints=checkpoints)

    def decide(self) -> Decision:
        decision = super().decide()
        for one in decision.submit:
            self._world.prompts[int(one.group.split(":")[1])] = one.prompt
            if one.prefix is not None:
                self._world.begun[one.rollout] = one.prefix
        return decision


def compare_prefixes(label: str, variation: float, seeds: range, steps: int, staleness: int = 4) -> Row:
    with_s, without_s = (
        statistics.fmean(drive(world, steps, WithPrefixes(world, staleness, tries)).step_s for world in worlds)
        for tries, worlds in ((n, [Walk(seed, variation, 0.0, SIZE) for seed in seeds]) for n in (TRIES, 0))
    )
    name = f"seconds per step, prefix sampling, {label}, staleness {staleness}"
    return Row(name, "s", with_s, without_s, "without", PREFIX_GOAL)


def _sample(rollout: str) -> str:
    return rollout.partition(":")[2]


def main() -> None:
    quick = parser(__doc__).parse_args().quick
    seeds, steps = (range(1), 10) if quick else (range(3), 24)
    rows = compare("heavy tail", [World(seed, 2.0, 0.5, SIZE) for seed in seeds], steps, (4,) if quick else STALENESS)
    if not quick:
        cut = [World(seed, 2.0, 0.5, SIZE, cut=0.15) for seed in seeds]
        rows += compare("15 % time-outs", cut, steps, (4,), is_main=False)
    for label, variation in (("light tail", 0.4), *(() if quick else (("heavy tail", 2.0),))):
        rows.append(compare_prefixes(label, variation, seeds, steps))
    publish("dapo", rows, packages=(), quick=quick)


if __name__ == "__main__":
    main()
