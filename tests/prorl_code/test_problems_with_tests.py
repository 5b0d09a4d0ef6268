# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Programming problems over HTTP: programs, functions, answers in text."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.cli.scripted.text import Script
from nemo_gym_prorl.tasks.code import convert
from nemo_gym_prorl.tasks.code.code_rows import row_for
from scripts.scripted_turns.code import null, oracle
from tests.prorl_code.conftest import PATHS, RESPONSE, Client, saying, serving
from tests.tasks import containers


pytestmark = pytest.mark.sandbox

SUMS = {"inputs": ["1 2\n", "-5 5\n", "10 20\n"], "outputs": ["3\n", "0\n", "30\n"]}
ADDS = "a, b = map(int, input().split())\nprint(a + b)\n"
SUM_ROW = row_for("Print the sum of two numbers.", {"unit_tests": SUMS}, function=None)
CALLED = {"inputs": ["[1, 2]\n3", "[]\n0"], "outputs": ["[1, 2, 3]", "[0]"], "fn_name": "push"}
CALL_ROW = row_for("Return the list with the number at its end.", {"unit_tests": CALLED}, function="push")


async def play(client: Client, row: dict[str, Any], script: Script) -> dict[str, Any]:
    assert await client.post("/seed_session", row) == (200, PATHS, None)
    for turn in script["turns"]:
        for call in turn["tool_calls"]:
            assert not (await client.tool(call["name"], **call["arguments"])).startswith("Error")
    status, verdict, _ = await client.post("/verify", row | {"response": RESPONSE})
    assert status == 200, verdict
    assert isinstance(verdict, dict)
    return verdict


@pytest.mark.parametrize(
    ("row", "script", "verdict", "passed"),
    [
        (SUM_ROW, oracle(ADDS), "passed", 3),
        (SUM_ROW, null(), "no_solution", None),
        (SUM_ROW, oracle("a, b = map(int, input().split())\nprint(a + max(b, 5))\n"), "wrong_answer", 0),
        (CALL_ROW, oracle("def push(items, item):\n    return [*items, item]\n"), "passed", 2),
    ],
    ids=["oracle", "null", "wrong", "function"],
)
async def test_rewards(client: Client, row: dict[str, Any], script: Script, verdict: str, passed: int | None) -> None:
    before = containers.instances()
    graded = await play(client, row, script)
    assert (graded["verdict"], graded["reward"]) == (verdict, float(verdict == "passed")), graded
    assert graded.get("tests", {}).get("passed") == passed
    assert containers.instances() == before


async def test_row_without_tools_is_answered_in_text(client: Client) -> None:
    row = {"responses_create_params": {"input": "Add."}, "verifier_metadata": {"unit_tests": SUMS}}
    for text, verdict in ((f"So:\n```python\nwrong\n```\nNo:\n```python\n{ADDS}```\n", "passed"), ("", "no_solution")):
        assert (await client.post("/seed_session", row))[0] == 200
        status, graded, _ = await client.post("/verify", row | {"response": saying(text)})
        assert (status, graded["verdict"]) == (200, verdict), graded
        await client.post("/close_session")


async def test_tests_file_and_fractional_reward(tmp_path: Path) -> None:
    row = convert.row_of({"question": "Add.", "input_output": json.dumps(SUMS)}, tmp_path)
    half = oracle("a, b = map(int, input().split())\nprint(max(a + b, 1))\n")
    async with serving(tests_folder=str(tmp_path), reward="fraction") as url, Client(url) as client:
        graded = await play(client, row, half)
    assert (graded["verdict"], graded["reward"]) == ("wrong_answer", 2 / 3)
    assert [failure["test"] for failure in graded["tests"]["failures"]] == [1]
    assert graded["solution"].startswith("a, b = ")
