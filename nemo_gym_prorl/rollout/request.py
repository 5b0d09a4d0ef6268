# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What may be asked of a pipeline: a job with its wishes, and the refusals.

A refusal is an error of the caller and comes before a job exists: nothing has to be undone, nobody else is disturbed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import orjson

from nemo_gym_prorl.failures import CallerError, Stage
from nemo_gym_prorl.rollout.checkpoints import Begin, Checkpoint


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


class NotYours(CallerError):
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


def turn_to_fork(rollout: str, turn: int | None, kept: Sequence[int], *, ended: bool) -> int:
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
    ``held``: the caller holds a connection for the job and takes its result away, so nobody else joins it.
    ``fork``: it begins where another job was after a turn.
    ``begin``: the same, of jobs at other services, or where it was itself at one that is lost.
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
    held: bool = False
    fork: Fork | None = None
    begin: Begin | None = None

    @property
    def forked_from(self) -> dict[str, Any] | None:
        """As callers are told; ``None`` of what is no fork."""
        if self.fork is not None:
            return self.fork.told()
        return self.begin.fork if self.begin is not None else None

    def digest(self) -> bytes:
        """What tells two jobs of one id apart.

        Raises:
            CallerError: the row cannot be written as JSON.
        """
        digest = row_digest(self.row)
        return digest if self.forked_from is None else row_digest({"row": digest.hex(), "fork": self.forked_from})


def row_digest(row: Mapping[str, Any]) -> bytes:
    """What tells two rows apart; equal for rows that are equal as JSON.

    Raises:
        CallerError: the row cannot be written as JSON.
    """
    try:
        return hashlib.sha256(orjson.dumps(row, option=orjson.OPT_SORT_KEYS)).digest()
    except TypeError as error:
        raise CallerError(f"cannot be written as JSON: {error}", field="row") from error
