# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of all four families, each solved and left alone, for a policy that plays turns.

Code: HumanEval, and the suite's problems on standard input and output. Mathematics and science: the examples that the
servers ship with, and calculations by number, so that there are as many rows as wanted. Software engineering: the
tasks that ``make swe-tasks`` makes; none where it has not been run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import count, cycle, islice
from typing import Any

from nemo_gym_prorl.tasks.code import rows
from nemo_gym_prorl.tasks.stem import problems as stem
from scripts.scripted_turns import code as code_scripts
from scripts.scripted_turns import humaneval as humaneval_scripts
from scripts.scripted_turns import math as math_scripts
from scripts.scripted_turns import stem as stem_scripts
from scripts.scripted_turns import swe as swe_scripts
from scripts.swe_tasks.making import ROWS, default_folder
from tests.tasks.code.tables import CONTESTS, contest_problem


Row = dict[str, Any]

FAMILIES = ("code", "math", "stem", "swe")
"""Names of the environments in ``environments/prorl_mixture``, which are what rows have in ``data_source``."""

ORACLE, NULL = "oracle", "null"
PLAYED = {ORACLE: "reference", NULL: "stub"}


def rows_of(family: str, variant: str, most: int, *, think_s: float = 0.0) -> list[Row]:
    """Some rows.

    Args:
        family: one of :data:`FAMILIES`.
        variant: ``oracle`` or ``null``.
        most: how many; of software engineering the tasks that there are, again and again.
        think_s: how long the policy takes for each turn, in seconds.
    """
    return [_as_sent(row, family, think_s) for row in islice(_FAMILIES[family](variant), most)]


def has_free_text(row: Row) -> bool:
    """A judge is asked about it."""
    return row["data_source"] == "stem" and stem.problem_of(row).kind is stem.Kind.TEXT


def _as_sent(row: Row, family: str, think_s: float) -> Row:
    params = row["responses_create_params"]
    script = json.loads(params["metadata"]["script"])
    for turn in script["turns"]:
        turn["latency_s"] = think_s
    params = {**params, "metadata": {"script": json.dumps(script, sort_keys=True)}}
    return {**row, "responses_create_params": params, "data_source": family}


def _code(variant: str) -> Iterator[Row]:
    """By turns a function of HumanEval and a program."""
    for problem, contest in zip(cycle(rows.problems().values()), cycle(CONTESTS.values()), strict=False):
        yield rows.humaneval_row(problem, humaneval_scripts.script_for(problem, PLAYED[variant]))
        script = code_scripts.oracle(contest["solution"]) if variant == ORACLE else code_scripts.null()
        solved = contest_problem(contest)
        metadata = {
            "unit_tests": {
                "inputs": [test.input for test in solved.tests],
                "outputs": [test.expected for test in solved.tests],
            },
            "checker": dict(solved.checker),
        }
        yield rows.row_for(f"The problem {contest['name']!r}.", metadata, function=None, script=script)


def _math(variant: str) -> Iterator[Row]:
    yield from math_scripts.example_rows(variant)
    for number in count(1):
        n, k = 10 + number, 3 + number % 5
        example = math_scripts.Example(
            f"In how many ways can {k} of {n} things be chosen, divided by the number of ways to choose one of them?",
            f"\\frac{{\\binom{{{n}}}{{{k}}}}}{{{n}}}",
            f"from sympy import binomial, Rational\nways = binomial({n}, {k})",
            f"Rational(ways, {n})",
        )
        yield math_scripts.scripted_row(example, variant)


def _stem(variant: str) -> Iterator[Row]:
    for number in count(1):
        mass, speed = 2 * number, 3 + number % 7
        question = f"What is the kinetic energy of {mass} kg at {speed} m/s?"
        problem = stem.problem_of(stem.row_for(question, f"{mass * speed**2 / 2:g} J"))
        yield stem.row_for(question, problem.expected, script=stem_scripts.script_for(problem, variant))


def _swe(variant: str) -> Iterator[Row]:
    made = default_folder() / ROWS
    rows = [json.loads(line) for line in made.read_text().splitlines()] if made.exists() else []
    return (swe_scripts.scripted_row(row, variant) for row in cycle(rows))


_FAMILIES: Mapping[str, Callable[[str], Iterator[Row]]] = {"code": _code, "math": _math, "stem": _stem, "swe": _swe}
