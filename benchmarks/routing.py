# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Routers on simulated engines with prefix caches, under traffic of coding agents.

Shapes of traffic: one burst; a stream; small caches (all prefixes just fit if evenly spread); scarce caches (live
rollouts need up to 1.2 times the fleet's capacity); groups of 32 with a group prompt of 30,000 tokens; engines that
join and leave. Every router replays the same traces. Hit rates are compared with that of engines that share one
unlimited cache.

A figure is the mean over seeds; the peer is the better of two. A row shows the shape with the worst ratio.
"""

from __future__ import annotations

import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engines import Trace
from benchmarks.report import Row, parser, publish
from benchmarks.routers import PEERS, BackendPoolRouter, StickyLeastLoaded
from benchmarks.traces import Fleet, Incident, Outcome, agent_trace, best_hit_rate


TUNING_SEEDS = (0,)
"""Seeds for ``--quick`` and for tuning a router; never published."""
SEEDS = {16: (101, 102, 103, 104, 105), 64: (101, 102, 103)}
"""Seeds of published figures, by number of engines; never used for tuning a router."""
BOUND = "<= 1.02"
"""Within 2 % of the best peer counts as equal, since the order of ties changes a figure by as much."""
HIT_RATE = ">= 0.98"


@dataclass(frozen=True)
class Shape:
    """Traffic and fleet.

    Attributes:
        trace: arguments of :func:`~benchmarks.traces.agent_trace`.
        groups: number of groups per engine.
        fleet: arguments of :class:`~benchmarks.traces.Fleet`; unused with ``waves``.
        waves: whether engines join and leave, a quarter of the fleet at a time.
        sizes: numbers of engines.
    """

    trace: dict[str, Any] = field(default_factory=dict)
    groups: int = 4
    fleet: dict[str, Any] = field(default_factory=dict)
    waves: bool = False
    sizes: tuple[int, ...] = (8, 16, 64)


SHAPES = {
    "burst": Shape(),
    "stream": Shape({"window_s": 300.0}, groups=8),
    "small caches": Shape(fleet={"capacity": 150_000}),
    "scarce caches": Shape(fleet={"capacity": 100_000}),
    "long group prompts, small caches": Shape(
        {"siblings": 32, "prompt": 30_000}, groups=1, fleet={"capacity": 200_000}, sizes=(8, 16)
    ),
    "waves": Shape({"window_s": 300.0}, groups=8, waves=True),
}


def waves(size: int) -> tuple[Incident, ...]:
    """Return incidents: a quarter of the engines joins after a minute, then each quarter in turn leaves for 65 s."""
    quarters = [range(start, size, 4) for start in range(4)]
    incidents = [Incident(60.0, "join", engine) for engine in quarters[3]]
    for minute, quarter in enumerate(quarters, 2):
        incidents += [Incident(60.0 * minute, "leave", engine) for engine in quarter]
        incidents += [Incident(60.0 * (minute + 1) + 5.0, "join", engine) for engine in quarter]
    return tuple(sorted(incidents, key=lambda incident: incident.at_s))


type Run = tuple[float, dict[str, Outcome]]
"""Best hit rate of one trace, and the outcomes by router."""


def _replayed(job: tuple[int, str, int]) -> Run:
    size, label, seed = job
    shape = SHAPES[label]
    return _replay(size, shape, agent_trace(shape.groups * size, seed=seed, **shape.trace))


def _replay(size: int, shape: Shape, trace: Trace) -> Run:
    options = {"incidents": waves(size)} if shape.waves else shape.fleet
    outcomes = {router.name: Fleet(trace, size, router(), **options).run() for router in (BackendPoolRouter, *PEERS)}
    of_peers = max(outcomes[peer.name].hit_rate for peer in PEERS)
    return max(of_peers, best_hit_rate(trace, size, StickyLeastLoaded())), outcomes


def rows_of_shape(where: str, runs: list[Run]) -> dict[str, Row]:
    best = statistics.mean(best for best, _ in runs)
    hit_rate = statistics.mean(outcomes[BackendPoolRouter.name].hit_rate for _, outcomes in runs)
    rows = {"hit rate": Row(f"hit rate, {where}", "", hit_rate, best, "one boundless cache", HIT_RATE)}
    for title, attribute in (("makespan", "makespan_s"), ("p99 turn", "p99_turn_s")):
        means = {
            router: statistics.mean(getattr(outcomes[router], attribute) for _, outcomes in runs)
            for router in runs[0][1]
        }
        ours = means.pop(BackendPoolRouter.name)
        peer = min(means, key=lambda router: means[router])
        rows[title] = Row(f"{title}, {where}", "s", ours, means[peer], peer, BOUND)
    return rows


def measure(seeds: dict[int, tuple[int, ...]]) -> list[Row]:
    keys = [(size, label) for size in seeds for label, shape in SHAPES.items() if size in shape.sizes]
    jobs = [(size, label, seed) for size, label in keys for seed in seeds[size]]
    with ProcessPoolExecutor(max_workers=2) as processes:
        replayed = iter(processes.map(_replayed, jobs))
        shapes = [
            rows_of_shape(f"{size} engines, {label}", [next(replayed) for _ in seeds[size]]) for size, label in keys
        ]
        return [
            sign([each[title] for each in shapes], key=lambda row: row.ratio or 0.0)
            for title, sign in (("hit rate", min), ("makespan", max), ("p99 turn", max))
        ]


def main() -> None:
    quick = parser(__doc__).parse_args().quick
    publish("routing", measure({8: TUNING_SEEDS} if quick else SEEDS), quick=quick)


if __name__ == "__main__":
    main()
