# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The bounds that hold in a service, and for jobs that bring none of their own."""

from __future__ import annotations

from dataclasses import dataclass, field

from nemo_gym_prorl.rollout.job import Budgets
from nemo_gym_prorl.rollout.scheduler import PoolSizes


JOURNAL_KEEP_S = 7 * 24 * 3600.0
JOURNAL_KEEP_BYTES = 16 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Bounds of whatever takes jobs on; times in seconds.

    Attributes:
        budgets: defaults for jobs that bring none.
        max_attempts: default cap on tries of INIT+RUN, and of EVAL.
        max_queued: jobs that may wait for INIT, or for a node, before :class:`QueueFull`.
        retain_bytes: bound of the rows and results of terminal jobs. Over it those whose time to live is over are
            forgotten; when younger ones fill it, new jobs are refused with :class:`QueueFull`.
        keep_unread_s: time to live of a result that nobody has read; that of one that was read is over.
    """

    budgets: Budgets = field(default_factory=Budgets)
    max_attempts: int = 3
    max_queued: int = 10_000
    retain_bytes: int = 2**30
    keep_unread_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings(ServiceSettings):
    """Bounds of one pipeline; times in seconds.

    Attributes:
        stages: pool sizes.
        release_s: how long a session may take to be released.
        cancel_grace_s: how long a cancelled stage may take to come back before it is abandoned.
        retry_delay_s: wait before the second try; doubles with each further one, up to 30 s.
        unreachable_s: how long a job may be held up by a server that cannot be reached before it fails.
        checkpoint_bytes: what checkpoints of rollouts may take, but for the latest one of each that goes on.
        checkpoint_s: how long those of a rollout are kept that has ended.
        probe_s: pause between two questions whether such a server answers again.
    """

    stages: PoolSizes = field(default_factory=PoolSizes)
    release_s: float = 60.0
    cancel_grace_s: float = 5.0
    retry_delay_s: float = 0.5
    unreachable_s: float = 900.0
    probe_s: float = 3.0
    checkpoint_bytes: int = 10 * 2**30
    checkpoint_s: float = 3600.0
