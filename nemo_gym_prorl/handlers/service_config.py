# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of the service in an agent's YAML; every one can be overridden on Gym's command line.

A setting that bounds a pipeline has its default there (:mod:`nemo_gym_prorl.rollout.settings`), and nowhere else.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from nemo_gym.config_types import ResourcesServerRef
from pydantic import BaseModel, ConfigDict, Field

from nemo_gym_prorl.handlers.gym_environment import GymEnvironmentHandler, OnTimeout
from nemo_gym_prorl.handlers.tool_loop import LoopLimits
from nemo_gym_prorl.rollout.job import Budgets
from nemo_gym_prorl.rollout.scheduler import PoolSizes
from nemo_gym_prorl.rollout.schemas import BudgetsModel, Identifier, Seconds
from nemo_gym_prorl.rollout.settings import JOURNAL_KEEP_BYTES, JOURNAL_KEEP_S, PipelineSettings


Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]

_BOUNDS = PipelineSettings()
_POOLS = _BOUNDS.stages
_LIMITS = LoopLimits()


class StagesConfig(BaseModel):
    """Slots per stage. ``ready`` bounds the buffer between INIT and RUN: each job in it holds a sandbox."""

    model_config = ConfigDict(extra="forbid")

    init: Positive = _POOLS.init
    ready: Annotated[int, Field(ge=0)] = _POOLS.ready
    run: Positive = _POOLS.run
    eval: Positive = _POOLS.eval


class EnvironmentSettings(BaseModel):
    """What an environment says about its rollouts; at the top of the agent's settings, of the default one."""

    model_config = ConfigDict(extra="forbid")

    resources_server: ResourcesServerRef | None = None
    """Gym's reference to its server. The default environment is called after it."""
    handler: str = GymEnvironmentHandler.name
    """Agent handler of its rows."""
    handler_config: dict[str, Any] = Field(default_factory=dict)
    """What that handler wants to be told, in its own words."""
    max_steps: Positive | None = _LIMITS.max_steps
    """Policy turns of one rollout."""
    max_total_sequence_length: Positive | None = _LIMITS.max_total_sequence_length
    """Prompt plus generated tokens of one rollout."""
    tool_concurrency: Positive = _LIMITS.tool_concurrency
    """Tool calls of one turn in flight at once; 1 keeps their order."""
    on_timeout: OnTimeout = OnTimeout.MASK
    """What becomes of a rollout whose RUN budget is used up: ``mask``, ``score`` as it is, or ``zero`` reward."""
    scores_groups_of: Positive | None = None
    """How many rollouts of a group the server's ``/verify`` scores together, answering none before all have come. By
    default what the server says of itself: ``num_rollouts_per_prompt``, else 1."""

    checkpoint_turns: Positive | None = None
    """After so many turns each a rollout can be resumed or forked, where its server can keep sessions; ``null``: never
    but from the start."""

    @property
    def limits(self) -> LoopLimits:
        """Of the tool loop."""
        return LoopLimits(self.max_steps, self.max_total_sequence_length, self.tool_concurrency)


class EnvironmentConfig(EnvironmentSettings):
    """One of several environments; what it leaves out is the service's. A ``handler`` of its own comes with a
    ``handler_config`` of its own, or none."""

    data_sources: list[str] = Field(default_factory=list)
    """Rows with one of these in ``data_source`` are its own, besides those with its name."""
    budgets: BudgetsModel = BudgetsModel()
    share: Share = 1.0
    """Of sandboxes and slots, in proportion to other environments', while rows of several wait."""


class ServiceConfig(EnvironmentSettings):
    """All settings."""

    environments: dict[Identifier, EnvironmentConfig] = Field(default_factory=dict)
    """Further environments that the same pools serve, by name."""

    further_model_servers: list[str] = Field(default_factory=list)
    """Instances that share the rollouts with the one in ``model_server``, each rollout staying at one of them."""
    stages: StagesConfig = StagesConfig()
    budgets: BudgetsModel = BudgetsModel()
    """Seconds that each stage may work on a rollout, per attempt. Time in a queue is free."""
    release_timeout_s: Seconds = _BOUNDS.release_s
    """How long a resources server may take to give a sandbox back."""
    cancel_grace_s: Seconds = _BOUNDS.cancel_grace_s
    """How long a cancelled stage may take to come back before it is abandoned."""
    max_attempts: Positive = _BOUNDS.max_attempts
    """Tries of a rollout whose infrastructure failed."""
    max_queued: Positive = _BOUNDS.max_queued
    """Rollouts that may wait before the job API answers 429."""
    retain_bytes: Positive = _BOUNDS.retain_bytes
    """Bound of what finished rollouts keep. Over it those whose time to live is over are forgotten; when younger ones
    fill it, the job API answers 429."""
    keep_unread_s: Seconds = _BOUNDS.keep_unread_s
    """Time to live of a result that nobody has read; that of one that was read is over."""
    journal: str | None = None
    """A folder on this machine's own disk in which accepted rollouts and outcomes outlive a restart; without it a
    restart forgets them."""
    journal_keep_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = JOURNAL_KEEP_S
    """How long an outcome is kept there."""
    journal_keep_bytes: Positive = JOURNAL_KEEP_BYTES
    """How much all of them may take there, compressed; the oldest are forgotten first."""
    unreachable_s: Seconds = _BOUNDS.unreachable_s
    """How long a server that cannot be reached may hold a rollout up before it fails."""
    checkpoint_bytes: Positive = _BOUNDS.checkpoint_bytes
    """What checkpoints may take on disk, but for the latest one of each rollout that goes on."""
    checkpoint_s: Seconds = _BOUNDS.checkpoint_s
    """How long those of a rollout are kept that has ended."""
    caller_grace_s: Seconds = 10.0
    """How long a ``/run`` whose caller vanished goes on, in case the caller posts it again."""
    prorl_wire: bool = False
    """Also serve the original ProRL wire format: /process, /cancel, /start, /stop, /add_llm_server, …"""
    control_token: str | None = None
    """The deployment's own key, good for everything: every route requires one as a bearer token. Without any the
    server listens on loopback only."""
    keys_file: Path | None = None
    """Clients with keys of their own, each with scopes and a share; `prorl key` writes it. Looked at again when it
    changes."""
    tls_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Also answer here, on all interfaces, by TLS; Gym's own servers go on using the plain address."""
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def pipeline_settings(self) -> PipelineSettings:
        """As the pipeline takes them."""
        return PipelineSettings(
            stages=PoolSizes(**self.stages.model_dump()),
            budgets=_within(self.budgets, _BOUNDS.budgets),
            release_s=self.release_timeout_s,
            cancel_grace_s=self.cancel_grace_s,
            max_attempts=self.max_attempts,
            max_queued=self.max_queued,
            retain_bytes=self.retain_bytes,
            keep_unread_s=self.keep_unread_s,
            unreachable_s=self.unreachable_s,
            checkpoint_bytes=self.checkpoint_bytes,
            checkpoint_s=self.checkpoint_s,
        )

    def of_environment(self, name: str) -> EnvironmentSettings:
        """The settings of one of the further environments, with the service's for those that it leaves out."""
        own = self.environments[name]
        said = {key: getattr(own, key) for key in EnvironmentSettings.model_fields if key in own.model_fields_set}
        above = {key: getattr(self, key) for key in EnvironmentSettings.model_fields}
        if "handler" in said:
            del above["handler_config"]
        return EnvironmentSettings.model_validate({**above, **said})

    def budgets_of(self, name: str) -> Budgets:
        """The budgets of one of the further environments."""
        return _within(self.environments[name].budgets, self.pipeline_settings().budgets)


def _within(said: BudgetsModel, above: Budgets) -> Budgets:
    """Those that are said, and for those that are not, what holds above them."""
    return replace(above, **{stage.value: seconds for stage, seconds in said.given().items()})
