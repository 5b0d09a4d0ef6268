# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Mathematical problems as a :class:`~nemo_gym_prorl.tasks.task.Task`: Python to compute with, an answer that is
compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_gym_prorl.failures import CallerError, TaskError
from nemo_gym_prorl.tasks.final_message import final_message
from nemo_gym_prorl.tasks.math.checker import MathChecker
from nemo_gym_prorl.tasks.math.rows import TOOLS, expected_answer
from nemo_gym_prorl.tasks.task import Grade, OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench.workbench import Workbench
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace


QUESTION_FILE = "question.txt"


class Math:
    """The task.

    Args:
        root: a folder of each sandbox that uploads reach; the agent works in ``<root>/workspace``.
        tools: bounds of one tool call.
        checker: compares answers; this task ends it.
    """

    resumes = True

    def __init__(self, root: str, tools: ToolLimits, checker: MathChecker) -> None:
        self._checker = checker
        self.tools = Workbench(TOOLS, f"{root.rstrip('/')}/workspace", tools)

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        """One like any other.

        Raises:
            CallerError: the row has no question or no expected answer.
        """
        expected_answer(row)
        return SandboxNeeds()

    async def prepare(self, row: Mapping[str, Any], tools: Workspace) -> None:
        """See that somebody could be right, before anybody tries; the question goes into the working folder."""
        try:
            await self._checker.require_gradeable(expected_answer(row))
        except TaskError as error:
            raise CallerError(error.reason, field="expected_answer") from error
        await tools.write({QUESTION_FILE: row["question"]})

    async def artefacts(self, row: Mapping[str, Any], tools: Workspace) -> None:
        """None: the answer is in the last message, and nothing in the sandbox can speak for it."""

    async def grade(
        self, row: Mapping[str, Any], artefacts: None, response: Mapping[str, Any], open_sandbox: OpenSandbox
    ) -> Grade:
        """Compare the last message's answer with the expected one."""
        checked = await self._checker.check(expected_answer(row), final_message(response), row["question"])
        return Grade(float(checked.right), checked.verdict, checked.detail, {"extracted_answer": checked.extracted})

    async def aclose(self) -> None:
        """End the checker."""
        await self._checker.aclose()
