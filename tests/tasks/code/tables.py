# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Problems and programs from the JSON lines files beside this module.

- ``contests.jsonl``: problems with tests by brute force, a solution, and wrong programs that differ in one place.
- ``programs.jsonl``: tests, a program and its verdict.
- ``cheats.jsonl``: programs that attack their grader.
- ``messages.jsonl``: messages of a policy and the program in each.
"""

import base64
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_gym_prorl.tasks.code.code_rows import CodeProblem, CodeTestCase, read_metadata, read_problem
from tests.tasks.rows_file import table


CONTESTS = {row["name"]: row for row in table(__file__, "contests.jsonl")}
PROGRAMS = table(__file__, "programs.jsonl")
CHEATS = {row["name"]: row for row in table(__file__, "cheats.jsonl")}

SUMS_TO_INPUT = (
    "def check(given, output, expected):\n"
    "    a, b = map(int, output.split())\n"
    "    return a + b == int(given), f'{a} + {b}'\n"
)
"""A checker program that accepts several outputs."""

NAMED = {
    "sum": {"unit_tests": {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]}},
    "push": {"unit_tests": {"inputs": [[[1], 2], [[], 0]], "outputs": [[1, 2], [0]], "fn_name": "push"}},
    "checked": {
        "unit_tests": {"inputs": ["9\n"], "outputs": ["4 5\n"]},
        "checker": {"kind": "program", "source": SUMS_TO_INPUT},
    },
}
"""Problems shared by several programs."""


def read(metadata: Any, folder: Path | None = None) -> CodeProblem:
    return read_problem(read_metadata({"verifier_metadata": metadata}), folder)


def problem_of(program: Mapping[str, Any]) -> CodeProblem:
    tests = program["tests"]
    return read(NAMED[tests] if isinstance(tests, str) else {"unit_tests": tests})


def contest_problem(contest: Mapping[str, Any]) -> CodeProblem:
    checker = {"kind": contest.get("checker", "tokens"), "absolute": 1e-6, "relative": 1e-6}
    return CodeProblem([CodeTestCase(*test) for test in contest["tests"]], None, checker)


def packed(tests: Any) -> dict[str, Any]:
    """Return tests packed like Gym's LiveCodeBench."""
    return {"packed": base64.b64encode(zlib.compress(json.dumps(tests).encode())).decode()}
