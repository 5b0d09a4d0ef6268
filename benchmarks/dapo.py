# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: seconds per step, what was generated for nothing, and what bias that buys, on a simulated clock.

Engines run 256 rollouts at a time; a batch is 32 prompts with variance. Seconds of a rollout are log-normal by
prompt and by rollout, 60 in the mean; the light tail has a coefficient of variation of 0.4, the heavy one of 2, before
the budget, which ends 0.7 % of rollouts (about 600 s) or, where it says so, 15 %, with reward 0. A prompt is
informative (the shorter half of its rollouts is right with 0.7, the longer one with 0.3) or always solved or never;
once half of the prompts take ten times as long. Training takes half as long as generating a batch would if all engines
were always busy with rollouts of use; that, with all prompts that have to be tried to find 32, is the bound.

Ours is ``DynamicSampler``, driven in simulated time. The peers are the schedules of others, written again: rounds as
NeMo RL's synchronous GRPO makes them, of 1 to 4 batches of prompts, the surplus of the last one discarded; early
termination as in ProRL's paper and verl's DAPO recipes: prompts are replaced as they end, all else is cancelled when
the batch is complete, and unfinished prompts come first in the next step; and admission as AReaL's, by what may still
be trained on, with batches of the first that are complete. The former two train while no engine works. Of use are
rollouts of batches and of groups which turned out to have no variance.

Bias is the mean of what was trained on over the mean of first tries of the same prompts, with the filter: in seconds,
which stand for tokens here, and in reward. 1 is unbiased; below 1 in length, long ones are trained on less than they
are sampled. The goal is held against the distance from 1. The sampler's own estimate of its bias is held against the
truth in 100 runs of 8 prompts a batch.

Prefix sampling is held against the same without it, in rollouts of turns: right is one whose prompt's ease and whose
turns' luck are above 0 in sum, with 12 turns, of which a fork takes some over and samples and costs only the others;
what is slow has less luck. There are 512 prompts, again and again, and the policy learns nothing. A fifth of the
groups vary: where each prompt is solved by 3 % or by 97 % of rollouts, somebody who can help comes with time; where
most are solved always or never, hardly anybody. Nothing is more than twice as fast, since training takes half of the
time that generating does without. Groups that begin at their prompt are held to the bias of the others. Of all groups,
told are bias (in what they sampled themselves), the share that began at a prefix, and that of the gradient (by the
luck of a turn, with advantages as GRPO's) on the first half of the turns, which is 0.5 without.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

from benchmarks import prefixes
from benchmarks.report import Figure, publish
from benchmarks.schedules import PROMPTS, RUN, SLOTS, EarlyTermination, FirstComplete, Run, World, drive
from benchmarks.synchronous import Rounds
from nemo_gym_prorl.dapo.contract import SamplerConfig
from nemo_gym_prorl.dapo.prompts import Epochs
from nemo_gym_prorl.dapo.sampler import DynamicSampler


STALENESS = (0, 1, 4, 8)
UNBIASED = 0.03


def sampler(world: World, staleness: int, *, prompts: int = PROMPTS) -> DynamicSampler:
    """Ours."""
    config = SamplerConfig(prompts, world.group_size, SLOTS, staleness, max_fruitless=10**9)
    return DynamicSampler(config, Epochs([{}] * 100_000, seed=None), run=RUN)


def compare(name: str, worlds: Sequence[World], steps: int) -> list[Figure]:
    """All schedules on one workload."""
    size, bound = worlds[0].group_size, worlds[0].bound_s
    always = {f"rounds of {m}": [drive(w, steps, Rounds(PROMPTS, size, m, RUN)) for w in worlds] for m in (1, 2, 3, 4)}
    always["early termination"] = [drive(world, steps, EarlyTermination(size)) for world in worlds]
    figures = []
    for staleness in STALENESS:
        runs = [drive(world, steps, sampler(world, staleness)) for world in worlds]
        areal = [drive(world, steps, FirstComplete(size, staleness)) for world in worlds]
        peers = {**always, "AReaL's admission": areal}
        label = f"{name}, staleness {staleness}"

        def figure(
            text: str,
            unit: str,
            of: Callable[[Run, World], float],
            goal: str | None = None,
            value: float | None = None,
            *,
            label: str = label,
            runs: list[Run] = runs,
            peers: dict[str, list[Run]] = peers,
        ) -> Figure:
            theirs = {
                peer: [of(run, w) for run, w in zip(others, worlds, strict=True)] for peer, others in peers.items()
            }
            ours = [of(run, world) for run, world in zip(runs, worlds, strict=True)]
            told = Figure.of(f"{label}: {text}", ours, unit, goal, peers=theirs)
            told.goal_value = abs(statistics.fmean(ours) - 1) if goal else value
            return told

        step = statistics.fmean(run.step_s for run in runs)
        rounds = min(statistics.fmean(run.step_s for run in peers[f"rounds of {m}"]) for m in (1, 2, 3, 4))
        heavy = worlds[0].variation > 1
        figures += [
            figure("seconds per step", "s", lambda run, _: run.step_s),
            Figure(
                f"{label}: best rounds over ours", rounds / step, "times", ">= 4" if heavy and staleness >= 4 else None
            ),
            Figure(f"{label}: over the bound of {bound:.0f} s", step / bound, "times", "<= 1.1"),
            figure("engines' time idle or of no use", "", lambda run, _: run.lost),
            figure("bias, length", "", lambda run, world: run.bias(world)[0], f"<= {UNBIASED}"),
            figure("bias, reward", "", lambda run, world: run.bias(world)[1], f"<= {UNBIASED}"),
            figure("versions behind, most", "", lambda run, _: max(run.lags)),
        ]
    return figures


def coverage(seeds: int, steps: int) -> list[Figure]:
    """How often the sampler's own interval of its bias holds the truth."""
    held, widths, told, truths = 0, [], [], []
    for seed in range(seeds):
        world = World(seed, 2.0, 0.5, 8)
        ours = sampler(world, 1, prompts=8)
        run = drive(world, steps, ours)
        estimate = ours.length_bias
        if estimate is not None:
            true = run.bias(world, estimate.end)[0]
            held += estimate.low <= true <= estimate.high
            told.append(estimate.value)
            widths.append(estimate.high - estimate.low)
            truths.append(true)
    return [
        Figure(f"estimate of bias: intervals that hold the truth, of {seeds}", held, "", f">= {0.95 * seeds}"),
        Figure("estimate of bias: median width", statistics.median(widths), ""),
        Figure(
            "estimate of bias: median estimate",
            statistics.median(told),
            "",
            peers={"true": statistics.median(truths)},
        ),
    ]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="seconds per step and bias of dynamic sampling, on a simulated clock")
    parser.add_argument("--quick", action="store_true", help="one workload, one seed, write nothing")
    quick = parser.parse_args().quick
    workloads = [("heavy tail, groups of 8, 50% informative", 2.0, 0.5, 8, {})]
    if not quick:
        workloads += [
            ("heavy tail, groups of 8, 20% informative", 2.0, 0.2, 8, {}),
            ("heavy tail, groups of 8, 80% informative", 2.0, 0.8, 8, {}),
            ("heavy tail, groups of 16, 50% informative", 2.0, 0.5, 16, {}),
            ("heavy tail, groups of 8, 50% informative, 15% time-outs", 2.0, 0.5, 8, {"cut": 0.15}),
            ("light tail, groups of 8, 50% informative", 0.4, 0.5, 8, {}),
            (
                "light tail, groups of 8, 50% informative, half of the prompts ten times as long",
                0.4,
                0.5,
                8,
                {"long": 0.5},
            ),
        ]
    figures = []
    for name, variation, informative, size, more in workloads:
        worlds = [World(seed, variation, informative, size, **more) for seed in range(1 if quick else 3)]
        figures += compare(name, worlds, 10 if quick else 24)
    figures += coverage(5 if quick else 100, 60)
    figures += prefixes.figures(range(1 if quick else 3), 10 if quick else 24)
    publish("dapo", figures, packages=(), quick=quick)


if __name__ == "__main__":
    main()
