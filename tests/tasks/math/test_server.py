# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The server over HTTP, with real sandboxes."""

import pytest

from nemo_gym_prorl.tasks.math.task import row_of
from scripts.scripted_turns.math import CHEATS, EXAMPLES
from tests.prorl_code.conftest import Client, saying


pytestmark = pytest.mark.sandbox
ROW = row_of({"problem": "What is $1 + 1$?", "answer": 2})


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
    status, verdict, _kind = await client.post("/verify", ROW | {"response": saying(r"It is \boxed{2}.")})
    assert (status, verdict["reward"], verdict["verdict"], verdict["extracted_answer"]) == (200, 1.0, "right", "2")


CHEATED = {
    "patched_kernel": ("import math_verify as m, sympy as s\ns.simplify(0 - 41040) == 0 and m.verify(0, 1)", "True"),
    "forged_library": ("print(open('/sandbox/workspace/verdict.json').read())", '"reward": 1.0'),
}
"""By cheat: code of a naive grader inside the policy's sandbox, and its output."""


@pytest.mark.parametrize("name", CHEATED)
async def test_nothing_in_the_sandbox_speaks_for_the_answer(client: Client, name: str) -> None:
    row = row_of({"problem": EXAMPLES[0].question, "answer": EXAMPLES[0].answer})
    assert (await client.post("/seed_session", row))[0] == 200
    [call, last] = CHEATS[name](EXAMPLES[0])
    await client.tool("python", code=call["tool_calls"][0]["arguments"]["code"], timeout_s=3)
    code, seen = CHEATED[name]
    assert seen in await client.tool("python", code=code)
    status, earned, _kind = await client.post("/verify", row | {"response": saying(last["content"])})
    assert (status, earned["reward"], earned["verdict"]) == (200, 0.0, "wrong")
