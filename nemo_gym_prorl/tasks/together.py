# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Two tool sets as one: tools of a sandbox beside tools that need none, say. For three, put a pair into a pair.

A set that needs no sandbox is handed the row's all the same, and leaves it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import CountsCalls, OpenTools, ResumableTools, SandboxNeeds, ToolSet


class OpenTogether[First: OpenTools, Second: OpenTools]:
    """The tools of one session, from two sets; an :class:`~nemo_gym_prorl.tasks.task.OpenTools`.

    Attributes:
        first: those of the first set, for the task's own use.
        second: those of the second.
    """

    def __init__(self, first: First, second: Second, names_of_first: frozenset[str]) -> None:
        self.first = first
        self.second = second
        self._names_of_first = names_of_first

    @property
    def over(self) -> bool:
        """The policy told either of them that it is done, which ends both."""
        return self.first.over or self.second.over

    async def call(self, tool: str, arguments: object) -> str:
        """Carry out a call. When one of the two is over, that one answers for both."""
        mine: OpenTools = self.first if tool in self._names_of_first else self.second
        ended = next((part for part in (self.first, self.second) if part.over), None)
        return await (ended or mine).call(tool, arguments)

    def tool_use(self) -> Mapping[str, Mapping[str, int]]:
        """How the calls went, by tool, of whichever counts."""
        used: dict[str, Mapping[str, int]] = {}
        parts: tuple[OpenTools, ...] = (self.first, self.second)
        for part in parts:
            if isinstance(part, CountsCalls):
                used |= part.tool_use()
        return used

    async def save(self) -> tuple[dict[str, Any], list[str]]:
        """Of both, where they can."""
        saved: dict[str, Any] = {}
        lost: list[str] = []
        parts: dict[str, OpenTools] = {"first": self.first, "second": self.second}
        for name, part in parts.items():
            if isinstance(part, ResumableTools):
                saved[name], gone = await part.save()
                lost += gone
        return saved, lost

    async def resume(self, saved: Mapping[str, Any], lost: Sequence[str]) -> None:
        """Both go on."""
        parts: dict[str, OpenTools] = {"first": self.first, "second": self.second}
        for name, part in parts.items():
            if isinstance(part, ResumableTools):
                await part.resume(saved[name], lost)

    async def close(self) -> None:
        """Let go of both, whatever the first says to it."""
        try:
            await self.first.close()
        finally:
            await self.second.close()


class Together[First: OpenTools, Second: OpenTools]:
    """A :class:`~nemo_gym_prorl.tasks.task.ToolSet` of two.

    Raises:
        ValueError: both have a tool of the same name.
    """

    def __init__(self, first: ToolSet[First], second: ToolSet[Second]) -> None:
        self._first = first
        self._second = second
        self._names_of_first = frozenset(schema["name"] for schema in first.schemas)
        if both := self._names_of_first & {schema["name"] for schema in second.schemas}:
            raise ValueError(f"two tools are called {min(both)}")

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The tools of the first set, then those of the second."""
        return [*self._first.schemas, *self._second.schemas]

    async def open(self, sandbox: Sandbox | None, needs: SandboxNeeds | None) -> OpenTogether[First, Second]:
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
        return OpenTogether(first, second, self._names_of_first)
