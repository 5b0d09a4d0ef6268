# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of rollouts: after a turn, all that another attempt, or another rollout, needs to go on from there.

What is in one is its handler's matter; here is how long it is kept. Of a job without its outcome the latest one always
is, since it may be needed; all others are erased over a bound of bytes, those of jobs that ended longest ago first, or
when their job has ended for so long. The rollout owns them: as long as it is here its service renews them, and who
keeps them erases by age only what no service renews. Several jobs may share one, as those that were forked there: it
is erased when none has it any more. Where services share a folder (:mod:`~.shared_checkpoints`) a job may begin from
what another service has taken, and then erases.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable


if TYPE_CHECKING:
    from nemo_gym_prorl.rollout.job import Job
    from nemo_gym_prorl.rollout.shared_checkpoints import SharedCheckpoints


RENEW_S = 900.0
"""Seconds between two renewals of what jobs have."""
ORPHAN_S = 24 * 3600.0  # a service with a journal may be down for a night
"""Seconds after its last renewal after which a checkpoint belongs to no rollout any more."""


@runtime_checkable
class Packs(Protocol):
    """The state of a checkpoint that others than its service can go on from."""

    def pack(self) -> bytes:
        """All of it; its handler's ``unpack`` makes the state of that."""
        ...


@dataclass(frozen=True, slots=True)
class Begin:
    """Where a job is to begin that other services have had, or had a parent of.

    Attributes:
        tries: ids of its earlier tries, the latest first; where none has left anything, the job begins anew.
        parents: of a fork, those of the rollout that it was forked from.
        turn: after which it was.
        parent: that rollout's id as callers know it.
        client: whose all of these are; ``None`` where an administrator vouches for them.
    """

    tries: tuple[str, ...] = ()
    parents: tuple[str, ...] = ()
    turn: int | None = None
    parent: str | None = None
    client: str | None = None

    @property
    def fork(self) -> dict[str, Any] | None:
        """As callers are told of it."""
        return {"id": self.parent or self.parents[0], "turn": self.turn, "lost": []} if self.parents else None


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """One of them.

    Attributes:
        turn: the turns that were taken.
        state: what its handler goes on from; never leaves the service.
        size: of what is kept for it, in bytes.
        spent_s: what the rollout had used of RUN's budget.
        lost: in a word each, what of its environment can't be carried over.
        borrowed: the id under which another service has taken it, whose it is to erase.
    """

    turn: int
    state: Any
    size: int
    spent_s: float = 0.0
    lost: tuple[str, ...] = ()
    borrowed: str = ""


class Checkpoints:
    """Those of one pipeline.

    Args:
        most_bytes: what all together may take, but for the latest of live jobs.
        keep_s: how long those of a job are kept that has ended.
        erase: erases some that no job has any more; told of which environment they are.
        clock: monotonic seconds.
        shared: where other services find them, too.
    """

    def __init__(
        self,
        most_bytes: int,
        keep_s: float,
        erase: Callable[[str, list[Checkpoint]], None],
        clock: Callable[[], float],
        shared: SharedCheckpoints | None = None,
    ) -> None:
        self._most_bytes = most_bytes
        self._keep_s = keep_s
        self._erase = erase
        self._clock = clock
        self._shared = shared
        self._holders: Counter[Checkpoint] = Counter()
        self._live: OrderedDict[Job, None] = OrderedDict()
        self._ended: OrderedDict[Job, float] = OrderedDict()
        self.bytes = 0
        """What all take."""

    async def keep(self, job: Job, checkpoint: Checkpoint) -> None:
        """A job has taken one, and goes on when it is where others find it."""
        try:
            if self._shared is not None:
                await self._shared.write(job, checkpoint)
        finally:
            self.add(job, checkpoint)

    def add(self, job: Job, checkpoint: Checkpoint) -> None:
        """A job has one more."""
        job.checkpoints[checkpoint.turn] = checkpoint
        self._live[job] = None
        self.bytes += checkpoint.size if not self._holders[checkpoint] else 0
        self._holders[checkpoint] += 1
        self.tidy()

    def has(self, checkpoint: Checkpoint) -> bool:
        """Whether any job has it still."""
        return checkpoint in self._holders

    def held(self) -> dict[str, list[Checkpoint]]:
        """All that any job has, by environment."""
        found: dict[str, dict[Checkpoint, None]] = {}
        for job in (*self._live, *self._ended):
            found.setdefault(job.environment, {}).update(dict.fromkeys(job.checkpoints.values()))
        return {environment: [*checkpoints] for environment, checkpoints in found.items()}

    def drop(self, job: Job, checkpoint: Checkpoint) -> None:
        """A job has no use for one of its own any more."""
        job.checkpoints.pop(checkpoint.turn, None)
        self._holders[checkpoint] -= 1
        if not self._holders[checkpoint]:
            del self._holders[checkpoint]
            self.bytes -= checkpoint.size
            self._erase(job.environment, [checkpoint])

    def ended(self, job: Job, *, keep: bool) -> None:
        """A job has its outcome; nobody will ask for its checkpoints unless they are to be kept."""
        if job in self._live:
            del self._live[job]
            self._ended[job] = self._clock()
            if not keep:
                self._drop_all(job)
            self.tidy()

    def tidy(self) -> None:
        """Erase what is too old or too much."""
        while self._ended:
            job, at = next(iter(self._ended.items()))
            if self.bytes <= self._most_bytes and self._clock() - at < self._keep_s:
                break
            self._drop_all(job)
        for job in self._live if self.bytes > self._most_bytes else ():
            for turn in sorted(job.checkpoints)[:-1]:
                self.drop(job, job.checkpoints[turn])
            if self.bytes <= self._most_bytes:
                break

    def _drop_all(self, job: Job) -> None:
        del self._ended[job]
        for checkpoint in [*job.checkpoints.values()]:
            self.drop(job, checkpoint)
