# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Traffic traces of coding agents, and their replay through a router on simulated engines."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from benchmarks.engines import Engine, Request, Rollout, Trace, Turn


def agent_trace(
    groups: int,
    *,
    siblings: int = 8,
    seed: int = 0,
    turns: float = 10.0,
    window_s: float = 0.0,
    system: int = 2000,
    prompt: int = 1500,
    tool_s: float = 1.5,
) -> Trace:
    """Return a trace of coding agents in training, with heavy-tailed numbers of turns, tool times and lengths.

    Args:
        groups: number of groups.
        siblings: rollouts per group.
        seed: seed of all random numbers.
        turns: median number of turns; the 99th percentile is about six times the median.
        window_s: seconds over which groups arrive evenly; 0 for one burst, as from a synchronous trainer.
        system: tokens of the system prompt, which all rollouts share.
        prompt: further prompt tokens that the rollouts of a group share.
        tool_s: median seconds of a tool call, heavy-tailed up to 300 s.
    """
    rng = random.Random(seed)
    rollouts = []
    for group in range(groups):
        start_s = window_s / groups * group
        for sibling in range(siblings):
            count = max(1, min(80, round(rng.lognormvariate(math.log(turns), 0.75))))
            steps = tuple(
                Turn(
                    observed=0 if k == 0 else min(8000, round(rng.lognormvariate(math.log(300), 1.0))),
                    written=min(3000, round(rng.lognormvariate(math.log(120), 0.8))),
                    tool_s=min(300.0, rng.lognormvariate(math.log(tool_s), 1.4)),
                )
                for k in range(count)
            )
            rollouts.append(Rollout(f"g{group}s{sibling}", f"g{group}", start_s, steps))
    return Trace(system=system, prompt=prompt, rollouts=tuple(rollouts))


@dataclass(frozen=True, slots=True)
class Incident:
    """Event of an engine, which leaves (``leave``) and loses its requests, or joins with an empty cache (``join``). An
    engine whose first incident is ``join`` is absent at the start."""

    at_s: float
    kind: str
    engine: int


@dataclass(slots=True)
class Outcome:
    """Result of a replay; ``hit_rate`` is the cached fraction of all prompt tokens."""

    makespan_s: float
    p99_turn_s: float
    hit_rate: float


@dataclass(frozen=True, slots=True)
class _Change:
    """Event at the time of an engine's next change; outdated if the engine has a newer version by then."""

    engine: Engine
    version: int


class Fleet:
    """Discrete-event simulation of a trace on engines behind a router.

    Args:
        trace: the traffic.
        engines: number of engines.
        router: router with the interface of :class:`benchmarks.routers.Base`.
        capacity: tokens of each engine's KV cache.
        incidents: joining and leaving engines, by time.
    """

    def __init__(
        self,
        trace: Trace,
        engines: int,
        router: Any,
        *,
        capacity: int = 400_000,
        incidents: tuple[Incident, ...] = (),
    ) -> None:
        self.trace, self.router, self.now = trace, router, 0.0
        first: dict[int, str] = {}
        for incident in incidents:
            first.setdefault(incident.engine, incident.kind)
        self.engines = [Engine(index, capacity, alive=first.get(index) != "join") for index in range(engines)]
        self._hits = self._prompts = 0
        self._events: list[tuple[float, int, object]] = []
        self._order = itertools.count()
        self._pending: deque[Request] = deque()
        self._latencies: list[float] = []
        self._left = len(trace.rollouts)
        for engine in self.alive():
            router.joined(engine.index)
        for incident in incidents:
            self._at(incident.at_s, incident)
        for rollout in trace.rollouts:
            self._at(rollout.start_s, Request(rollout, 0, trace.system + trace.prompt, rollout.start_s))

    def alive(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.alive]

    def run(self) -> Outcome:
        while self._left:
            self.now, _, event = heapq.heappop(self._events)
            if isinstance(event, Request):
                self._send(event)
            elif isinstance(event, Incident):
                self._happen(event)
            elif isinstance(event, _Change) and event.engine.version == event.version:
                self._work(event.engine)
        self._latencies.sort()
        late = self._latencies[min(len(self._latencies) - 1, int(len(self._latencies) * 0.99))]
        return Outcome(self.now, late, self._hits / self._prompts)

    def _at(self, when: float, event: object) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _send(self, request: Request) -> None:
        chosen = self.router.route(request, self)
        if chosen is None:
            self._pending.append(request)
            return
        engine = self.engines[chosen]
        request.engine = chosen
        if not engine.alive:
            self.router.cut(request)
            self._send(request)
            return
        engine.waiting.append(request)
        self._work(engine)

    def _retry(self) -> None:
        for _ in range(len(self._pending)):
            self._send(self._pending.popleft())

    def _work(self, engine: Engine) -> None:
        engine.advance(self.now)
        done = [request for request in engine.running if request.is_done]
        if done:
            engine.running = [request for request in engine.running if not request.is_done]
        for request in done:
            engine.release(request, self.trace)
        for request, hit in engine.admit(self.trace):
            self._hits += hit
            self._prompts += request.prompt
        engine.version += 1
        change = engine.next_change()
        if change < math.inf:
            self._at(self.now + change, _Change(engine, engine.version))
        for request in done:
            self.router.answered(request)
            self._answered(request)
            self._retry()

    def _answered(self, request: Request) -> None:
        self._latencies.append(self.now - request.asked_s)
        turn = request.rollout.turns[request.index]
        if request.index + 1 < len(request.rollout.turns):
            then = self.now + turn.tool_s
            self._at(then, Request(request.rollout, request.index + 1, request.footprint, then))
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
            self._retry()
        else:
            engine.alive = False
            engine.version += 1
            lost = engine.cut_off()
            self.router.left(engine.index)
            for request in lost:
                self.router.cut(request)
                self._send(request)


def best_hit_rate(trace: Trace, engines: int, router: Any) -> float:
    """Return the hit rate of engines that share one unlimited cache, where no routing decision can lose a prefix.

    The value is not an upper bound if many prompts with a long common prefix arrive at once. An engine with room
    for all these prompts prefills the prefix once per prompt. In a full engine, later prompts wait, and then find the
    prefix cached.
    """
    fleet = Fleet(trace, engines, router, capacity=10**12)
    for engine in fleet.engines[1:]:
        engine.cache, engine.used = fleet.engines[0].cache, fleet.engines[0].used
    return fleet.run().hit_rate
