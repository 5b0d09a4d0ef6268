# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Verdicts on programs, cheats and checkers in real sandboxes."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest

from nemo_gym_prorl.failures import CallerError, TaskError
from nemo_gym_prorl.tasks.code.code_rows import CodeProblem, CodeTestCase, read_metadata, read_problem
from nemo_gym_prorl.tasks.code.convert import row_of
from tests.conftest import LONG
from tests.tasks.code.conftest import Judge
from tests.tasks.code.tables import CHEATS, CONTESTS, PROGRAMS, contest_problem, problem_of
from tests.tasks.rows_file import table


pytestmark = [pytest.mark.sandbox, pytest.mark.asyncio(loop_scope="module")]

LINES = {"kind": "lines"}
VALUES = {"kind": "lines", "absolute": 1e-6, "relative": 1e-6, "wrapped": False}
SUM = problem_of({"tests": "sum"})
ADD = "print(sum(map(int, input().split())))\n"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program["name"] or program["source"][:40])
async def test_program_gets_the_verdict_of_the_table(judge: Judge, program: Mapping[str, Any]) -> None:
    time_s, problem = 0.5 if program["verdict"] == "timed_out" else 4, problem_of(program)
    output_bytes = 1 << 20 if program["tests"] == "sum" else 16 << 20
    graded = await judge(problem, program["source"], time_s=time_s, output_bytes=output_bytes)
    assert (graded.verdict, graded.reward) == (program["verdict"], float(program["verdict"] == "passed")), graded
    assert program.get("detail", "") in graded.detail
    assert graded.fields["tests"]["strict"] == program.get("strict", graded.fields["tests"]["strict"])


ATTACKED = CodeProblem([CodeTestCase(f"{i}\n", f"{i * i + 90210}\n") for i in range(3)], None, LINES)
ATTACKED_CALLS = CodeProblem([CodeTestCase([i], [i, i * i]) for i in range(3)], "f", VALUES)
RIGHT = {None: "print(int(input()) ** 2 + 90210)\n", "f": "def f(n): return n, n * n\n"}


async def gathered(judge: Judge, programs: Sequence[tuple[CodeProblem, str]], **limits: Any) -> list[str]:
    gate = asyncio.Semaphore(3)

    async def one(problem: CodeProblem, source: str) -> str:
        async with gate:
            return (await judge(problem, source, **limits)).verdict

    return await asyncio.gather(*(one(*program) for program in programs))


@pytest.mark.parametrize("name", [name for name, cheat in CHEATS.items() if "verdict" in cheat])
async def test_cheat_earns_nothing_and_has_its_verdict(judge: Judge, name: str) -> None:
    cheat = CHEATS[name]
    problem = ATTACKED_CALLS if "function" in cheat else ATTACKED
    grade = await judge(problem, cheat["source"], time_s=10 if name == "huge memory" else 1, memory_mib=192)
    assert (grade.reward, grade.verdict) == (0.0, cheat["verdict"]), grade
    assert (await judge(problem, RIGHT[problem.function])).passed, "the sandbox is as it was"


async def test_other_cheats_earn_nothing(judge: Judge) -> None:
    others = [cheat for cheat in CHEATS.values() if "verdict" not in cheat]
    verdicts = await gathered(judge, [(ATTACKED, cheat["source"]) for cheat in others], time_s=1, memory_mib=192)
    assert [cheat["name"] for cheat, verdict in zip(others, verdicts, strict=True) if verdict == "passed"] == []
    assert (await judge(ATTACKED, RIGHT[None])).passed, "the sandbox is as it was"


async def test_every_contest_solution_passes(judge: Judge) -> None:
    verdicts = await gathered(judge, [(contest_problem(one), one["solution"]) for one in CONTESTS.values()])
    assert {name: verdict for name, verdict in zip(CONTESTS, verdicts, strict=True) if verdict != "passed"} == {}


@pytest.mark.longer("every mistake of every problem; else one of every third")
async def test_no_mutated_contest_solution_passes(judge: Judge) -> None:
    chosen = [*CONTESTS.values()][:: 1 if LONG else 3]
    wrong = [(contest_problem(one), mutant) for one in chosen for mutant in one["mutants"][: None if LONG else 1]]
    assert set(await gathered(judge, wrong)) <= {"wrong_answer", "crashed"}


async def test_rows_can_only_lower_limits(judge: Judge) -> None:
    lower = CodeProblem(SUM.tests, None, LINES, time_limit_s=0.2, memory_limit_mib=64)
    assert (await judge(lower, "x = 0\nwhile x < 10**7: x += 1\n" + ADD, time_s=9)).verdict == "timed_out"
    assert (await judge(lower, "x = bytearray(100 << 20)\n" + ADD)).verdict == "memory"
    higher = CodeProblem(SUM.tests, None, LINES, memory_limit_mib=4096)
    assert (await judge(higher, "x = bytearray(300 << 20)\n" + ADD, memory_mib=256)).verdict == "memory"


async def test_all_tests_together_have_a_limit(judge: Judge) -> None:
    many = CodeProblem([CodeTestCase("1 2\n", "3\n")] * 50, None, LINES)
    graded = await judge(many, "import time\ntime.sleep(0.2)\n" + ADD, total_s=1)
    assert graded.verdict == "timed_out"
    assert "all tests together have 1 s" in graded.detail
    assert graded.fields["tests"]["run"] < 50


@pytest.mark.parametrize(
    ("test", "passes", "fails"),
    [
        ("assert sorted(f(2)) == [0, 1]", ["{1, 0}", "(1, 0)", "iter([1, 0])"], ["[0]", "[1, 0, 0]", "7"]),
        ("assert set(f(2)) == {0, 1}", ["{1, 0}", "[1, 0, 0]"], ["{0}", "[[0], 1]"]),
        ("assert list(f(2)) == [0, 1]", ["range(2)"], ["[1, 0]"]),
        ("assert len(f(2)) == 2", ["'ab'", "[[], []]"], ["2", "[2]"]),
    ],
)
async def test_builtin_is_applied_to_a_result(
    judge: Judge, test: str, passes: Sequence[str], fails: Sequence[str]
) -> None:
    problem = read_problem(read_metadata(row_of({"question": "?", "test": test})), None)
    for expressions, passed in ((passes, True), (fails, False)):
        for expression in expressions:
            assert (await judge(problem, f"def f(n): return {expression}")).passed == passed, expression


async def test_arguments_that_json_does_not_have(judge: Judge) -> None:
    row = row_of({"question": "?", "test": "assert f((1, 2), {3: 'a\\nb'}, {4}) == 'a\\nb'"})
    problem = read_problem(read_metadata(row), None)
    kinds = "(type(a), type(b), type(c)) == (tuple, dict, set)"
    assert (await judge(problem, f"def f(a, b, c): return b[sum(a)] if {kinds} and 4 in c else ''")).passed
    grade = await judge(problem, "def f(a, b, c): return 'a'")
    assert grade.verdict == "wrong_answer"
    assert "(1, 2)" in grade.detail


@pytest.mark.parametrize("test", ["assert f() == 21", "assert f() == 21\nassert f((1,)) == 21"])
async def test_call_without_arguments(judge: Judge, test: str) -> None:
    problem = read_problem(read_metadata(row_of({"question": "?", "test": test})), None)
    assert (await judge(problem, "def f(*given): return 21")).passed
    assert not (await judge(problem, "def f(*given): return '21'")).passed


def checked(source: str, expected: str = "9\n") -> CodeProblem:
    return CodeProblem([CodeTestCase("9\n", expected)], None, {"kind": "program", "source": source})


async def test_answer_cannot_attack_its_checker(judge: Judge) -> None:
    """A checker that evaluates its input is isolated from the grader like a candidate."""
    source = 'import os\nprint(\'__import__("os").kill(__import__("os").getppid(), 9) or (4, 5)\')\n'
    evaluates = "def check(given, output, expected):\n    return sum(eval(output)) == 9\n"
    assert (await judge(checked(evaluates, "(4, 5)"), source)).verdict == "wrong_answer"


@pytest.mark.parametrize("source", ["def check(*a): raise KeyError", "def check(*a", "import os\nos._exit(0)"])
async def test_broken_checker_is_the_rows_fault(judge: Judge, source: str) -> None:
    with pytest.raises(TaskError, match=r"verifier_metadata\.checker"):
        await judge(checked(source), "print(9)")


async def test_tests_of_megabytes(judge: Judge) -> None:
    big = CodeProblem(
        [CodeTestCase("1 " * 10**6 + "\n", f"{10**6}\n"), CodeTestCase("x" * (3 << 20), "0\n")], None, LINES
    )
    assert (await judge(big, "import sys\nprint(sys.stdin.read().count('1'))\n")).passed


ADDS = {None: "print(sum(map(int, open(0).read().split())))", "add": "def add(a, b):\n    return a + b"}
DOES_NOT = {None: "print(6)", "add": "def add(a, b):\n    return [a + b] if a == 2 else 6"}
"""Wrapped results are correct only for sets that wrap results."""


async def test_correct_program_passes_rows_of_each_published_set(judge: Judge) -> None:
    found = []
    for one in table("tests/published/test_sets.py", "sets.jsonl"):
        if one["family"] == "code" and one["name"] != "HumanEval":  # whose functions do not add
            for record in one["records"] if one["kept"] else ():
                with suppress(CallerError):
                    found.append((one["name"], read_problem(read_metadata(row_of(record)), None)))
    assert len(found) > 15
    for name, problem in found:
        assert (await judge(problem, ADDS[problem.function])).verdict == "passed", name
        wrapped = problem.checker.get("wrapped") and problem.function
        assert wrapped or (await judge(problem, DOES_NOT[problem.function])).verdict == "wrong_answer", name
