# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Queues of the scheduler: fair order of waiting jobs, and the barrier of groups that are scored together. Pure.

:class:`FairQueue` orders by priority, then client, then environment, then arrival. Of two clients or environments, the
one with less load relative to its share goes first; ties are served in turn. So a thousand long jobs of one client or
environment block no other client or environment. Limits are divided among clients in proportion to their shares. All
clients without a configured share have one share of 1 together, because callers can invent client names.

:class:`GroupBarrier` gathers the rollouts of a group whose verifier compares them (Gym's ``genrm_compare``): such a
``/verify`` answers only once all rollouts of the group have arrived. Siblings gather outside the queue and pass EVAL
as one cohort, so that waiting siblings hold no slots. A group has one cohort at a time in the queue or in EVAL, since
some verifiers identify a cohort only by its prompt. A job that is scored again after a failure gathers again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, KeysView, Mapping, Set
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType


class _ClientQueue:
    """Waiting jobs of one client at one priority."""

    def __init__(self, turn: int) -> None:
        self.turn = turn
        """Count of the queue's events when a job was last served, or else when the first arrived."""
        self.jobs: dict[str, OrderedDict[str, None]] = {}
        """Ids in the order of arrival, by environment."""
        self._turns: dict[str, int] = {}
        """The same by environment."""

    def push(self, job_id: str, environment: str, turn: int) -> None:
        if environment not in self.jobs:
            self.jobs[environment] = OrderedDict()
            self._turns[environment] = turn
        self.jobs[environment][job_id] = None

    def remove(self, job_id: str, environment: str) -> None:
        del self.jobs[environment][job_id]
        self._forget_empty(environment)

    def pop(self, load: Callable[[str], float], turn: int, among: Container[str] | None) -> tuple[str, str]:
        """Remove the first job of the environment with the least load (of equals, the one served longest ago), and
        return the job and its environment."""
        there = self.jobs if among is None else [name for name in self.jobs if name in among]
        environment = min(there, key=lambda name: (load(name), self._turns[name]))
        job_id, _ = self.jobs[environment].popitem(last=False)
        self.turn = self._turns[environment] = turn
        self._forget_empty(environment)
        return job_id, environment

    def _forget_empty(self, environment: str) -> None:
        if not self.jobs[environment]:
            del self.jobs[environment], self._turns[environment]


class FairQueue:
    """Waiting jobs of one stage, in fair order (see the module).

    The owner reports each client's load by :meth:`add_load`: slots in use, or sessions. A decision costs O(n) in the
    number of waiting clients.

    Args:
        load: returns a client's load in an environment, divided by the environment's share.
        shares: shares of clients, relative to each other; 1 by default.
    """

    def __init__(self, load: Callable[[str, str], float], shares: Mapping[str, float] = MappingProxyType({})) -> None:
        self._load = load
        self._shares = shares
        self._queues: dict[tuple[int, str], _ClientQueue] = {}
        """Waiting jobs by priority and client."""
        self._held: Counter[str] = Counter()
        self._turn = 0
        self._waiting: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._waiting.total()

    @property
    def environments(self) -> KeysView[str]:
        return self._waiting.keys()

    def push(self, job_id: str, client: str, priority: int, environment: str) -> None:
        self._turn += 1
        queue = self._queues.setdefault((priority, client), _ClientQueue(self._turn))
        queue.push(job_id, environment, self._turn)
        self._waiting[environment] += 1

    def remove(self, job_id: str, client: str, priority: int, environment: str) -> None:
        """Remove a job from any position."""
        self._queues[priority, client].remove(job_id, environment)
        self._forget_empty(priority, client, environment)

    def pop(self, among: Set[str] | None = None) -> str:
        """Remove the next job, and return its id. The queue must not be empty.

        Args:
            among: environments to choose from, of which one must have a waiting job; ``None`` for all environments.
        """
        ranks = (
            (-priority, self._held[client] / self._shares.get(client, 1.0), queue.turn, client)
            for (priority, client), queue in self._queues.items()
            if among is None or not among.isdisjoint(queue.jobs)
        )
        negated, _, _, client = min(ranks)
        queue = self._queues[-negated, client]
        self._turn += 1
        job_id, environment = queue.pop(lambda name: self._load(client, name), self._turn, among)
        self._forget_empty(-negated, client, environment)
        return job_id

    def add_load(self, client: str, more: int) -> None:
        """Add ``more`` to a client's load; negative to reduce it."""
        self._held[client] += more
        if not self._held[client]:
            del self._held[client]

    def share(self, shares: Mapping[str, float]) -> None:
        """Set the clients' shares."""
        self._shares = shares

    def _forget_empty(self, priority: int, client: str, environment: str) -> None:
        self._waiting[environment] -= 1
        if not self._waiting[environment]:
            del self._waiting[environment]
        if not self._queues[priority, client].jobs:
            del self._queues[priority, client]


def is_under_fair_share(client: str, bound: float, usage: Mapping[str, float], shares: Mapping[str, float]) -> bool:
    """Return whether a client uses less than its fair share of a limit. Such a client is admitted even when the limit
    is reached. All clients without a configured share have one share of 1 together.

    Args:
        client: name of the client.
        bound: limit for all clients together.
        usage: current usage by client, in the unit of the limit.
        shares: configured shares by client.
    """
    if client in shares:
        own, share = usage.get(client, 0), shares[client]
    else:
        own, share = sum(used for name, used in usage.items() if name not in shares), 1.0
    return own < bound * share / (sum(shares.values()) + 1.0)


@dataclass(frozen=True, slots=True)
class Member:
    """Membership of a job in a cohort: the cohort's unique number, and the index of the job in the cohort."""

    cohort: int
    index: int


@dataclass(slots=True)
class _Group:
    """Jobs of a group that have no outcome yet.

    Attributes:
        live: all these jobs.
        gathered: jobs that wait for siblings, in order of arrival.
        complete: cohort that waits for a slot, represented in the queue by its first job; empty if none waits.
        working: jobs of the cohort that is being scored.
    """

    live: set[str] = field(default_factory=set)
    gathered: dict[str, None] = field(default_factory=dict)
    complete: tuple[str, ...] = ()
    working: dict[str, None] = field(default_factory=dict)


class GroupBarrier:
    """Barrier at which the rollouts of a group gather before their verifier scores them together.

    Args:
        sizes: cohort size by environment; other environments are ignored.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = {name: size for name, size in sizes.items() if size > 1}
        self._groups: dict[tuple[str, str], _Group] = {}
        self._keys: dict[str, tuple[str, str]] = {}
        self._numbers = count()

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._keys

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for siblings, or behind the job that represents their cohort in the queue."""
        return sum(len(group.gathered) + len(group.complete[1:]) for group in self._groups.values())

    def missing(self, job_id: str) -> tuple[int, frozenset[str]] | None:
        """Return how many siblings of a waiting job were never submitted, and the jobs of its group without an
        outcome; ``None`` if the job does not wait. Jobs of a cohort in the queue wait, too: a sibling may be cancelled
        before the cohort gets a slot."""
        if job_id not in self._keys:
            return None
        group, size = self._of(job_id)
        if job_id not in group.gathered and job_id not in group.complete:
            return None
        return max(0, size - len(group.live)), frozenset(group.live)

    # -- events: methods that may complete a cohort also return the job that enters the queue for the cohort -------

    def join(self, job_id: str, environment: str, group: str | None) -> None:
        """Register a new job; ignored if the job has no group or its environment scores jobs alone."""
        if environment in self._sizes and group is not None:
            self._keys[job_id] = environment, group
            self._groups.setdefault((environment, group), _Group()).live.add(job_id)

    def leave(self, job_id: str) -> None:
        """Remove a job that has its outcome."""
        key = self._keys.pop(job_id, None)
        if key is not None:
            self._groups[key].live.discard(job_id)
            if not self._groups[key].live:
                del self._groups[key]

    def gather(self, job_id: str) -> str | None:
        """Add a job that is ready to be scored; return the job that enters the queue if a cohort is now complete."""
        group, size = self._of(job_id)
        group.gathered[job_id] = None
        return self._completed(group, size)

    def withdraw(self, job_id: str) -> tuple[str | None, str | None]:
        """Remove a waiting job. Return the job to take out of the queue, which represented the job's cohort, and the
        job that enters the queue for a newly complete cohort; each may be ``None``."""
        group, size = self._of(job_id)
        stood = None
        if job_id in group.complete:
            stood = group.complete[0]
            group.gathered = dict.fromkeys((*group.complete, *group.gathered))
            group.complete = ()
        group.gathered.pop(job_id, None)
        return stood, self._completed(group, size)

    def start(self, job_id: str) -> dict[str, Member]:
        """Start the cohort of the job that got a slot; return the cohort's members by job, that job first."""
        group, _ = self._of(job_id)
        number = next(self._numbers)
        group.working, group.complete = dict.fromkeys(group.complete), ()
        return {member: Member(number, index) for index, member in enumerate(group.working)}

    def scored(self, job_id: str) -> tuple[str | None, str | None]:
        """Remove a job whose scoring ended. Return a sibling that is still being scored, and the job that enters the
        queue for the next cohort; each may be ``None``."""
        group, size = self._of(job_id)
        del group.working[job_id]
        return next(iter(group.working), None), self._completed(group, size)

    def _of(self, job_id: str) -> tuple[_Group, int]:
        key = self._keys[job_id]
        return self._groups[key], self._sizes[key[0]]

    def _completed(self, group: _Group, size: int) -> str | None:
        if group.complete or group.working or len(group.gathered) < size:
            return None
        group.complete = tuple(group.gathered)[:size]
        group.gathered = dict.fromkeys(tuple(group.gathered)[size:])
        return group.complete[0]
