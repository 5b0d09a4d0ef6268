# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""One inference endpoint as the pool sees it: what is placed on it, how it fares, what the pool may decide about it.

A backend that fails is down until a probe finds it alive, then on trial: one request at a time, until one succeeds.
The wait before a probe doubles with each failure in a row.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.pool.prefixes import Holdings, tokens_in
from nemo_gym_prorl.policy.pool.tickets import Queue, Rollout


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

_FULL = 0.9
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
    prefixes: Holdings = field(default_factory=Holdings)
    """What its live rollouts began with."""
    capacity: int | None = None
    """Tokens that fit into its KV cache, if it says so."""
    own: int = 0
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
    elders: int = 0
    elders_left: int = 0

    @property
    def demand(self) -> int:
        """Tokens of all its live rollouts, what they share counted once."""
        return self.prefixes.tokens + self.own

    def needs(self, rollout: Rollout) -> int:
        """How many tokens the rollout would add to the demand."""
        return rollout.own + self.lacks(rollout)

    def lacks(self, rollout: Rollout) -> int:
        """How many tokens of the prompt that the rollout began with no other one here has."""
        return tokens_in(rollout.blocks) - self.prefixes.tokens_of(rollout.blocks)

    def take(self, rollout: Rollout) -> None:
        """The rollout lives here from now on."""
        self.live.add(rollout.id)
        self.prefixes.add(rollout.blocks)
        self.own += rollout.own
        if rollout.group:
            self.groups[rollout.group] += 1

    def grow(self, rollout: Rollout, tokens: int) -> None:
        """The rollout, which lives here, has a prompt of so many tokens now."""
        self.own -= rollout.own
        rollout.tokens = tokens
        self.own += rollout.own

    def let_go(self, rollout: Rollout) -> None:
        """The rollout lives here no longer."""
        self.live.discard(rollout.id)
        self.prefixes.remove(rollout.blocks)
        self.own -= rollout.own
        if rollout.group:
            self.groups[rollout.group] -= 1
            if not self.groups[rollout.group]:
                del self.groups[rollout.group]

    @property
    def weight(self) -> float:
        """Live rollouts, plus what a late joiner is given for the load that it did not see, as this backend feels
        it."""
        unseen = self.head_start * self.elders_left / self.elders if self.elders else 0.0
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
        full = self.capacity is not None and self.demand > _FULL * self.capacity
        if not full and self.turns >= _OPINION and longer > _SLOW:
            self.slowness = max(self.slowness, longer)
        elif longer <= 1.0:
            self.slowness = 1.0
