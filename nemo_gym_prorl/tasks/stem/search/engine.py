# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a search engine is to the tool: a question in, ranked passages out, and two ways to fail.

A question that the engine does not take is the policy's mistake, and an observation. An engine that can't be had is
ours: a policy that reads "no results" where there was no search learns that searching is useless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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
