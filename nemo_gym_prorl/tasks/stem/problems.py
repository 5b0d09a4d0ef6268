# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of science questions, parsed into problems, and conversion of published records to rows. Pure.

Rows have the fields of Gym's ``math_with_judge`` (``question``, ``expected_answer``) or ``mcqa`` (``options``, with
the letter as ``expected_answer``), so rows of those servers work unchanged. In a multiple choice an answer is one
letter, or the text of one option. An answer that names several options, or a letter with the text of another option,
is wrong.

Published options are texts by letter, a list of texts, ``{"text": [...], "label": [...]}`` (ARC), ``opa`` to ``opd``
(MedMCQA), a right answer next to wrong ones (GPQA, SciQ), or part of the question. SCP-116K has a worked solution
(``matched_solution``) instead of an answer; :func:`answer_in` extracts the final answer, or the record is dropped.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Any

from nemo_gym_prorl.failures import CallerError, is_text
from nemo_gym_prorl.tasks.dataset_records import (
    UnusableRecord,
    answer_of,
    create_params,
    gold,
    lowered,
    no_answer,
    options_by_field,
    question_of,
    require_answerable,
    text_of,
)
from nemo_gym_prorl.tasks.final_answer import extract_final_answer
from nemo_gym_prorl.tasks.stem import quantities
from nemo_gym_prorl.tasks.stem.quantities import plain, without_box, words
from nemo_gym_prorl.tasks.stem.search import SCHEMA
from nemo_gym_prorl.tasks.workbench import workbench_schemas


_OPTION = re.compile(r"^\s*(?:[\(\[]([A-J])[\)\]]|([A-J])[.):])\s+(\S.*?)\s*$", re.MULTILINE)
_LABEL = re.compile(r"(?<![A-Za-z])(?:[\(\[]([A-J])[\)\]]|([A-J])[.):])(?=\s*\S)")
_LETTER = re.compile(r"(?:(?:option|choice|answer)\s*:?\s*)?[\(\[{]?\s*([A-Za-z])\s*[\)\]}]?[.:]?", re.IGNORECASE)
_LETTER_AND_WORDS = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?(?:[\(\[]\s*([A-Za-z])\s*[\)\]]|([A-Za-z])\s*[\).:])[\s:.-]*(\S.*)",
    re.IGNORECASE,
)

_LETTER_BESIDE_WORDS = re.compile(r"(?:(?:option|choice|answer)\s*:?\s*)?([A-Za-z])(?:\s*,)?\s+(\S.*)", re.IGNORECASE)
_IN_BRACKETS = re.compile(r"[(\[]\s*(.*?)\s*[)\]]")
_TEX_SPACE = re.compile(r"\\[,;:! ]|\\q?quad(?![a-zA-Z])|~")


def options_in(question: str) -> tuple[str, dict[str, str]] | None:
    """Return the text before a question's options, and the options by letter; ``None`` without options from A on."""
    found = list(_OPTION.finditer(question))
    options = {match[1] or match[2]: match[3] for match in found}
    if len(found) < 2 or list(options) != list("ABCDEFGHIJ")[: len(found)]:
        return None
    return question[: found[0].start()].strip(), options


def letters_in(question: str) -> str:
    """Return the letters of the options that a question shows, from A on; empty with fewer than two."""
    shown = {found[1] or found[2] for found in _LABEL.finditer(question)}
    letters = "".join(takewhile(shown.__contains__, "ABCDEFGHIJ"))
    return letters if len(letters) > 1 else ""


def letter_of(answer: str) -> str | None:
    found = _LETTER.fullmatch(plain(answer))
    return found[1].upper() if found else None


def chosen_option(
    options: Mapping[str, str], answer: str, same: Callable[[str, str], bool] = lambda one, other: False
) -> str | None:
    """Return the letter of the option that an answer chooses; ``None`` unless it chooses exactly one.

    Args:
        options: texts by letter.
        same: equality of an option and an answer that differ as texts, for example of quantities.
    """
    if (letter := letter_of(answer)) is not None and letter in options:
        return letter
    said = plain(_TEX_SPACE.sub(" ", answer))
    if whole := _meant(options, said, same):
        return whole
    found = _LETTER_AND_WORDS.fullmatch(said) or _LETTER_BESIDE_WORDS.fullmatch(said)
    if found is None:
        return None
    *letters, beside = found.groups()
    letter = next(filter(None, letters)).upper()
    inner = _IN_BRACKETS.fullmatch(beside)
    said_of_it = {_meant(options, text, same) for text in (beside, inner[1] if inner else beside)}
    return letter if letter in options and letter in said_of_it else None


def _meant(options: Mapping[str, str], said: str, same: Callable[[str, str], bool]) -> str | None:
    ways: tuple[Callable[[str], bool], ...] = (
        lambda option: words(option) == words(said),
        lambda option: words(option).casefold() == words(said).casefold(),
        lambda option: same(option, said),
    )
    for means in ways:
        found = [letter for letter, option in options.items() if means(option)]
        if found:
            return found[0] if len(found) == 1 else None
    return None


WORKBENCH_TOOLS = ("python",)
"""Tools of the policy besides ``search``."""

MAX_QUESTION_CHARS = 20_000  # bounds the prompts of policy and judge
MAX_EXPECTED_CHARS = 2000

SYSTEM_PROMPT = """\
You answer questions of science. The tool `search` finds passages in a library of texts; the tool `python` is a \
persistent Python for computing. Give the final answer, and nothing but the answer, in \\boxed{}: of a multiple \
choice the letter, of a quantity the number with its unit."""

_MATHEMATICS = re.compile(r"[\\^_=+*/<>]|(?<![A-Za-z])(?:[a-zA-Z]\s*[(!]|(?:sin|cos|tan|ln|log|exp|sqrt)(?![A-Za-z]))")
_COMMAND = re.compile(r"\\[A-Za-z]+|\\.")
_PROSE = re.compile(r"[^\W\d_]{4,}")


class AnswerKind(StrEnum):
    """Kind of an expected answer, which determines the rules that check the policy's answer."""

    CHOICE = "choice"
    QUANTITY = "quantity"
    FORMULA = "formula"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class StemProblem:
    """Question with its expected answer.

    Attributes:
        question: text of the question; empty for a multiple choice whose row has none.
        expected: expected answer; the letter in a multiple choice.
        options: texts by letter; empty for a free answer, or if the options cannot be parsed from the question.
    """

    question: str
    expected: str
    options: Mapping[str, str]
    kind: AnswerKind

    @property
    def letters(self) -> str:
        """Letters of the options; empty for a free answer."""
        if self.kind is not AnswerKind.CHOICE:
            return ""
        return "".join(self.options) or letters_in(self.question)


def problem_of(row: Mapping[str, Any]) -> StemProblem:
    """Return the problem of a dataset row.

    Raises:
        CallerError: ``question``, ``expected_answer`` or ``options`` is missing or invalid; names the field.
    """
    expected = _text(row, "expected_answer", MAX_EXPECTED_CHARS)
    options = _options(row.get("options"))
    if options:
        # Rows of Gym's mcqa have the question only in the policy's input.
        question = _text(row, "question", MAX_QUESTION_CHARS) if row.get("question") is not None else ""
        if expected not in options:
            raise CallerError(f"must be one of the options' letters, {', '.join(options)}", field="expected_answer")
        return StemProblem(question, expected, options, AnswerKind.CHOICE)
    question = _text(row, "question", MAX_QUESTION_CHARS)
    kind = kind_of(expected, question)
    shown = options_in(question) if kind is AnswerKind.CHOICE else None
    return StemProblem(question, expected, shown[1] if shown else {}, kind)


def kind_of(expected: str, question: str = "") -> AnswerKind:
    """Return the kind of an expected answer of a row without options.

    A letter is a choice only if the question shows options. In an open question a letter is a symbol, as C for carbon.
    """
    text = plain(expected)
    if (letter := letter_of(text)) is not None and letter in letters_in(question):
        return AnswerKind.CHOICE
    if quantities.read(expected) is not None:
        return AnswerKind.QUANTITY
    if _MATHEMATICS.search(text) and not _PROSE.search(_COMMAND.sub(" ", text)):
        return AnswerKind.FORMULA
    return AnswerKind.TEXT


def row_for(
    question: str, expected: str, options: Mapping[str, str] | None = None, script: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the dataset row of a problem, whose question does not contain the options.

    In a multiple choice ``expected`` is a letter of ``options``. See :func:`.create_params` for ``script``.
    """
    prompt = "\n".join([question, *(f"{letter}: {text}" for letter, text in (options or {}).items())])
    tools = [*workbench_schemas(WORKBENCH_TOOLS), SCHEMA]
    params = create_params(SYSTEM_PROMPT, prompt, tools, script=script)
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
    """Return the texts by letter of a row's ``options``: a list of objects with one letter each, or one object."""
    if given is None:
        return {}
    parts = [given] if isinstance(given, Mapping) else given
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise CallerError('must be a list like [{"A": "text"}, {"B": "text"}]', field="options")
    options: dict[str, str] = {}
    for letter, text in (pair for part in parts for pair in part.items()):
        if not isinstance(letter, str) or not re.fullmatch(r"[A-Z]", letter) or letter in options:
            raise CallerError(f"{letter!r} must be a capital letter that occurs once", field="options")
        if not isinstance(text, str) or not is_text(text) or not 0 < len(text) <= MAX_EXPECTED_CHARS:
            raise CallerError(f"{letter} must be a text of at most {MAX_EXPECTED_CHARS} characters", field="options")
        options[letter] = text
    if len(options) < 2:
        raise CallerError("must have at least two options", field="options")
    return options


DATA_SOURCE = "stem"
"""Field ``data_source`` of converted rows, since records do not name their data set."""

MAX_LINE_CHARS = 120
"""Maximum characters of a one-line solution that is an answer as a whole."""

_SOLUTION = ("matched_solution", "solution")
_LETTER_FIELDS = ("answer_letter", "answerkey", "answer_idx")
_INDEX = ("answer_index", "cop")
_RIGHT = ("correct answer", "correct_answer")
_FLAW = "error_type"
"""Field of MMLU-Redux that is ``ok`` or names a flaw of the question or answer."""

_WRONG = re.compile(r"incorrect answer \d|distractor\d")
_DELIMITED = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def row_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a record to a row.

    Args:
        record: record with a question, and with options or an answer, under one of the names in
            :mod:`nemo_gym_prorl.tasks.dataset_records` and this module. Rows of Gym only get a ``data_source``.

    Raises:
        CallerError: a field is missing or invalid; names the field.
        UnusableRecord: the record has no answer or a known flaw, needs a picture, or is a programming task.
    """
    if isinstance(record.get("responses_create_params"), Mapping) and record.get("expected_answer") is not None:
        gold(record["expected_answer"], "expected_answer")
        problem_of(record)
        return {"data_source": DATA_SOURCE, **record}
    plain = lowered(record)
    require_answerable(plain)
    if (flaw := plain.get(_FLAW)) not in (None, "", "ok"):
        raise UnusableRecord(f"the set says {flaw!r}", field=_FLAW)
    _, question = question_of(plain, record)
    if (options := _options_of(plain, question)) is not None:
        expected = _letter(plain, options, record)
    else:
        expected = _answer(plain, record)
        if (found := options_in(question)) and (letter := chosen_option(found[1], expected)):
            question, options, expected = found[0], found[1], letter
    problem = problem_of({"question": question, "expected_answer": expected, "options": options})
    row = row_for(problem.question, problem.expected, problem.options)
    domain = plain.get("domain")
    return row | {
        "data_source": DATA_SOURCE,
        "verifier_metadata": {"domain": domain} if isinstance(domain, str) else {},
    }


def answer_in(solution: str) -> str | None:
    """Return the final answer of a worked solution; ``None`` if the answer cannot be recognised."""
    lines = [line.strip() for line in solution.strip().splitlines() if line.strip()]
    if not lines:
        return None
    if answer := extract_final_answer(solution):
        return answer.rstrip(".")
    if len(lines) == 1 and len(lines[0]) <= MAX_LINE_CHARS:
        return lines[0]
    formulas = [next(filter(None, match.groups())) for match in _DELIMITED.finditer(solution)]
    if formulas and "=" in formulas[-1] and formulas[-1].strip() in lines[-1]:
        return formulas[-1].rpartition("=")[2].strip() or None
    return None


def _options_of(record: Mapping[str, Any], question: str) -> dict[str, str] | None:
    """Return the options of a record by letter, from any of the published formats; ``None`` without options."""
    if right := next((name for name in _RIGHT if record.get(name)), None):
        texts = [record[right], *(text for name, text in record.items() if _WRONG.fullmatch(name) and text)]
        # The order by hash is reproducible, and does not always put the right option first.
        return _lettered(sorted(texts, key=lambda text: hashlib.sha256(f"{question}\0{text}".encode()).digest()))
    given = record.get("options") if record.get("options") is not None else record.get("choices")
    if isinstance(given, Mapping) and isinstance(given.get("text"), list):
        return _lettered(given["text"])
    if isinstance(given, Mapping):
        return {str(letter): text for letter, text in given.items() if text is not None}
    if not isinstance(given, list) or not given:
        return _lettered(texts) if (texts := options_by_field(record)) else None
    if all(isinstance(part, Mapping) and len(part) == 1 for part in given):
        return {letter: text for part in given for letter, text in part.items()}
    texts = list(given)
    while texts and texts[-1] == "N/A":  # padding in MMLU-Pro
        texts.pop()
    return _lettered(texts)


def _lettered(texts: Sequence[Any]) -> dict[str, str]:
    if not 2 <= len(texts) <= len(string.ascii_uppercase) or not all(isinstance(text, str) for text in texts):
        raise CallerError("must be 2 to 26 texts", field="options")
    return dict(zip(string.ascii_uppercase, (text.strip() for text in texts), strict=False))


def _letter(record: Mapping[str, Any], options: Mapping[str, str], given: Mapping[str, Any]) -> str:
    """Return the letter of the right option, which a record states as letter, label, index from 0, or text."""
    if right := next((name for name in _RIGHT if record.get(name)), None):
        return next(letter for letter, text in options.items() if text == str(record[right]).strip())
    name, value = next(
        ((name, record[name]) for name in (*_LETTER_FIELDS, *_INDEX) if record.get(name) is not None),
        None,
    ) or (answer_of(record) or ("answer", _answer(record, given)))
    if value in ("", -1):
        raise no_answer({"answer": None}, given)
    labels = record["choices"].get("label") if isinstance(record.get("choices"), Mapping) else None
    if isinstance(labels, list) and value in labels:
        value = labels.index(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value < len(options):
            raise CallerError(f"{value} must be an index below {len(options)}, the number of options", field=name)
        return list(options)[value]
    if (letter := chosen_option(options, gold(value, name))) is None:
        raise CallerError(f"must contain the answer in `{name}`", field="options")
    return letter


def _answer(record: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    if record.get("answer_number") is not None:  # SciBench
        return f"{gold(record['answer_number'], 'answer_number')} {record.get('unit') or ''}".strip()
    if (found := answer_of(record)) is not None:
        return gold(found[1], found[0])
    for name in _SOLUTION:
        if isinstance(solution := record.get(name), str):
            if (answer := answer_in(solution)) is None:
                raise UnusableRecord("the final answer cannot be told from the working", field=name)
            return gold(answer, name)
    raise no_answer(record, given)
