# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The environments of one service, and which of them a row goes to.

One pipeline runs the rollouts of several environments through the same pools. An environment is a name, the handler
that knows how to run its rows, and the budgets that hold where a job brings none. A row goes to

1. the environment that its job names;
2. else the one that takes the row's ``data_source``, which each does under its own name, and under those given to it;
3. else the default one. Where there is none the row is refused: a wrong guess would train on a wrong reward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_prorl.failures import CallerError, suggest
from nemo_gym_prorl.rollout.handler import AgentHandler
from nemo_gym_prorl.rollout.job import Budgets
from nemo_gym_prorl.rollout.request import JobRequest


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
