# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Problems with tests by brute force: right programs pass, each wrong one fails, in real containers."""

import asyncio
import os

import pytest

from tests.tasks.code.conftest import Judge
from tests.tasks.code.problems import CONTESTS
from tests.tasks.code.problems.contest import TESTS, Contest


pytestmark = [pytest.mark.sandbox, pytest.mark.asyncio(loop_scope="module")]


async def all_at(limit: int, judge: Judge, programs: list[tuple[Contest, str]]) -> list[str]:
    gate = asyncio.Semaphore(limit)

    async def one(contest: Contest, source: str) -> str:
        async with gate:
            return (await judge(contest.problem, source)).verdict

    return await asyncio.gather(*(one(contest, source) for contest, source in programs))


async def test_every_solution_passes_and_they_differ(judge: Judge) -> None:
    assert len({contest.name for contest in CONTESTS}) == len(CONTESTS) >= 35
    assert len({contest.solution for contest in CONTESTS}) == len(CONTESTS)
    verdicts = await all_at(2, judge, [(contest, contest.solution) for contest in CONTESTS])
    wrong = {contest.name: verdict for contest, verdict in zip(CONTESTS, verdicts, strict=True) if verdict != "passed"}
    assert wrong == {}


@pytest.mark.longer("every mistake of every problem; else one of each")
async def test_no_wrong_program_passes(judge: Judge) -> None:
    most = None if os.environ.get("PRORL_TEST_LONG") else 1
    wrong = [(contest, mutant) for contest in CONTESTS for mutant in contest.mutants[:most]]
    verdicts = await all_at(2, judge, wrong)
    passed = [contest.name for (contest, _), verdict in zip(wrong, verdicts, strict=True) if verdict == "passed"]
    assert passed == []
    assert set(verdicts) <= {"wrong_answer", "crashed"}


async def test_a_share_of_the_tests(judge: Judge) -> None:
    contest = next(contest for contest in CONTESTS if contest.name == "palindrome")
    grade = await judge(contest.problem, contest.mutants[0], rule="fraction")
    report = grade.fields["tests"]
    assert report["run"] == TESTS
    assert 0 < grade.reward == report["passed"] / TESTS < 1
    assert len(report["failures"]) == min(20, TESTS - report["passed"])
    assert not grade.passed
