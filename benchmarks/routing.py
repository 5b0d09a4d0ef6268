# SPDX-License-Identifier: Apache-2.0
"""Which router keeps prefix caches warm and nobody waiting: ours against the others, on agent traffic.

Two parts. Real: two vLLM engines, and the ``sglang-router`` and ``vllm-router`` wheels as their authors ship them,
where they install (:mod:`benchmarks.real_engines`). Simulated: 16 and 64 engines with a KV capacity
(:mod:`benchmarks.fleet`), where an engine dies, is slow, or joins late; and with caches that are small (all prefixes
just fit, evenly spread) or scarce (at the peak, live rollouts need 1.0 to 1.2 times what the whole fleet holds).

The best possible hit rate is that of a fleet whose engines share one boundless cache, which bounds every router from
above whatever its caches hold. One cache of the fleet's pooled capacity comes within 0.02 of it even where caches are
scarce, as it evicts those alone that wait longest for a tool; what is missing there beyond that is lost by spreading
tokens unevenly, and is a router's to win.

Run with ``python -m benchmarks.routing [--quick]``; quick is the simulation of 16 engines alone.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks import real_engines
from benchmarks.fleet import Fleet, Incident, Outcome, agent_trace, best_hit_rate
from benchmarks.report import Figure, publish
from benchmarks.routers import PEERS, Ours, StickyLeastLoaded


SEEDS = 3
NOISE = 1.02
"""A makespan or latency within 2 % of the best counts as equal: the order of equal choices moves it as much."""
SCENARIOS: dict[str, tuple[float, dict[str, Any]]] = {
    "burst": (0.0, {}),
    "stream": (300.0, {}),
    "small caches": (0.0, {"capacity": 150_000}),
    "scarce caches": (0.0, {"capacity": 100_000}),
    "one dies": (0.0, {"incidents": (Incident(60.0, "die", 3),)}),
    "one is slow": (0.0, {"incidents": (Incident(0.0, "slow", 3),)}),
    "one joins late": (0.0, {"incidents": (Incident(60.0, "join", 3),)}),
}
"""Over how many seconds the groups arrive, and what the fleet is like."""


def simulated(quick: bool) -> list[Figure]:
    """Every scenario at every size, as means over several traces."""
    figures = []
    sizes, seeds = ((16,), 1) if quick else ((16, 64), SEEDS)
    keys = list(itertools.product(sizes, SCENARIOS))
    jobs = [(size, label, seed) for size, label in keys for seed in range(seeds)]
    with ProcessPoolExecutor() as processes:
        replayed = list(processes.map(_replayed, *zip(*jobs, strict=True)))
    for index, (size, label) in enumerate(keys):
        runs = replayed[index * seeds : (index + 1) * seeds]
        hits, makespans, latencies = (
            {name: statistics.mean(getattr(outcomes[name], field) for _, outcomes in runs) for name in runs[0][1]}
            for field in ("hit_rate", "makespan_s", "p99_turn_s")
        )
        where, ours = f"{size} engines, {label}", hits.pop(Ours.name)
        best = statistics.mean(best for best, _ in runs)
        figures.append(Figure(f"{where}: hit rate", ours, f"of {best:.3f} possible", ">= 0.98", ours / best, hits))
        figures.append(_against(f"{where}: makespan", makespans.pop(Ours.name), makespans))
        figures.append(_against(f"{where}: p99 turn", latencies.pop(Ours.name), latencies))
    return figures


def _replayed(size: int, label: str, seed: int) -> tuple[float, dict[str, Outcome]]:
    """The best hit rate of one trace, and what every router makes of it."""
    window_s, options = SCENARIOS[label]
    trace = agent_trace(label, groups=(8 if window_s else 4) * size, window_s=window_s, seed=seed)
    outcomes = {router.name: Fleet(trace, size, router(), **options).run() for router in (Ours, *PEERS)}
    return best_hit_rate(trace, size, StickyLeastLoaded()), outcomes


def real() -> list[Figure]:
    """The same figures of real engines, as means over the repeats."""
    figures = []
    for label, measured in real_engines.measure().items():
        ours = measured.pop("prorl")
        hits = {name: statistics.mean(peer.hit_rates) for name, peer in measured.items()}
        hit = statistics.mean(ours.hit_rates)
        figures.append(Figure(f"{label}: hit rate", hit, "", ">= 0.98", hit / max(hits.values()), hits))
        makespans = {name: peer.makespans_s for name, peer in measured.items()}
        figures.append(_repeated(f"{label}: makespan", ours.makespans_s, makespans))
        latencies = {name: peer.p99_turns_s for name, peer in measured.items()}
        figures.append(_repeated(f"{label}: p99 turn", ours.p99_turns_s, latencies))
    return figures


def _repeated(name: str, ours: list[float], peers: dict[str, list[float]]) -> Figure:
    """Equal is what lies within two standard errors of the difference from the best peer, repeat by repeat."""
    means = {peer: statistics.mean(values) for peer, values in peers.items()}
    best = min(means, key=lambda peer: means[peer])
    differences = [own - other for own, other in zip(ours, peers[best], strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) / means[best]
    goal = f"<= {max(NOISE, 1 + 2 * error):.2f}"
    return Figure(name, statistics.mean(ours), "s", goal, statistics.mean(ours) / means[best], means)


def _against(name: str, ours: float, peers: dict[str, float]) -> Figure:
    return Figure(name, ours, "s", f"<= {NOISE}", ours / min(peers.values()), peers)


def at_their_best(figures: list[Figure]) -> list[Figure]:
    """For each peer, the makespan or latency in which ours is furthest ahead of it: peer's over ours."""
    leads: dict[str, tuple[float, str]] = {}
    for figure in figures:
        for peer, value in figure.peers.items():
            if figure.unit == "s":
                leads[peer] = max(leads.get(peer, (0.0, "")), (value / figure.value, figure.name))
    return [Figure(f"ahead of {peer} in {name}", lead, "times", ">= 1.02") for peer, (lead, name) in leads.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the simulation of 16 engines alone")
    quick = parser.parse_args().quick
    figures = simulated(quick)
    if not quick:
        figures += real()
    figures += at_their_best(figures)
    publish("routing", figures, packages=("nemo-gym",), quick=quick)


if __name__ == "__main__":
    main()
