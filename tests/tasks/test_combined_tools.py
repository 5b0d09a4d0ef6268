# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Union of two tool sets."""

from collections.abc import Mapping

import pytest

from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import CombinedToolSet, SandboxNeeds


class Opened:
    def __init__(self, name: str) -> None:
        self.name = name
        self.over = False
        self.closed = 0
        self.calls = 0

    async def call(self, tool: str, arguments: object) -> str:
        self.calls += 1
        return f"{self.name} did {tool}"

    def tool_use(self) -> Mapping[str, Mapping[str, int]]:
        return {self.name: {"calls": self.calls}}

    async def close(self) -> None:
        self.closed += 1
        if self.name == "broken":
            raise OSError("broken")


class Tools:
    def __init__(self, name: str, *tools: str, fails: bool = False) -> None:
        self.schemas = [{"name": tool} for tool in tools]
        self.name = name
        self.fails = fails
        self.opened: list[Opened] = []

    async def open(self, sandbox: Sandbox | None, needs: SandboxNeeds | None) -> Opened:
        if self.fails:
            raise OSError("none to be had")
        self.opened.append(Opened(self.name))
        return self.opened[-1]


async def test_call_is_routed_by_tool_name() -> None:
    both = await CombinedToolSet(Tools("one", "a", "b"), Tools("two", "c")).open(None, None)
    assert [await both.call(tool, {}) for tool in "abc"] == ["one did a", "one did b", "two did c"]
    assert both.tool_use() == {"one": {"calls": 2}, "two": {"calls": 1}}
    assert not both.over
    both.first.over = True
    assert both.over
    assert await both.call("c", {}) == "one did c", "who is over answers for both"


async def test_both_tool_sets_are_closed_on_errors() -> None:
    both = await CombinedToolSet(Tools("broken", "a"), Tools("two", "c")).open(None, None)
    with pytest.raises(OSError, match="broken"):
        await both.close()
    assert (both.first.closed, both.second.closed) == (1, 1)
    first = Tools("one", "a")
    with pytest.raises(OSError, match="none to be had"):
        await CombinedToolSet(first, Tools("two", "c", fails=True)).open(None, None)
    assert [opened.closed for opened in first.opened] == [1]


async def test_sets_nest_and_names_are_unique() -> None:
    three = CombinedToolSet(CombinedToolSet(Tools("one", "a"), Tools("two", "b")), Tools("three", "c"))
    assert [schema["name"] for schema in three.schemas] == ["a", "b", "c"]
    opened = await three.open(None, None)
    assert [await opened.call(tool, {}) for tool in "abc"] == ["one did a", "two did b", "three did c"]
    with pytest.raises(ValueError, match="both tool sets have a tool named 'a'"):
        CombinedToolSet(three, Tools("four", "a"))
