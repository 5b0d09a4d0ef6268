# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How an environment is written: the :class:`Task` protocol, and what goes in and out of it.

A family of tasks (HumanEval, say) is one :class:`Task`. It sees dataset rows, sandboxes and what the policy answered,
and knows nothing of HTTP, of who provides sandboxes, or of how many rollouts there are. A rollout goes through it so:

1. :meth:`Task.needs` looks at the row: it is refused here, by field, or says what sandbox it takes, if any.
2. :meth:`ToolSet.open` and :meth:`Task.prepare` make that sandbox ready; then the policy calls tools.
3. :meth:`Task.artefacts` takes out what is to be graded, and the sandbox is gone.
4. :meth:`Task.grade` judges that, and what the policy said, in fresh sandboxes if it takes any.

So nothing but artefacts and response passes from the policy to its judge.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import orjson

from nemo_gym_prorl.tasks.sandbox import Sandbox


_MAX_REWARD = sys.float_info.max
TOOL_USE = "tool_use"
"""Field of a rollout's row: how the calls of each tool went, in these numbers."""

TOOL_NUMBERS = ("calls", "errors", "timeouts", "cut")
"""Each is at the top of the row as well, ``tool_<number>``, summed over tools: Gym's metrics take what is there."""

_RESERVED_FIELDS = frozenset(
    {"reward", "passed", "verdict", "verdict_detail", "response", "responses_create_params", TOOL_USE}
    | {f"tool_{number}" for number in TOOL_NUMBERS}
)

EXHAUSTED = "exhausted"
"""Verdict on a policy that used up its sandbox."""


@dataclass(frozen=True, slots=True)
class SandboxNeeds:
    """What a row asks of its sandboxes. ``None``: as the server's configuration has it.

    Attributes:
        image: whatever the sandbox provider takes for one.
        network: it may reach the network.
        cpu: cores.
        memory_mib: memory, in MiB.
        disk_gib: what it may write, in GiB.
        processes: how many processes and threads it may have.
        fields: names of the row's fields that ask for these, where they have other names, as in
            ``{"image": "image_name"}``; whoever wrote a row is told of its mistakes in these words.
    """

    image: str | None = None
    network: bool | None = None
    cpu: float | None = None
    memory_mib: int | None = None
    disk_gib: int | None = None
    processes: int | None = None
    fields: Mapping[str, str] = field(default_factory=dict)

    def row_field(self, need: str) -> str:
        """The name of the row's field that asks for it."""
        return self.fields.get(need, need)


@dataclass(frozen=True, slots=True)
class Grade:
    """A statement about what the policy did. Trouble with machines is none: that is raised.

    Attributes:
        reward: the reward.
        verdict: why, in a word of the family's own; safe as a metric label.
        detail: why, for a person. May quote hidden tests, so it is not for the policy.
        fields: more for the rollout's row, as JSON: a patch, a report of tests. None of what Gym reads of a row, nor
            of what is said here.

    Raises:
        ValueError: the reward is no finite number, the verdict no word, or the fields are not as said.
    """

    reward: float
    verdict: str
    detail: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # An int may be too large for a float.
        if not isinstance(self.reward, int | float) or not -_MAX_REWARD <= self.reward <= _MAX_REWARD:
            raise ValueError(f"the reward must be a finite number, not {self.reward!r:.100}")
        if not isinstance(self.verdict, str) or not self.verdict:
            raise ValueError(f"the verdict must be a word, not {self.verdict!r:.100}")
        if taken := [name for name in self.fields if name in _RESERVED_FIELDS or str(name).startswith("_ng_")]:
            raise ValueError(f"{taken[0]!r} is no field of a grade's own")
        try:
            orjson.dumps(self.fields)
        except TypeError as error:
            raise ValueError(f"the fields are no JSON: {error}") from error

    @property
    def passed(self) -> bool:
        """It earned the whole reward, which is 1."""
        return self.reward >= 1.0


class OpenTools(Protocol):
    """The tools of one session."""

    @property
    def over(self) -> bool:
        """The policy has said that it is done: nothing more is carried out."""
        ...

    async def call(self, tool: str, arguments: object) -> str:
        """Carry out a call and return the observation. Wrong arguments, of whatever shape, are one.

        Raises:
            AgentError: the policy used up its sandbox, which is gone.
            InfrastructureError: ``session_lost``, the sandbox is gone.
        """
        ...

    async def close(self) -> None:
        """Let go of everything. Comes after the sandbox has ended, whatever ended it."""
        ...


@runtime_checkable
class CountsToolCalls(Protocol):
    """Tools that tell how they were used, for whoever looks at trajectories."""

    def tool_use(self) -> Mapping[str, Mapping[str, int]]:
        """By tool, numbers: ``{"bash": {"calls": 3, "errors": 1}}``. Stays after :meth:`OpenTools.close`."""
        ...


@runtime_checkable
class ResumableTools(Protocol):
    """Tools that can go on in another sandbox that has the files of theirs."""

    async def save(self) -> tuple[dict[str, Any], list[str]]:
        """What they know beyond files, as JSON, and in a word each what of theirs can't be carried over. Comes between
        two calls, while the sandbox lives."""
        ...

    async def resume(self, saved: Mapping[str, Any], lost: Sequence[str]) -> None:
        """Go on from there; comes before the first call. The policy is told what is lost by the tool that lost it."""
        ...


class ToolSet[Opened: OpenTools](Protocol):
    """What a policy may call."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The tools as the Responses API describes functions; also what a row's ``tools`` hold."""
        ...

    async def open(self, sandbox: Sandbox | None, needs: SandboxNeeds | None) -> Opened:
        """The tools of one session.

        Args:
            sandbox: what they work in; fresh. ``None`` if the row needs none.
            needs: what was asked of it.

        Raises:
            CallerError: the row's image lacks what tools need; names the row's field.
            InfrastructureError: they can't be had.
        """
        ...


class OpenSandbox(Protocol):
    """Gives fresh sandboxes, and stops each at the end of its block."""

    def __call__(self, needs: SandboxNeeds | None = None) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox of these needs; by default of the row's own.

        Raises:
            CallerError: the row asks for what can't be had; names its field.
            InfrastructureError: none could be had.
        """
        ...


class Task[Opened: OpenTools, Artefacts](Protocol):
    """One family of tasks. All sessions share it, so it keeps nothing of any of them."""

    @property
    def tools(self) -> ToolSet[Opened]:
        """What the policy may call."""
        ...

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds | None:
        """What sandbox a row takes; ``None`` if it takes none. Called first, and quick.

        Raises:
            CallerError: the row is none of this family's; names the field.
        """
        ...

    async def prepare(self, row: Mapping[str, Any], tools: Opened) -> None:
        """Put there what the policy finds.

        Raises:
            CallerError: the row's sandbox can't be made ready; names the field.
            InfrastructureError: the sandbox did not do it.
        """
        ...

    async def artefacts(self, row: Mapping[str, Any], tools: Opened) -> Artefacts:
        """All that grading will see of what the policy left behind. What is wrong with it is part of it.

        Raises:
            AgentError: the policy used up its sandbox.
            InfrastructureError: the sandbox is gone.
        """
        ...

    async def grade(
        self,
        row: Mapping[str, Any],
        artefacts: Artefacts,
        response: Mapping[str, Any],
        open_sandbox: OpenSandbox,
    ) -> Grade:
        """Judge.

        Args:
            row: as it was seeded.
            artefacts: what was taken out.
            response: the policy's last Responses object.
            open_sandbox: gives sandboxes that the policy never touched.

        Raises:
            TaskError: nobody could be graded on this row.
            InfrastructureError: it could not be graded: ``verifier_error``, or as ``open_sandbox`` says.
        """
        ...


@runtime_checkable
class ResumableTask(Protocol):
    """A task that keeps nothing of a session but what is in its sandbox and its :class:`ResumableTools`: so it can go
    on from there elsewhere, without :meth:`Task.prepare`.

    Attributes:
        resumes: whether that is so.
    """

    resumes: bool


@runtime_checkable
class AsyncCloseable(Protocol):
    """A task that holds something for all sessions, such as processes of its own."""

    async def aclose(self) -> None:
        """Let go of it. Comes when the server ends, after all sessions."""
        ...


class CombinedTools[First: OpenTools, Second: OpenTools]:
    """The tools of one session, from two sets; an :class:`~nemo_gym_prorl.tasks.task.OpenTools`.

    Attributes:
        first: those of the first set, for the task's own use.
        second: those of the second.
    """

    def __init__(self, first: First, second: Second, names_of_first: frozenset[str]) -> None:
        self.first = first
        self.second = second
        self._parts: dict[str, OpenTools] = {"first": first, "second": second}
        self._names_of_first = names_of_first

    @property
    def over(self) -> bool:
        """The policy told either of them that it is done, which ends both."""
        return self.first.over or self.second.over

    async def call(self, tool: str, arguments: object) -> str:
        """Carry out a call. When one of the two is over, that one answers for both."""
        mine = self._parts["first" if tool in self._names_of_first else "second"]
        ended = next((part for part in self._parts.values() if part.over), None)
        return await (ended or mine).call(tool, arguments)

    def tool_use(self) -> Mapping[str, Mapping[str, int]]:
        """How the calls went, by tool, of whichever counts."""
        counting = (part.tool_use() for part in self._parts.values() if isinstance(part, CountsToolCalls))
        return {tool: counts for used in counting for tool, counts in used.items()}

    async def save(self) -> tuple[dict[str, Any], list[str]]:
        """Of both, where they can."""
        resumable = {name: part for name, part in self._parts.items() if isinstance(part, ResumableTools)}
        saved = {name: await part.save() for name, part in resumable.items()}
        return {name: known for name, (known, _) in saved.items()}, [one for _, lost in saved.values() for one in lost]

    async def resume(self, saved: Mapping[str, Any], lost: Sequence[str]) -> None:
        """Both go on."""
        for name, part in self._parts.items():
            if isinstance(part, ResumableTools):
                await part.resume(saved[name], lost)

    async def close(self) -> None:
        """Let go of both, whatever the first says to it."""
        try:
            await self.first.close()
        finally:
            await self.second.close()


class CombinedToolSet[First: OpenTools, Second: OpenTools]:
    """A :class:`~nemo_gym_prorl.tasks.task.ToolSet` of two.

    Raises:
        ValueError: both have a tool of the same name.
    """

    def __init__(self, first: ToolSet[First], second: ToolSet[Second]) -> None:
        self._first = first
        self._second = second
        self.schemas: Sequence[Mapping[str, Any]] = [*first.schemas, *second.schemas]
        self._names_of_first = frozenset(schema["name"] for schema in first.schemas)
        if both := self._names_of_first & {schema["name"] for schema in second.schemas}:
            raise ValueError(f"two tools are called {min(both)}")

    async def open(self, sandbox: Sandbox | None, needs: SandboxNeeds | None) -> CombinedTools[First, Second]:
        """Open both; if the second can't be had, the first is closed again.

        Raises:
            CallerError: the row's image lacks what tools need; names the row's field.
            InfrastructureError: they can't be had.
        """
        first = await self._first.open(sandbox, needs)
        try:
            second = await self._second.open(sandbox, needs)
        except BaseException:
            await first.close()
            raise
        return CombinedTools(first, second, self._names_of_first)
