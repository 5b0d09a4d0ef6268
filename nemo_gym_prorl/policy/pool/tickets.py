# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What the pool places: rollouts, and the tickets under which their turns wait and run."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from nemo_gym_prorl.policy.pool.prefixes import tokens_in


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
    def own(self) -> int:
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
