# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Settings of rollout services; each setting and its default is declared only in this module.

The agent's YAML configuration inherits :class:`PipelineSettings`, so its fields are YAML keys.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from nemo_gym_prorl.failures import Stage


Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600, allow_inf_nan=False)]

RETAIN_S = 7 * 24 * 3600.0
"""Default time to live, in seconds, of a result in memory: a result of Friday is there on Monday."""
RETAIN_BYTES = 2**30
"""Default memory limit for finished rollouts."""
JOURNAL_KEEP_S = 7 * 24 * 3600.0
"""Default age, in seconds, after which the journal forgets an outcome: a trainer may be down for a week."""
JOURNAL_KEEP_BYTES = 16 * 2**30
"""Default size limit of all outcomes in the journal, compressed."""


class Budgets(BaseModel):
    """Seconds that each stage may work on a job, per attempt. Time in a queue is not charged."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    init: Seconds = 600.0
    run: Seconds = 3600.0
    eval: Seconds = 900.0

    def of(self, stage: Stage) -> float:
        return float(getattr(self, stage.value))


class PoolSizes(BaseModel):
    """Slots per stage. ``ready`` bounds the buffer between INIT and RUN: each job in it holds a sandbox."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    init: Positive = 8
    ready: Annotated[int, Field(ge=0)] = 8
    run: Positive = 32
    eval: Positive = 8

    def of(self, stage: Stage) -> int:
        return int(getattr(self, stage.value))


class ServiceSettings(BaseModel):
    """Limits of any service that accepts jobs: a pipeline, or the gateway of a fleet."""

    model_config = ConfigDict(extra="forbid")

    budgets: Budgets = Budgets()
    """Seconds that each stage may work on a rollout, per attempt. Time in a queue is free."""
    max_attempts: Positive = 3
    """Tries of a rollout, if infrastructure fails."""
    max_queued: Positive = 10_000
    """Rollouts that may wait before the job API answers 429."""
    retain_bytes: Positive = RETAIN_BYTES
    """Memory limit for finished rollouts, beyond which the oldest are forgotten."""
    retain_s: Seconds = RETAIN_S
    """Lifetime of a finished rollout in memory."""


class PipelineSettings(ServiceSettings):
    """Limits of one pipeline."""

    stages: PoolSizes = PoolSizes()
    release_timeout_s: Seconds = 60.0
    """Time limit for releasing a sandbox."""
    cancel_grace_s: Seconds = 5.0
    """Seconds after which a cancelled stage is abandoned."""
    unreachable_s: Seconds = 900.0
    """Seconds for which a rollout waits for an unreachable server."""
    checkpoint_bytes: Positive = 10 * 2**30
    """Disk limit of checkpoints."""
    checkpoint_s: Seconds = 3600.0
    """Lifetime of checkpoints after the end of their rollout."""

    retry_delay_s: ClassVar[float] = 1.0
    """Seconds before the second try, ± 20 % so that rollouts that failed together are not retried together; five times
    as long with each further try, up to 30 s. Tests override the value."""
    probe_s: ClassVar[float] = 3.0
    """Seconds between two probes of a server that is down. Tests override the value."""
