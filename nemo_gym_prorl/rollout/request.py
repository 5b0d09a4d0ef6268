# SPDX-License-Identifier: Apache-2.0
"""What may be asked of a pipeline: a job with its wishes, the bounds that hold where it has none, and the refusals.

A refusal is an error of the caller and comes before a job exists: nothing has to be undone, nobody else is disturbed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.job import Budgets
from nemo_gym_prorl.rollout.stages import PoolSizes


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
    """The id belongs to a job with another row."""

    http_status = 409
    problem = "id-conflict"


class Draining(CallerError):
    """The service takes no new jobs."""

    http_status = 503
    problem = "draining"
    retry_after_s = 30


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """Bounds of one pipeline; times in seconds.

    Attributes:
        stages: pool sizes.
        budgets: defaults for jobs that bring none.
        release_s: how long a session may take to be released.
        cancel_grace_s: how long a cancelled stage may take to come back before it is abandoned.
        max_attempts: default cap on tries of INIT+RUN, and of EVAL.
        retry_delay_s: wait before the second try; doubles with each further one, up to 30 s.
        max_queued: jobs that may wait for INIT before :class:`QueueFull`.
        retain_bytes: what the rows and results of terminal jobs may take. Those that were read are forgotten first;
            when unread ones fill it, new jobs are refused with :class:`QueueFull`.
        keep_unread_s: how long a result that nobody has read is kept, whatever the bound.
        unreachable_s: how long a job may be held up by a server that cannot be reached before it fails.
        probe_s: pause between two questions whether such a server answers again.
    """

    stages: PoolSizes = field(default_factory=PoolSizes)
    budgets: Budgets = field(default_factory=Budgets)
    release_s: float = 60.0
    cancel_grace_s: float = 5.0
    max_attempts: int = 3
    retry_delay_s: float = 0.5
    max_queued: int = 10_000
    retain_bytes: int = 2**30
    keep_unread_s: float = 3600.0
    unreachable_s: float = 900.0
    probe_s: float = 3.0


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a caller may say about a job; everything but the row has a default.

    ``held``: the caller holds a connection for the job and takes its result away, so nobody else joins it.
    """

    row: dict[str, Any]
    id: str | None = None
    handler: str | None = None
    group: str | None = None
    client: str = "default"
    priority: int = 0
    budgets: Budgets | None = None
    max_attempts: int | None = None
    held: bool = False
