# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Task family ``math``: mathematical problems with a Python tool, and conversion of published records to rows.

The final answer is compared with the expected answer. Rows have the fields ``question`` and ``expected_answer``, like
rows of Gym's ``math_with_judge``, which work unchanged. Rows that :func:`row_of` converts also offer the Python tool.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nemo_gym_prorl.failures import CallerError, TaskError
from nemo_gym_prorl.tasks.dataset_records import (
    UnusableRecord,
    answer_of,
    create_params,
    gold,
    lowered,
    missing,
    no_answer,
    options_by_field,
    question_of,
    require_answerable,
    text_of,
)
from nemo_gym_prorl.tasks.final_answer import extract_final_answer, last_message_text
from nemo_gym_prorl.tasks.math.checker import MathChecker
from nemo_gym_prorl.tasks.math.spelling import unwrapped
from nemo_gym_prorl.tasks.task import Grade, OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench import Workbench, workbench_schemas
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace


TOOLS = ("python",)

SYSTEM_PROMPT = """\
You solve mathematical problems. The tool `python` is a persistent Python with numpy, scipy and sympy; use it to \
compute and to check. End with the final answer, and nothing but the answer, in \\boxed{}."""

DATA_SOURCE = "math"
"""Field ``data_source`` of converted rows, since records do not name their data set."""

MAX_ANSWER_CHARS = 2000
"""Maximum characters of an expected answer, to bound parsing."""

_AROUND = re.compile(
    r"\ASolve the following math problem step by step\. The last line[^\n]*\n+"
    r'|\n+Remember to put your answer on its own line after "Answer:"\.\s*\Z'
    r"|\s+Present the answer in LaTex format: \\boxed\{Your answer\}\s*\Z"
)
"""Output instructions of DAPO-Math-17k and Eurus-2, which the system prompt replaces."""

_VALIDITY = ("problem_is_valid", "solution_is_valid")
"""Fields of NuminaMath-1.5 that are ``Yes`` or the reason why a problem is invalid."""

_NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905
_OPTION = re.compile(r"\(?([A-H])[.)]\s+[^\d\\$]+")
_STATED = re.compile(r"[A-Z][a-z]+(?: [a-z]+){0,8} (?:is|are|was|equals) (\\?\$?-?\d[^a-z\s]*?)\.?")
_SENTENCE = re.compile(
    r"[A-Z][a-z]+ (?:[a-z]+ ){0,8}(?:is|are|was|were|has|have|had|will|needs?|gets?|takes?|costs?|equals?) [^\\]*\d"
)
_TWO_UNITS = re.compile(r"\d+ [a-z]+ \d+ [a-z]+\.?")
_SENTENCES = re.compile(r"[a-z]{2}[.!?]\s+[A-Z]")
_WORD = re.compile(r"(?<!\\)\b[a-z]{3,}")


def row_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a record to a row.

    Args:
        record: record with a question and an answer under one of the names in
            :mod:`nemo_gym_prorl.tasks.dataset_records`, or with a worked ``solution`` that has its answer in a box.

    Raises:
        CallerError: a field is missing or invalid; names the field.
        UnusableRecord: the record has no final answer, is a multiple choice, or is invalid according to its data set.
    """
    plain = lowered(record)
    require_answerable(plain)
    for name in ("options", "choices"):
        if plain.get(name) or (name == "options" and options_by_field(plain)):
            raise UnusableRecord("is a multiple choice; convert it with `prorl data stem`", field=name)
    for name in _VALIDITY:
        if isinstance(plain.get(name), str) and plain[name] != "Yes":
            raise UnusableRecord(f"the set says {plain[name]!r}", field=name)
    name, asked = question_of(plain, record)
    question = text_of(_AROUND.sub("", asked), name)
    answer = _final(plain, record, question)
    return {
        "responses_create_params": create_params(SYSTEM_PROMPT, question, workbench_schemas(TOOLS), parallel=False),
        "question": question,
        "expected_answer": answer,
        "data_source": DATA_SOURCE,
    }


def expected_answer(row: Mapping[str, Any]) -> str:
    """Return the expected answer of a row.

    Raises:
        CallerError: question or answer is missing or invalid, or the row is a multiple choice; names the field.
    """
    if row.get("options"):
        raise CallerError("is a multiple choice; use prorl_stem for it", field="options")
    for name in ("question", "expected_answer"):
        if row.get(name) is None:
            raise missing(row, name)
    text_of(row["question"], "question")
    return _answer(row["expected_answer"], "expected_answer")


def _final(record: Mapping[str, Any], given: Mapping[str, Any], question: str) -> str:
    if (found := answer_of(record)) is not None:
        name, value = found[0], gold(found[1], found[0])
        if not _is_worked(value):
            return _value_of(_answer(value, name), name, question)
    elif isinstance(record.get("solution"), str):
        name, value = "solution", record["solution"]
    else:
        raise no_answer(record, given)
    if (boxed := extract_final_answer(value) if "boxed" in value else None) is None:
        raise UnusableRecord("is a worked solution without its final answer in a box", field=name)
    return _answer(gold(boxed, name), name)


def _value_of(answer: str, field: str, question: str) -> str:
    """Return the number, value or option letter that an answer in words means; raises UnusableRecord for sentences."""
    text = answer.strip()
    if (option := _OPTION.fullmatch(text)) and re.search(rf"(?m)(?:^|\s)\(?{option[1]}[.)]\s", question):
        return option[1]
    if text.lower() in _NUMBERS:
        return str(_NUMBERS.index(text.lower()))
    if stated := _STATED.fullmatch(text):
        return stated[1]
    if _SENTENCE.match(text):
        raise UnusableRecord("is a sentence, not a value", field=field)
    if _TWO_UNITS.fullmatch(text):
        raise UnusableRecord("has two units, which are not added up", field=field)
    return answer


def _is_worked(answer: str) -> bool:
    """Return whether a text is a worked solution in lines or sentences rather than a final answer."""
    if ("\n" in answer and r"\begin" not in answer) or _SENTENCES.search(answer):
        return True
    before, box, _ = answer.partition(r"\boxed")
    return bool(box and _WORD.search(before))


def _answer(value: Any, field: str) -> str:
    text = text_of(value, field, MAX_ANSWER_CHARS, number=True)
    if not unwrapped(text):
        raise CallerError("has nothing in its box", field=field)
    return text


RowOf = Callable[[Mapping[str, Any]], dict[str, Any]]

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_COSTLY = re.compile(r"\^\s*\{?[^{}]*\^|\)\s*\^|\^\s*\{?\s*-?\d{3}|!|\\(?:sum|prod|int|lim|binom)|.{300}", re.DOTALL)
"""Expressions that may keep sympy busy for long: checked in a worker with bounded time, others in process."""


@contextmanager
def require_readable_answers(row_of: RowOf) -> Iterator[RowOf]:
    """Yield ``row_of`` with a check: a row whose expected answer cannot be parsed raises :class:`CallerError`."""

    from nemo_gym_prorl.tasks.math.comparison import unreadable_part  # loads sympy, so not at the top

    with asyncio.Runner() as runner:
        checker = MathChecker()

        def checked(record: Mapping[str, Any]) -> dict[str, Any]:
            row = row_of(record)
            answer = expected_answer(row)
            if not _NUMBER.fullmatch(answer) and (_COSTLY.search(answer) or unreadable_part(answer)):
                try:
                    runner.run(checker.require_gradeable(answer))
                except TaskError as error:
                    raise CallerError(error.reason, field="expected_answer") from error
            return row

        try:
            yield checked
        finally:
            runner.run(checker.aclose())


QUESTION_FILE = "question.txt"


class Math:
    """Task of mathematical problems; closes its checker. The policy works in the sandbox's ``<root>/workspace``."""

    resumes = True

    def __init__(self, root: str, tools: ToolLimits, checker: MathChecker) -> None:
        self._checker = checker
        self.tools = Workbench(TOOLS, f"{root.rstrip('/')}/workspace", tools)

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        expected_answer(row)
        return SandboxNeeds()

    async def prepare(self, row: Mapping[str, Any], tools: Workspace) -> None:
        """Check that the expected answer is gradeable, and write the question into the working folder.

        Raises:
            CallerError: the expected answer is not gradeable.
            InfrastructureError: ``verifier_error``, or the sandbox failed.
        """
        try:
            await self._checker.require_gradeable(expected_answer(row))
        except TaskError as error:
            raise CallerError(error.reason, field="expected_answer") from error
        await tools.write({QUESTION_FILE: row["question"]})

    async def artefacts(self, row: Mapping[str, Any], tools: Workspace) -> None:
        """Return nothing, because only the last message is graded and the sandbox is untrusted."""

    async def grade(
        self, row: Mapping[str, Any], artefacts: None, response: Mapping[str, Any], open_sandbox: OpenSandbox
    ) -> Grade:
        checked = await self._checker.check(expected_answer(row), last_message_text(response), row["question"])
        return Grade(float(checked.right), checked.verdict, checked.detail, {"extracted_answer": checked.extracted})

    async def aclose(self) -> None:
        await self._checker.aclose()
