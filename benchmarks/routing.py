# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which router keeps prefix caches warm and nobody waiting: ours against the others, on agent traffic.

Simulated: 16 and 64 engines with a KV capacity (:mod:`benchmarks.traces`), under traffic of many shapes: at once, as a
stream, in bursts; engines that die, are slow, or come and go; a system prompt of 20,000 tokens that all share; tools
that take minutes; caches that are small (all prefixes just fit, evenly spread) or scarce (at the peak, live rollouts
need 1.0 to 1.2 times what the whole fleet holds); groups of 32 whose prompt of 30,000 tokens nobody else has; fleets
of 8 engines, where a group is a large part of the load. What real engines make of it is in
:mod:`benchmarks.routing_real`.

Then shapes that are drawn, not chosen (:func:`drawn`), and that nobody tuned to. Each is one trace, whose best of six
peers is often the luckiest one, which stands against us.

The best possible hit rate is that of a fleet whose engines share one boundless cache, or the best peer's if that is
more (see :func:`~benchmarks.traces.best_hit_rate`). One cache of the fleet's pooled capacity comes within 0.02 of it
even where caches are scarce, as it evicts those alone that wait longest for a tool; what is missing there beyond that
is lost by spreading tokens unevenly, and is a router's to win.

Every figure is a mean over seeds, each of which fixes a trace that all routers replay; a goal speaks of the ratio to
the best peer, whose 95 % confidence interval stands beside it and never moves the goal. Seeds that routers were tuned
with are never reported.

Run with ``python -m benchmarks.routing [--quick | --tune]``: quick is 8 and 16 engines and one tuning seed, tune all
tuning seeds; neither writes anything.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engines import Trace
from benchmarks.report import Figure, publish
from benchmarks.routers import PEERS, Ours, StickyLeastLoaded
from benchmarks.statistic import interval
from benchmarks.traces import Fleet, Incident, Outcome, agent_trace, best_hit_rate
from nemo_gym_prorl.policy.pool.pool import BackendPool


TUNING_SEEDS = (0, 1, 2)
"""Whoever changes a router looks at these."""
REPORT_SEEDS = {8: (101, 102, 103, 104, 105), 16: (101, 102, 103, 104, 105), 64: (101, 102, 103)}
"""These are published, by the number of engines, and nothing is ever tuned with them."""
TUNING_DRAWS = range(48)
"""Drawn shapes that may be looked at."""
REPORT_DRAWS = range(1000, 1100)
"""Drawn shapes that are published."""
BOUND = 1.02
"""A makespan or latency within 2 % of the best peer's counts as equal: the order of equal choices moves it as much."""
HIT_RATE = 0.98
"""Of the best possible."""
WITHDRAWN = 10_000
"""Turns that wait and are withdrawn, the latest first."""


@dataclass(frozen=True)
class Shape:
    """What the traffic and the fleet are like.

    Attributes:
        trace: see :func:`~benchmarks.traces.agent_trace`.
        groups: prompts per engine.
        fleet: see :class:`~benchmarks.traces.Fleet`.
        waves: engines come and go, a quarter of the fleet at a time.
        sizes: numbers of engines that it is played on.
    """

    trace: dict[str, Any] = field(default_factory=dict)
    groups: int = 4
    fleet: dict[str, Any] = field(default_factory=dict)
    waves: bool = False
    sizes: tuple[int, ...] = (16, 64)


SHAPES = {
    "burst": Shape(),
    "stream": Shape({"window_s": 300.0}, groups=8),
    "bursts": Shape({"window_s": 300.0, "bursts": 4}, groups=8),
    "small caches": Shape(fleet={"capacity": 150_000}),
    "scarce caches": Shape(fleet={"capacity": 100_000}),
    "hot system prompt": Shape({"system": 20_000, "window_s": 100.0}, groups=8, sizes=(8, 16, 64)),
    "hot system prompt, small caches": Shape(
        {"system": 20_000, "window_s": 300.0}, groups=8, fleet={"capacity": 150_000}
    ),
    "long group prompts": Shape({"siblings": 32, "prompt": 30_000}, groups=1, sizes=(8, 16)),
    "long group prompts, small caches": Shape(
        {"siblings": 32, "prompt": 30_000}, groups=1, fleet={"capacity": 200_000}, sizes=(8, 16)
    ),
    "minutes of tools, small caches": Shape(
        {"tool_s": 60.0, "tool_spread": 1.0, "tool_at_most_s": 600.0}, fleet={"capacity": 150_000}
    ),
    "one dies": Shape(fleet={"incidents": (Incident(60.0, "die", 3),)}),
    "one is slow": Shape(fleet={"incidents": (Incident(0.0, "slow", 3),)}),
    "one joins late": Shape(fleet={"incidents": (Incident(60.0, "join", 3),)}),
    "waves": Shape({"window_s": 300.0}, groups=8, waves=True),
}


def waves(size: int) -> tuple[Incident, ...]:
    """A quarter of the engines comes after a minute; from then on one quarter after the other leaves for a minute."""
    quarters = [range(start, size, 4) for start in range(4)]
    incidents = [Incident(60.0, "join", engine) for engine in quarters[3]]
    for minute, quarter in enumerate(quarters, 2):
        incidents += [Incident(60.0 * minute, "leave", engine) for engine in quarter]
        incidents += [Incident(60.0 * (minute + 1) + 5.0, "join", engine) for engine in quarter]
    return tuple(sorted(incidents, key=lambda incident: incident.at_s))


def drawn(index: int) -> tuple[int, Shape]:
    """How many engines, and a shape: groups of 4 to 64 with 1,000 to 60,000 tokens of their own, caches of 100,000 to
    1,000,000, and 2 to 16 engines with 6 to 48 rollouts each, at once or as a stream."""
    rng = random.Random(f"shape {index}")

    def between(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    while True:
        size, siblings = rng.randint(2, 16), round(between(4, 64))
        prompt, capacity = round(between(1_000, 60_000)), round(between(100_000, 1_000_000))
        groups = max(2, round(between(6, 48) * size / siblings))
        window_s, system, tool_s = (
            rng.choice((0, 0, 200, 600)),
            rng.choice((500, 2000, 8000)),
            rng.choice((1.5, 1.5, 10)),
        )
        # A prefix and a rollout fit anywhere, and the replay takes seconds.
        if capacity >= 2 * (prompt + system) and groups * siblings <= 600:
            trace = {"siblings": siblings, "prompt": prompt, "window_s": window_s, "system": system, "tool_s": tool_s}
            return size, Shape(trace, groups=groups, fleet={"capacity": capacity})


type Run = tuple[float, dict[str, Outcome]]
"""The best hit rate of one trace, and what every router makes of it."""


def simulated(seeds: dict[int, tuple[int, ...]], draws: range) -> list[Figure]:
    """Every shape at every size, as means over the traces of its seeds; then those that are drawn."""
    keys = [(size, label) for size in seeds for label, shape in SHAPES.items() if size in shape.sizes]
    jobs = [(size, label, seed) for size, label in keys for seed in seeds[size]]
    with ProcessPoolExecutor(max_workers=2) as processes:
        replayed = iter(processes.map(_replayed, *zip(*jobs, strict=True)))
        others = processes.map(_drawn_replayed, draws)
        figures = []
        for size, label in keys:
            figures += _figures(f"{size} engines, {label}", [next(replayed) for _ in seeds[size]])
        return [*figures, *_ratios([outcomes for _, outcomes in others])]


def _replayed(size: int, label: str, seed: int) -> Run:
    shape = SHAPES[label]
    return _replay(size, shape, agent_trace(label, groups=shape.groups * size, seed=seed, **shape.trace))


def _drawn_replayed(index: int) -> Run:
    size, shape = drawn(index)
    return _replay(size, shape, agent_trace("drawn", groups=shape.groups, seed=index, **shape.trace))


def _replay(size: int, shape: Shape, trace: Trace) -> Run:
    options = {"incidents": waves(size)} if shape.waves else shape.fleet
    outcomes = {router.name: Fleet(trace, size, router(), **options).run() for router in (Ours, *PEERS)}
    of_peers = max(outcomes[peer.name].hit_rate for peer in PEERS)
    return max(of_peers, best_hit_rate(trace, size, StickyLeastLoaded())), outcomes


def _ratios(runs: list[dict[str, Outcome]]) -> list[Figure]:
    """How ours stands to the best peer of each drawn trace."""
    figures = []
    for name, what in (("makespan_s", "makespan"), ("p99_turn_s", "p99 turn")):
        seconds = [{router: getattr(outcome, name) for router, outcome in outcomes.items()} for outcomes in runs]
        ratios = [each.pop(Ours.name) / min(each.values()) for each in seconds]
        label = f"{len(runs)} drawn shapes: {what} over the best peer's"
        extremes, tenths = (min(ratios), max(ratios)), statistics.quantiles(ratios, n=10)
        figures += [
            Figure(
                f"{label}, geometric mean", statistics.geometric_mean(ratios), "", f"<= {BOUND}", interval=extremes
            ),
            Figure(f"{label}, median and tenths", statistics.median(ratios), "", interval=(tenths[0], tenths[-1])),
            Figure(f"{label}, share within {BOUND}", statistics.mean(ratio <= BOUND for ratio in ratios), ""),
        ]
    return figures


def _figures(where: str, runs: list[Run]) -> list[Figure]:
    values = {
        name: {router: [float(getattr(outcomes[router], name)) for _, outcomes in runs] for router in runs[0][1]}
        for name in ("hit_rate", "makespan_s", "p50_turn_s", "p99_turn_s", "migrations")
    }
    hits = values["hit_rate"]
    shares = [own / best for own, (best, _) in zip(hits[Ours.name], runs, strict=True)]
    best = statistics.mean(best for best, _ in runs)
    means = {name: _means(each) for name, each in values.items()}
    own = {name: each.pop(Ours.name) for name, each in means.items()}
    return [
        Figure(
            f"{where}: hit rate",
            own["hit_rate"],
            f"of {best:.3f} possible",
            f">= {HIT_RATE}",
            own["hit_rate"] / best,
            means["hit_rate"],
            goal_interval=interval(shares),
        ),
        against(f"{where}: makespan", Ours.name, values["makespan_s"]),
        against(f"{where}: p99 turn", Ours.name, values["p99_turn_s"]),
        Figure(f"{where}: p50 turn", own["p50_turn_s"], "s", peers=means["p50_turn_s"]),
        Figure(f"{where}: migrations", own["migrations"], "", peers=means["migrations"]),
    ]


def against(name: str, ours: str, seconds: dict[str, list[float]]) -> Figure:
    """Ours over the best peer, which is the one whose mean is least; the interval is of the differences from it, each
    within one trace."""
    means = _means(seconds)
    own = means.pop(ours)
    best = min(means, key=lambda peer: means[peer])
    differences = [(a - b) / means[best] for a, b in zip(seconds[ours], seconds[best], strict=True)]
    return Figure(name, own, "s", f"<= {BOUND}", own / means[best], means, goal_interval=interval(differences))


def _means(values: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.mean(each) for name, each in values.items()}


def withdrawals() -> Figure:
    """What it costs the loop when all who wait for a backend hang up."""
    pool = BackendPool()
    for ticket in range(WITHDRAWN):
        pool.request(ticket, f"r{ticket}")
    began = time.process_time()
    for ticket in reversed(range(WITHDRAWN)):
        pool.withdraw(ticket, 0.0)
    return Figure(f"{WITHDRAWN:,} turns that wait are withdrawn", time.process_time() - began, "s of CPU", "<= 0.5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--quick", action="store_true", help="8 and 16 engines and one tuning seed")
    kind.add_argument("--tune", action="store_true", help="the tuning seeds")
    chosen = parser.parse_args()
    seeds, draws = REPORT_SEEDS, REPORT_DRAWS
    if chosen.quick:
        seeds, draws = dict.fromkeys((8, 16), TUNING_SEEDS[:1]), TUNING_DRAWS[:6]
    elif chosen.tune:
        seeds, draws = dict.fromkeys(REPORT_SEEDS, TUNING_SEEDS), TUNING_DRAWS
    figures = [*simulated(seeds, draws), withdrawals()]
    publish("routing", figures, packages=("nemo-gym",), quick=chosen.quick or chosen.tune)


if __name__ == "__main__":
    main()
