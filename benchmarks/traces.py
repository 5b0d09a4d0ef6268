# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Traces of agents' traffic, replayed on simulated engines (:mod:`benchmarks.engines`), for comparing routers where no
fleet is at hand."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from benchmarks.engines import Engines, Request, Rollout, Router, Trace, Turn


SYSTEM, PROMPT = 2000, 1500
"""Tokens of the prompt that all rollouts share, and of what a group shares beyond that."""


def drawn_turns(
    rng: random.Random,
    turns: float = 10.0,
    tool_s: float = 1.5,
    tool_spread: float = 1.4,
    tool_at_most_s: float = 300.0,
) -> tuple[Turn, ...]:
    """The turns of one coding agent; for what they are see :func:`agent_trace`."""
    count = max(1, min(80, round(rng.lognormvariate(math.log(turns), 0.75))))
    return tuple(
        Turn(
            observed=0 if k == 0 else min(8000, round(rng.lognormvariate(math.log(300), 1.0))),
            written=min(3000, round(rng.lognormvariate(math.log(120), 0.8))),
            tool_s=min(tool_at_most_s, rng.lognormvariate(math.log(tool_s), tool_spread)),
        )
        for k in range(count)
    )


def agent_trace(
    name: str,
    groups: int,
    *,
    siblings: int = 8,
    seed: int = 0,
    turns: float = 10.0,
    window_s: float = 0.0,
    bursts: int | None = None,
    system: int = SYSTEM,
    prompt: int = PROMPT,
    tool_s: float = 1.5,
    tool_spread: float = 1.4,
    tool_at_most_s: float = 300.0,
) -> Trace:
    """Coding agents in training: heavy-tailed numbers of turns, tool times and lengths.

    Args:
        name: of the trace.
        groups: how many prompts.
        siblings: rollouts per prompt.
        seed: fixes everything.
        turns: median number of turns; the 99th percentile is about six times that.
        window_s: groups arrive evenly over this time; 0 is one burst, as a synchronous trainer sends it.
        bursts: they arrive in so many bursts, evenly over the window, instead.
        system: tokens of the prompt that all share.
        prompt: tokens that a group shares beyond that.
        tool_s: median of the time that a tool takes.
        tool_spread: of its logarithm.
        tool_at_most_s: the longest a tool takes.
    """
    rng = random.Random(seed)
    rollouts = []
    interval_s = window_s / (bursts or groups)
    for group in range(groups):
        start_s = interval_s * (group * bursts // groups if bursts else group)
        for sibling in range(siblings):
            steps = drawn_turns(rng, turns, tool_s, tool_spread, tool_at_most_s)
            rollouts.append(Rollout(f"g{group}s{sibling}", f"g{group}", start_s, steps))
    return Trace(name, system=system, prompt=prompt, rollouts=tuple(rollouts))


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that happens to an engine: ``die``, ``leave`` (it is taken out of service, which cuts its requests),
    ``slow`` (a fifth of its speed) or ``join`` (with an empty cache; one whose first incident it is was not there)."""

    at_s: float
    kind: str
    engine: int


@dataclass(slots=True)
class Outcome:
    """What a replay came to."""

    makespan_s: float
    p50_turn_s: float
    p99_turn_s: float
    hit_rate: float
    migrations: int
    """Turns that another engine took than the one before."""


class Fleet(Engines):
    """Replays a trace through a router."""

    def __init__(
        self,
        trace: Trace,
        engines: int,
        router: Router,
        *,
        capacity: int = 400_000,
        incidents: tuple[Incident, ...] = (),
    ) -> None:
        first: dict[int, str] = {}
        for incident in incidents:
            first.setdefault(incident.engine, incident.kind)
        late = frozenset(engine for engine, kind in first.items() if kind == "join")
        super().__init__(trace, engines, router, capacity, late)
        self._latencies: list[float] = []
        for incident in incidents:
            self.at(incident.at_s, incident)
        context = trace.system + trace.prompt
        for rollout in trace.rollouts:
            self.at(rollout.start_s, Request(rollout, 0, context, rollout.start_s))
        self._left = len(trace.rollouts)

    def run(self) -> Outcome:
        while self._left:
            event = self.next_event()
            if isinstance(event, Request):
                self.send(event)
            elif isinstance(event, Incident):
                self._happen(event)
        self._latencies.sort()
        count = len(self._latencies)
        return Outcome(
            self.now,
            self._latencies[count // 2],
            self._latencies[min(count - 1, int(count * 0.99))],
            self.hits / self.prompts,
            self.migrations,
        )

    def answered(self, request: Request) -> None:
        self._latencies.append(self.now - request.asked_s)
        turn = request.rollout.turns[request.index]
        if request.index + 1 < len(request.rollout.turns):
            then = self.now + turn.tool_s
            self.at(then, Request(request.rollout, request.index + 1, request.footprint, then))
        else:
            self._left -= 1
            self.router.finished(request.rollout)

    def _happen(self, incident: Incident) -> None:
        engine = self.engines[incident.engine]
        engine.advance(self.now)
        if incident.kind == "join":
            engine.alive = True
            engine.forget()
            self.router.joined(engine.index)
            self.retry()
        elif incident.kind == "slow":
            engine.speed = 0.2
            self.work(engine)
        else:
            engine.alive = False
            engine.version += 1
            lost = engine.cut_off()
            if incident.kind == "die":
                self.router.died(engine.index)
            else:
                self.router.left(engine.index)
            for request in lost:
                self.router.cut(request)
                self.send(request)


def best_hit_rate(trace: Trace, engines: int, router: Router) -> float:
    """Hit rate of a fleet whose engines share one boundless cache, where a router can lose nothing.

    It is no bound where prompts that are read at the same time share much: engines that have room for all at once read
    it once for each, and those that make some wait find it cached.
    """
    fleet = Fleet(trace, engines, router, capacity=10**12)
    for engine in fleet.engines[1:]:
        engine.cache, engine.used = fleet.engines[0].cache, fleet.engines[0].used
    return fleet.run().hit_rate
