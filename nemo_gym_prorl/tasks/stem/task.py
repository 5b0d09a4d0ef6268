# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Questions of science as a :class:`~nemo_gym_prorl.tasks.task.Task`: search and Python, and an answer in words.

The answer stands in the policy's last message, so nothing is taken out of the sandbox, and grading takes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym_prorl.failures import CallerError, TaskError
from nemo_gym_prorl.tasks.final_answer import MAX_ANSWER_CHARS, final_answer, final_message
from nemo_gym_prorl.tasks.stem.judge import Judge, Verdict
from nemo_gym_prorl.tasks.stem.problems import WORKBENCH_TOOLS, Kind, problem_of
from nemo_gym_prorl.tasks.stem.rules import Ruled, Rules, Ruling
from nemo_gym_prorl.tasks.stem.search import OpenSearch, SearchTool
from nemo_gym_prorl.tasks.task import Grade, HasEnd, OpenSandbox, OpenTogether, SandboxNeeds, Together
from nemo_gym_prorl.tasks.workbench.workbench import Workbench
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace


QUESTION_FILE = "question.txt"

Tools = OpenTogether[Workspace, OpenSearch]


class Stem:
    """The task.

    Args:
        root: a folder of each sandbox; the policy's Python works in ``<root>/workspace``.
        tools: bounds of one call of Python.
        search: the other tool.
        rules: the check that comes first.
        judge: for what rules leave undecided; ``None`` if there is none, and then rows that can't do without one are
            refused.
        holds: what is to be let go of at the end.
    """

    resumes = True

    def __init__(
        self,
        root: str,
        tools: ToolLimits,
        search: SearchTool,
        rules: Rules,
        judge: Judge | None = None,
        holds: Sequence[HasEnd] = (),
    ) -> None:
        workbench = Workbench(WORKBENCH_TOOLS, f"{root.rstrip('/')}/workspace", tools)
        self.tools = Together(workbench, search)
        self._rules = rules
        self._judge = judge
        self._holds = holds

    async def aclose(self) -> None:
        """Let go of engine, checker and judge."""
        for held in self._holds:
            await held.aclose()

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        """One like any other.

        Raises:
            CallerError: the row is none of this family's, or takes a judge where there is none.
        """
        if problem_of(row).kind is Kind.TEXT and self._judge is None:
            raise CallerError(
                "is free text, which takes a judge, and this server has none (judge_model_server)",
                field="expected_answer",
            )
        return SandboxNeeds()

    async def prepare(self, row: Mapping[str, Any], tools: Tools) -> None:
        """Put the question into the working folder, which there is only then. The first examines the judge.

        Raises:
            CallerError: the expected formula can't be read, and there is no judge to compare it.
            InfrastructureError: the judge can't be used; names ``judge_model_server``.
        """
        problem = problem_of(row)
        if self._judge is not None:
            await self._judge.require_strict()
        if problem.kind is Kind.FORMULA and self._judge is None:
            try:
                await self._rules.require_readable(problem.expected)
            except TaskError as error:
                raise CallerError(error.reason, field="expected_answer") from error
        await tools.first.write({QUESTION_FILE: problem.question})

    async def artefacts(self, row: Mapping[str, Any], tools: Tools) -> None:
        """Nothing leaves the sandbox."""

    async def grade(
        self, row: Mapping[str, Any], artefacts: None, response: Mapping[str, Any], open_sandbox: OpenSandbox
    ) -> Grade:
        """By rules, and what they leave undecided by the judge.

        Raises:
            InfrastructureError: the checker of formulas or the judge failed.
        """
        problem = problem_of(row)
        answer = final_answer(final_message(response), problem.letters) or None
        if answer is None:
            return Grade(0.0, "no_answer", "the last message has no \\boxed{}, and does not say what the answer is")
        told: dict[str, Any] = {"extracted_answer": answer[:MAX_ANSWER_CHARS], "checked_by": problem.kind.value}
        if len(answer) > MAX_ANSWER_CHARS:
            return Grade(0.0, "too_long", f"the answer is longer than {MAX_ANSWER_CHARS} characters", told)
        ruled = await self._rules.check(problem, answer)
        if ruled.ruling is Ruling.UNDECIDED and self._judge is not None:
            judged = await self._judge.judge(problem, answer)
            told |= {"checked_by": "judge", "judge_reply": judged.reply}
            verdict, detail = _JUDGED[judged.verdict]
            return Grade(float(judged.verdict is Verdict.SAME), verdict, detail, told)
        return _by_rules(ruled, told)


def _by_rules(ruled: Ruled, told: Mapping[str, Any]) -> Grade:
    right = ruled.ruling is Ruling.RIGHT
    return Grade(float(right), "right" if right else "wrong", ruled.why, told)


_JUDGED = {
    Verdict.SAME: ("right", "the judge says that it is the same"),
    Verdict.DIFFERENT: ("wrong", "the judge says that it is another answer"),
    Verdict.STEERED: ("steered", "the answer talks to the judge"),
}
