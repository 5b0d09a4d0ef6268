# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rows from records of published datasets: SCP-116K, and whatever has questions and answers. Pure.

SCP-116K gives a worked solution (``matched_solution``) rather than an answer. Its final answer is taken where it is
plain to see; a record in which it is not makes no row, since nobody could be graded by a page of working.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.final_answer import final_answer
from nemo_gym_prorl.tasks.math.rows import asked_in, missing, truth_of
from nemo_gym_prorl.tasks.stem.choices import chosen, options_in
from nemo_gym_prorl.tasks.stem.problems import problem_of, row_for


DATA_SOURCE = "stem"
"""Of rows made here: a record does not say what set it is of."""

LONGEST_LINE = 120
"""A solution of one line no longer than that is an answer."""

_QUESTION = ("problem", "question")
_CHAT = "prompt"
_ANSWER = ("expected_answer", "answer", "ground_truth")
_SOLUTION = ("matched_solution", "solution")
_MATHEMATICS = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def row_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a dataset's record.

    Args:
        record: has ``problem`` (or ``question``, or verl's ``prompt``, a chat whose last message of a user is the
            question), and one of ``expected_answer``, ``answer``, ``ground_truth``,
            ``reward_model.ground_truth``, ``matched_solution``, ``solution``. ``options`` may be given as Gym has
            them, or stand in the question, each on a line of its own. ``domain`` is kept.

    Raises:
        CallerError: something is missing or no good; names it.
    """
    question = _question(record)
    expected, options = _answer(record), record.get("options")
    if options is None and (found := options_in(question)):
        stem, read = found
        if letter := chosen(read, expected):
            question, expected, options = stem, letter, [read]
    problem = problem_of({"question": question, "expected_answer": expected, "options": options})
    row = row_for(problem.question, problem.expected, problem.options)
    domain = record.get("domain")
    return row | {
        "data_source": DATA_SOURCE,
        "verifier_metadata": {"domain": domain} if isinstance(domain, str) else {},
    }


def answer_in(solution: str) -> str | None:
    """The final answer of a worked solution, if it is plain to see."""
    lines = [line.strip() for line in solution.strip().splitlines() if line.strip()]
    if not lines:
        return None
    if answer := final_answer(solution):
        return answer.rstrip(".")
    if len(lines) == 1 and len(lines[0]) <= LONGEST_LINE:
        return lines[0]
    formulas = [next(filter(None, match.groups())) for match in _MATHEMATICS.finditer(solution)]
    if formulas and "=" in formulas[-1] and formulas[-1].strip() in lines[-1]:
        return formulas[-1].rpartition("=")[2].strip() or None
    return None


def _question(record: Mapping[str, Any]) -> str:
    name = next((name for name in (*_QUESTION, _CHAT) if record.get(name) is not None), _QUESTION[0])
    question = record.get(name)
    if name == _CHAT and isinstance(question, list):
        question = asked_in(question)
        if question is None:
            raise CallerError("has no message of a user", field=name)
    if question is None:
        raise missing(record, name)
    if not isinstance(question, str):
        raise CallerError("must be text", field=name)
    return question


def _answer(record: Mapping[str, Any]) -> Any:
    for name in _ANSWER:
        if record.get(name) is not None:
            return record[name]
    # As verl has it.
    if (truth := truth_of(record)) is not None:
        return truth
    for name in _SOLUTION:
        if isinstance(solution := record.get(name), str):
            if (answer := answer_in(solution)) is None:
                raise CallerError("its final answer is not plain to see; give it as `answer`", field=name)
            return answer
    raise missing(record, _ANSWER[1])
