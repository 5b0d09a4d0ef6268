# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The server over HTTP, with real sandboxes: what an agent server sees."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.tasks.math.task import row_of
from scripts.scripted_turns.math import EXAMPLES, example_rows, scripted_row
from tests.prorl_code.conftest import Client
from tests.tasks.math.conftest import said


pytestmark = pytest.mark.sandbox
ROW = row_of({"problem": "What is $1 + 1$?", "answer": 2})


async def play(client: Client, row: dict[str, Any]) -> dict[str, Any]:
    """A whole rollout of a row with a script; gives what it earned."""
    status, body, _kind = await client.post("/seed_session", row)
    assert status == 200, body
    turns = json.loads(row["responses_create_params"]["metadata"]["script"])["turns"]
    for call in [call for turn in turns for call in turn["tool_calls"]]:
        await client.tool(call["name"], **call["arguments"])
    status, verdict, _kind = await client.post("/verify", row | {"response": said(turns[-1]["content"])})
    assert status == 200, verdict
    assert await client.post("/close_session") == (200, {}, None)
    assert isinstance(verdict, dict)
    return verdict


async def test_python_keeps_its_state_and_has_the_packages(client: Client) -> None:
    assert (await client.post("/seed_session", ROW))[0] == 200
    code = "import numpy, scipy.optimize, sympy\nx = sympy.symbols('x')\nroots = sympy.solve(x**2 - 2, x)"
    assert await client.tool("python", code=code) == "[ok]"
    assert await client.tool("python", code="max(roots)") == "sqrt(2)\n[ok]"
    assert await client.tool("python", code="float(numpy.sqrt(4)) + scipy.optimize.brentq(lambda t: t, -1, 1)") == (
        "2.0\n[ok]"
    )
    assert await client.tool("python", code="open('question.txt').read()") == "'What is $1 + 1$?'\n[ok]"
    assert (await client.tool("python", code="1/0")).endswith("ZeroDivisionError: division by zero\n[error]")
    assert await client.tool("python", restart=True)
    assert "NameError" in await client.tool("python", code="roots")
    status, verdict, _kind = await client.post("/verify", ROW | {"response": said(r"It is \boxed{2}.")})
    assert (status, verdict["reward"], verdict["verdict"], verdict["extracted_answer"]) == (200, 1.0, "right", "2")


async def test_oracle_and_null_policy(client: Client) -> None:
    earned = {
        variant: [await play(client, scripted_row(example, variant)) for example in EXAMPLES]
        for variant in ("oracle", "null")
    }
    assert [one["verdict"] for one in earned["oracle"]] == ["right"] * len(EXAMPLES)
    assert [one["verdict"] for one in earned["null"]] == ["no_answer"] * len(EXAMPLES)
    assert {one["reward"] for one in earned["null"]} == {0.0}


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({}, "question"),
        ({"question": "?"}, "expected_answer"),
        ({"question": "?", "expected_answer": "  "}, "expected_answer"),
        ({"question": "?", "expected_answer": r"\boxed{}"}, "expected_answer"),
        ({"question": "?", "expected_answer": ["2"]}, "expected_answer"),
        ({"question": 7, "expected_answer": "2"}, "question"),
    ],
)
async def test_a_bad_row_is_refused_and_the_field_named(client: Client, bad: dict[str, Any], field: str) -> None:
    status, body, kind = await client.post("/seed_session", bad)
    assert (status, kind) == (422, None), body
    assert [error["field"] for error in body["errors"]] == [field]


def test_the_example_rows_are_the_examples() -> None:
    file = Path("resources_servers/prorl_math/data/example.jsonl")
    assert [json.loads(line) for line in file.read_text().splitlines()] == example_rows()
