# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""State of one inference backend in the pool, and of the rollouts and turns that the pool places.

A backend that fails is down until a probe succeeds. The backend is then on trial: only one request at a time, until a
request succeeds. The wait before a probe doubles with each consecutive failure.

Rollouts share prefixes of their first prompts, in blocks that an engine caches once for all of them. A block's name is
a digest of all tokens up to its end, so two prompts share a block exactly if both are equal up to the block's end.
Pure: no task, socket, clock or thread.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

from nemo_gym_prorl.failures import CallerError


BLOCK_TOKENS = 256
"""Tokens of a block; smaller blocks distinguish prompts more finely and cost more memory per prompt."""

_DIGEST_BYTES = 8
"""Bytes of a block's name; a collision would only miscount load."""


def blocks_of(prompt: Sequence[int]) -> bytes:
    """Return the concatenated names of a prompt's whole blocks; the remaining tokens count as private."""
    tokens = memoryview(array("q", prompt))
    digest = blake2b(digest_size=_DIGEST_BYTES)
    names = bytearray()
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        digest.update(tokens[start : start + BLOCK_TOKENS])
        names += digest.digest()
    return bytes(names)


def tokens_in(blocks: bytes) -> int:
    return len(blocks) // _DIGEST_BYTES * BLOCK_TOKENS


class PrefixBlockCounts:
    """Counter of a backend's live rollouts for each block."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()

    def add(self, blocks: bytes) -> None:
        self._counts.update(_each(blocks))

    def remove(self, blocks: bytes) -> None:
        for block in _each(blocks):
            self._counts[block] -= 1
            if not self._counts[block]:
                del self._counts[block]

    def tokens_of(self, blocks: bytes) -> int:
        """Return how many tokens at the start of a prompt are in blocks of counted rollouts.

        A block's name is a digest of the prompt up to the block's end, so binary search finds the last shared block.
        """
        low, high = 0, len(blocks) // _DIGEST_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[(middle - 1) * _DIGEST_BYTES : middle * _DIGEST_BYTES] in self._counts:
                low = middle
            else:
                high = middle - 1
        return low * BLOCK_TOKENS

    @property
    def tokens(self) -> int:
        return len(self._counts) * BLOCK_TOKENS


def _each(blocks: bytes) -> Iterator[bytes]:
    return (blocks[start : start + _DIGEST_BYTES] for start in range(0, len(blocks), _DIGEST_BYTES))


type Queue = OrderedDict[int, Ticket]
"""Waiting tickets by id, in order; removal takes constant time."""


@dataclass(slots=True)
class Rollout:
    """A rollout: live on a backend, waiting for a backend, or inactive.

    Attributes:
        id: name of the rollout.
        group: group of the rollouts of one prompt.
        run: training run whose backends may sample the rollout.
        seen_order: position of the rollout's first request in the order of the pool's joins and requests.
        backend: id of the backend with the rollout's prefix; ``None`` before the first placement.
        tickets: ids of turns that wait or run.
        idle_since: pool time at which the last turn ended; ``None`` while the rollout has turns.
        blocks: blocks of the first prompt (:func:`blocks_of`), which other rollouts may share.
        tokens: length of the latest prompt.
    """

    id: str
    group: str | None
    seen_order: int
    run: str | None = None
    backend: str | None = None
    tickets: set[int] = field(default_factory=set)
    idle_since: float | None = None
    blocks: bytes = b""
    tokens: int = 0

    @property
    def private_tokens(self) -> int:
        """Number of tokens of the latest prompt outside the rollout's blocks."""
        return max(0, self.tokens - tokens_in(self.blocks))


@dataclass(slots=True)
class Ticket:
    """A turn that waits in a queue, or runs on the backend with the id ``backend``, since the pool time ``since``."""

    id: int
    rollout: Rollout
    backend: str | None = None
    since: float = 0.0
    _queue: Queue | None = None

    def enqueue(self, queue: Queue, *, first: bool = False) -> None:
        """Join a queue at its end, or at its front with ``first``."""
        self._queue = queue
        queue[self.id] = self
        if first:
            queue.move_to_end(self.id, last=False)

    def unqueue(self) -> None:
        if self._queue is not None:
            del self._queue[self.id]
            self._queue = None


@dataclass(slots=True)
class RunQueue:
    """A run's tickets that wait for any backend."""

    moved: float
    """Last pool time at which no turn of the run waited in an outage."""
    returning: Queue = field(default_factory=OrderedDict)
    fresh: Queue = field(default_factory=OrderedDict)
    """Tickets of rollouts that had no backend yet."""

    def __len__(self) -> int:
        return len(self.returning) + len(self.fresh)


def first_of(queue: Queue) -> Ticket:
    """Return the first ticket of a queue, which must not be empty."""
    return next(iter(queue.values()))


_PROBE_MIN_WAIT_S, _PROBE_MAX_WAIT_S = 1.0, 30.0
"""First and longest wait in seconds before a failed backend is probed."""

_TURN_SMOOTHING = 0.08
"""Weight of the latest turn in a backend's mean turn time; the mean thus covers about 12 turns."""

_MIN_TURN_S = 0.001
"""Lower bound of a turn time in seconds; differences between shorter turns are noise."""

_MIN_TURNS = 12
"""Number of turns before a backend can count as slow, so that its mean does not depend on the first turns alone."""

_SLOW_RATIO = 2.0
"""Ratio to the median backend's turn time above which a backend counts as slow."""

KV_SATURATED = 0.9
"""Share of the KV cache in use above which an engine evicts prefixes."""


class BackendExists(CallerError):
    """The id or URL of the backend to add is in use."""

    http_status = 409
    problem = "already-there"


class NoSuchBackend(CallerError):
    """The named backend does not exist."""

    http_status = 404
    problem = "no-such-backend"


class Health(StrEnum):
    """State of a backend's circuit breaker."""

    UP = "up"
    TRIAL = "trial"
    """A probe succeeded after a failure; the backend receives one request at a time until a request succeeds."""
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Assign:
    """Send the ticket's request to the backend now."""

    ticket: int
    backend: str
    weight_version: str | None


@dataclass(frozen=True, slots=True)
class Abort:
    """The backend is being removed: cancel the ticket's request to the backend. The pool places the ticket again."""

    ticket: int
    backend: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No turn of the ticket's run was in flight for ``unreachable_s``: fail the turn and withdraw the ticket."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Probe the backend's health and report the result to ``probed``."""

    backend: str


type Decision = Assign | Abort | GiveUp | Probe


@dataclass(slots=True)
class Backend:
    """One inference backend: its settings, health, load and live rollouts."""

    id: str
    url: str
    weight_version: str | None
    limit: int
    order: int
    run: str | None = None
    """Training run whose rollouts the backend samples; ``None`` for rollouts that name no run."""
    health: Health = Health.UP
    draining: bool = False
    paused_since: float | None = None
    """Pool time of the pause; ``None`` if the backend is not paused."""
    live: set[str] = field(default_factory=set)
    groups: Counter[str] = field(default_factory=Counter)
    """Number of live rollouts of each group."""
    prefixes: PrefixBlockCounts = field(default_factory=PrefixBlockCounts)
    """Prefixes of live rollouts' first prompts."""
    capacity: int | None = None
    """Tokens that fit into the KV cache, if reported."""
    private_tokens: int = 0
    """Sum of live rollouts' private tokens."""
    held: Queue = field(default_factory=OrderedDict)
    """Tickets that wait for this backend, which has their prefix."""
    in_flight: set[int] = field(default_factory=set)
    last_placed: int = 0
    failures: int = 0
    failovers: int = 0
    """Number of requests that failed on this backend and were queued again."""
    probe_at: float | None = None
    down_since: float | None = None
    """Pool time of the first failure since the last answer."""
    hot: bool = False
    """Whether the backend's last load report showed waiting requests and a saturated KV cache."""
    turns: int = 0
    turn_s: float = 1.0
    """Geometric mean of latest turn times in seconds."""
    slowness: float = 1.0
    """Ratio of the backend's turn time to the median, if the backend counts as slow; else 1."""
    load_credit: int = 0
    load_at_join: int = 0
    load_at_join_left: int = 0
    """Number of the ``load_at_join`` rollouts of peers that have not finished; scales ``load_credit`` down."""

    @property
    def kv_demand(self) -> int:
        """Tokens of all live rollouts, shared prefixes counted once."""
        return self.prefixes.tokens + self.private_tokens

    def needs(self, rollout: Rollout) -> int:
        """Return how many tokens the rollout would add to :attr:`kv_demand`."""
        return rollout.private_tokens + self.missing_prefix_tokens(rollout)

    def missing_prefix_tokens(self, rollout: Rollout) -> int:
        """Return how many tokens of the rollout's blocks no live rollout of this backend shares."""
        return tokens_in(rollout.blocks) - self.prefixes.tokens_of(rollout.blocks)

    def take(self, rollout: Rollout) -> None:
        self.live.add(rollout.id)
        self.prefixes.add(rollout.blocks)
        self.private_tokens += rollout.private_tokens
        if rollout.group:
            self.groups[rollout.group] += 1

    def grow(self, rollout: Rollout, tokens: int) -> None:
        """Update the length of a live rollout's prompt."""
        self.private_tokens -= rollout.private_tokens
        rollout.tokens = tokens
        self.private_tokens += rollout.private_tokens

    def release(self, rollout: Rollout) -> None:
        self.live.discard(rollout.id)
        self.prefixes.remove(rollout.blocks)
        self.private_tokens -= rollout.private_tokens
        if rollout.group:
            self.groups[rollout.group] -= 1
            if not self.groups[rollout.group]:
                del self.groups[rollout.group]

    @property
    def weight(self) -> float:
        """Load for placement: live rollouts, plus load that a late joiner is credited with, scaled by slowness."""
        unseen = self.load_credit * self.load_at_join_left / self.load_at_join if self.load_at_join else 0.0
        return (len(self.live) + unseen + 1) * self.slowness - 1

    @property
    def paused(self) -> bool:
        return self.paused_since is not None

    @property
    def usable(self) -> bool:
        """Return whether the backend's health permits a request of one of its live rollouts."""
        return self.health is Health.UP or (self.health is Health.TRIAL and not self.in_flight)

    @property
    def takes_new(self) -> bool:
        """Return whether health and draining permit that a rollout is placed on the backend."""
        return not self.draining and self.usable

    @property
    def has_room(self) -> bool:
        """Return whether the backend has a free slot and may fill it. A hot backend has at most one live rollout."""
        return self.takes_new and not self.paused and len(self.live) < (1 if self.hot else self.limit)

    def failed(self, now: float) -> None:
        """Record a failed request or probe, and schedule the next probe."""
        self.health = Health.DOWN
        self.down_since = now if self.down_since is None else self.down_since
        self.probe_at = now + min(_PROBE_MIN_WAIT_S * 2**self.failures, _PROBE_MAX_WAIT_S)
        self.failures = min(self.failures + 1, 16)

    def probe_due(self, now: float) -> bool:
        """Return whether a scheduled probe is due, and unschedule the probe."""
        due = self.probe_at is not None and self.probe_at <= now
        if due:
            self.probe_at = None
        return due

    def recovers(self) -> None:
        """Record a successful probe."""
        self.health, self.probe_at = Health.TRIAL, None

    def answered(self, seconds: float, peers: Iterable[Backend]) -> None:
        """Record a successful request, which ends a trial, and update turn time and slowness.

        ``peers`` are the run's backends, this backend included. A backend becomes slow when its turns take far longer
        than the median backend's, and stops being slow when its turns take no longer. A backend whose cache is full
        does not become slow, because its load explains the longer turns.
        """
        self.failures, self.probe_at, self.down_since = 0, None, None
        self.health = Health.UP
        self.turns += 1
        # Turn times are heavy-tailed; a geometric mean limits the effect of one long answer.
        self.turn_s *= (max(seconds, _MIN_TURN_S) / self.turn_s) ** max(1 / self.turns, _TURN_SMOOTHING)
        known = sorted(peer.turn_s for peer in peers if peer.turns and peer.health is Health.UP)
        longer = self.turn_s / known[(len(known) - 1) // 2]
        full = self.capacity is not None and self.kv_demand > KV_SATURATED * self.capacity
        if not full and self.turns >= _MIN_TURNS and longer > _SLOW_RATIO:
            self.slowness = max(self.slowness, longer)
        elif longer <= 1.0:
            self.slowness = 1.0
