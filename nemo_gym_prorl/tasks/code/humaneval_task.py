# SPDX-License-Identifier: Apache-2.0
"""HumanEval as a :class:`~nemo_gym_prorl.tasks.task.Task`: a stub to complete with the tools of the workbench."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_gym_prorl.tasks.code.humaneval import HANDING_IN, SOLUTION_FILE, TOOLS, problem_for
from nemo_gym_prorl.tasks.code.humaneval_grading import GradingLimits, Reason, grade, judged
from nemo_gym_prorl.tasks.task import Grade, OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench.workbench import Workbench
from nemo_gym_prorl.tasks.workbench.workspace import Taken, ToolLimits, Workspace


MAX_SOLUTION_BYTES = 256 * 1024
"""Longest solution that is graded."""

HANDED_IN = f"Submitted. {SOLUTION_FILE} is tested as it is now. The task is over: answer without calling a tool."


class HumanEval:
    """The task.

    Args:
        root: a folder of each sandbox that uploads reach; the agent works in ``<root>/workspace``.
        tools: bounds of one tool call.
        grading: bounds of one candidate.
    """

    def __init__(self, root: str, tools: ToolLimits, grading: GradingLimits) -> None:
        self._root = root.rstrip("/")
        self._grading = grading
        self.tools = Workbench(TOOLS, f"{self._root}/workspace", tools, handing_in=HANDING_IN, handed_in=HANDED_IN)

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        """One like any other.

        Raises:
            CallerError: the row names no problem.
        """
        problem_for(row)
        return SandboxNeeds()

    async def prepare(self, row: Mapping[str, Any], tools: Workspace) -> None:
        """Put the stub there."""
        await tools.write({SOLUTION_FILE: problem_for(row).stub})

    async def artefacts(self, row: Mapping[str, Any], tools: Workspace) -> Taken:
        """The solution's file."""
        return await tools.take(SOLUTION_FILE, limit=MAX_SOLUTION_BYTES)

    async def grade(
        self,
        row: Mapping[str, Any],
        artefacts: Taken,
        response: Mapping[str, Any],
        open_sandbox: OpenSandbox,
    ) -> Grade:
        """Run the problem's tests; see :mod:`.grading`."""
        if artefacts.content is None:
            return judged(Reason.NO_SOLUTION, artefacts.problem or "")
        try:
            source = artefacts.content.decode()
        except UnicodeDecodeError:
            return judged(Reason.NO_SOLUTION, f"{SOLUTION_FILE} is not UTF-8 text")
        return await grade(open_sandbox, problem_for(row), source, self._grading, self._root)
