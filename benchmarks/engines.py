# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated inference engines with prefix caches, behind a router.

Time is virtual. An engine works on all its requests at once: prefill at a fixed rate shared by the requests in it,
decoding at a rate that falls with the batch and is halved while it prefills. Its KV cache holds what requests in
flight need (a request that does not fit waits at the engine) and, in what is left, prefixes in the order of their last
use: the system prompt, one prefix per group, one per rollout. A prefix that was evicted is prefilled again. As in
paged engines each is there once however many requests use it, and stays while one does; and as vLLM names a block when
it is scheduled, what one request reads the next ones find: they wait at the engine until it has been read.

A router answers two questions: which engine takes a turn now (or none yet), and nothing else.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, OrderedDict, deque
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

    def route(self, request: Request, fleet: Engines) -> int | None:
        """An engine, or ``None`` to ask again after the next :meth:`answered` or :meth:`finished`."""

    def answered(self, request: Request) -> None: ...

    def cut(self, request: Request) -> None:
        """Its engine is gone; it will be routed again."""

    def dropped(self, rollout: Rollout, request: Request | None) -> None:
        """The rollout was cancelled, in the middle of this request or between two."""

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
    used: Counter[str] = field(default_factory=Counter)
    """How many running requests use each prefix that is shared; none of those can be evicted."""
    readers: dict[str, Request] = field(default_factory=dict)
    """Which request reads a prefix, or was the first to."""
    pinned: int = 0
    """Tokens of running requests, what they share counted once."""
    updated_s: float = 0.0
    busy_s: float = 0.0
    """How long it had any request."""
    version: int = 0

    PREFILL = 12_000.0
    """Prompt tokens per second of an idle engine."""
    STEP_S = 0.012
    """Seconds per decoding step of a batch of one."""
    PER_REQUEST_S = 0.0006
    """What each further request adds to a step."""

    def rates(self, prefilling: int) -> tuple[float, float]:
        """Tokens per second of each request in prefill, of which there are so many, and of each in decoding."""
        decoding = len(self.running) - prefilling
        share = 0.5 if prefilling and decoding else 1.0
        prefill = self.PREFILL * share / prefilling if prefilling else 0.0
        decode = share / (self.STEP_S + self.PER_REQUEST_S * decoding) if decoding else 0.0
        return prefill * self.speed, decode * self.speed

    def advance(self, now: float) -> None:
        """Do the work of the time since the last call."""
        passed = now - self.updated_s
        self.updated_s = now
        if not self.running or not passed:
            return
        self.busy_s += passed
        in_prefill = [request for request in self.running if request.prefill > 0]
        prefill, decode = self.rates(len(in_prefill))
        prefilled, decoded = prefill * passed, decode * passed
        if len(in_prefill) < len(self.running):
            for request in self.running:
                if request.prefill == 0:
                    request.decode -= decoded
        for request in in_prefill:
            request.prefill = max(0.0, request.prefill - prefilled)
            if request.prefill < 1e-6:
                request.prefill = 0.0

    def next_change(self) -> float:
        """Seconds until a request ends its prefill or its decoding."""
        if not self.running:
            return math.inf
        prefills = [request.prefill for request in self.running if request.prefill > 0]
        decodes = [request.decode for request in self.running if request.prefill == 0]
        prefill, decode = self.rates(len(prefills))
        first = min(prefills) / prefill if prefills else math.inf
        return min(first, max(0.0, min(decodes)) / decode) if decodes else first

    def admit(self, trace: Trace) -> Iterator[tuple[Request, int]]:
        """Start waiting requests that fit; yields each with its cached prompt tokens."""
        while self.waiting:
            request = self.waiting[0]
            shared = shared_by(request, trace)
            readers = [self.readers[key] for key in shared if key in self.readers]
            needed = request.footprint - sum([size for key, size in shared.items() if self.used[key]])
            full = bool(self.running) and self.pinned + needed > self.capacity
            if full or any(reader.prefill > 0 for reader in readers):
                return
            self.waiting.popleft()
            hit = self.use(request, shared)
            request.prefill = float(request.prompt - hit)
            request.decode = float(request.rollout.turns[request.index].written)
            self.pinned += needed
            self.evict()
            self.running.append(request)
            yield request, hit

    def use(self, request: Request, shared: dict[str, int]) -> int:
        """Take a request's prefixes out of the cache; how many tokens of its prompt that saves.

        The first prefix that is missing ends the match.
        """
        hit, whole = 0, True
        for key in (*shared, request.rollout.id):
            cached = self.cache.pop(key, 0)
            self.cached -= cached
            there = shared[key] if self.used[key] else cached
            hit += there if whole else 0
            if key in shared:
                self.used[key] += 1
                whole = whole and there == shared[key]
                if not whole:
                    self.readers[key] = request
        return min(hit, request.prompt - 1)

    def release(self, request: Request, trace: Trace) -> None:
        """A request is over. What it used, and has read, stays as long as there is room."""
        shared = shared_by(request, trace)
        own = request.footprint - sum(shared.values())
        for key, size in (shared | {request.rollout.id: own}).items():
            self.used[key] -= key in shared
            if self.readers.get(key) is request:
                del self.readers[key]
            if not self.used[key]:
                del self.used[key]
                self.pinned -= size
                if request.prefill == 0:
                    self.cached += size
                    self.cache[key] = size
        self.evict()

    def cut_off(self) -> list[Request]:
        """All its requests, none of which it has any longer."""
        lost = [*self.running, *self.waiting]
        self.running, self.waiting, self.pinned = [], deque(), 0
        self.used.clear()
        self.readers.clear()
        return lost

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

    def forget(self) -> None:
        """No prefix is cached any more; what is in flight goes on."""
        self.cache.clear()
        self.cached = 0

    @property
    def kv_use(self) -> float:
        """Share of the cache that requests in flight hold."""
        return self.pinned / self.capacity


def shared_by(request: Request, trace: Trace) -> dict[str, int]:
    """The prefixes that a request shares with others, in the order of its prompt, and their tokens."""
    return {"system": trace.system, request.rollout.group: trace.prompt}


class Engines:
    """Engines, their router, and the queue of events that is the clock; whoever drives them says what an answer leads
    to.

    Args:
        trace: what prompts begin with.
        engines: how many.
        router: sends turns to them.
        capacity: tokens of each one's KV cache.
        absent: those that are not there at first.
    """

    def __init__(
        self, trace: Trace, engines: int, router: Router, capacity: int, absent: frozenset[int] = frozenset()
    ) -> None:
        self.trace = trace
        self.router = router
        self.engines = [Engine(index, capacity, alive=index not in absent) for index in range(engines)]
        self.now = 0.0
        self.hits = self.prompts = self.migrations = 0
        """Prompt tokens that were cached, prompt tokens, turns that another engine took than the one before."""
        self._events: list[tuple[float, int, object]] = []
        self._order = itertools.count()
        self._pending: deque[Request] = deque()
        self._homes: dict[str, int] = {}
        for engine in self.alive():
            router.joined(engine.index)

    def answered(self, request: Request) -> None:
        """A turn was sampled."""
        raise NotImplementedError

    def alive(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.alive]

    def at(self, when: float, event: object) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def next_event(self) -> object:
        """Go to the next event; ``None`` if it was one of the engines' own."""
        self.now, _, event = heapq.heappop(self._events)
        if not isinstance(event, _Change):
            return event
        if event.engine.version == event.version:
            self.work(event.engine)
        return None

    def send(self, request: Request) -> None:
        """A turn wants to be sampled."""
        chosen = self.router.route(request, self)
        if chosen is None:
            self._pending.append(request)
            return
        engine = self.engines[chosen]
        request.engine = chosen
        if not engine.alive:
            self.router.cut(request)
            self.send(request)
            return
        self.migrations += self._homes.get(request.rollout.id, chosen) != chosen
        self._homes[request.rollout.id] = chosen
        engine.waiting.append(request)
        self.work(engine)

    def drop(self, rollout: Rollout, request: Request | None) -> None:
        """A rollout is cancelled, in the middle of this request or between two."""
        self.router.dropped(rollout, request)
        if request is not None and request in self._pending:
            self._pending.remove(request)
        elif request is not None:
            engine = self.engines[request.engine]
            engine.advance(self.now)
            if request in engine.running:
                engine.running.remove(request)
                engine.release(request, self.trace)
            else:
                engine.waiting.remove(request)
            self.work(engine)
        self.retry()

    def retry(self) -> None:
        """Ask the router again about the turns that it had no engine for."""
        for _ in range(len(self._pending)):
            self.send(self._pending.popleft())

    def work(self, engine: Engine) -> None:
        """Bring an engine up to date, take what it finished, start what fits, and come back at its next change."""
        engine.advance(self.now)
        done = [r for r in engine.running if r.prefill == 0 and r.decode <= 1e-6]
        if done:
            engine.running = [r for r in engine.running if not (r.prefill == 0 and r.decode <= 1e-6)]
        for request in done:
            engine.release(request, self.trace)
        for request, hit in engine.admit(self.trace):
            self.hits += hit
            self.prompts += request.prompt
        engine.version += 1
        change = engine.next_change()
        if change < math.inf:
            self.at(self.now + change, _Change(engine, engine.version))
        for request in done:
            self.router.answered(request)
            self.answered(request)
            self.retry()


@dataclass(frozen=True, slots=True)
class _Change:
    """Something ends at an engine, unless something else came first."""

    engine: Engine
    version: int
