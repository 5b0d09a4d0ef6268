# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The right program passes each row of a programming problem, and a wrong one none; in a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_gym_prorl.commands.data import records
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.code.convert import row_of
from nemo_gym_prorl.tasks.code.rows import Problem, read_metadata, read_problem
from tests.published.code import CODE
from tests.published.test_sets import written
from tests.tasks.code.conftest import Judge, judge


__all__ = ["judge"]
pytestmark = [pytest.mark.sandbox, pytest.mark.asyncio(loop_scope="module")]

RIGHT = {None: "print(sum(map(int, open(0).read().split())))", "add": "def add(a, b):\n    return a + b"}
WRONG = {None: "print(6)", "add": "def add(a, b):\n    return [a + b] if a == 2 else 6"}
"""A result in a list of its own is right only where sets have such results."""


def problems(folder: Path) -> list[tuple[str, Problem]]:
    found = []
    for one in (one for one in CODE if one.kept):
        (folder / one.name.replace("/", "-")).mkdir()
        for _, record in records(written(folder / one.name.replace("/", "-"), one)):
            try:
                row = row_of(record)
            except CallerError:
                continue
            if "task_id" not in row:  # HumanEval's functions do not add
                found.append((one.name, read_problem(read_metadata(row), None)))
    return found


async def test_the_right_program_passes(judge: Judge, tmp_path: Path) -> None:
    found = problems(tmp_path)
    assert len(found) > 15
    for name, problem in found:
        assert (await judge(problem, RIGHT[problem.function])).verdict == "passed", name
        wrapped = problem.checker.get("wrapped") and problem.function
        assert wrapped or (await judge(problem, WRONG[problem.function])).verdict == "wrong_answer", name
