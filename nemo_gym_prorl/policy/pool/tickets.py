# SPDX-License-Identifier: Apache-2.0
"""What the pool places: rollouts, and the tickets under which their turns wait and run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Rollout:
    """A rollout, live on a backend or waiting for one.

    Attributes:
        id: its name.
        group: shared by the rollouts of one prompt.
        born: when it was first seen, by the pool's own count.
        backend: where its prefix is, once it had one.
        tickets: its turns that wait or run.
        idle_since: since when it has had none.
        prompt: tokens of its first turn's prompt, which its siblings share.
        tokens: of its latest turn's prompt.
    """

    id: str
    group: str | None
    born: int
    backend: str | None = None
    tickets: set[int] = field(default_factory=set)
    idle_since: float | None = None
    prompt: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Ticket:
    """A turn, which waits in at most one queue or runs on one backend since a certain time."""

    id: int
    rollout: Rollout
    backend: str | None = None
    since: float = 0.0
    _queue: deque[Ticket] | None = None

    def enqueue(self, queue: deque[Ticket], *, first: bool = False) -> None:
        """Wait in a queue, at its end or in front."""
        self._queue = queue
        if first:
            queue.appendleft(self)
        else:
            queue.append(self)

    def unqueue(self) -> None:
        """Wait no longer."""
        if self._queue is not None:
            self._queue.remove(self)
            self._queue = None
