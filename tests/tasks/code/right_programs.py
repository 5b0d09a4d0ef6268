# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Right programs for tests in the format of Gym's ``code_gen``, each with what its site or Gym's grader grants."""

import base64
import json
import zlib
from typing import Any


def reads(given: str, printed: str) -> dict[str, Any]:
    """Tests of a program."""
    return {"inputs": [given], "outputs": [printed]}


def calls(given: str, returned: str) -> dict[str, Any]:
    """Tests of a function ``f``."""
    return {"inputs": [given], "outputs": [returned], "fn_name": "f"}


def packed(tests: Any) -> dict[str, Any]:
    """Tests as Gym's LiveCodeBench has them."""
    return {"packed": base64.b64encode(zlib.compress(json.dumps(tests).encode())).decode()}


BIG = "7" * 5000
DEEP = "def down(n): return 0 if n == 0 else 1 + down(n - 1)\n"

RIGHT_PROGRAMS: dict[str, tuple[dict[str, Any], str]] = {
    "recursion": (reads("5000\n", "5000\n"), DEEP + "print(down(int(input())))"),
    "recursion of a function": (calls("5000", "5000"), DEEP + "def f(n): return down(n)"),
    "deque": (reads("3\n", "2\n"), "queue = deque(range(int(input())))\nprint(queue.pop())"),
    "gcd": (reads("12 18\n", "6\n"), "print(gcd(*map(int, input().split())))"),
    "List": (
        reads("1 2\n", "3\n"),
        "def total(parts: List[int]) -> int: return sum(parts)\nprint(total([*map(int, input().split())]))",
    ),
    "sys": (reads("1 2\n", "3\n"), "print(sum(map(int, sys.stdin.read().split())))"),
    "stdin": (reads("1 2\n", "3\n"), "print(sum(map(int, stdin.readline().split())))"),
    "math": (reads("16\n", "4.0\n"), "print(math.sqrt(int(input())))"),
    "heap": (reads("3 1 2\n", "1\n"), "heap = [*map(int, input().split())]\nheapify(heap)\nprint(heappop(heap))"),
    "statistics": (reads("1 2 6\n", "3\n"), "print(mean(map(int, input().split())))"),
    "datetime": (reads("3\n", "3\n"), "print((datetime.timedelta(days=int(input()))).days)"),
    "json": (reads("[1, 2]\n", "2\n"), "print(len(json.loads(input())))"),
    "stdout": (reads("3\n", "3\n"), "stdout.write(input())"),
    "print a long integer": (reads("5000\n", "1" + "0" * 5000 + "\n"), "print(10 ** int(input()))"),
    "read a long integer": (reads(BIG + "\n", "7\n"), "print(int(input()) % 10)"),
    "digits of a long integer": (reads("20000\n", "6021\n"), "print(len(str(2 ** int(input()))))"),
    "return a long integer": (calls("5000", "1" + "0" * 5000), "def f(n): return 10 ** n"),
    "take a long integer": (calls(BIG, "7"), "def f(n): return n % 10"),
    "fraction": (reads("1 3\n", "0.33333331\n"), "a, b = map(int, input().split())\nprint(a / b)"),
    "fraction for an integer": (reads("49\n", "7\n"), "print(int(input()) ** 0.5 + 1e-12)"),
    "large fraction": (reads("1\n", "12345678.9\n"), "print(12345678.90000001)"),
    "fraction of a function": (calls("3", "0.33333"), "def f(n): return 1 / n"),
    "fractions in a list": (calls("3", "[0.333333, 1.0]"), "def f(n): return [1 / n, 1]"),
    "YES": (reads("1\n", "YES\n"), "print('yes')"),
    "No": (reads("1 2\n", "No\nYes\n"), "print('NO')\nprint('YES')"),
    "packed": (packed(reads("1 2\n", "3\n")), "print(sum(map(int, input().split())))"),
    "packed function": (packed(calls("[1, 2]", "3")) | {"fn_name": "f"}, "def f(parts): return sum(parts)"),
    "packed long integer": (packed(calls(BIG, "7")) | {"fn_name": "f"}, "def f(n): return n % 10"),
    "class": (
        calls("[1, 2]", "[1, 2]"),
        "class Solution:\n    def f(self, a: List[int]) -> List[int]: return sorted(a)",
    ),
}
"""Tests and a program by what the program relies on."""

STRICTLY_WRONG = {"fraction", "fraction for an integer", "large fraction", "fraction of a function", "YES", "No"}
"""Right programs whose output is not the expected text or number."""

WRONG_PROGRAMS: dict[str, tuple[dict[str, Any], str]] = {
    "another name": (reads("1\n", "1\n"), "print(unknown_name)"),
    "fraction too far": (reads("1\n", "0.3333\n"), "print(0.3335)"),
    "rounded large integer": (reads("1\n", "123456789012345678\n"), "print(1.2345678901234568e17)"),
    "near large integer": (reads("1\n", "1000000\n"), "print(1000000.5)"),
    "off by one": (reads("1\n", "1000001\n"), "print(1000000)"),
    "padded": (reads("1\n", "0110\n"), "print(110)"),
    "another word": (reads("1\n", "YES\n"), "print('YESS')"),
    "case of another word": (reads("1\n", "Alice\n"), "print('alice')"),
    "yes among words": (reads("1\n", "YES 1\n"), "print('yes 1')"),
    "nan": (reads("1\n", "0.5\n"), "print(float('nan'))"),
    "rounded large result": (calls("1", "123456789012345678"), "def f(n): return 1.2345678901234568e17"),
    "truth of a result": (calls("1", "true"), "def f(n): return 1"),
    "text of a result": (calls("1", "21"), "def f(n): return '21'"),
    "nothing": (reads("1\n", "1\n"), "deque"),
    "prelude is no solution": (calls("[2, 1]", "[1, 2]"), "deque"),
    "runaway": (reads("1\n", "1\n"), "def f(n): return f(n + 1)\nprint(f(1))"),
}
