# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Requests to a service: a job with its options, a place in a log, and the refusals.

A refusal is an error of the caller and comes before a job exists: nothing has to be undone, nobody else is disturbed.

A :class:`Cursor` is a place in one of a service's logs, opaque text to callers. It carries the epoch in which it was
given, since all counts begin anew with each start, but for outcomes in a journal. A cursor of another epoch is an
error, and never a place in the wrong log, which would be an unnoticed gap.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from nemo_gym_prorl.failures import CallerError, Stage
from nemo_gym_prorl.rollout.gym_rows import row_digest
from nemo_gym_prorl.rollout.job import Checkpoint, ResumePoint


NO_CLIENT = "default"
"""The client of jobs that name none."""


class QueueFull(CallerError):
    """The queue for INIT, or what may be kept of results that nobody has read, is at its bound; try again later."""

    http_status = 429
    problem = "queue-full"
    retry_after_s = 5


class RolloutForgotten(CallerError):
    """A job of that id has ended and was forgotten. It is not run again under the same id: who asks holds it for the
    same rollout, and would train on another."""

    http_status = 410
    problem = "rollout-forgotten"


class JobConflict(CallerError):
    """The id belongs to a job with another row, or of another run."""

    http_status = 409
    problem = "id-conflict"

    @classmethod
    def with_anothers(cls, job_id: str | None) -> Self:
        """The id belongs to a job of somebody else."""
        return cls(f"job {job_id!r} belongs to another caller; choose another id", field="id")


class NotOwner(CallerError):
    """A job, or a name, that is another client's."""

    http_status = 403
    problem = "not-yours"


class NoCheckpoint(CallerError):
    """A rollout is to be forked after a turn after which there is no checkpoint."""

    http_status = 409
    problem = "no-checkpoint"


class CheckpointsForgotten(CallerError):
    """A rollout that has ended is to be forked, and nothing is kept of it any more from which others could go on."""

    http_status = 410
    problem = "checkpoints-forgotten"


class Draining(CallerError):
    """The service takes no new jobs."""

    http_status = 503
    problem = "draining"
    retry_after_s = 30


def resolve_fork_turn(rollout: str, turn: int | None, kept: Sequence[int], *, ended: bool) -> int:
    """After which turn a rollout is forked: the wanted one, by default the latest.

    Args:
        rollout: its id.
        turn: that is wanted.
        kept: those that there are checkpoints of, in order.
        ended: it has its outcome.

    Raises:
        NoCheckpoint: of that turn.
        CheckpointsForgotten: of any, and there will be none.
    """
    if not kept and ended:
        raise CheckpointsForgotten(f"the checkpoints of rollout {rollout!r} are erased, or it had none")
    wanted = kept[-1] if turn is None and kept else turn
    if wanted is None or wanted not in kept:
        there = f"there are those after turn {', '.join(map(str, kept))}" if kept else "there is none yet"
        raise NoCheckpoint(f"rollout {rollout!r} has no checkpoint after turn {turn}; {there}", field="turn")
    return wanted


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a job begins that shares the first turns of another one."""

    parent: str
    checkpoint: Checkpoint

    def told(self) -> dict[str, Any]:
        """As callers are told."""
        return {"id": self.parent, "turn": self.checkpoint.turn, "lost": [*self.checkpoint.lost]}


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a caller may say about a job; everything but the row has a default.

    ``environment``: the row's, where that is not left to its ``data_source``.
    ``run``: whose backends sample it; ``None`` for the model server's own.
    ``budgets``: seconds by stage; those left out are the environment's.
    ``attached``: the caller holds a connection for the job and takes its result away, so nobody else joins it.
    ``fork``: it begins where another job was after a turn.
    ``resume_point``: the same, of jobs at other services, or where it was itself at one that is lost.
    """

    row: dict[str, Any]
    id: str | None = None
    environment: str | None = None
    group: str | None = None
    client: str = NO_CLIENT
    run: str | None = None
    priority: int = 0
    budgets: Mapping[Stage, float] = field(default_factory=dict)
    max_attempts: int | None = None
    attached: bool = False
    fork: Fork | None = None
    resume_point: ResumePoint | None = None

    @property
    def forked_from(self) -> dict[str, Any] | None:
        """As callers are told; ``None`` of what is no fork."""
        if self.fork is not None:
            return self.fork.told()
        return self.resume_point.fork if self.resume_point is not None else None

    def digest(self) -> bytes:
        """What tells two jobs of one id apart.

        Raises:
            CallerError: the row cannot be written as JSON.
        """
        digest = row_digest(self.row)
        return digest if self.forked_from is None else row_digest({"row": digest.hex(), "fork": self.forked_from})


_FORM = re.compile(r"(?:([0-9a-z]+)-)?([0-9]{1,18})", re.ASCII)


class CursorExpired(CallerError):
    """What lies behind the cursor is not all there any more; the follower has missed outcomes and must list afresh."""

    http_status = 410
    problem = "cursor-expired"


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place behind the ``position`` first entries of a log.

    Attributes:
        epoch: of the service that gave it; empty in a bare number, which belongs to no epoch. Only the bare ``0``, the
            beginning, holds in each.
        position: entries before it.
    """

    epoch: str
    position: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.position}" if self.epoch else str(self.position)

    @classmethod
    def parse(cls, text: str, field: str = "after") -> Self:
        """A cursor from its text.

        Raises:
            CallerError: it is none; names ``field``.
        """
        if (match := _FORM.fullmatch(text)) is None:
            raise CallerError(f"{text[:100]!r} is no cursor; send one as the service gave it, or 0", field=field)
        return cls(match[1] or "", int(match[2]))

    def within(self, epoch: str, first: int, end: int) -> int:
        """The position in a log of this ``epoch`` that holds entries ``first`` to ``end``.

        Raises:
            CursorExpired: it is of another epoch, or what lies behind it is forgotten.
            CallerError: it lies beyond the end, where no cursor was ever given.
        """
        if self.epoch != epoch and (self.epoch or self.position):
            raise CursorExpired(
                f"{self} was given by a service that has been restarted; list again and follow from the new cursor",
                field="after",
            )
        if self.position < first:
            raise CursorExpired(
                f"what lies behind {self} is partly forgotten, up to {epoch}-{first}; list again and follow from the "
                "new cursor",
                field="after",
            )
        if self.position > end:
            raise CallerError(f"{self} lies beyond the end of the log, {epoch}-{end}", field="after")
        return self.position
