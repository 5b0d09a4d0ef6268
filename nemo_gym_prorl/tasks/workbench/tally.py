# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How a policy's tool calls went, as numbers for whoever looks at trajectories. Pure.

Everything is read from the observation, which is all that the policy saw as well: a call that it could take for a
success counts as one. Nothing inside a sandbox can forge what is read (:mod:`.observations`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass


_HAVE_STATUS = frozenset({"bash", "python"})

_TROUBLE = ("Error: ", "Error in the arguments")

_STATUS = re.compile(r"\[(?P<status>[^\[\];]*)(?P<notes>(?:;[^\[\]]*)?)\]$")
_CUT = re.compile(r"; [0-9]+ bytes omitted")


@dataclass(slots=True)
class ToolCounts:
    """Of one tool.

    Attributes:
        calls: all of them.
        errors: not carried out, or ended with an error: wrong arguments, an exit code that is not 0, an exception.
        timeouts: ended because their time was up; errors as well.
        cut: observations of ``bash`` and ``python`` of which the middle is left out.
    """

    calls: int = 0
    errors: int = 0
    timeouts: int = 0
    cut: int = 0


class Tally:
    """Of one session."""

    def __init__(self) -> None:
        self._tools: dict[str, ToolCounts] = {}

    def count(self, tool: str, observation: str) -> None:
        """Count a call that was answered with this."""
        counts = self._tools.setdefault(tool, ToolCounts())
        counts.calls += 1
        said = _STATUS.match(observation, observation.rfind("\n") + 1) if tool in _HAVE_STATUS else None
        status = said["status"] if said else ""
        counts.timeouts += status.startswith("timed out")
        counts.cut += bool(said and _CUT.search(said["notes"]))
        failed = status == "error" or status.startswith("timed out")
        failed |= status.startswith("exit code: ") and status != "exit code: 0"
        counts.errors += failed or (not status and observation.startswith(_TROUBLE))

    def resume(self, counted: Mapping[str, Mapping[str, int]]) -> None:
        """Go on from what :meth:`as_json` gave."""
        self._tools = {tool: ToolCounts(**counts) for tool, counts in counted.items()}

    def as_json(self) -> Mapping[str, Mapping[str, int]]:
        """By tool, for a rollout's row."""
        return {tool: asdict(counts) for tool, counts in self._tools.items()}
