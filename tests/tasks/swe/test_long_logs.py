# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tests that print more than a log may hold: who is charged, and what is read all the same."""

import pytest

from nemo_gym_prorl.failures import TaskError
from nemo_gym_prorl.tasks.swe.grading import seed_of
from nemo_gym_prorl.tasks.swe.instance import Row
from nemo_gym_prorl.tasks.swe.testing import TestLimits
from tests.tasks.swe import tally
from tests.tasks.swe.test_cheating import append


pytestmark = pytest.mark.sandbox

SMALL = TestLimits(timeout_s=60, log_kib=64)
FLOOD = "python3 -c \"print(('x' * 99 + '\\n') * {lines})\"\n"
LOUD = """
_parse = parse
def parse(text):
    print("PASSED\\n" * 10**6)
    return _parse(text)
"""
BY_LOG_ONLY = {"runner": "log"}


async def test_forty_megabytes_of_output_before_pytests_summary_are_no_fault() -> None:
    command = FLOOD.format(lines=400_000) + tally.row()["swe"]["test_command"]
    grade, _ = await tally.play(tally.APPLY_FIX, test_command=command)
    assert (grade.reward, grade.verdict) == (1.0, "resolved"), grade


async def test_an_unfinished_fix_is_no_better_for_its_flood() -> None:
    grade, _ = await tally.play(append("tally/money.py", LOUD), task=tally.make_task(tests=SMALL))
    assert (grade.reward, grade.verdict) == (0.0, "failed"), grade


async def test_a_row_whose_own_fix_prints_too_much_is_not_charged() -> None:
    command = FLOOD.format(lines=2000) + tally.row()["swe"]["test_command"]
    with pytest.raises(TaskError, match="its own fix neither"):
        await tally.play(tally.APPLY_FIX, task=tally.make_task(tests=SMALL), test_command=command, **BY_LOG_ONLY)


async def test_a_flood_of_the_policys_own_is_charged() -> None:
    commands = f"{tally.APPLY_FIX}\n{append('tally/money.py', LOUD)}"
    grade, _ = await tally.play(commands, task=tally.make_task(tests=SMALL), **BY_LOG_ONLY)
    assert (grade.reward, grade.verdict) == (0.0, "log_unreadable"), grade


def test_how_tests_are_changed_is_decided_by_the_row_alone() -> None:
    def seed(**swe: str) -> str:
        return seed_of(Row.model_validate(tally.row(**swe)))

    assert seed() == seed()
    assert len({seed(), seed(patch=""), seed(test_patch=tally.TEST_PATCH + "\n")}) == 3
