# SPDX-License-Identifier: Apache-2.0
"""Problems with tests as a :class:`~nemo_gym_prorl.tasks.task.Task`, beside HumanEval's in one environment.

A row with tools has its solution in a file. A row without is answered in text, as NeMo Gym's ``code_gen`` rows are:
the last block of code counts.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_gym_prorl.tasks.code.grading import CodeLimits, RewardRule, Verdict, failed, grade
from nemo_gym_prorl.tasks.code.humaneval import SOLUTION_FILE
from nemo_gym_prorl.tasks.code.humaneval_task import MAX_SOLUTION_BYTES, HumanEval
from nemo_gym_prorl.tasks.code.rows import find_tests_file, has_tests, read_metadata, read_problem
from nemo_gym_prorl.tasks.final_message import final_message
from nemo_gym_prorl.tasks.task import Grade, OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench.workspace import Taken, Workspace


MAX_SOLUTION_FIELD = 64 * 1024
"""Characters of the solution in the rollout's row."""

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


class ProgrammingProblems:
    """The task.

    Args:
        humaneval: has the tools, and the rows that name their problem.
        root: a folder of each sandbox that uploads reach.
        limits: bounds of one candidate.
        rule: what part of the tests earns what.
        tests_folder: where the files are that rows name.
    """

    def __init__(
        self, humaneval: HumanEval, root: str, limits: CodeLimits, rule: RewardRule, tests_folder: Path | None
    ) -> None:
        self._humaneval = humaneval
        self._root = root
        self._limits = limits
        self._rule: RewardRule = rule
        self._tests_folder = tests_folder
        self.tools = humaneval.tools

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        """One like any other.

        Raises:
            CallerError: the row is no problem of either kind.
        """
        if not has_tests(row):
            return self._humaneval.needs(row)
        metadata = read_metadata(row)
        if metadata.tests_file is None:
            read_problem(metadata, None)
        else:
            find_tests_file(metadata, self._tests_folder)
        return SandboxNeeds()

    async def prepare(self, row: Mapping[str, Any], tools: Workspace) -> None:
        """Put the stub there, if there is one."""
        if has_tests(row):
            await tools.write({SOLUTION_FILE: ""})
        else:
            await self._humaneval.prepare(row, tools)

    async def artefacts(self, row: Mapping[str, Any], tools: Workspace) -> Taken:
        """The solution's file."""
        return await tools.take(SOLUTION_FILE, limit=MAX_SOLUTION_BYTES)

    async def grade(
        self, row: Mapping[str, Any], artefacts: Taken, response: Mapping[str, Any], open_sandbox: OpenSandbox
    ) -> Grade:
        """Run the problem's tests; see :mod:`.grading`."""
        if not has_tests(row):
            return await self._humaneval.grade(row, artefacts, response, open_sandbox)
        source = _source(artefacts) if _has_tools(row) else last_block(final_message(response))
        if not source.strip():
            return failed(Verdict.NO_SOLUTION, artefacts.problem or f"{SOLUTION_FILE} holds no Python")
        problem = await asyncio.to_thread(read_problem, read_metadata(row), self._tests_folder)
        graded = await grade(open_sandbox, problem, source, self._limits, self._rule, self._root)
        return Grade(
            graded.reward, graded.verdict, graded.detail, {**graded.fields, "solution": source[:MAX_SOLUTION_FIELD]}
        )


def last_block(text: str) -> str:
    """The last fenced block of code; all of the text if there is none."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def _has_tools(row: Mapping[str, Any]) -> bool:
    return bool((row.get("responses_create_params") or {}).get("tools"))


def _source(artefacts: Taken) -> str:
    try:
        return (artefacts.content or b"").decode()
    except UnicodeDecodeError:
        return ""
