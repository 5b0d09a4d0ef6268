# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated inference engine with a prefix cache, in virtual time.

An engine works on all its requests at once: prefill at a fixed rate shared by the requests in prefill, decoding at a
rate that falls with the batch and is halved during prefill. The KV cache holds the tokens of running requests (a
request that does not fit waits) and, in the rest, prefixes in LRU order: the system prompt, one prefix a group, one a
rollout. A prefix is stored once however many requests use it, and is not evicted while one does. As vLLM registers a
block when it is scheduled, a request whose prefix is being read waits until it has been read.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a rollout: new tokens to read, tokens to write, and seconds of the tool after it."""

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
    """Rollouts over a system prompt and a prompt per group, in tokens."""

    system: int
    prompt: int
    rollouts: tuple[Rollout, ...]


@dataclass(slots=True)
class Request:
    """Turn of a rollout as a request to an engine."""

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
    """One simulated engine."""

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
    """The request that reads a prefix, or read it first."""
    pinned: int = 0
    """Tokens of running requests, shared ones counted once."""
    updated_s: float = 0.0
    version: int = 0

    PREFILL = 12_000.0
    """Prompt tokens per second of an idle engine."""
    STEP_S = 0.012
    """Seconds per decoding step of a batch of one."""
    PER_REQUEST_S = 0.0006
    """What each further request adds to a step."""

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
        """Return seconds until a request ends its prefill or its decoding."""
        if not self.running:
            return math.inf
        prefills = [request.prefill for request in self.running if request.prefill > 0]
        decodes = [request.decode for request in self.running if request.prefill == 0]
        prefill, decode = self.rates(len(prefills))
        first = min(prefills) / prefill if prefills else math.inf
        return min(first, max(0.0, min(decodes)) / decode) if decodes else first

    def admit(self, trace: Trace) -> Iterator[tuple[Request, int]]:
        """Start waiting requests that fit; yield each with its cached prompt tokens."""
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
        """Take a request's prefixes out of the cache; return the prompt tokens saved, up to the first missing one."""
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
        """End a request; prefixes that it has read stay while there is room."""
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
        """Evict the least recently used prefixes, from their ends, until the cache fits."""
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
        """Clear the cache; running requests go on."""
        self.cache.clear()
        self.cached = 0

    @property
    def kv_use(self) -> float:
        return self.pinned / self.capacity


def shared_by(request: Request, trace: Trace) -> dict[str, int]:
    """Return the shared prefixes of a request in the order of its prompt, with their tokens."""
    return {"system": trace.system, request.rollout.group: trace.prompt}
