# SPDX-License-Identifier: Apache-2.0
"""Which router keeps prefix caches warm and nobody waiting: ours against the others, on agent traffic.

Simulated: 16 and 64 engines with a KV capacity (:mod:`benchmarks.fleet`), under traffic of many shapes: at once, as a
stream, in bursts; engines that die, are slow, or come and go; a system prompt of 20,000 tokens that all share; tools
that take minutes; caches that are small (all prefixes just fit, evenly spread) or scarce (at the peak, live rollouts
need 1.0 to 1.2 times what the whole fleet holds). What real engines make of it is in :mod:`benchmarks.routing_real`.

The best possible hit rate is that of a fleet whose engines share one boundless cache, or the best peer's if that is
more (see :func:`~benchmarks.fleet.best_hit_rate`). One cache of the fleet's pooled capacity comes within 0.02 of it
even where caches are scarce, as it evicts those alone that wait longest for a tool; what is missing there beyond that
is lost by spreading tokens unevenly, and is a router's to win.

Every figure is a mean over seeds, each of which fixes a trace that all routers replay; a goal speaks of the ratio to
the best peer, whose 95 % confidence interval stands beside it and never moves the goal. Seeds that routers were tuned
with are never reported.

Run with ``python -m benchmarks.routing [--quick | --tune]``: quick is 16 engines and one tuning seed, tune all tuning
seeds; neither writes anything.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fleet import Fleet, Incident, Outcome, agent_trace, best_hit_rate
from benchmarks.report import Figure, publish
from benchmarks.routers import PEERS, Ours, StickyLeastLoaded
from benchmarks.statistic import interval
from nemo_gym_prorl.policy.pool.pool import BackendPool


TUNING_SEEDS = (0, 1, 2)
"""Whoever changes a router looks at these."""
REPORT_SEEDS = {16: (101, 102, 103, 104, 105), 64: (101, 102, 103)}
"""These are published, by the number of engines, and nothing is ever tuned with them."""
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
        trace: see :func:`~benchmarks.fleet.agent_trace`.
        groups: prompts per engine.
        fleet: see :class:`~benchmarks.fleet.Fleet`.
        waves: engines come and go, a quarter of the fleet at a time.
    """

    trace: dict[str, Any] = field(default_factory=dict)
    groups: int = 4
    fleet: dict[str, Any] = field(default_factory=dict)
    waves: bool = False


SHAPES = {
    "burst": Shape(),
    "stream": Shape({"window_s": 300.0}, groups=8),
    "bursts": Shape({"window_s": 300.0, "bursts": 4}, groups=8),
    "small caches": Shape(fleet={"capacity": 150_000}),
    "scarce caches": Shape(fleet={"capacity": 100_000}),
    "hot system prompt": Shape({"system": 20_000, "window_s": 100.0}, groups=8),
    "hot system prompt, small caches": Shape(
        {"system": 20_000, "window_s": 300.0}, groups=8, fleet={"capacity": 150_000}
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


type Run = tuple[float, dict[str, Outcome]]
"""The best hit rate of one trace, and what every router makes of it."""


def simulated(seeds: dict[int, tuple[int, ...]]) -> list[Figure]:
    """Every shape at every size, as means over the traces of its seeds."""
    keys = list(itertools.product(seeds, SHAPES))
    jobs = [(size, label, seed) for size, label in keys for seed in seeds[size]]
    with ProcessPoolExecutor(max_workers=2) as processes:
        replayed = iter(processes.map(_replayed, *zip(*jobs, strict=True)))
        figures = []
        for size, label in keys:
            figures += _figures(f"{size} engines, {label}", [next(replayed) for _ in seeds[size]])
    return figures


def _replayed(size: int, label: str, seed: int) -> Run:
    shape = SHAPES[label]
    trace = agent_trace(label, groups=shape.groups * size, seed=seed, **shape.trace)
    options = {"incidents": waves(size)} if shape.waves else shape.fleet
    outcomes = {router.name: Fleet(trace, size, router(), **options).run() for router in (Ours, *PEERS)}
    of_peers = max(outcomes[peer.name].hit_rate for peer in PEERS)
    return max(of_peers, best_hit_rate(trace, size, StickyLeastLoaded())), outcomes


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
    kind.add_argument("--quick", action="store_true", help="16 engines and one tuning seed")
    kind.add_argument("--tune", action="store_true", help="the tuning seeds")
    chosen = parser.parse_args()
    seeds = REPORT_SEEDS
    if chosen.quick:
        seeds = {16: TUNING_SEEDS[:1]}
    elif chosen.tune:
        seeds = dict.fromkeys(REPORT_SEEDS, TUNING_SEEDS)
    figures = [*simulated(seeds), withdrawals()]
    publish("routing", figures, packages=("nemo-gym",), quick=chosen.quick or chosen.tune)


if __name__ == "__main__":
    main()
