# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Routers of simulated engines: the production :class:`BackendPool`, and reimplementations of published algorithms."""

from __future__ import annotations

from collections import Counter, defaultdict

from benchmarks.engines import Request, Rollout, Trace
from benchmarks.traces import Fleet
from nemo_gym_prorl.policy.pool.backend import Assign, Decision, blocks_of
from nemo_gym_prorl.policy.pool.pool import BackendPool


class Base:
    """Base of the peers' routers: tracks the engines in service and the number of requests in flight at each.

    ``route`` returns the index of an engine; ``None`` lets the request wait until the next answer. ``cut`` reports
    that a request lost its engine and will be routed again.
    """

    name = "base"

    def __init__(self) -> None:
        self.engines: list[int] = []
        self.in_flight: Counter[int] = Counter()

    def joined(self, engine: int) -> None:
        self.engines.append(engine)
        self.engines.sort()

    def left(self, engine: int) -> None:
        self.engines.remove(engine)

    def route(self, request: Request, fleet: Fleet) -> int | None:
        self.trace = fleet.trace
        chosen = self.choose(request)
        self.in_flight[chosen] += 1
        return chosen

    def choose(self, request: Request) -> int:
        raise NotImplementedError

    def answered(self, request: Request) -> None:
        self.in_flight[request.engine] -= 1

    def cut(self, request: Request) -> None:
        self.answered(request)

    def finished(self, rollout: Rollout) -> None:
        pass


class StickyLeastLoaded(Base):
    """``sticky_least_loaded``: a rollout stays at the engine with the fewest requests in flight at its first turn."""

    name = "sticky least loaded"

    def __init__(self) -> None:
        super().__init__()
        self._home: dict[str, int] = {}

    def choose(self, request: Request) -> int:
        home = self._home.get(request.rollout.id)
        if home is None or home not in self.engines:
            home = min(self.engines, key=lambda engine: (self.in_flight[engine], engine))
            self._home[request.rollout.id] = home
        return home


class CacheAware(Base):
    """SGLang's policy ``cache_aware``: the engine to which the longest prefix was sent. If this prefix covers at most
    30 % of the prompt, the engine with the fewest prefix tokens; if loads differ by more than 64 requests and a factor
    of 1.5, the engine with the least load."""

    name = "cache aware"

    def __init__(self) -> None:
        super().__init__()
        self._sent: dict[int, dict[str, int]] = defaultdict(dict)

    def left(self, engine: int) -> None:
        super().left(engine)
        self._sent.pop(engine, None)

    def choose(self, request: Request) -> int:
        loads = [self.in_flight[engine] for engine in self.engines]
        if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
            chosen = min(self.engines, key=lambda engine: (self.in_flight[engine], engine))
        else:
            matched = {engine: self._matched(engine, request) for engine in self.engines}
            best = max(self.engines, key=lambda engine: matched[engine])
            smallest = min(self.engines, key=lambda engine: sum(self._sent[engine].values()))
            chosen = best if matched[best] / request.prompt > 0.3 else smallest
        sent = self._sent[chosen]
        sent["system"], sent[request.rollout.group] = self.trace.system, self.trace.prompt
        sent[request.rollout.id] = request.footprint - self.trace.system - self.trace.prompt
        return chosen

    def _matched(self, engine: int, request: Request) -> int:
        sent = self._sent[engine]
        if "system" not in sent:
            return 0
        if request.rollout.group not in sent:
            return self.trace.system
        return self.trace.system + self.trace.prompt + sent.get(request.rollout.id, 0)


class BackendPoolRouter:
    """Router under test: the production :class:`BackendPool`, with the engines' load reported every 2 s of simulated
    time."""

    name = "prorl"

    def __init__(self) -> None:
        self.pool = BackendPool()
        self._tickets: dict[int, Request] = {}
        self._ticket_of: dict[int, int] = {}
        self._assigned: dict[int, int] = {}
        self._count = 0
        self._reported_s = -2.0
        self._fleet: Fleet | None = None
        self._blocks_of: dict[str, bytes] = {}

    def joined(self, engine: int) -> None:
        self._take(self.pool.add(str(engine), ""))

    def left(self, engine: int) -> None:
        self._take(self.pool.remove(str(engine)))

    def route(self, request: Request, fleet: Fleet) -> int | None:
        self._fleet = fleet
        if fleet.now - self._reported_s >= 2.0:
            self._reported_s = fleet.now
            for engine in fleet.alive():
                waiting, kv_use = len(engine.waiting), engine.kv_use
                self._take(
                    self.pool.report(str(engine.index), waiting=waiting, kv_use=kv_use, capacity=engine.capacity)
                )
            self._take(self.pool.tick(fleet.now))
        ticket = self._ticket_of.get(id(request))
        if ticket is None:
            self._count += 1
            ticket = self._ticket_of[id(request)] = self._count
            self._tickets[ticket] = request
            blocks = b"" if request.index else self._blocks(request.rollout.group, fleet.trace)
            rollout = request.rollout
            self._take(self.pool.request(ticket, rollout.id, rollout.group, fleet.now, request.prompt, blocks))
        return self._assigned.pop(ticket, None)

    def _blocks(self, group: str, trace: Trace) -> bytes:
        """Return the prefix blocks of a group's prompt, as the model server computes them from token ids."""
        if group not in self._blocks_of:
            self._blocks_of[group] = blocks_of([0] * trace.system + [1 + len(self._blocks_of)] * trace.prompt)
        return self._blocks_of[group]

    def answered(self, request: Request) -> None:
        ticket = self._ticket_of[id(request)]
        del self._ticket_of[id(request)], self._tickets[ticket]
        self._take(self.pool.answered(ticket, self._fleet.now))

    def cut(self, request: Request) -> None:
        # The pool reassigns the requests of a removed backend itself.
        if str(request.engine) in self.pool.backends:
            self._take(self.pool.failed(self._ticket_of[id(request)], self._fleet.now))

    def finished(self, rollout: Rollout) -> None:
        self._take(self.pool.finish(rollout.id))

    def _take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Assign):
                self._assigned[decision.ticket] = int(decision.backend)


PEERS = (StickyLeastLoaded, CacheAware)
