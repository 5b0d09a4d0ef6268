# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rows from records of published sets of questions, with options or with an answer in words. Pure.

Options come as texts by letter, as a list of texts, as ``{"text": [...], "label": [...]}`` (ARC), as ``opa`` to
``opd`` (MedMCQA), as a right answer beside wrong ones (GPQA, SciQ), or in the question. A row has them as Gym's
``mcqa`` does.

SCP-116K gives a worked solution (``matched_solution``) rather than an answer. A record makes a row only if the final
answer of the solution is plain to see: a page of working cannot be compared with an answer.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.final_answer import final_answer
from nemo_gym_prorl.tasks.records import (
    UnusableRecord,
    answer_of,
    gold,
    lowered,
    no_answer,
    question_of,
    require_answerable,
)
from nemo_gym_prorl.tasks.stem.choices import chosen, options_in
from nemo_gym_prorl.tasks.stem.problems import problem_of, row_for


DATA_SOURCE = "stem"
"""Of rows made here: a record does not say what set it is of."""

LONGEST_LINE = 120
"""A solution of one line no longer than that is an answer."""

_SOLUTION = ("matched_solution", "solution")
_LETTER = ("answer_letter", "answerkey", "answer_idx")
_INDEX = ("answer_index", "cop")
_RIGHT = ("correct answer", "correct_answer")
_WRONG = re.compile(r"incorrect answer \d|distractor\d")
_MATHEMATICS = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def row_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a dataset's record.

    Args:
        record: has a question, and options or an answer, under one of the names in
            :mod:`nemo_gym_prorl.tasks.records` and above; a row of Gym's stays as it is. ``domain`` is kept.

    Raises:
        CallerError: a field is missing or wrong; names it.
        UnusableRecord: the set knows no answer, or the question needs a picture.
    """
    if isinstance(record.get("responses_create_params"), Mapping) and record.get("expected_answer") is not None:
        gold(record["expected_answer"], "expected_answer")
        problem_of(record)
        return {"data_source": DATA_SOURCE, **record}
    plain = lowered(record)
    require_answerable(plain)
    _, question = question_of(plain, record)
    if (options := _options(plain, question)) is not None:
        expected = _letter(plain, options, record)
    else:
        expected = _answer(plain, record)
        if (found := options_in(question)) and (letter := chosen(found[1], expected)):
            question, options, expected = found[0], found[1], letter
    problem = problem_of({"question": question, "expected_answer": expected, "options": options})
    row = row_for(problem.question, problem.expected, problem.options)
    domain = plain.get("domain")
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


def _options(record: Mapping[str, Any], question: str) -> dict[str, str] | None:
    """Options by letter from A on, in whatever shape a set has them; ``None`` if it has none."""
    if right := next((name for name in _RIGHT if record.get(name)), None):
        texts = [record[right], *(text for name, text in record.items() if _WRONG.fullmatch(name) and text)]
        # A fixed order, in which the right one is not always the first.
        return _lettered(sorted(texts, key=lambda text: hashlib.sha256(f"{question}\0{text}".encode()).digest()))
    if record.get("opa") is not None:
        return _lettered([record.get(f"op{letter}") for letter in "abcd"])
    given = record.get("options") if record.get("options") is not None else record.get("choices")
    if isinstance(given, Mapping) and isinstance(given.get("text"), list):
        return _lettered(given["text"])
    if isinstance(given, Mapping):
        return {str(letter): text for letter, text in given.items() if text is not None}
    if not isinstance(given, list) or not given:
        return None
    if all(isinstance(part, Mapping) and len(part) == 1 for part in given):
        return {letter: text for part in given for letter, text in part.items()}
    texts = list(given)
    while texts and texts[-1] == "N/A":  # MMLU-Pro's filling
        texts.pop()
    return _lettered(texts)


def _lettered(texts: Sequence[Any]) -> dict[str, str]:
    if not 2 <= len(texts) <= len(string.ascii_uppercase) or not all(isinstance(text, str) for text in texts):
        raise CallerError("must be 2 to 26 texts", field="options")
    return dict(zip(string.ascii_uppercase, (text.strip() for text in texts), strict=False))


def _letter(record: Mapping[str, Any], options: Mapping[str, str], given: Mapping[str, Any]) -> str:
    """The letter of the right option: given as a letter, a label, a position from 0, or the option's text."""
    if right := next((name for name in _RIGHT if record.get(name)), None):
        return next(letter for letter, text in options.items() if text == str(record[right]).strip())
    name, value = next(
        ((name, record[name]) for name in (*_LETTER, *_INDEX) if record.get(name) is not None),
        None,
    ) or (answer_of(record) or ("answer", _answer(record, given)))
    if value in ("", -1):
        raise no_answer({"answer": None}, given)
    labels = record["choices"].get("label") if isinstance(record.get("choices"), Mapping) else None
    if isinstance(labels, list) and value in labels:
        value = labels.index(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value < len(options):
            raise CallerError(f"{value} is no position among {len(options)} options", field=name)
        return list(options)[value]
    if (letter := chosen(options, gold(value, name))) is None:
        raise CallerError(f"none of the options is the answer in `{name}`", field="options")
    return letter


def _answer(record: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    if record.get("answer_number") is not None:  # SciBench
        return f"{gold(record['answer_number'], 'answer_number')} {record.get('unit') or ''}".strip()
    if (found := answer_of(record)) is not None:
        return gold(found[1], found[0])
    for name in _SOLUTION:
        if isinstance(solution := record.get(name), str):
            if (answer := answer_in(solution)) is None:
                raise UnusableRecord("its final answer is not plain to see", field=name)
            return gold(answer, name)
    raise no_answer(record, given)
