# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The order of waiting jobs, and each client's part of the bounds that all share. Pure.

The highest priority goes first; among equals the client that holds the least for its share, ties in turn; within a
client the environment that has the least for its share, ties in turn; within that, first come, first served. So a
thousand long jobs of one client, or of one environment, keep nobody else's out.

Clients with a share have a part each; all others have one part together, as if they were a client with a share of 1:
a name costs nothing there, and each new name would be a new part.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, KeysView, Mapping, Set
from types import MappingProxyType


class _Line:
    """Waiting jobs of one client at one priority."""

    def __init__(self) -> None:
        self.jobs: dict[str, OrderedDict[str, None]] = {}
        """Ids in order, by environment."""
        self._turns: dict[str, int] = {}
        """When each environment was last served here, or came."""

    def push(self, job_id: str, environment: str, turn: int) -> None:
        """Append a job."""
        if environment not in self.jobs:
            self.jobs[environment] = OrderedDict()
            self._turns[environment] = turn
        self.jobs[environment][job_id] = None

    def remove(self, job_id: str, environment: str) -> None:
        """Take a job out."""
        del self.jobs[environment][job_id]
        self._forget_empty(environment)

    def pop(self, load: Callable[[str], float], turn: int, among: Container[str] | None) -> tuple[str, str]:
        """Take the first job of the environment with the least load; among equals, of the one served longest ago.
        Gives the job and its environment."""
        there = self.jobs if among is None else [name for name in self.jobs if name in among]
        environment = min(there, key=lambda name: (load(name), self._turns[name]))
        job_id, _ = self.jobs[environment].popitem(last=False)
        self._turns[environment] = turn
        self._forget_empty(environment)
        return job_id, environment

    def _forget_empty(self, environment: str) -> None:
        if not self.jobs[environment]:
            del self.jobs[environment], self._turns[environment]


class _Level:
    """Waiting jobs of one priority. Its heap ranks clients; entries that are no longer true are skipped."""

    def __init__(self) -> None:
        self.jobs: dict[str, _Line] = {}
        """By client."""
        self.turns: dict[str, int] = {}
        """When each client was last served here, or came."""
        self._ranks: list[tuple[float, int, str]] = []

    def rank(self, client: str, load: Callable[[str], float]) -> None:
        """The client has another load, or another turn, than before."""
        heapq.heappush(self._ranks, (load(client), self.turns[client], client))
        if len(self._ranks) > 2 * len(self.jobs) + 16:
            self.rank_all(load)

    def rank_all(self, load: Callable[[str], float]) -> None:
        """Every client may have another load than before."""
        self._ranks = [(load(client), turn, client) for client, turn in self.turns.items()]
        heapq.heapify(self._ranks)

    def first(self, load: Callable[[str], float]) -> str:
        """The client with the least load; among equals the one served longest ago."""
        while True:
            had, turn, client = self._ranks[0]
            if self.turns.get(client) == turn and load(client) == had:
                return client
            heapq.heappop(self._ranks)


class FairQueue:
    """Waiting jobs of one stage, in the order told above.

    Who queues says with :meth:`holds` what each client has, be that slots or what lasts longer. An event costs
    O(log n), amortised, and once for each priority at which its client waits and each environment of which the client
    has jobs there.

    Args:
        load: what a client has of an environment already, over its share; the environment with the least goes first.
        shares: of clients, in proportion to each other's; 1 where none is said.
    """

    def __init__(self, load: Callable[[str, str], float], shares: Mapping[str, float] = MappingProxyType({})) -> None:
        self._load = load
        self._shares = shares
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []
        """A heap of the levels there are, negated; the first of them is not empty, if any is."""
        self._waits_at: dict[str, set[int]] = {}
        self._held: Counter[str] = Counter()
        self._turn = 0
        self._waiting: Counter[str] = Counter()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def environments(self) -> KeysView[str]:
        """Those that have jobs here."""
        return self._waiting.keys()

    def push(self, job_id: str, client: str, priority: int, environment: str) -> None:
        """Append a job; it must not be in the queue yet."""
        self._turn += 1
        if priority not in self._levels:
            self._levels[priority] = _Level()
            heapq.heappush(self._priorities, -priority)
        level = self._levels[priority]
        if client not in level.jobs:
            level.jobs[client] = _Line()
            self._waits_at.setdefault(client, set()).add(priority)
            self._moves_back(level, client)
        level.jobs[client].push(job_id, environment, self._turn)
        self._waiting[environment] += 1
        self._size += 1

    def remove(self, job_id: str, client: str, priority: int, environment: str) -> None:
        """Take a job out from wherever it stands."""
        self._levels[priority].jobs[client].remove(job_id, environment)
        self._forget_empty(priority, client, environment)

    def pop(self, among: Set[str] | None = None) -> str:
        """Take the next job. The queue must not be empty.

        Args:
            among: only of one of these environments, of which there must be a job; that looks at every client.
        """
        priority, client = self._first() if among is None else self._first_of(among)
        level = self._levels[priority]
        self._moves_back(level, client)
        job_id, environment = level.jobs[client].pop(lambda name: self._load(client, name), self._turn, among)
        self._forget_empty(priority, client, environment)
        return job_id

    def holds(self, client: str, more: int) -> None:
        """The client has so much more than before, or less."""
        self._held[client] += more
        if not self._held[client]:
            del self._held[client]
        for priority in self._waits_at.get(client, ()):
            self._levels[priority].rank(client, self._load_of)

    def share(self, shares: Mapping[str, float]) -> None:
        """From now on clients have these shares. Costs O(n)."""
        self._shares = shares
        for level in self._levels.values():
            level.rank_all(self._load_of)

    def _first(self) -> tuple[int, str]:
        priority = -self._priorities[0]
        return priority, self._levels[priority].first(self._load_of)

    def _first_of(self, environments: Set[str]) -> tuple[int, str]:
        ranks = (
            (-priority, self._load_of(client), level.turns[client], client)
            for priority, level in self._levels.items()
            for client, line in level.jobs.items()
            if not environments.isdisjoint(line.jobs)
        )
        priority, _, _, client = min(ranks)
        return -priority, client

    def _load_of(self, client: str) -> float:
        return self._held[client] / self._shares.get(client, 1.0)

    def _moves_back(self, level: _Level, client: str) -> None:
        """Among equals, the client's turn is last now."""
        self._turn += 1
        level.turns[client] = self._turn
        level.rank(client, self._load_of)

    def _forget_empty(self, priority: int, client: str, environment: str) -> None:
        self._size -= 1
        self._waiting[environment] -= 1
        if not self._waiting[environment]:
            del self._waiting[environment]
        level = self._levels[priority]
        if level.jobs[client].jobs:
            return
        del level.jobs[client], level.turns[client]
        self._waits_at[client].discard(priority)
        if not self._waits_at[client]:
            del self._waits_at[client]
        while self._priorities and not self._levels[-self._priorities[0]].jobs:
            del self._levels[-heapq.heappop(self._priorities)]


def is_within_part(client: str, bound: float, has: Mapping[str, float], shares: Mapping[str, float]) -> bool:
    """Whether a client has less than its part, so that it may have more although the bound is reached.

    Args:
        client: it.
        bound: of all together.
        has: what each client has of it.
        shares: of the clients that have one.
    """
    if client in shares:
        own, share = has.get(client, 0), shares[client]
    else:
        own, share = sum(had for name, had in has.items() if name not in shares), 1.0
    return own < bound * share / (sum(shares.values()) + 1.0)
