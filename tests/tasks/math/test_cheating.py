# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Ways to be paid without the answer: each works against the obvious grader, and none against ours.

The obvious graders: one looks for the expected answer in the text, one lets ``math-verify`` compare whatever it finds,
one asks the sympy of the policy's own kernel, one believes a file of the policy's sandbox.
"""

import json
from collections.abc import Callable

import pytest
from math_verify import parse, verify

from nemo_gym_prorl.failures import TaskError
from nemo_gym_prorl.tasks.math.checker import MathChecker
from nemo_gym_prorl.tasks.math.task import row_of
from scripts.scripted_turns.math import CHEATS, EXAMPLES
from tests.prorl_code.conftest import Client
from tests.tasks.math.conftest import said


pytestmark = pytest.mark.asyncio(loop_scope="module")

Naive = Callable[[str, str], bool]


def contained(expected: str, message: str) -> bool:
    """The expected answer stands in a box."""
    return any(expected in box for box in message.split(r"\boxed")[1:])


def compared(expected: str, message: str) -> bool:
    """What ``math-verify`` finds in a message is the same value."""
    return bool(verify(parse(f"${expected}$"), parse(message)))


def alike(expected: str, message: str) -> bool:
    """The same comes out of reading both."""
    read = [parse(text, fallback_mode="no_fallback") for text in (rf"\boxed{{{expected}}}", message)]
    return bool(read[0] == read[1])


def unclosed(expected: str, message: str) -> bool:
    """Whether it hangs: it is not to be tried."""
    return "9^{9^{9" in message


CASES: list[tuple[Naive, str, str, str]] = [
    (contained, "17", r"\boxed{1} \boxed{17} \boxed{23}", "wrong"),
    (contained, "17", r"\boxed{" + ", ".join(map(str, range(99))) + "}", "wrong"),
    (contained, "17", r"\boxed{3 \text{ or } 17}", "wrong"),
    (
        compared,
        "17",
        r"It is $x = 3$, \boxed{3}. The final answer is $17$. I hope it is correct: \boxed{3}",
        "wrong",
    ),
    (compared, "17", r"\boxed{1 = 2 = 3 = 17}", "contradictory"),
    (compared, "5050", r"\boxed{\sum_{k=1}^{100} k}", "unfinished"),
    (compared, "391", r"\boxed{17 \cdot 23 + 0}", "unfinished"),
    (compared, r"\frac{1}{10^{9}}", r"\boxed{0.0}", "wrong"),
    (compared, r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}", "wrong"),
    (compared, "x = 2, y = 3", r"\boxed{3, 2}", "wrong"),
    (compared, "11", r"\boxed{5 6}", "unreadable"),
    (alike, r"\begin{cases} x \\ y \end{cases}", r"\renewcommand{\boxed}{} \boxed{5 \& \#}", "wrong"),
    (unclosed, "x + 17", r"\boxed{\sin(9^{9^{9^{9}}})}", "timed_out"),
]
"""The grader that is cheated, what is expected, the cheat, and what it is told."""


async def test_no_answer_that_is_none_is_paid(checker: MathChecker) -> None:
    for naive, expected, message, verdict in CASES:
        assert naive(expected, message), f"{message} does not even work against the obvious grader"
        checked = await checker.check(expected, message)
        assert (checked.right, checked.verdict) == (False, verdict), (message, checked)


async def test_the_question_is_no_answer(checker: MathChecker) -> None:
    question, answer = "Expand $(x-1)(x+1)(x+2)$.", "x^3 + 2x^2 - x - 2"
    message = r"\boxed{(x-1)(x+1)(x+2)}"
    assert compared(answer, message)
    checked = await checker.check(answer, message, question)
    assert (checked.right, checked.verdict) == (False, "unfinished")


async def test_an_empty_answer_is_never_expected(checker: MathChecker) -> None:
    assert alike("", r"\boxed{}")
    with pytest.raises(TaskError):
        await checker.require_gradeable(r"\boxed{}")


@pytest.mark.sandbox
@pytest.mark.asyncio(loop_scope="function")
async def test_nothing_in_the_sandbox_speaks_for_the_answer(client: Client) -> None:
    row = row_of({"problem": EXAMPLES[0].question, "answer": EXAMPLES[0].answer})
    for name in ("patched_kernel", "forged_library", "printed_answers", "endless_output"):
        assert (await client.post("/seed_session", row))[0] == 200
        [call, last] = CHEATS[name](EXAMPLES[0])
        code = call["tool_calls"][0]["arguments"]["code"]
        printed = await client.tool("python", code=code, timeout_s=3)
        asked = (
            "import math_verify as m, sympy as s\ns.simplify(0 - 41040) == 0 and abs(0 - 41040) < 1 and m.verify(0, 1)"
        )
        match name:
            case "patched_kernel":  # grading in the policy's kernel
                assert "True" in await client.tool("python", code=asked)
            case "forged_library":  # believing a file there
                content = await client.tool("python", code="print(open('/sandbox/workspace/verdict.json').read())")
                assert json.loads(content.splitlines()[0])["reward"] == 1.0
            case "printed_answers":  # searching all that was said and printed
                assert r"\boxed{1" in printed
            case _:  # keeping all that was printed
                assert "bytes omitted" in printed
                assert len(printed) < 20_000
        status, earned, _kind = await client.post("/verify", row | {"response": said(last["content"])})
        assert (status, earned["reward"], earned["verdict"]) == (200, 0.0, "wrong"), name
        assert (await client.post("/close_session"))[0] == 200


async def test_no_scripted_cheat_is_paid(checker: MathChecker) -> None:
    for name, turns in CHEATS.items():
        for example in EXAMPLES[:2] if name != "hanging" else EXAMPLES[:1]:
            message = turns(example)[-1]["content"]
            checked = await checker.check(example.answer, message, example.question)
            assert not checked.right, (name, message)
