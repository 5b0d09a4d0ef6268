# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Answers that a policy wrote to break the grader earn 0 and are never a failure, which would be masked."""

import asyncio

import pytest

from nemo_gym_prorl.tasks.math.checker import MathChecker
from nemo_gym_prorl.tasks.math.task import Math
from nemo_gym_prorl.tasks.stem.problems import row_for
from nemo_gym_prorl.tasks.stem.search import SearchSettings, SearchTool, TavilySearch
from nemo_gym_prorl.tasks.stem.task import Rules, Stem
from nemo_gym_prorl.tasks.task import ExtractedFile, UnreadableAnswer
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits
from tests.prorl_code.conftest import saying


NO_JSON = [
    None, b"", b'"\xff"', '{"answer": 3}'.encode("utf-16"), b"[" * 90_000, b"[" * 500 + b"]" * 500, b"NaN",
    b"[-Infinity]", b"1e999", b"9" * 400, b"9" * 5000, b"18446744073709551617", b'"\\ud800"', b"1 2",
]  # fmt: skip


@pytest.mark.parametrize("written", NO_JSON, ids=lambda written: repr(written)[:30])
def test_json_of_a_policy_is_read_or_unreadable(written: bytes | None) -> None:
    with pytest.raises(UnreadableAnswer):
        ExtractedFile(written).json()
    assert ExtractedFile(b'{"a": 1, "a": [18446744073709551615, 0.1]}').json() == {"a": [2**64 - 1, 0.1]}


HOSTILE = [
    "9" * 400, "9" * 900 + "/7", "1e999", "NaN", "\\infty", "[" * 900, "\\frac{" * 150, "\\frac{1}{0}", "\\ud800",
    "3 \\pmod{" + "9" * 900 + "}", "101_{" + "9" * 900 + "}", "10^{10^{10}}", "9" * 308 + " km", "1e308 °F", "²",
]  # fmt: skip


async def test_no_family_fails_on_a_hostile_answer() -> None:
    checker = MathChecker()
    try:
        stem = Stem("/sandbox", ToolLimits(), SearchTool(TavilySearch("no key"), SearchSettings()), Rules(checker))
        tasks = [
            (Math("/sandbox", ToolLimits(), checker), {"question": "How many?", "expected_answer": "7"}),
            *((stem, row_for("How much is it?", expected)) for expected in ("5 kg", "25 °C", "102")),
        ]
        grading = (
            task.grade(row, None, saying(f"\\boxed{{{answer}}}"), None)  # type: ignore[arg-type]  # takes no sandbox
            for task, row in tasks
            for answer in HOSTILE
        )
        assert {grade.reward for grade in await asyncio.gather(*grading)} == {0.0}
    finally:
        await checker.aclose()
