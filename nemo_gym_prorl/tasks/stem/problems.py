# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Problems of science: dataset rows in, what is to be graded out. Pure.

Rows are those of Gym's ``math_with_judge`` (``question``, ``expected_answer``) and of its ``mcqa`` (``options``, with
the letter as ``expected_answer``), so data that people have for these works as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nemo_gym_prorl.failures import CallerError, is_text
from nemo_gym_prorl.tasks.records import text_of
from nemo_gym_prorl.tasks.stem import quantities
from nemo_gym_prorl.tasks.stem.answers import plain, without_box
from nemo_gym_prorl.tasks.stem.choices import letter_of, letters_in, options_in
from nemo_gym_prorl.tasks.stem.search import SCHEMA
from nemo_gym_prorl.tasks.workbench.workbench import workbench_schemas


WORKBENCH_TOOLS = ("python",)
"""What the policy may call beside ``search``."""

MAX_QUESTION_CHARS = 20_000
MAX_EXPECTED_CHARS = 2000

SYSTEM_PROMPT = """\
You answer questions of science. The tool `search` finds passages in a library of texts; the tool `python` is a \
persistent Python for computing. Give the final answer, and nothing but the answer, in \\boxed{}: of a multiple \
choice the letter, of a quantity the number with its unit."""

_MATHEMATICS = re.compile(r"[\\^_=+*/<>]|(?<![A-Za-z])(?:[a-zA-Z]\s*[(!]|(?:sin|cos|tan|ln|log|exp|sqrt)(?![A-Za-z]))")
_COMMAND = re.compile(r"\\[A-Za-z]+|\\.")
_PROSE = re.compile(r"[^\W\d_]{4,}")


class Kind(StrEnum):
    """What an expected answer is, and so what checks it first."""

    CHOICE = "choice"
    QUANTITY = "quantity"
    FORMULA = "formula"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Problem:
    """One question.

    Attributes:
        question: as the policy reads it.
        expected: the answer.
        options: text by letter; empty where the answer is free.
        kind: of the answer.
    """

    question: str
    expected: str
    options: Mapping[str, str]
    kind: Kind

    @property
    def letters(self) -> str:
        """Of the options; empty where the answer is free."""
        if self.kind is not Kind.CHOICE:
            return ""
        return "".join(self.options) or letters_in(self.question)


def problem_of(row: Mapping[str, Any]) -> Problem:
    """The problem of a dataset row.

    Raises:
        CallerError: ``question``, ``expected_answer`` or ``options`` is missing or no good; names it.
    """
    expected = _text(row, "expected_answer", MAX_EXPECTED_CHARS)
    options = _options(row.get("options"))
    if options:
        # A row of Gym's mcqa has its question only where the policy reads it.
        question = _text(row, "question", MAX_QUESTION_CHARS) if row.get("question") is not None else ""
        if expected not in options:
            raise CallerError(f"must be one of the options' letters, {', '.join(options)}", field="expected_answer")
        return Problem(question, expected, options, Kind.CHOICE)
    question = _text(row, "question", MAX_QUESTION_CHARS)
    kind = kind_of(expected, question)
    shown = options_in(question) if kind is Kind.CHOICE else None
    return Problem(question, expected, shown[1] if shown else {}, kind)


def kind_of(expected: str, question: str = "") -> Kind:
    """What kind of answer this is, where the row has no options. A letter is a choice only of the options that the
    question shows: of an open question it is a symbol, as carbon's C."""
    text = plain(expected)
    if (letter := letter_of(text)) is not None and letter in letters_in(question):
        return Kind.CHOICE
    if quantities.read(expected) is not None:
        return Kind.QUANTITY
    if _MATHEMATICS.search(text) and not _PROSE.search(_COMMAND.sub(" ", text)):
        return Kind.FORMULA
    return Kind.TEXT


def row_for(
    question: str, expected: str, options: Mapping[str, str] | None = None, script: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The dataset row of a problem.

    Args:
        question: without the options.
        expected: the answer; of a multiple choice the letter.
        options: text by letter.
        script: turns for a model server that plays back scripts (see ``scripts``); ``None`` for a real model.
    """
    told = "\n".join([question, *(f"{letter}: {text}" for letter, text in (options or {}).items())])
    params: dict[str, Any] = {
        "input": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": told}],
        "tools": [*workbench_schemas(WORKBENCH_TOOLS), SCHEMA],
        "parallel_tool_calls": True,
    }
    if script is not None:
        # Gym's metadata maps strings to strings, so the script travels as JSON text.
        params["metadata"] = {"script": json.dumps(script, sort_keys=True)}
    row = {"responses_create_params": params, "question": question, "expected_answer": expected}
    return row | ({"options": [{letter: text} for letter, text in options.items()]} if options else {})


def _text(row: Mapping[str, Any], name: str, limit: int) -> str:
    if row.get(name) is None:
        raise CallerError("missing", field=name)
    value = text_of(row[name], name, limit, number=name == "expected_answer")
    if name != "expected_answer":
        return value
    value = without_box(value)
    if not plain(value):
        raise CallerError("has nothing in its box", field=name)
    return value.strip()


def _options(given: object) -> dict[str, str]:
    """Gym's list of one-letter objects, or one object of all."""
    if given is None:
        return {}
    parts = [given] if isinstance(given, Mapping) else given
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise CallerError('must be a list like [{"A": "text"}, {"B": "text"}]', field="options")
    options: dict[str, str] = {}
    for letter, text in (pair for part in parts for pair in part.items()):
        if not isinstance(letter, str) or not re.fullmatch(r"[A-Z]", letter) or letter in options:
            raise CallerError(f"{letter!r} is no letter of its own", field="options")
        if not isinstance(text, str) or not is_text(text) or not 0 < len(text) <= MAX_EXPECTED_CHARS:
            raise CallerError(f"{letter} must be a text of at most {MAX_EXPECTED_CHARS} characters", field="options")
        options[letter] = text
    if len(options) < 2:
        raise CallerError("there must be two at least", field="options")
    return options
