# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: seconds per step, and what was generated for nothing, on a simulated clock.

Engines run 256 rollouts at a time; a batch is 32 prompts with variance. Seconds of a rollout are log-normal by
prompt and by rollout, 60 in the mean, and end at 600, which is its budget; the light tail has a coefficient of
variation of 0.4, the heavy one of 2 (before the budget). A prompt is informative (solved half of the time) or always
solved or never. Training takes half as long as generating a batch would if all engines were always busy with rollouts
of use; that, with all prompts that have to be tried to find 32, is the bound.

Ours is ``DynamicSampler``, driven in simulated time. The peers are the schedules of others, written again here: rounds
as NeMo RL's synchronous GRPO makes them, of 1 to 4 batches of prompts, the surplus of the last one discarded; and
early stop as in verl's DAPO recipes: prompts are replaced as they end, all else is cancelled when the batch is
complete, and unfinished prompts come first in the next step. Both train while no engine works. Of use are rollouts of
batches and of groups which turned out to have no variance; bias is the mean time of a rollout that was trained on over
that of all rollouts: below 1, long ones were dropped.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.report import Figure, publish
from nemo_gym_prorl.dapo.contract import SamplerConfig
from nemo_gym_prorl.dapo.fates import Fate, Usage
from nemo_gym_prorl.dapo.prompts import Epochs
from nemo_gym_prorl.dapo.sampler import DynamicSampler


SLOTS = 256
PROMPTS = 32
MEAN_S = 60.0
BUDGET_S = 600.0
STALENESS = (0, 1, 4, 8)
WARM_UP = 5
"""Steps that are not counted: the first ones begin with empty engines."""


def drawn_reward(seed: int, informative: float, prompt: int, sample: str) -> float:
    """0 or 1: of a prompt that is informative (by that probability) at even odds, of others always the same."""
    kind = random.Random(f"{seed}:kind:{prompt}").random()
    if kind >= informative:
        return float(kind < (1 + informative) / 2)
    return float(random.Random(f"{seed}:reward:{sample}").random() < 0.5)


@dataclass(frozen=True)
class World:
    """A workload: the same for all schedules of one seed."""

    seed: int
    variation: float
    informative: float
    group_size: int

    def duration(self, prompt: int, sample: str) -> float:
        """Seconds of a rollout: half of the logarithm's variance is its prompt's."""
        variance = math.log1p(self.variation**2) / 2
        spread = math.sqrt(variance)
        of_prompt = random.Random(f"{self.seed}:{prompt}").gauss(0, spread)
        of_rollout = random.Random(f"{self.seed}:{sample}").gauss(0, spread)
        return min(MEAN_S * math.exp(of_prompt + of_rollout - variance), BUDGET_S)

    @functools.cached_property
    def mean_s(self) -> float:
        """Of rollouts, with the budget."""
        return statistics.fmean(self.duration(prompt, f"mean:{prompt}") for prompt in range(50_000))

    def reward(self, prompt: int, sample: str) -> float:
        """0 or 1."""
        return drawn_reward(self.seed, self.informative, prompt, sample)

    @property
    def bound_s(self) -> float:
        """Seconds of generation per step if all engines are always busy, and every rollout is of use."""
        varies = self.informative * (1 - 2 * 0.5**self.group_size)
        return PROMPTS / varies * self.group_size * self.mean_s / SLOTS

    @property
    def training_s(self) -> float:
        """Seconds of training per step."""
        return self.bound_s / 2


@dataclass(slots=True)
class Run:
    """What a schedule did, after its warm-up."""

    steps: list[float] = field(default_factory=list)
    """Times at which batches were trained."""
    busy_s: float = 0.0
    used_s: float = 0.0
    lengths: list[float] = field(default_factory=list)
    """Seconds of the rollouts that were trained on."""
    staleness: list[int] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        return (self.steps[-1] - self.steps[WARM_UP]) / (len(self.steps) - 1 - WARM_UP)

    @property
    def lost(self) -> float:
        """Share of the engines' time that was idle, or went into rollouts that were of no use."""
        return 1 - self.used_s / (SLOTS * self.steps[-1])

    @property
    def length_s(self) -> float:
        """Mean of the rollouts that were trained on."""
        return statistics.fmean(self.lengths)


def ours(world: World, steps: int, staleness: int) -> Run:
    """The sampler, with engines and a trainer that take simulated time."""
    config = SamplerConfig(PROMPTS, world.group_size, SLOTS, staleness, max_fruitless=10**9)
    sampler = DynamicSampler(config, Epochs([{}] * 100_000, seed=None))
    run = Run()
    now, trained = 0.0, 0
    began: dict[str, float] = {}
    used: dict[str, float] = {}
    events: list[tuple[float, str]] = []
    batches: deque[int] = deque()
    training = ""
    sampler.ask()
    while len(run.steps) <= steps + WARM_UP:
        decision = sampler.decide()
        for rollout in decision.cancel:
            lasted = now - began.pop(rollout)
            run.busy_s += lasted
            sampler.cancelled(rollout, Usage(lasted))
        for batch in decision.batches:
            batches.append(batch.number)
            for scored in (scored for group in batch.groups.values() for scored in group):
                run.lengths.append(used[scored.rollout])
                run.staleness.append(batch.version - scored.version)
        for submission in decision.submit:
            began[submission.rollout] = now
            prompt, sample = submission.prompt, submission.rollout
            heapq.heappush(events, (now + world.duration(prompt, sample), sample))
        if batches and not training:
            training = f"train:{batches.popleft()}"
            heapq.heappush(events, (now + world.training_s, training))
        if decision.cancel:
            continue
        now, event = heapq.heappop(events)
        if event == training:
            training = ""
            trained += 1
            run.steps.append(now)
            sampler.weights(trained)
            sampler.ask()
        elif event in began:
            used[event] = now - began.pop(event)
            run.busy_s += used[event]
            prompt = int(event.split(":")[1])
            sampler.scored(event, world.reward(prompt, event), Usage(used[event], used[event]))
    run.used_s = sampler.fates[Fate.EMITTED].seconds + sampler.fates[Fate.NO_VARIANCE].seconds
    return run


def rounds(world: World, steps: int, multiplier: int) -> Run:
    """Synchronous rounds of ``multiplier`` batches of prompts, until there are enough with variance."""
    run = Run()
    now, prompt = 0.0, 0
    while len(run.steps) <= steps + WARM_UP:
        groups: list[list[float]] = []
        while len(groups) < PROMPTS:
            slots = [now] * SLOTS
            for number in range(prompt, prompt + multiplier * PROMPTS):
                samples = [f"{number}:{place}" for place in range(world.group_size)]
                durations = [world.duration(number, sample) for sample in samples]
                for duration in durations:
                    heapq.heapreplace(slots, slots[0] + duration)
                run.busy_s += sum(durations)
                if len({world.reward(number, sample) for sample in samples}) > 1:
                    groups.append(durations)
                else:
                    run.used_s += sum(durations)
            prompt += multiplier * PROMPTS
            now = max(slots)
        trained_on = [duration for group in groups[:PROMPTS] for duration in group]
        run.used_s += sum(trained_on)
        run.lengths += trained_on
        now += world.training_s
        run.steps.append(now)
    return run


def early_stop(world: World, steps: int) -> Run:
    """Prompts are replaced as they end; a complete batch ends the step, and unfinished prompts are tried again."""
    run = Run()
    now, fresh = 0.0, 0
    first: deque[int] = deque()
    tries: dict[int, int] = {}
    while len(run.steps) <= steps + WARM_UP:
        events: list[tuple[float, float, int, str]] = []
        waiting: deque[tuple[int, str]] = deque()
        done: dict[int, list[tuple[float, float]]] = {}
        groups = 0
        while groups < PROMPTS:
            while len(events) < SLOTS:
                if not waiting:
                    number = first.popleft() if first else fresh
                    fresh = max(fresh, number + 1)
                    tries[number] = tries.get(number, 0) + 1
                    done[number] = []
                    waiting.extend((number, f"{number}:{place}:{tries[number]}") for place in range(world.group_size))
                number, sample = waiting.popleft()
                heapq.heappush(events, (now + world.duration(number, sample), now, number, sample))
            now, began, number, sample = heapq.heappop(events)
            run.busy_s += now - began
            done[number].append((now - began, world.reward(number, sample)))
            if len(done[number]) == world.group_size:
                group = done.pop(number)
                run.used_s += sum(duration for duration, _ in group)
                if len({reward for _, reward in group}) > 1:
                    groups += 1
                    run.lengths += [duration for duration, _ in group]
        run.busy_s += sum(now - began for _, began, _, _ in events)
        first.extendleft(sorted(done, reverse=True))
        now += world.training_s
        run.steps.append(now)
    return run


def compare(name: str, variation: float, informative: float, size: int, seeds: range, steps: int) -> list[Figure]:
    """All schedules on one workload."""
    worlds = [World(seed, variation, informative, size) for seed in seeds]
    bound, mean_s = worlds[0].bound_s, worlds[0].mean_s
    peers = {f"rounds of {m}": [rounds(world, steps, m) for world in worlds] for m in (1, 2, 3, 4)}
    best = min(statistics.fmean(run.step_s for run in runs) for runs in peers.values())
    peers["early stop"] = [early_stop(world, steps) for world in worlds]
    figures = []
    for staleness in STALENESS:
        runs = [ours(world, steps, staleness) for world in worlds]
        label = f"{name}, staleness {staleness}"

        def figure(
            text: str, unit: str, of: Callable[[Run], float], runs: list[Run] = runs, label: str = label
        ) -> Figure:
            theirs = {peer: [of(run) for run in others] for peer, others in peers.items()}
            return Figure.of(f"{label}: {text}", [of(run) for run in runs], unit, peers=theirs)

        step = statistics.fmean(run.step_s for run in runs)
        figures += [
            figure("seconds per step", "s", lambda run: run.step_s),
            Figure(f"{label}: best rounds over ours", best / step, "times", ">= 1.8" if variation > 1 else None),
            Figure(f"{label}: over the bound of {bound:.0f} s", step / bound, "times", "<= 1.1"),
            figure("engines' time idle or of no use", "", lambda run: run.lost),
            figure("length bias", "", lambda run: run.length_s / mean_s),
        ]
        lags = [lag for run in runs for lag in run.staleness]
        figures.append(Figure(f"{label}: versions behind, mean", statistics.fmean(lags), ""))
    return figures


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="seconds per step of dynamic sampling, on a simulated clock")
    parser.add_argument("--quick", action="store_true", help="one workload, one seed, write nothing")
    quick = parser.parse_args().quick
    workloads = [("heavy tail", 2.0, 0.5, 8)]
    if not quick:
        workloads += [("heavy tail", 2.0, 0.2, 8), ("heavy tail", 2.0, 0.8, 8), ("heavy tail", 2.0, 0.5, 16)]
        workloads += [("light tail", 0.4, informative, 8) for informative in (0.2, 0.5, 0.8)]
        workloads += [("light tail", 0.4, 0.5, 16)]
    figures = []
    for tail, variation, informative, size in workloads:
        name = f"{tail}, groups of {size}, {informative:.0%} informative"
        figures += compare(name, variation, informative, size, range(1 if quick else 3), 10 if quick else 40)
    publish("dapo", figures, packages=(), quick=quick)


if __name__ == "__main__":
    main()
