# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Mathematical problems as a :class:`~nemo_gym_prorl.tasks.task.Task`: Python to compute with, an answer that is
compared; and their rows.

Rows are those of Gym's ``math_with_judge``, ``question`` and ``expected_answer``: whoever has rows for that server can
use them here as they are. Those made here also give the policy its tool.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nemo_gym_prorl.failures import CallerError, TaskError
from nemo_gym_prorl.tasks.final_answer import final_answer, final_message
from nemo_gym_prorl.tasks.math.checker import MathChecker
from nemo_gym_prorl.tasks.math.spelling import unwrapped
from nemo_gym_prorl.tasks.records import (
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
from nemo_gym_prorl.tasks.task import Grade, OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench.workbench import Workbench, workbench_schemas
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace


TOOLS = ("python",)
"""What the policy may call."""

SYSTEM_PROMPT = """\
You solve mathematical problems. The tool `python` is a persistent Python with numpy, scipy and sympy; use it to \
compute and to check. End with the final answer, and nothing but the answer, in \\boxed{}."""

DATA_SOURCE = "math"
"""Of rows made here: a record does not say what set it is of."""

MAX_ANSWER_CHARS = 2000
"""Longest expected answer."""

_AROUND = re.compile(
    r"\ASolve the following math problem step by step\. The last line[^\n]*\n+"
    r'|\n+Remember to put your answer on its own line after "Answer:"\.\s*\Z'
    r"|\s+Present the answer in LaTex format: \\boxed\{Your answer\}\s*\Z"
)
"""What DAPO-Math-17k and Eurus-2 say around each problem of where the answer goes; here the system prompt does."""

_VALIDITY = ("problem_is_valid", "solution_is_valid")
"""NuminaMath-1.5's own judgement: ``Yes``, or why not."""

_SENTENCES = re.compile(r"[a-z]{2}[.!?]\s+[A-Z]")
_WORD = re.compile(r"(?<!\\)\b[a-z]{3,}")


def row_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a dataset's record.

    Args:
        record: has a question and an answer under one of the names in :mod:`nemo_gym_prorl.tasks.records`, or a worked
            ``solution`` with its answer in a box.

    Raises:
        CallerError: a field is missing or wrong; names it.
        UnusableRecord: the set knows no final answer, or calls the problem wrong.
    """
    plain = lowered(record)
    require_answerable(plain)
    for name in ("options", "choices"):
        if plain.get(name) or (name == "options" and options_by_field(plain)):
            raise UnusableRecord("is a multiple choice; `prorl data stem` makes rows of those", field=name)
    for name in _VALIDITY:
        if isinstance(plain.get(name), str) and plain[name] != "Yes":
            raise UnusableRecord(f"the set says {plain[name]!r}", field=name)
    name, asked = question_of(plain, record)
    question = text_of(_AROUND.sub("", asked), name)
    answer = _final(plain, record)
    return {
        "responses_create_params": create_params(SYSTEM_PROMPT, question, workbench_schemas(TOOLS), parallel=False),
        "question": question,
        "expected_answer": answer,
        "data_source": DATA_SOURCE,
    }


def expected_answer(row: Mapping[str, Any]) -> str:
    """The expected answer of a row.

    Raises:
        CallerError: there is none, or the row is a multiple choice; names the field.
    """
    if row.get("options"):
        raise CallerError("is a multiple choice, which prorl_stem grades", field="options")
    for name in ("question", "expected_answer"):
        if row.get(name) is None:
            raise missing(row, name)
    text_of(row["question"], "question")
    return _answer(row["expected_answer"], "expected_answer")


def _final(record: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """The final answer of a record: its answer, or what stands in the box of its solution."""
    if (found := answer_of(record)) is not None:
        name, value = found[0], gold(found[1], found[0])
        if not _is_worked(value):
            return _answer(value, name)
    elif isinstance(record.get("solution"), str):
        name, value = "solution", record["solution"]
    else:
        raise no_answer(record, given)
    if (boxed := final_answer(value) if "boxed" in value else None) is None:
        raise UnusableRecord("is worked out, without its final answer in a box", field=name)
    return _answer(gold(boxed, name), name)


def _is_worked(answer: str) -> bool:
    """Whether text is a solution in lines or sentences rather than a final answer."""
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
"""What sympy may work on for long is read in a bounded process, which takes 30 ms, and all else here, in 1 ms."""


@contextmanager
def requiring_readable(row_of: RowOf) -> Iterator[RowOf]:
    """A function from a record to its row, which raises :class:`CallerError` if the expected answer can't be read."""
    from nemo_gym_prorl.tasks.math.comparison import unread  # imports sympy

    with asyncio.Runner() as runner:
        checker = MathChecker()

        def checked(record: Mapping[str, Any]) -> dict[str, Any]:
            row = row_of(record)
            answer = expected_answer(row)
            if not _NUMBER.fullmatch(answer) and (_COSTLY.search(answer) or unread(answer)):
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
    """The task.

    Args:
        root: a folder of each sandbox that uploads reach; the agent works in ``<root>/workspace``.
        tools: bounds of one tool call.
        checker: compares answers; this task ends it.
    """

    resumes = True

    def __init__(self, root: str, tools: ToolLimits, checker: MathChecker) -> None:
        self._checker = checker
        self.tools = Workbench(TOOLS, f"{root.rstrip('/')}/workspace", tools)

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        """One like any other.

        Raises:
            CallerError: the row has no question or no expected answer.
        """
        expected_answer(row)
        return SandboxNeeds()

    async def prepare(self, row: Mapping[str, Any], tools: Workspace) -> None:
        """See that somebody could be right, before anybody tries; the question goes into the working folder."""
        try:
            await self._checker.require_gradeable(expected_answer(row))
        except TaskError as error:
            raise CallerError(error.reason, field="expected_answer") from error
        await tools.write({QUESTION_FILE: row["question"]})

    async def artefacts(self, row: Mapping[str, Any], tools: Workspace) -> None:
        """None: the answer is in the last message, and nothing in the sandbox can speak for it."""

    async def grade(
        self, row: Mapping[str, Any], artefacts: None, response: Mapping[str, Any], open_sandbox: OpenSandbox
    ) -> Grade:
        """Compare the last message's answer with the expected one."""
        checked = await self._checker.check(expected_answer(row), final_message(response), row["question"])
        return Grade(float(checked.right), checked.verdict, checked.detail, {"extracted_answer": checked.extracted})

    async def aclose(self) -> None:
        """End the checker."""
        await self._checker.aclose()
