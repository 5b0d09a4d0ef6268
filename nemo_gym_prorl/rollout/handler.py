# SPDX-License-Identifier: Apache-2.0
"""How a kind of task plugs in: the AgentHandler protocol and the registry that finds handlers.

A handler knows what INIT, RUN and EVAL mean for its tasks, and nothing of pools, budgets, retries or cancellation. It
is found through the entry-point group ``nemo_gym_prorl.agent_handlers``, so a new kind of task is a new package and
touches no file here. Which handler runs a row is decided by the row's ``data_source`` if a handler of that name is
installed, else by the service's configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, runtime_checkable

from nemo_gym_prorl.failures import CallerError, Failure, Stage
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

    async def unreachable(self) -> Sequence[str]:
        """Names (as in ``InfrastructureError.server``) of its servers that do not answer now. Asked every few seconds
        while one of them is out, and once when a job lost its connection to one."""
        ...


HandlerFactory = Callable[[Any], AgentHandler]
"""Builds a handler from the service's context (see ``handlers.gym_environment.GymContext``)."""


class HandlerRegistry:
    """Installed handlers, each built at first use.

    Args:
        context: passed to each factory.
        default: the handler for rows whose ``data_source`` names none.
        builtin: name → factory of handlers that need no entry point, since they come with the service.

    Raises:
        CallerError: the default is not installed, or two packages registered one name.
    """

    def __init__(self, context: Any, default: str, builtin: Mapping[str, HandlerFactory]) -> None:
        self._context = context
        self._default = default
        self._factories = {**builtin, **_installed(entry_points(group=ENTRY_POINT_GROUP))}
        self._handlers: dict[str, AgentHandler] = {}
        self._require(default, field="handler")

    @property
    def names(self) -> list[str]:
        """Installed handlers, sorted."""
        return sorted(self._factories)

    def choose(self, row: Mapping[str, Any], name: str | None = None) -> str:
        """The handler for a row: the one asked for, else the row's ``data_source``, else the default.

        Raises:
            CallerError: the one asked for is not installed.
        """
        if name is not None:
            self._require(name, field="handler")
            return name
        source = row.get("data_source")
        return source if isinstance(source, str) and source in self._factories else self._default

    def get(self, name: str) -> AgentHandler:
        """The handler of that name, built at first use."""
        if name not in self._handlers:
            self._handlers[name] = self._factories[name](self._context)
        return self._handlers[name]

    def _require(self, name: str, field: str) -> None:
        if name not in self._factories:
            raise CallerError(
                f"no agent handler {name!r} is installed; installed are {', '.join(self.names) or 'none'}. A package "
                f"registers one in its entry-point group {ENTRY_POINT_GROUP!r}",
                field=field,
            )


def _installed(points: Iterable[EntryPoint]) -> dict[str, HandlerFactory]:
    found: dict[str, EntryPoint] = {}
    for point in points:
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise CallerError(
                f"two agent handlers are named {point.name!r}: {other.value} and {point.value}; uninstall one",
                field="handler",
            )
    return {name: _lazy(point) for name, point in found.items()}


def _lazy(point: EntryPoint) -> HandlerFactory:
    def build(context: Any) -> AgentHandler:
        factory: HandlerFactory = point.load()
        return factory(context)

    return build
