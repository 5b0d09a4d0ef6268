# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Status of a rollout service as ``/status`` reports it, and the sum over the nodes of a fleet."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import Self

from pydantic import BaseModel, Field

from nemo_gym_prorl.failures import Stage
from nemo_gym_prorl.rollout.handler import Environments
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.scheduling.circuit_breaker import Outage
from nemo_gym_prorl.rollout.scheduling.scheduler import StageScheduler
from nemo_gym_prorl.rollout.settings import ServiceSettings


VERSION = metadata.version("nemo-gym-prorl")


class PoolView(BaseModel):
    """Slots of one stage, and the jobs that hold a slot or wait for one. For `run`, `waiting` is the READY buffer."""

    slots: int
    working: int
    waiting: int


class HeldView(BaseModel):
    """Unreachable server, and the environments whose rollouts wait for it."""

    reason: str
    since: float = Field(description="Seconds since the epoch.")
    environments: list[str] = Field(description="Environments whose rollouts do not start meanwhile.")

    @classmethod
    def all_of(cls, outages: Iterable[Outage]) -> dict[str, Self]:
        """Return outages by server; the reason is that of the first environment that detected the outage."""
        views: dict[str, Self] = {}
        for outage in sorted(outages, key=lambda outage: outage.at):
            view = views.setdefault(outage.server, cls(reason=outage.reason, since=outage.at, environments=[]))
            view.environments.append(outage.environment)
        return views


class EnvironmentView(BaseModel):
    """An environment of the service, and the numbers of its rollouts that are in a stage or wait for a stage."""

    handler: str
    data_sources: list[str] = Field(description="Values of a row's `data_source` that this environment takes.")
    default: bool = Field(default=False, description="Whether it takes rows that no other environment takes.")
    scores_groups_of: int = Field(default=1, description="Rollouts of a group that its verifier scores together.")
    budgets: dict[Stage, float] = Field(description="Default budgets of its rollouts, in seconds.")
    max_attempts: int = Field(default=3, description="Default for its rollouts.")
    working: dict[Stage, int]
    waiting: dict[Stage, int]
    tool_errors: dict[int, int] = Field(
        default_factory=dict, description="Tool answers with HTTP 429, or 500 and above, by status."
    )

    @classmethod
    def all_of(
        cls, environments: Environments, scheduler: StageScheduler, settings: ServiceSettings
    ) -> dict[str, Self]:
        """Return the environments of a pipeline by name."""
        counts, sources = scheduler.by_environment(), environments.data_sources
        views = {}
        for name in environments.names:
            environment = environments.environment(name)
            budgets = environment.budgets or settings.budgets
            views[name] = cls(
                handler=environment.handler,
                data_sources=[source for source, taken_by in sources.items() if taken_by == name],
                default=name == environments.default,
                scores_groups_of=environment.scores_groups_of,
                budgets={stage: budgets.of(stage) for stage in Stage},
                max_attempts=environment.max_attempts or settings.max_attempts,
                working={stage: counts[name, stage, True] for stage in Stage},
                waiting={stage: counts[name, stage, False] for stage in Stage},
                tool_errors=dict(environment.tool_errors),
            )
        return views


class StatusView(BaseModel):
    """Counts of the service per stage, pool and state."""

    version: str = Field(default="", description="Version of this package.")
    draining: bool
    stages: dict[Stage, PoolView]
    ready_slots: int
    sessions: int = Field(description="Sandboxes of INIT, READY and RUN, those being created included.")
    states: dict[JobState, int] = Field(description="Remembered jobs by state.")
    held: dict[str, HeldView] = Field(
        default_factory=dict, description="Unreachable servers by name; no rollout that needs one starts."
    )
    retained_bytes: int = Field(default=0, description="Memory of finished rollouts.")
    abandoned: int = Field(description="Handler calls that ignored their cancellation.")
    checkpoint_folder: str | None = Field(
        default=None, description="Id of the folder in which services share checkpoints."
    )
    journal: str | None = Field(
        default=None, description="Error of the journal, if it cannot be written; new rollouts are refused meanwhile."
    )
    environments: dict[str, EnvironmentView]

    def version_mismatch(self) -> str | None:
        """Return why a service of this version cannot join the fleet; ``None`` if it can. Formats may differ between
        minor versions."""
        if self.version.split(".")[:2] == VERSION.split(".")[:2]:
            return None
        return (
            f"it runs nemo-gym-prorl {self.version or 'of an older version'}, and this is {VERSION}; install the same"
        )

    @classmethod
    def sum(cls, views: Iterable[Self]) -> Self:
        """Return the summed status of several services, which is draining if all of them are. The settings of an
        environment are those of the first service that has it."""
        stages = {stage: PoolView(slots=0, working=0, waiting=0) for stage in Stage}
        total = cls(
            version=VERSION,
            draining=False,
            stages=stages,
            ready_slots=0,
            sessions=0,
            states=dict.fromkeys(JobState, 0),
            abandoned=0,
            environments={},
        )
        views = [*views]
        total.draining = bool(views) and all(view.draining for view in views)
        for view in views:
            for stage, pool in view.stages.items():
                own = total.stages[stage]
                own.slots, own.working = own.slots + pool.slots, own.working + pool.working
                own.waiting += pool.waiting
            total.ready_slots += view.ready_slots
            total.sessions += view.sessions
            total.abandoned += view.abandoned
            total.retained_bytes += view.retained_bytes
            total.states = {state: count + view.states.get(state, 0) for state, count in total.states.items()}
            total.held |= view.held
            for name, environment in view.environments.items():
                if name not in total.environments:
                    total.environments[name] = environment.model_copy(deep=True)
                    continue
                known = total.environments[name]
                for stage in Stage:
                    known.working[stage] += environment.working[stage]
                    known.waiting[stage] += environment.waiting[stage]
                for status, count in environment.tool_errors.items():
                    known.tool_errors[status] = known.tool_errors.get(status, 0) + count
        return total


def stage_pools(scheduler: StageScheduler) -> dict[Stage, PoolView]:
    """Return the pool of each stage."""
    return {
        stage: PoolView(
            slots=scheduler.sizes.of(stage), working=scheduler.working(stage), waiting=scheduler.waiting(stage)
        )
        for stage in Stage
    }
