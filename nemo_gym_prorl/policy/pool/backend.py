# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""One inference endpoint as the pool sees it, and the rollouts and turns that the pool places.

A backend that fails is down until a probe finds it alive, then on trial: one request at a time, until one succeeds.
The wait before a probe doubles with each failure in a row.

Rollouts share the beginnings of their first prompts, in blocks that an engine caches once for all of them. A block is
named by a digest of all tokens up to its end, so two prompts have a block in common exactly if they are the same up to
there. Pure: no task, socket, clock or thread.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

from nemo_gym_prorl.failures import CallerError


BLOCK = 256
"""Tokens of a block. Smaller ones tell prompts apart further, and each costs a place in every count."""

_DIGEST = 8
"""Bytes of a block's name."""


def blocks_of(prompt: Sequence[int]) -> bytes:
    """The names of a prompt's whole blocks, from its beginning; what is left of it is its own."""
    tokens = memoryview(array("q", prompt))
    digest = blake2b(digest_size=_DIGEST)
    names = bytearray()
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        digest.update(tokens[start : start + BLOCK])
        names += digest.digest()
    return bytes(names)


def tokens_in(blocks: bytes) -> int:
    """How many tokens so many blocks have."""
    return len(blocks) // _DIGEST * BLOCK


class PrefixBlockCounts:
    """How many live rollouts of a backend have each block."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()

    def add(self, blocks: bytes) -> None:
        """A rollout with these blocks is live here."""
        self._counts.update(_each(blocks))

    def remove(self, blocks: bytes) -> None:
        """It is so no longer."""
        for block in _each(blocks):
            self._counts[block] -= 1
            if not self._counts[block]:
                del self._counts[block]

    def tokens_of(self, blocks: bytes) -> int:
        """How many tokens of a prompt are here. They are its beginning, whose end a binary search finds."""
        low, high = 0, len(blocks) // _DIGEST
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[(middle - 1) * _DIGEST : middle * _DIGEST] in self._counts:
                low = middle
            else:
                high = middle - 1
        return low * BLOCK

    @property
    def tokens(self) -> int:
        """Of all blocks, each counted once."""
        return len(self._counts) * BLOCK


def _each(blocks: bytes) -> Iterator[bytes]:
    return (blocks[start : start + _DIGEST] for start in range(0, len(blocks), _DIGEST))


type Queue = OrderedDict[int, Ticket]
"""Waiting tickets by id, in their order: whichever hangs up is gone in constant time."""


@dataclass(slots=True)
class Rollout:
    """A rollout, live on a backend or waiting for one.

    Attributes:
        id: its name.
        group: shared by the rollouts of one prompt.
        run: whose backends it may live on.
        born: when it was first seen, by the pool's own count.
        backend: where its prefix is, once it had one.
        tickets: its turns that wait or run.
        idle_since: since when it has had none.
        blocks: of its first turn's prompt (:mod:`.prefixes`), which others may share.
        tokens: of its latest turn's prompt.
    """

    id: str
    group: str | None
    born: int
    run: str | None = None
    backend: str | None = None
    tickets: set[int] = field(default_factory=set)
    idle_since: float | None = None
    blocks: bytes = b""
    tokens: int = 0

    @property
    def private_tokens(self) -> int:
        """Tokens that are in none of its blocks."""
        return max(0, self.tokens - tokens_in(self.blocks))


@dataclass(slots=True)
class Ticket:
    """A turn, which waits in at most one queue or runs on one backend, since a certain time."""

    id: int
    rollout: Rollout
    backend: str | None = None
    since: float = 0.0
    _queue: Queue | None = None

    def enqueue(self, queue: Queue, *, first: bool = False) -> None:
        """Wait in a queue, at its end or in front."""
        self._queue = queue
        queue[self.id] = self
        if first:
            queue.move_to_end(self.id, last=False)

    def unqueue(self) -> None:
        """Wait no longer."""
        if self._queue is not None:
            del self._queue[self.id]
            self._queue = None


@dataclass(slots=True)
class Line:
    """The tickets of a run that have no backend yet, and when anything of that run was last known to be under way."""

    moved: float
    returning: Queue = field(default_factory=OrderedDict)
    fresh: Queue = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.returning) + len(self.fresh)


def first_of(queue: Queue) -> Ticket:
    """Whose turn it is; the queue must not be empty."""
    return next(iter(queue.values()))


_PROBE_AFTER_S, _PROBE_AT_MOST_S = 1.0, 30.0
"""The first wait before a failed backend is probed, and the longest."""

_TURN_SMOOTHING = 0.08
"""Weight of the latest turn in a backend's mean turn time."""

_SHORTEST_S = 0.001
"""Turns count as at least this long; below it only noise differs."""

_OPINION = 12
"""How many turns a backend must have had before it can count as slow."""

_SLOW = 2.0
"""How many times longer than the median backend's a backend's turns must take for it to count as slow."""

KV_SATURATED = 0.9
"""The share of its cache from which a backend's long turns may come of prefixes that were evicted."""


class AlreadyThere(CallerError):
    """What is to be added exists."""

    http_status = 409
    problem = "already-there"


class NoSuchBackend(CallerError):
    """A backend is asked for that is not there."""

    http_status = 404
    problem = "no-such-backend"


class Health(StrEnum):
    """What is known about a backend."""

    UP = "up"
    TRIAL = "trial"
    """Answers its probe again after a failure; gets one request at a time until one succeeds."""
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Assign:
    """Send the ticket's request to the backend now."""

    ticket: int
    backend: str
    weight_version: str | None


@dataclass(frozen=True, slots=True)
class Abort:
    """The backend is being removed: cancel the ticket's request there; it is placed again."""

    ticket: int
    backend: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Nothing of the ticket's run has been under way for too long: the turn fails, and is to be withdrawn."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the backend whether it is alive and report it with ``probed``."""

    backend: str


type Decision = Assign | Abort | GiveUp | Probe


@dataclass(slots=True)
class Backend:
    """One inference endpoint and what the pool knows of it."""

    id: str
    url: str
    weight_version: str | None
    limit: int
    order: int
    run: str | None = None
    """Whose rollouts it samples; ``None`` for those that name no run."""
    health: Health = Health.UP
    draining: bool = False
    paused: bool = False
    live: set[str] = field(default_factory=set)
    groups: Counter[str] = field(default_factory=Counter)
    """How many live rollouts there are of each group."""
    prefixes: PrefixBlockCounts = field(default_factory=PrefixBlockCounts)
    """What its live rollouts began with."""
    capacity: int | None = None
    """Tokens that fit into its KV cache, if it says so."""
    private_tokens: int = 0
    """Tokens that each of its live rollouts has for itself."""
    held: Queue = field(default_factory=OrderedDict)
    """Tickets that wait for this very backend, where their prefix is."""
    in_flight: set[int] = field(default_factory=set)
    last_placed: int = 0
    failures: int = 0
    failovers: int = 0
    """Requests that failed here and were sent elsewhere."""
    probe_at: float | None = None
    hot: bool = False
    """It says that it is over capacity."""
    turns: int = 0
    turn_s: float = 1.0
    """How long a turn takes, in the mean."""
    slowness: float = 1.0
    """How many times longer than others' its turns take, if it counts as slow."""
    head_start: int = 0
    load_at_join: int = 0
    load_at_join_left: int = 0

    @property
    def kv_demand(self) -> int:
        """Tokens of all its live rollouts, what they share counted once."""
        return self.prefixes.tokens + self.private_tokens

    def needs(self, rollout: Rollout) -> int:
        """How many tokens the rollout would add to the demand."""
        return rollout.private_tokens + self.missing_prefix_tokens(rollout)

    def missing_prefix_tokens(self, rollout: Rollout) -> int:
        """How many tokens of the prompt that the rollout began with no other one here has."""
        return tokens_in(rollout.blocks) - self.prefixes.tokens_of(rollout.blocks)

    def take(self, rollout: Rollout) -> None:
        """The rollout lives here from now on."""
        self.live.add(rollout.id)
        self.prefixes.add(rollout.blocks)
        self.private_tokens += rollout.private_tokens
        if rollout.group:
            self.groups[rollout.group] += 1

    def grow(self, rollout: Rollout, tokens: int) -> None:
        """The rollout, which lives here, has a prompt of so many tokens now."""
        self.private_tokens -= rollout.private_tokens
        rollout.tokens = tokens
        self.private_tokens += rollout.private_tokens

    def release(self, rollout: Rollout) -> None:
        """The rollout lives here no longer."""
        self.live.discard(rollout.id)
        self.prefixes.remove(rollout.blocks)
        self.private_tokens -= rollout.private_tokens
        if rollout.group:
            self.groups[rollout.group] -= 1
            if not self.groups[rollout.group]:
                del self.groups[rollout.group]

    @property
    def weight(self) -> float:
        """Live rollouts, plus what a late joiner is given for the load that it did not see, as this backend feels
        it."""
        unseen = self.head_start * self.load_at_join_left / self.load_at_join if self.load_at_join else 0.0
        return (len(self.live) + unseen + 1) * self.slowness - 1

    # How it fares

    @property
    def usable(self) -> bool:
        """Whether it may be sent a request for a rollout that it has."""
        return self.health is Health.UP or (self.health is Health.TRIAL and not self.in_flight)

    @property
    def takes_new(self) -> bool:
        """Whether it may be given a rollout that it does not have."""
        return not self.draining and self.usable

    @property
    def has_room(self) -> bool:
        """Whether it can be given a rollout now. One that is hot gets no more than it has."""
        return self.takes_new and not self.paused and len(self.live) < (1 if self.hot else self.limit)

    def failed(self, now: float) -> None:
        """A request or a probe failed; the next probe is due after a while."""
        self.health = Health.DOWN
        self.probe_at = now + min(_PROBE_AFTER_S * 2**self.failures, _PROBE_AT_MOST_S)
        self.failures = min(self.failures + 1, 16)

    def probe_due(self, now: float) -> bool:
        """Whether to probe it now; says so once."""
        due = self.probe_at is not None and self.probe_at <= now
        if due:
            self.probe_at = None
        return due

    def recovers(self) -> None:
        """A probe found it alive."""
        self.health, self.probe_at = Health.TRIAL, None

    def answered(self, seconds: float, peers: Iterable[Backend]) -> None:
        """A request succeeded: it is up. Learn how long its turns take, and whether it is slow among its peers, of
        which it is one: it is from when they take far longer than others' until they take no longer. Rollouts that
        fill its cache explain that, and are no fault of its own."""
        self.failures, self.probe_at = 0, None
        self.health = Health.UP
        self.turns += 1
        # Turn times are heavy-tailed: in a geometric mean, one long answer says little.
        self.turn_s *= (max(seconds, _SHORTEST_S) / self.turn_s) ** max(1 / self.turns, _TURN_SMOOTHING)
        known = sorted(peer.turn_s for peer in peers if peer.turns and peer.health is Health.UP)
        longer = self.turn_s / known[(len(known) - 1) // 2]
        full = self.capacity is not None and self.kv_demand > KV_SATURATED * self.capacity
        if not full and self.turns >= _OPINION and longer > _SLOW:
            self.slowness = max(self.slowness, longer)
        elif longer <= 1.0:
            self.slowness = 1.0
