# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``search`` as a tool, and what a search engine is to it: a question in, ranked passages out, and two ways to fail.

A question that the engine does not take is the policy's mistake, and an observation. An engine that can't be had is
ours: a policy that reads "no results" where there was no search learns that searching is useless. The tool runs in the
server's process: the sandbox has no network, and needs none for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import Field

from nemo_gym_prorl.tasks.arguments import Arguments, BadArguments, parse_arguments, tool_schema
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import SandboxNeeds
from nemo_gym_prorl.tasks.workbench.tools import Tally


MAX_QUERY_CHARS = 400
MAX_PAGE = 4
"""Beyond these no engine that we know of gives more: a hosted one has 20 results to a query, or 400 characters."""

NOTHING = "No results. Try other words."
NO_MORE = "No more results."


class BadQuery(Exception):
    """The engine does not take this query; the message is for the policy."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text that can be found.

    Attributes:
        text: what it says.
        title: what it is called; may be empty.
        source: where it is from: an address, a name; may be empty.
    """

    text: str
    title: str = ""
    source: str = ""


class SearchEngine(Protocol):
    """Finds passages."""

    async def prepare(self) -> None:
        """Make sure that it can be asked; called before each session, so all but the first call must be quick.

        Raises:
            InfrastructureError: it can't; says how to mend it.
        """
        ...

    async def search(self, query: str, limit: int) -> Sequence[Passage]:
        """The best passages, best first; none if nothing fits.

        Args:
            query: not empty.
            limit: the most that are wanted.

        Raises:
            BadQuery: the engine does not take it.
            InfrastructureError: the engine can't be had.
        """
        ...

    async def aclose(self) -> None:
        """Let go of files and connections."""
        ...


class SearchArguments(Arguments):
    """Search a library of texts. The answer is a page of passages, best first. A few telling words find more than a \
whole question."""

    query: str = Field(min_length=1, max_length=MAX_QUERY_CHARS, description="What to look for.")
    page: int | None = Field(default=None, ge=1, le=MAX_PAGE, description="Which page of the results; default 1.")

    def lacks(self) -> str | None:
        """Words."""
        return None if self.query.strip() else "search needs a query"


SCHEMA = tool_schema("search", SearchArguments)
"""The tool as the Responses API describes functions."""


@dataclass(frozen=True, slots=True)
class PageLimits:
    """Bounds of a page of results.

    Attributes:
        results: passages on it.
        passage_chars: longest text of one.
    """

    results: int = 5
    passage_chars: int = 1500


class OpenSearch:
    """The tool of one session."""

    over = False

    def __init__(self, engine: SearchEngine, limits: PageLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._tally = Tally()

    async def call(self, tool: str, arguments: object) -> str:
        """A page of results, or what is wrong with the call.

        Raises:
            InfrastructureError: the engine can't be had.
        """
        observation = await self._call(tool, arguments)
        self._tally.count(tool, observation)
        return observation

    def tool_use(self) -> Mapping[str, Mapping[str, int]]:
        """How the calls so far went, by tool."""
        return self._tally.as_json()

    async def save(self) -> tuple[dict[str, Any], list[str]]:
        """How the calls went."""
        return {"tally": self.tool_use()}, []

    async def resume(self, saved: Mapping[str, Any], lost: Sequence[str]) -> None:
        """Count on."""
        self._tally.resume(saved["tally"])

    async def _call(self, tool: str, arguments: object) -> str:
        try:
            asked = parse_arguments(tool, SearchArguments, arguments)
        except BadArguments as error:
            return str(error)
        before = ((asked.page or 1) - 1) * self._limits.results
        try:
            found = await self._engine.search(asked.query.strip(), before + self._limits.results)
        except BadQuery as error:
            return f"Error: {error}"
        return render(found[before : before + self._limits.results], before, self._limits)

    async def close(self) -> None:
        """There is nothing to let go of: the engine is everybody's."""


class SearchTool:
    """A :class:`~nemo_gym_prorl.tasks.task.ToolSet` of ``search`` alone."""

    schemas: Sequence[Mapping[str, Any]] = (SCHEMA,)

    def __init__(self, engine: SearchEngine, limits: PageLimits) -> None:
        self._engine = engine
        self._limits = limits

    async def open(self, sandbox: Sandbox | None, needs: SandboxNeeds | None) -> OpenSearch:
        """The tool of a session, when the engine can be asked.

        Raises:
            InfrastructureError: it can't.
        """
        await self._engine.prepare()
        return OpenSearch(self._engine, self._limits)


def render(passages: Sequence[Passage], before: int, limits: PageLimits) -> str:
    """A page as the policy reads it: numbered, each of bounded length.

    Args:
        passages: of this page.
        before: how many results come before it.
        limits: bounds.
    """
    if not passages:
        return NO_MORE if before else NOTHING
    parts = []
    for number, passage in enumerate(passages, before + 1):
        head = " - ".join(_line(part) for part in (passage.title, passage.source) if part.strip())
        parts.append(f"[{number}] {head}".rstrip() + f"\n{_cut(passage.text.strip(), limits.passage_chars)}")
    return "\n\n".join(parts)


def _line(text: str) -> str:
    return _cut(" ".join(text.split()), 200)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit].rstrip()} [...]"
