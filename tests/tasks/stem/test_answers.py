# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rules, whole messages through extraction, rules and judge, and cheats.

A row of ``answers.jsonl`` has an expected answer, an answer, and the ruling. A row of ``messages.jsonl`` has a last
message and the verdict.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio

from nemo_gym_prorl.tasks.math.checker import MathChecker
from nemo_gym_prorl.tasks.stem.judge import AskModel, Judge
from nemo_gym_prorl.tasks.stem.problems import problem_of, row_for
from nemo_gym_prorl.tasks.stem.search import SearchSettings, SearchTool, TavilySearch
from nemo_gym_prorl.tasks.stem.task import Rules, Stem
from nemo_gym_prorl.tasks.task import Grade
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits
from tests.prorl_code.conftest import saying
from tests.tasks.rows_file import table
from tests.tasks.stem.judges import asked, honest


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def formulas() -> AsyncIterator[MathChecker]:
    checker = MathChecker()
    yield checker
    await checker.aclose()


async def graded(formulas: MathChecker, ask: AskModel, row: Mapping[str, Any], text: str) -> Grade:
    search = SearchTool(TavilySearch("no key"), SearchSettings())
    task = Stem("/sandbox", ToolLimits(), search, Rules(formulas), Judge(ask, "judge"))
    return await task.grade(row, None, saying(text), None)  # type: ignore[arg-type]  # takes no sandbox


async def test_rules_say_of_answers_what_the_table_says(formulas: MathChecker) -> None:
    rules = Rules(formulas)

    async def said(row: Mapping[str, Any]) -> str | None:
        problem = {"question": row.get("question", "What is it?"), "expected_answer": row["expected"]}
        options = {"options": [row["options"]]} if "options" in row else {}
        right, why = await rules.check(problem_of(problem | options), row["answer"])
        allowed = {True: ["right"], False: ["wrong", "not right"], None: ["undecided", "not right"]}[right]
        return None if row["ruling"] in allowed else f"{row}: {right}, {why}"

    mistakes = await asyncio.gather(*map(said, table(__file__, "answers.jsonl")))
    assert [one for one in mistakes if one] == []


@pytest.mark.parametrize("said", table(__file__, "messages.jsonl"), ids=lambda said: said["message"][:40])
async def test_an_answer_as_people_say_it(formulas: MathChecker, said: Mapping[str, Any]) -> None:
    row = row_for(said["question"], said["expected"], said.get("options"))
    grade = await graded(formulas, asked(honest), row, said["message"])
    assert (grade.verdict, grade.reward) == (said["verdict"], float(said["verdict"] == "right")), grade


@pytest.mark.parametrize(
    ("expected", "text", "verdict"),
    [
        ("mitochondria", "\\boxed{mitochondria}" + " hm" * 200_000 + "\\boxed{ribosomes}", "wrong"),
        ("it doubles", "\\boxed{" + "; ".join(f"{n} percent" for n in range(500)) + "; it doubles}", "too_long"),
    ],
    ids=["hidden in a flood", "a book of answers"],
)
async def test_a_flood_does_not_pay(formulas: MathChecker, expected: str, text: str, verdict: str) -> None:
    grade = await graded(formulas, asked(honest), row_for("Which is it?", expected), text)
    assert (grade.reward, grade.verdict) == (0.0, verdict), grade
