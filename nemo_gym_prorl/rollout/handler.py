# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Environments and handlers: how a kind of task plugs in, and which environment a row goes to.

A handler knows what INIT, RUN and EVAL mean for its tasks, and nothing of pools, budgets, retries or cancellation. It
is found through the entry-point group ``nemo_gym_prorl.agent_handlers``, so a new kind of task is a new package and
touches no file here.

One pipeline runs the rollouts of several environments through the same pools. An environment is a name, the handler
that runs its rows, and the budgets that hold where a job brings none. A row goes to

1. the environment that its job names;
2. else the one that takes the row's ``data_source``, which each does under its own name, and under those given to it;
3. else the default one. Where there is none the row is refused: a wrong guess would train on a wrong reward.
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
    """What the pipeline calls. Every coroutine may be cancelled at any await and must then clean up after itself.

    Attributes:
        name: the name in the registry.
    """

    name: str

    async def init(self, job: Job) -> Any:
        """Acquire what the task needs and return it as the session. Budget: ``job.budgets.init`` seconds.

        If it raises or is cancelled it leaves nothing behind: there is no session that could be released.
        """
        ...

    async def run(self, job: Job, session: Any) -> Trajectory:
        """Let the policy act. Budget: ``job.budgets.run`` seconds.

        Sets ``job.trajectory`` early and fills it, so that a rollout that is cut short keeps what was sampled.
        """
        ...

    async def release(self, job: Job, session: Any) -> None:
        """Give back what the agent used. Called once per session, whatever happened, shielded and bounded in time,
        and before EVAL starts: scoring begins only when the agent can no longer change anything."""
        ...

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        """Score. Budget: ``job.budgets.eval`` seconds. May be called again with the same trajectory."""
        ...

    def on_failure(self, job: Job, stage: Stage | None, failure: Failure) -> Outcome:
        """The outcome of a job that ends without a reward; ``stage`` is ``None`` if it was waiting."""
        ...


@runtime_checkable
class ReportsWaiting(Protocol):
    """Optional: a handler that knows for how long its agent could not act."""

    async def waited(self, job: Job) -> float:
        """Seconds of this RUN attempt in which the agent waited for a policy backend, including a wait that still goes
        on. Asked when the RUN budget is used up, which is then extended by it: waiting is nobody's time."""
        ...


@runtime_checkable
class ReportsUnreachable(Protocol):
    """Optional: a handler that can ask whether its servers answer."""

    async def unreachable(self) -> Mapping[str, Collection[Stage]] | Collection[str]:
        """Names (as in ``InfrastructureError.server``) of its servers that do not answer now, and the stages that need
        each; names alone are needed by all. Asked every few seconds while a stage works on a job or one of them is
        out, and once when a job lost its connection to one."""
        ...


@runtime_checkable
class HandlesTimeouts(Protocol):
    """Optional: a handler for which a rollout whose RUN budget is used up may end well. Without it, and where it says
    ``None``, such a rollout fails as ``agent_timeout``."""

    def timed_out(self, job: Job, session: Any) -> Trajectory | Verdict | None:
        """What counts instead: a trajectory, to be scored as it is, or a verdict that needs no scoring. Called when
        ``run`` has come back from its cancellation, before ``release``."""
        ...


@runtime_checkable
class StoresCheckpoints(Protocol):
    """Optional: a handler that takes checkpoints (:meth:`.job.Job.keep_checkpoint`), and goes on from the job's latest
    one in ``init`` and ``run``."""

    async def forget(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Have what is kept for them erased; no job has them any more."""
        ...

    async def renew(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Have what is kept for them count as new; jobs have them still."""
        ...


@runtime_checkable
class RestoresCheckpoints(Protocol):
    """Optional: a handler whose jobs can go on from a checkpoint that another service has taken; its states have
    ``pack`` (:class:`~.checkpoints.SerializableState`)."""

    def unpack(self, packed: bytes) -> Any:
        """The state that was packed. Whatever of ``ValueError``, ``KeyError`` and ``TypeError`` it raises says that it
        is damaged. Called in a thread."""
        ...


@runtime_checkable
class CancelsScoring(Protocol):
    """Optional: a handler whose scoring may go on though the call was cut short, as where it is a server's."""

    async def end_scoring(self, job: Job) -> None:
        """End it. Called of a job that fails after EVAL has been tried, before it has its outcome; shielded and
        bounded in time as ``release`` is."""
        ...


HandlerFactory = Callable[[Any], AgentHandler]
"""Builds a handler from its context (``handlers.gym_environment.GymContext``), of which ``config`` is its own
configuration. If it has an attribute ``Config``, a pydantic model, the configuration is one of those, else a dict."""


class HandlerRegistry:
    """Installed handlers, imported when they are first asked for.

    Args:
        builtin: name → factory of handlers that need no entry point, since they come with the service.

    Raises:
        CallerError: two packages registered one name.
    """

    def __init__(self, builtin: Mapping[str, HandlerFactory]) -> None:
        self.plugins = _installed(entry_points(group=ENTRY_POINT_GROUP))
        """Name → entry point of the handlers that other packages bring."""
        self._builtin = builtin

    @property
    def names(self) -> list[str]:
        """Installed handlers, sorted."""
        return sorted({*self._builtin, *self.plugins})

    def require(self, name: str, field: str) -> None:
        """Refuse a handler that is not installed.

        Raises:
            CallerError: with ``field``, and the nearest of those that are.
        """
        if name not in self._builtin and name not in self.plugins:
            raise CallerError(
                f"no agent handler {name!r} is installed{suggest(name, self.names)}. A package registers one in its "
                f"entry-point group {ENTRY_POINT_GROUP!r}",
                field=field,
            )

    def factory(self, name: str) -> HandlerFactory:
        """The factory of an installed handler; imports its package."""
        plugin = self.plugins.get(name)
        if plugin is None:
            return self._builtin[name]
        factory: HandlerFactory = plugin.load()
        return factory

    def config(self, name: str, given: Mapping[str, Any], field: str) -> Any:
        """A handler's own configuration, as its model has it; without a model what was given.

        Raises:
            CallerError: the model refuses it, or has no such key; names the key below ``field``.
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
        handler: name of the handler that runs its rows.
        build: makes that handler; called once, when the first row needs it.
        data_sources: rows with one of these in ``data_source`` are its own.
        budgets, max_attempts: of jobs that bring none; ``None`` for the service's.
        share: of sandboxes and slots while rows of several environments wait, in proportion to each other's.
        scores_groups_of: how many siblings of a group its verifier scores together; 1 where it scores each for itself.
        checkpoint_turns: after so many turns each, its handler takes a checkpoint; ``None`` for none.
        tool_errors: answers of its tools that were errors, by HTTP status; counted by its handler.
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
    """The environments of one service.

    Args:
        environments: all of them.
        default: name of the one for rows that no other takes; ``None`` to refuse those.

    Raises:
        CallerError: two have one name, or take the same ``data_source``.
    """

    def __init__(self, environments: Iterable[Environment], default: str | None) -> None:
        self._all: dict[str, Environment] = {}
        self._by_source: dict[str, str] = {}
        self._default = default
        self._handlers: dict[str, AgentHandler] = {}
        for environment in environments:
            if environment.name in self._all:
                raise CallerError("there are two of that name", field=f"environments.{environment.name}")
            self._all[environment.name] = environment
            for source in sorted(environment.data_sources):
                other = self._by_source.setdefault(source, environment.name)
                if other != environment.name:
                    raise CallerError(
                        f"{source!r} is taken by environment {other!r} as well; a row has one environment",
                        field=f"environments.{environment.name}.data_sources",
                    )

    @classmethod
    def of(cls, handler: AgentHandler) -> Environments:
        """One environment for all rows, run by this handler and called after it."""
        return cls([Environment(handler.name, handler.name, lambda: handler)], handler.name)

    @property
    def names(self) -> list[str]:
        """The environments, in the order in which they were given."""
        return [*self._all]

    @property
    def data_sources(self) -> Mapping[str, str]:
        """``data_source`` of a row → name of its environment."""
        return self._by_source

    @property
    def default(self) -> str | None:
        """The one for rows that no other takes."""
        return self._default

    @property
    def shares(self) -> Mapping[str, float]:
        """Name of an environment → its share."""
        return {name: environment.share for name, environment in self._all.items()}

    def environment(self, name: str) -> Environment:
        """The environment of that name, which there must be."""
        return self._all[name]

    def get(self, name: str) -> AgentHandler:
        """The handler of an environment, built at first use."""
        if name not in self._handlers:
            self._handlers[name] = self._all[name].build()
        return self._handlers[name]

    def choose(self, row: Mapping[str, Any], name: str | None = None) -> Environment:
        """The environment of a row.

        Args:
            row: its ``data_source`` is looked at.
            name: the environment that its job names.

        Raises:
            CallerError: there is none of that name, or none that takes the row; names the field and those there are.
        """
        if name is not None:
            if name not in self._all:
                raise CallerError(f"there is no {name!r}{suggest(name, self._all)}", field="environment")
            return self._all[name]
        source = row.get("data_source")
        found = self._by_source.get(source) if isinstance(source, str) else None
        if found is None:
            found = self._default
        if found is None:
            said = "is missing" if source is None else f"{source!r:.200} belongs to no environment"
            known = suggest(source if isinstance(source, str) else "", self._by_source)
            raise CallerError(f"{said}, and the service has no default one{known}", field="row.data_source")
        return self._all[found]

    def of_job(self, request: JobRequest) -> Environment:
        """The environment of a job that is asked for.

        Raises:
            CallerError: as :meth:`choose`, or it scores siblings together and the job has none.
        """
        environment = self.choose(request.row, request.environment)
        if environment.scores_groups_of > 1 and request.group is None:
            together = f"{environment.scores_groups_of} rollouts of a group together"
            raise CallerError(f"environment {environment.name!r} scores {together}; say which it is", field="group")
        return environment
