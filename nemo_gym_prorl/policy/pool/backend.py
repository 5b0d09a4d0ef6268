# SPDX-License-Identifier: Apache-2.0
"""One inference endpoint as the pool sees it, and what the pool may decide about it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.pool.prefixes import Holdings, tokens_in
from nemo_gym_prorl.policy.pool.tickets import Rollout


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
