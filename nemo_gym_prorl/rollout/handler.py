# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Environments and handlers: the plug-in interface for kinds of tasks, and the assignment of rows to environments.

Handlers implement the three stages; the pipeline owns scheduling, budgets, retries and cancellation. Handlers are
found through the entry-point group ``nemo_gym_prorl.agent_handlers``, so a new kind of task is a package of its own.

One pipeline runs the rollouts of several environments through the same pools. An environment is a name, the handler
that runs its rows, and default budgets. A row is assigned to

1. the environment that its job names;
2. else the environment that takes the row's ``data_source``: its own name, and the names configured for it;
3. else the default environment. Without a default environment the row is refused: a wrong guess would train on a wrong
reward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel, ValidationError, create_model

from nemo_gym_prorl.failures import CallerError, Failure, Stage, suggest
from nemo_gym_prorl.rollout.job import Checkpoint, Job, Outcome, Trajectory, Verdict
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.settings import Budgets


ENTRY_POINT_GROUP = "nemo_gym_prorl.agent_handlers"


@runtime_checkable
class AgentHandler(Protocol):
    """Stages of a kind of task. Every coroutine may be cancelled at any await and must then clean up after itself.

    Attributes:
        name: name of the handler in the registry.
    """

    name: str

    async def init(self, job: Job) -> Any:
        """Acquire the task's resources and return them as the session. Budget: ``job.budgets.init`` seconds.

        If the call raises or is cancelled, it must leave nothing behind: no session exists that could be released.
        """
        ...

    async def run(self, job: Job, session: Any) -> Trajectory:
        """Let the policy act on the task. Budget: ``job.budgets.run`` seconds.

        Sets ``job.trajectory`` early and fills it, so that an interrupted rollout keeps its samples.
        """
        ...

    async def release(self, job: Job, session: Any) -> None:
        """Release the agent's resources. Called once per session in every case, shielded, with a time limit, and
        before EVAL: scoring starts only when the agent can no longer change the sandbox."""
        ...

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        """Score the trajectory. Budget: ``job.budgets.eval`` seconds. May be called again with the same trajectory."""
        ...

    def on_failure(self, job: Job, stage: Stage | None, failure: Failure) -> Outcome:
        """Return the outcome of a job that ends without a reward; ``stage`` is ``None`` if the job was waiting."""
        ...


@runtime_checkable
class ReportsWaiting(Protocol):
    """Optional capability of a handler: report how long the agent waited for a backend."""

    async def waited(self, job: Job) -> float:
        """Return the seconds of this RUN attempt in which the agent waited for a policy backend, including a current
        wait. The pipeline asks when the RUN budget is used up, and extends the budget by the result."""
        ...


@runtime_checkable
class ReportsUnreachable(Protocol):
    """Optional capability of a handler: probe its servers."""

    async def unreachable(self) -> Mapping[str, Collection[Stage]]:
        """Return the names (as in ``InfrastructureError.server``) of the servers that do not answer, with the stages
        that need each. Called every few seconds while the environment has a job in a stage or a server down, and when
        a job loses its connection to a server."""
        ...


@runtime_checkable
class HandlesTimeouts(Protocol):
    """Optional capability of a handler: decide about rollouts beyond RUN's budget (default: ``agent_timeout``)."""

    def timed_out(self, job: Job, session: Any) -> Trajectory | Verdict | None:
        """Return a trajectory to score, a verdict that needs no scoring, or ``None`` to fail the rollout. Called
        after the cancelled ``run`` has returned, before ``release``."""
        ...


@runtime_checkable
class StoresCheckpoints(Protocol):
    """Optional capability of a handler: take checkpoints (:meth:`.job.Job.keep_checkpoint`), and resume from the job's
    latest checkpoint in ``init`` and ``run``."""

    async def forget(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Erase the stored data of checkpoints that no job holds."""
        ...

    async def renew(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Reset the age of the stored data of checkpoints that jobs still hold."""
        ...

    def unpack(self, packed: bytes) -> Any:
        """Return a checkpoint's state from the bytes of its ``pack``
        (:class:`~.storage.checkpoints.SerializableState`), which another service may have written. Called in a thread.
        Raises ``ValueError``, ``KeyError`` or ``TypeError`` if the bytes are damaged."""
        ...


@runtime_checkable
class CancelsScoring(Protocol):
    """Optional capability of a handler: cancel scoring that continues, for example at a server, after ``eval`` was
    cancelled."""

    async def end_scoring(self, job: Job) -> None:
        """Cancel the scoring of a job that fails after EVAL was tried. Called before the job has its outcome; shielded
        and time-limited like ``release``."""
        ...


HandlerFactory = Callable[[Any], AgentHandler]
"""Creates a handler from its context (``agent.gym_environment.GymContext``), whose ``config`` is the handler's own
configuration. If the factory has a pydantic model ``Config``, the configuration is an instance of it, else a dict."""


class HandlerRegistry:
    """Installed handlers, imported at first use.

    Args:
        builtin: factories by name of the handlers that come with the service.

    Raises:
        CallerError: two packages registered the same name.
    """

    def __init__(self, builtin: Mapping[str, HandlerFactory]) -> None:
        self.plugins = _installed(entry_points(group=ENTRY_POINT_GROUP))
        """Entry points of the handlers of other packages, by name."""
        self._builtin = builtin

    @property
    def names(self) -> list[str]:
        """Names of the installed handlers, sorted."""
        return sorted({*self._builtin, *self.plugins})

    def require(self, name: str, field: str) -> None:
        """Check that a handler is installed.

        Raises:
            CallerError: the handler is not installed; names ``field`` and suggests the nearest name.
        """
        if name not in self._builtin and name not in self.plugins:
            raise CallerError(
                f"no agent handler {name!r} is installed{suggest(name, self.names)}. Install a package that registers "
                f"it in the entry-point group {ENTRY_POINT_GROUP!r}",
                field=field,
            )

    def factory(self, name: str) -> HandlerFactory:
        """Return the factory of an installed handler; the first call imports the handler's package."""
        plugin = self.plugins.get(name)
        if plugin is None:
            return self._builtin[name]
        factory: HandlerFactory = plugin.load()
        return factory

    def config(self, name: str, given: Mapping[str, Any], field: str) -> Any:
        """Return a handler's configuration as an instance of the handler's model ``Config``; without a model, a copy.

        Raises:
            CallerError: the model refuses the configuration; names the key below ``field``.
        """
        model = getattr(self.factory(name), "Config", None)
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return dict(given)
        if model.model_config.get("extra") is None:
            model = create_model(model.__name__, __base__=model, __cls_kwargs__={"extra": "forbid"})
        try:
            return model.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            raise CallerError(first["msg"], field=".".join(map(str, (field, *first["loc"])))) from None


def _installed(points: Iterable[EntryPoint]) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in points:
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise CallerError(
                f"two agent handlers are named {point.name!r}: {other.value} and {point.value}; uninstall one",
                field="handler",
            )
    return found


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment of a service.

    Attributes:
        name: unique in the service.
        handler: name of the handler that runs the environment's rows.
        build: creates the handler; called once, at the handler's first use.
        data_sources: values of a row's ``data_source`` that this environment takes.
        budgets, max_attempts: defaults for the environment's jobs; ``None`` for the service's defaults.
        share: share of sandboxes and slots while rows of several environments wait, relative to the other shares.
        scores_groups_of: number of a group's rollouts that the verifier scores together; 1 if each is scored alone.
        checkpoint_turns: number of turns between checkpoints; ``None`` for no checkpoints.
        tool_errors: number of error answers of tools by HTTP status; counted by the handler.
    """

    name: str
    handler: str
    build: Callable[[], AgentHandler]
    data_sources: frozenset[str] = frozenset()
    budgets: Budgets | None = None
    max_attempts: int | None = None
    share: float = 1.0
    scores_groups_of: int = 1
    checkpoint_turns: int | None = None
    tool_errors: Mapping[int, int] = field(default_factory=dict)


class Environments:
    """Environments of one service.

    Args:
        environments: all environments.
        default: name of the environment for rows that no other environment takes; ``None`` to refuse such rows.

    Raises:
        CallerError: two environments have the same name or take the same ``data_source``.
    """

    def __init__(self, environments: Iterable[Environment], default: str | None) -> None:
        self._all: dict[str, Environment] = {}
        self._by_source: dict[str, str] = {}
        self._default = default
        self._handlers: dict[str, AgentHandler] = {}
        for environment in environments:
            if environment.name in self._all:
                raise CallerError("two environments have this name", field=f"environments.{environment.name}")
            self._all[environment.name] = environment
            for source in sorted(environment.data_sources):
                other = self._by_source.setdefault(source, environment.name)
                if other != environment.name:
                    raise CallerError(
                        f"environment {other!r} takes {source!r} too; list it in one environment only",
                        field=f"environments.{environment.name}.data_sources",
                    )

    @classmethod
    def of(cls, handler: AgentHandler) -> Environments:
        """Return a single environment for all rows, named like its handler ``handler``."""
        return cls([Environment(handler.name, handler.name, lambda: handler)], handler.name)

    @property
    def names(self) -> list[str]:
        return [*self._all]

    @property
    def data_sources(self) -> Mapping[str, str]:
        return self._by_source

    @property
    def default(self) -> str | None:
        """Name of the environment for rows that no other environment takes; ``None`` if such rows are refused."""
        return self._default

    @property
    def shares(self) -> Mapping[str, float]:
        return {name: environment.share for name, environment in self._all.items()}

    def environment(self, name: str) -> Environment:
        """Return the environment with this name, which must exist."""
        return self._all[name]

    def get(self, name: str) -> AgentHandler:
        """Return the handler of an environment, which must exist; the first call creates the handler."""
        if name not in self._handlers:
            self._handlers[name] = self._all[name].build()
        return self._handlers[name]

    def choose(self, row: Mapping[str, Any], name: str | None = None) -> Environment:
        """Return the environment of a row.

        Args:
            row: row with an optional ``data_source``.
            name: environment that the job names; ``None`` to choose by the row.

        Raises:
            CallerError: no environment has that name, or no environment takes the row; suggests known names.
        """
        if name is not None:
            if name not in self._all:
                raise CallerError(f"no environment {name!r}{suggest(name, self._all)}", field="environment")
            return self._all[name]
        source = row.get("data_source")
        found = self._by_source.get(source) if isinstance(source, str) else None
        if found is None:
            found = self._default
        if found is None:
            said = "is missing" if source is None else f"{source!r:.200} belongs to no environment"
            known = suggest(source if isinstance(source, str) else "", self._by_source)
            raise CallerError(f"{said}, and the service has no default environment{known}", field="row.data_source")
        return self._all[found]

    def of_job(self, request: JobRequest) -> Environment:
        """Return the environment of a requested job.

        Raises:
            CallerError: as for :meth:`choose`; or the environment scores groups together and the job has no group.
        """
        environment = self.choose(request.row, request.environment)
        if environment.scores_groups_of > 1 and request.group is None:
            together = f"{environment.scores_groups_of} rollouts of a group together"
            raise CallerError(f"environment {environment.name!r} scores {together}; name the group", field="group")
        return environment
