# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How a kind of task plugs in: the AgentHandler protocol and the registry that finds handlers.

A handler knows what INIT, RUN and EVAL mean for its tasks, and nothing of pools, budgets, retries or cancellation. It
is found through the entry-point group ``nemo_gym_prorl.agent_handlers``, so a new kind of task is a new package and
touches no file here. An environment of the service names its handler (:mod:`~nemo_gym_prorl.rollout.environments`),
and may give it a configuration of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel, ValidationError

from nemo_gym_prorl.failures import CallerError, Failure, Stage, suggest
from nemo_gym_prorl.rollout.checkpoints import Checkpoint
from nemo_gym_prorl.rollout.job import Job, Outcome, Trajectory, Verdict


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
class TellsWaiting(Protocol):
    """Optional: a handler that knows for how long its agent could not act."""

    async def waited(self, job: Job) -> float:
        """Seconds of this RUN attempt in which the agent waited for a policy backend, including a wait that still goes
        on. Asked when the RUN budget is used up, which is then extended by it: waiting is nobody's time."""
        ...


@runtime_checkable
class TellsUnreachable(Protocol):
    """Optional: a handler that can ask whether its servers answer."""

    async def unreachable(self) -> Mapping[str, Collection[Stage]] | Collection[str]:
        """Names (as in ``InfrastructureError.server``) of its servers that do not answer now, and the stages that need
        each; names alone are needed by all. Asked every few seconds while a stage works on a job or one of them is
        out, and once when a job lost its connection to one."""
        ...


@runtime_checkable
class EndsTimeouts(Protocol):
    """Optional: a handler for which a rollout whose RUN budget is used up may end well. Without it, and where it says
    ``None``, such a rollout fails as ``agent_timeout``."""

    def timed_out(self, job: Job, session: Any) -> Trajectory | Verdict | None:
        """What counts instead: a trajectory, to be scored as it is, or a verdict that needs no scoring. Called when
        ``run`` has come back from its cancellation, before ``release``."""
        ...


@runtime_checkable
class KeepsCheckpoints(Protocol):
    """Optional: a handler that takes checkpoints (:meth:`.job.Job.keep_checkpoint`), and goes on from the job's latest
    one in ``init`` and ``run``."""

    async def forget(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Have what is kept for them erased; no job has them any more."""
        ...

    async def renew(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Have what is kept for them count as new; jobs have them still."""
        ...


@runtime_checkable
class UnpacksCheckpoints(Protocol):
    """Optional: a handler whose jobs can go on from a checkpoint that another service has taken; its states have
    ``pack`` (:class:`~.checkpoints.Packs`)."""

    def unpack(self, packed: bytes) -> Any:
        """The state that was packed. Whatever of ``ValueError``, ``KeyError`` and ``TypeError`` it raises says that it
        is damaged. Called in a thread."""
        ...


@runtime_checkable
class EndsScoring(Protocol):
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
            model = type(model)(model.__name__, (model,), {"__module__": model.__module__}, extra="forbid")
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
