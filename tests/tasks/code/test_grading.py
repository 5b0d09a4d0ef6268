# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Verdicts and their reasons, checkers of rows, and whose fault it is when there is no verdict; in real containers."""

from typing import Any

import pytest

from nemo_gym_prorl.failures import TaskError
from nemo_gym_prorl.tasks.code.grading import CodeLimits, grade
from nemo_gym_prorl.tasks.code.rows import Case, Problem, read_metadata, read_problem
from tests.tasks import containers
from tests.tasks.code.conftest import Judge
from tests.tasks.code.right_programs import RIGHT_PROGRAMS, STRICTLY_WRONG, WRONG_PROGRAMS


pytestmark = [pytest.mark.sandbox, pytest.mark.asyncio(loop_scope="module")]

LINES = {"kind": "lines"}
VALUES = {"kind": "lines", "absolute": 1e-6, "relative": 1e-6, "wrapped": False}
SUM = Problem([Case("1 2\n", "3\n"), Case("5 5\n", "10\n")], None, LINES)
PUSH = Problem([Case([[1], 2], [1, 2]), Case([[], 0], [0])], "push", VALUES)
ADD = "print(sum(map(int, input().split())))\n"


@pytest.mark.parametrize(
    ("source", "verdict", "detail"),
    [
        (ADD, "passed", ""),
        ("import sys\nprint(eval(sys.stdin.read().replace(' ', '+')))", "passed", ""),
        ("print(sum(map(int, open(0))) if 0 else sum(map(int, open('/dev/stdin').read().split())))", "passed", ""),
        ("import os\nprint(sum(map(int, os.read(0, os.fstat(0).st_size).split())))", "passed", ""),
        (f"def main():\n    {ADD}if __name__ == '__main__':\n    main()\n", "passed", ""),
        (f"{ADD}import sys\nsys.exit()\n", "passed", ""),
        (f"{ADD}import sys\nsys.exit(3)\n", "crashed", "test 0 of 2: SystemExit: 3"),
        (f"import threading as t\nt.stack_size(1 << 27)\ndef run():\n    {ADD}t.Thread(target=run).start()\n",
         "passed", ""),
        ("import atexit, sys\nout = []\natexit.register(lambda: sys.stdout.write(out[0]))\n"
         "out.append(str(sum(map(int, input().split()))))\n", "passed", ""),
        ("f = open(1, 'w')\nf.write(str(sum(map(int, input().split()))))\n", "passed", ""),
        ("import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and f(n - 1)\nf(50000)\n" + ADD, "passed", ""),
        ("def f(n): return n and f(n - 1)\nf(990)\n" + ADD, "passed", ""),
        ("open('scratch', 'w').write('1')\nopen('/dev/null', 'w').write('1')\n" + ADD, "passed", ""),
        ("import resource as r\nr.setrlimit(r.RLIMIT_STACK, (2**29, r.RLIM_INFINITY))\n" + ADD, "passed", ""),
        ("from resource import *\nsetrlimit(RLIMIT_STACK, (RLIM_INFINITY, RLIM_INFINITY))\n" + ADD, "passed", ""),
        ("\ufeff" + ADD, "passed", ""),
        ("import numpy as np\nprint(np.array(input().split(), int).sum())", "passed", ""),
        ("import sys\nclass Out:\n    def __init__(self): self.told = []\n"
         "    def __del__(self): sys.stdout.write(END.join(map(str, self.told)))\n"
         "END = '\\n'\nout = Out()\nout.told.append(sum(map(int, input().split())))\n", "passed", ""),
        ("import io, sys\nsys.stdout = io.TextIOWrapper(open(1, 'wb', closefd=False))\n"
         "class Out:\n    def __del__(self): print(told)\ntold = sum(map(int, input().split()))\nout = Out()\n",
         "passed", ""),
        ("print(3)", "wrong_answer", "test 1 of 2"),
        ("", "wrong_answer", "test 0 of 2"),
        ("1 / 0", "crashed", "test 0 of 2: ZeroDivisionError: division by zero"),
        ("def f(n): return f(n)\nf(1)", "crashed", "RecursionError"),
        ("import ctypes\nctypes.string_at(0)", "crashed", "ended by signal 11"),
        ("import os\nos._exit(0)", "wrong_answer", "test 0 of 2"),
        ("while True: pass", "timed_out", "test 0 of 2: "),
        ("import time\ntime.sleep(1000)", "timed_out", "by the clock"),
        ("input(); input()", "crashed", "EOFError"),
        ("x = bytearray(1 << 33)", "memory", "MemoryError"),
        ("while True: print('x' * 10**6)", "output_limit", "more than 1048576 bytes"),
        ("print(1", "syntax_error", "SyntaxError: '(' was never closed"),
        ("x = '\0'", "syntax_error", "null bytes"),
        ("import nothing_like_it", "crashed", "ModuleNotFoundError"),
    ],
)  # fmt: skip
async def test_programs(judge: Judge, source: str, verdict: str, detail: str) -> None:
    graded = await judge(SUM, source, time_s=0.5 if verdict == "timed_out" else 4, output_bytes=1 << 20)
    assert graded.verdict == verdict, graded
    assert detail in graded.detail
    assert graded.reward == float(verdict == "passed")


def problem_of(tests: dict[str, Any]) -> Problem:
    return read_problem(read_metadata({"verifier_metadata": {"unit_tests": tests}}), None)


@pytest.mark.parametrize("name", RIGHT_PROGRAMS)
async def test_right_programs(judge: Judge, name: str) -> None:
    tests, source = RIGHT_PROGRAMS[name]
    graded = await judge(problem_of(tests), source, time_s=4)
    assert (graded.verdict, graded.reward) == ("passed", 1.0), graded
    assert graded.fields["tests"]["strict"] == int(name not in STRICTLY_WRONG)


@pytest.mark.parametrize("name", WRONG_PROGRAMS)
async def test_wrong_programs(judge: Judge, name: str) -> None:
    tests, source = WRONG_PROGRAMS[name]
    graded = await judge(problem_of(tests), source, time_s=4)
    assert (graded.reward, graded.fields["tests"]["strict"]) == (0.0, 0), graded


@pytest.mark.parametrize(
    ("source", "verdict", "detail"),
    [
        ("def push(items, item): return items + [item]", "passed", ""),
        ("def push(items, item): return (*items, item)", "passed", ""),
        ("import numpy\ndef push(items, item): return [*map(numpy.int64, items), numpy.int64(item)]", "passed", ""),
        ("def push(items, item):\n    print('noise' * 10**6)\n    return items + [item]", "passed", ""),
        ("class Solution:\n    def push(self, items: List[int], item: int) -> List[int]: return items + [item]",
         "passed", ""),
        ("kept = []\ndef push(items, item):\n    kept.append(item)\n    return items + kept", "passed", ""),
        ("def push(items, item): return items", "wrong_answer", "test 0 of 2"),
        ("def push(items, item): return {1}", "wrong_answer", "type set is not JSON"),
        ("def push(items, item): return 10 ** 5000", "wrong_answer", "test 0 of 2"),
        ("def push(items, item):\n    x = []\n    for _ in range(900): x = [x]\n    return x", "wrong_answer", ""),
        ("def push(items, item): return 'x' * (9 << 20)", "output_limit", "more than"),
        ("def push(items): return items", "crashed", "TypeError"),
        ("def push(items, item):\n    import sys\n    sys.exit(0)", "crashed", "SystemExit"),
        ("def push(items, item):\n    import os\n    os._exit(0)", "wrong_answer", "nothing that can be read"),
        ("def pull(items, item): return items", "no_solution", "defines no function push"),
        ("push = 3", "no_solution", "defines no function push"),
    ],
)  # fmt: skip
async def test_functions(judge: Judge, source: str, verdict: str, detail: str) -> None:
    graded = await judge(PUSH, source, time_s=4)
    assert graded.verdict == verdict, graded
    assert detail in graded.detail


@pytest.mark.parametrize(
    ("name", "arguments", "returned", "source", "verdict"),
    [
        ("gcd", [4, 6], 2, "pass", "no_solution"),
        ("sorted", [[2, 1]], [1, 2], "x = 1", "no_solution"),
        ("gcd", [4, 6], 2, "from math import gcd", "passed"),
        ("search", [[1, 2], 2], 1,
         "class Solution:\n    def search(self, a: List[int], b: int) -> int: return bisect_left(a, b)", "passed"),
    ],
)  # fmt: skip
async def test_what_may_be_taken_for_granted_is_no_solution(
    judge: Judge, name: str, arguments: list[Any], returned: Any, source: str, verdict: str
) -> None:
    assert (await judge(Problem([Case(arguments, returned)], name, VALUES), source, time_s=4)).verdict == verdict


async def test_a_row_can_lower_limits_and_not_raise_them(judge: Judge) -> None:
    lower = Problem(SUM.tests, None, LINES, time_limit_s=0.2, memory_limit_mib=64)
    assert (await judge(lower, "x = 0\nwhile x < 10**7: x += 1\n" + ADD, time_s=9)).verdict == "timed_out"
    assert (await judge(lower, "x = bytearray(100 << 20)\n" + ADD)).verdict == "memory"
    higher = Problem(SUM.tests, None, LINES, memory_limit_mib=4096)
    assert (await judge(higher, "x = bytearray(300 << 20)\n" + ADD, memory_mib=256)).verdict == "memory"


async def test_all_tests_together_have_a_limit(judge: Judge) -> None:
    many = Problem([Case("1 2\n", "3\n")] * 50, None, LINES)
    graded = await judge(many, "import time\ntime.sleep(0.2)\n" + ADD, total_s=1)
    assert graded.verdict == "timed_out"
    assert "all tests together have 1 s" in graded.detail
    assert graded.fields["tests"]["run"] < 50


def checked(source: str, expected: str = "9\n") -> Problem:
    return Problem([Case("9\n", expected)], None, {"kind": "program", "source": source})


SUMS_TO_INPUT = (
    "def check(given, output, expected):\n"
    "    a, b = map(int, output.split())\n"
    "    return a + b == int(given), f'{a} + {b}'\n"
)


@pytest.mark.parametrize(
    ("source", "verdict", "detail"),
    [
        ("print(4, 5)", "passed", ""),
        ("print(2, 7)", "passed", ""),
        ("print(4, 4)", "wrong_answer", "test 0 of 1: 4 + 4"),
        ("print('garbage')", "wrong_answer", "the checker did not judge it: ValueError"),
    ],
)
async def test_a_checker_of_the_row(judge: Judge, source: str, verdict: str, detail: str) -> None:
    graded = await judge(checked(SUMS_TO_INPUT, "4 5\n"), source)
    assert (graded.verdict, graded.reward) == (verdict, float(verdict == "passed")), graded
    assert detail in graded.detail


async def test_an_answer_that_attacks_its_checker_gets_nothing_out_of_it(judge: Judge) -> None:
    """A checker that runs what was printed: its grader is as far away from it as from the candidate."""
    source = 'import os\nprint(\'__import__("os").kill(__import__("os").getppid(), 9) or (4, 5)\')\n'
    evaluates = "def check(given, output, expected):\n    return sum(eval(output)) == 9\n"
    assert (await judge(checked(evaluates, "(4, 5)"), source)).verdict == "wrong_answer"


@pytest.mark.parametrize(
    "source",
    ["def check(*a): raise KeyError", "def check(*a): return 1", "def check(*a", "x = 1", "import os\nos._exit(0)"],
)
async def test_a_checker_that_judges_nothing_is_the_rows_fault(judge: Judge, source: str) -> None:
    with pytest.raises(TaskError, match=r"verifier_metadata\.checker"):
        await judge(checked(source), "print(9)")


async def test_a_disk_that_a_solution_fills_is_its_own_doing() -> None:
    source = "for i in range(9):\n    open(f'f{i}', 'wb').write(bytes(50 << 20))\nimport time\ntime.sleep(30)\n"

    def open_sandbox() -> Any:
        return containers.running_ours(disk_mib=64)

    graded = await grade(open_sandbox, SUM, source, CodeLimits(time_s=9), containers.ROOT)
    assert (graded.reward, graded.verdict) == (0.0, "exhausted")


async def test_tests_of_megabytes(judge: Judge) -> None:
    big = Problem([Case("1 " * 10**6 + "\n", f"{10**6}\n"), Case("x" * (3 << 20), "0\n")], None, LINES)
    source = "import sys\nprint(sys.stdin.read().count('1'))\n"
    assert (await judge(big, source)).passed
