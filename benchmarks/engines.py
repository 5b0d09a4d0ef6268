# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated inference engine with a prefix cache, in virtual time.

An engine works on all its requests at once. Requests in prefill share a fixed rate; the decoding rate falls with the
batch size and is halved during prefill. The KV cache has the tokens of running requests; a request that does not fit
waits. The rest of the cache has prefixes in LRU order: the system prompt, one prefix per group, and one per rollout. A
prefix is stored once for all requests, and is not evicted while a request uses it. A request whose prefix another
request is prefilling waits until that prefill ends, since vLLM registers a block when the block is scheduled.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn of a rollout: new tokens in the prompt, tokens to decode, and seconds of the tool call that follows."""

    observed: int
    written: int
    tool_s: float


@dataclass(frozen=True, slots=True)
class Rollout:
    """Rollout of a trace; siblings share the group and the group's prompt."""

    id: str
    group: str
    start_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Rollouts of a trace, with the lengths in tokens of the system prompt and of each group's prompt."""

    system: int
    prompt: int
    rollouts: tuple[Rollout, ...]


@dataclass(slots=True)
class Request:
    """Request to an engine for one turn of a rollout. ``context``: tokens of the history before the turn. ``prefill``,
    ``decode``: tokens left to prefill and to decode."""

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

    @property
    def is_done(self) -> bool:
        return self.prefill == 0 and self.decode <= 1e-6


@dataclass(slots=True)
class Engine:
    """Simulated engine. ``capacity``: tokens of its KV cache. Times are seconds of simulated time."""

    index: int
    capacity: int
    alive: bool = True
    running: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    cache: OrderedDict[str, int] = field(default_factory=OrderedDict)
    cached: int = 0
    used: Counter[str] = field(default_factory=Counter)
    """Running requests by shared prefix; a used prefix is not evicted."""
    readers: dict[str, Request] = field(default_factory=dict)
    """Per prefix, the request that prefills the prefix, or prefilled it first."""
    pinned: int = 0
    """Tokens of running requests, shared ones counted once."""
    updated_s: float = 0.0
    version: int = 0

    PREFILL = 12_000.0
    """Prompt tokens per second of an idle engine."""
    STEP_S = 0.012
    """Seconds per decoding step of a batch of one."""
    PER_REQUEST_S = 0.0006
    """Seconds that each further request adds to a decoding step."""

    def rates(self, prefilling: int) -> tuple[float, float]:
        decoding = len(self.running) - prefilling
        share = 0.5 if prefilling and decoding else 1.0
        prefill = self.PREFILL * share / prefilling if prefilling else 0.0
        decode = share / (self.STEP_S + self.PER_REQUEST_S * decoding) if decoding else 0.0
        return prefill, decode

    def advance(self, now: float) -> None:
        passed = now - self.updated_s
        self.updated_s = now
        if not self.running or not passed:
            return
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
        """Return the seconds until the next request ends its prefill or its decoding; infinity without a request."""
        if not self.running:
            return math.inf
        prefills = [request.prefill for request in self.running if request.prefill > 0]
        decodes = [request.decode for request in self.running if request.prefill == 0]
        prefill, decode = self.rates(len(prefills))
        first = min(prefills) / prefill if prefills else math.inf
        return min(first, max(0.0, min(decodes)) / decode) if decodes else first

    def admit(self, trace: Trace) -> Iterator[tuple[Request, int]]:
        """Start waiting requests that fit; yield each request with its number of cached prompt tokens."""
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
        """Pin a request's prefixes; return the number of cached prompt tokens before the first missing token."""
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
        """End a request, and cache the request's prefilled prefixes, as far as there is room."""
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
        lost = [*self.running, *self.waiting]
        self.running, self.waiting, self.pinned = [], deque(), 0
        self.used.clear()
        self.readers.clear()
        return lost

    def evict(self) -> None:
        """Evict the least recently used prefixes, each from its end, until the cache fits."""
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
        """Clear the cache; running requests continue."""
        self.cache.clear()
        self.cached = 0

    @property
    def kv_use(self) -> float:
        return self.pinned / self.capacity


def shared_by(request: Request, trace: Trace) -> dict[str, int]:
    """Return the prefixes that a request shares with others, in the order of the prompt, with their token counts."""
    return {"system": trace.system, request.rollout.group: trace.prompt}
