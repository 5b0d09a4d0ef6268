# SPDX-License-Identifier: Apache-2.0
"""A simulated fleet of inference engines with prefix caches, for comparing routers where no fleet is at hand.

Time is virtual. An engine works on all its requests at once: prefill at a fixed rate shared by the requests in it,
decoding at a rate that falls with the batch and is halved while it prefills. Its KV cache holds what requests in
flight need (a request that does not fit waits at the engine) and, in what is left, prefixes in the order of their last
use: the system prompt, one prefix per group, one per rollout, each there once however many requests use it, as in
paged engines. A prefix that was evicted is prefilled again.

A router answers two questions: which engine takes a turn now (or none yet), and nothing else.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a rollout: new tokens to read, tokens to write, and how long the tool takes after it."""

    observed: int
    written: int
    tool_s: float


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout of a trace; siblings share the group and its prompt."""

    id: str
    group: str
    start_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """What is replayed: rollouts over a system prompt and a prompt per group, in tokens."""

    name: str
    system: int
    prompt: int
    rollouts: tuple[Rollout, ...]


def agent_trace(
    name: str,
    groups: int,
    *,
    siblings: int = 8,
    seed: int = 0,
    turns: float = 10.0,
    window_s: float = 0.0,
    bursts: int | None = None,
    system: int = 2000,
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
            count = max(1, min(80, round(rng.lognormvariate(math.log(turns), 0.75))))
            steps = tuple(
                Turn(
                    observed=0 if k == 0 else min(8000, round(rng.lognormvariate(math.log(300), 1.0))),
                    written=min(3000, round(rng.lognormvariate(math.log(120), 0.8))),
                    tool_s=min(tool_at_most_s, rng.lognormvariate(math.log(tool_s), tool_spread)),
                )
                for k in range(count)
            )
            rollouts.append(Rollout(f"g{group}s{sibling}", f"g{group}", start_s, steps))
    return Trace(name, system=system, prompt=1500, rollouts=tuple(rollouts))


@dataclass(slots=True)
class Request:
    """A turn on its way through the fleet."""

    rollout: Rollout
    index: int
    context: int
    asked_s: float
    engine: int = -1
    prefill: float = 0.0
    decode: float = 0.0
    held: int = 0

    @property
    def prompt(self) -> int:
        return self.context + self.rollout.turns[self.index].observed

    @property
    def footprint(self) -> int:
        return self.prompt + self.rollout.turns[self.index].written


class Router(Protocol):
    """A routing policy."""

    name: str

    def joined(self, engine: int) -> None: ...

    def died(self, engine: int) -> None: ...

    def left(self, engine: int) -> None: ...

    def route(self, request: Request, fleet: Fleet) -> int | None:
        """An engine, or ``None`` to ask again after the next :meth:`answered` or :meth:`finished`."""

    def answered(self, request: Request) -> None: ...

    def cut(self, request: Request) -> None:
        """Its engine is gone; it will be routed again."""

    def finished(self, rollout: Rollout) -> None: ...


@dataclass(slots=True)
class Engine:
    """One simulated engine."""

    index: int
    capacity: int
    speed: float = 1.0
    alive: bool = True
    running: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    cache: OrderedDict[str, int] = field(default_factory=OrderedDict)
    cached: int = 0
    pinned: int = 0
    updated_s: float = 0.0
    version: int = 0

    PREFILL = 12_000.0
    """Prompt tokens per second of an idle engine."""
    STEP_S = 0.012
    """Seconds per decoding step of a batch of one."""
    PER_REQUEST_S = 0.0006
    """What each further request adds to a step."""

    def rates(self) -> tuple[float, float]:
        """Tokens per second of each request in prefill, and of each in decoding."""
        prefilling = sum(request.prefill > 0 for request in self.running)
        decoding = len(self.running) - prefilling
        share = 0.5 if prefilling and decoding else 1.0
        prefill = self.PREFILL * share / prefilling if prefilling else 0.0
        decode = share / (self.STEP_S + self.PER_REQUEST_S * decoding) if decoding else 0.0
        return prefill * self.speed, decode * self.speed

    def advance(self, now: float) -> None:
        """Do the work of the time since the last call."""
        prefill, decode = self.rates()
        passed = now - self.updated_s
        self.updated_s = now
        for request in self.running:
            if request.prefill > 0:
                request.prefill = max(0.0, request.prefill - prefill * passed)
                if request.prefill < 1e-6:
                    request.prefill = 0.0
            else:
                request.decode -= decode * passed

    def next_change(self) -> float:
        """Seconds until a request ends its prefill or its decoding."""
        prefill, decode = self.rates()
        return min(
            (r.prefill / prefill if r.prefill > 0 else max(0.0, r.decode) / decode for r in self.running),
            default=math.inf,
        )

    def admit(self, trace: Trace) -> Iterator[tuple[Request, int]]:
        """Start waiting requests that fit; yields each with its cached prompt tokens."""
        while self.waiting and (not self.running or self.pinned + self.waiting[0].footprint <= self.capacity):
            request = self.waiting.popleft()
            hit, shared = self.lookup(request, trace)
            request.prefill = float(request.prompt - hit)
            request.decode = float(request.rollout.turns[request.index].written)
            # Blocks of a prefix that others share are there once.
            request.held = request.footprint - shared
            self.pinned += request.held
            self.evict()
            self.running.append(request)
            yield request, hit

    def lookup(self, request: Request, trace: Trace) -> tuple[int, int]:
        """Cached tokens of a request's prompt, and how many of them others use as well.

        The first prefix that is missing ends the match.
        """
        shared = 0
        for key, size in (("system", trace.system), (request.rollout.group, trace.prompt)):
            if self.cache.get(key, 0) < size:
                shared += self.cache.get(key, 0)
                return min(shared, request.prompt - 1), shared
            self.cache.move_to_end(key)
            shared += size
        own = self.cache.pop(request.rollout.id, 0)
        self.cached -= own
        return min(shared + own, request.prompt - 1), shared

    def keep(self, request: Request, trace: Trace) -> None:
        """A finished request's tokens stay as long as there is room."""
        for key, size in (("system", trace.system), (request.rollout.group, trace.prompt)):
            self.cached += size - self.cache.get(key, 0)
            self.cache[key] = size
            self.cache.move_to_end(key)
        own = request.footprint - trace.system - trace.prompt
        self.cached += own - self.cache.get(request.rollout.id, 0)
        self.cache[request.rollout.id] = own
        self.cache.move_to_end(request.rollout.id)
        self.evict()

    def evict(self) -> None:
        """Forget what was used longest ago, from its end, until the cache fits."""
        while self.cached > 0 and self.pinned + self.cached > self.capacity:
            key, size = next(iter(self.cache.items()))
            excess = self.pinned + self.cached - self.capacity
            if size <= excess:
                del self.cache[key]
                self.cached -= size
            else:
                self.cache[key] = size - excess
                self.cached -= excess

    @property
    def kv_use(self) -> float:
        """Share of the cache that requests in flight hold."""
        return self.pinned / self.capacity


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


class Fleet:
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
        self.trace = trace
        self.router = router
        first: dict[int, str] = {}
        for incident in incidents:
            first.setdefault(incident.engine, incident.kind)
        late = {engine for engine, kind in first.items() if kind == "join"}
        self.engines = [Engine(index, capacity, alive=index not in late) for index in range(engines)]
        self.now = 0.0
        self._events: list[tuple[float, int, object]] = []
        self._order = itertools.count()
        self._pending: deque[Request] = deque()
        self._latencies: list[float] = []
        self._hits = self._prompts = self._migrations = 0
        self._homes: dict[str, int] = {}
        for engine in self.engines:
            if engine.alive:
                router.joined(engine.index)
        for incident in incidents:
            self._at(incident.at_s, incident)
        context = trace.system + trace.prompt
        for rollout in trace.rollouts:
            self._at(rollout.start_s, Request(rollout, 0, context, rollout.start_s))
        self._left = len(trace.rollouts)

    def alive(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.alive]

    def run(self) -> Outcome:
        while self._left:
            self.now, _, event = heapq.heappop(self._events)
            if isinstance(event, Request):
                self._send(event)
            elif isinstance(event, Incident):
                self._happen(event)
            else:
                engine, version = event
                if engine.version == version:
                    self._work(engine)
        self._latencies.sort()
        count = len(self._latencies)
        return Outcome(
            self.now,
            self._latencies[count // 2],
            self._latencies[min(count - 1, int(count * 0.99))],
            self._hits / self._prompts,
            self._migrations,
        )

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
        self._migrations += self._homes.get(request.rollout.id, chosen) != chosen
        self._homes[request.rollout.id] = chosen
        engine.waiting.append(request)
        self._work(engine)

    def _retry(self) -> None:
        for _ in range(len(self._pending)):
            self._send(self._pending.popleft())

    def _work(self, engine: Engine) -> None:
        """Bring an engine up to date, take what it finished, start what fits, and come back at its next change."""
        engine.advance(self.now)
        done = [r for r in engine.running if r.prefill == 0 and r.decode <= 1e-6]
        if done:
            engine.running = [r for r in engine.running if not (r.prefill == 0 and r.decode <= 1e-6)]
        for request in done:
            engine.pinned -= request.held
            engine.keep(request, self.trace)
        for request, hit in engine.admit(self.trace):
            self._hits += hit
            self._prompts += request.prompt
        engine.version += 1
        change = engine.next_change()
        if change < math.inf:
            self._at(self.now + change, (engine, engine.version))
        for request in done:
            self._answered(request)

    def _answered(self, request: Request) -> None:
        self._latencies.append(self.now - request.asked_s)
        self.router.answered(request)
        turn = request.rollout.turns[request.index]
        if request.index + 1 < len(request.rollout.turns):
            then = self.now + turn.tool_s
            self._at(then, Request(request.rollout, request.index + 1, request.footprint, then))
        else:
            self._left -= 1
            self.router.finished(request.rollout)
        self._retry()

    def _happen(self, incident: Incident) -> None:
        engine = self.engines[incident.engine]
        engine.advance(self.now)
        if incident.kind == "join":
            engine.alive = True
            engine.cache.clear()
            engine.cached = engine.pinned = 0
            self.router.joined(engine.index)
            self._retry()
        elif incident.kind == "slow":
            engine.speed = 0.2
            self._work(engine)
        else:
            engine.alive = False
            engine.version += 1
            lost = [*engine.running, *engine.waiting]
            engine.running, engine.waiting = [], deque()
            if incident.kind == "die":
                self.router.died(engine.index)
            else:
                self.router.left(engine.index)
            for request in lost:
                self.router.cut(request)
                self._send(request)


def best_hit_rate(trace: Trace, engines: int, router: Router) -> float:
    """Hit rate of a fleet whose engines share one boundless cache, where a router can lose nothing.

    It is no bound where prompts that are read at the same time share much: engines that have room for all at once read
    it once for each, and those that make some wait find it cached.
    """
    fleet = Fleet(trace, engines, router, capacity=10**12)
    for engine in fleet.engines[1:]:
        engine.cache = fleet.engines[0].cache
    return fleet.run().hit_rate
