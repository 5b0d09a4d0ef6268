# SPDX-License-Identifier: Apache-2.0
"""Dataset rows of mathematical problems: those of Gym's ``math_with_judge``, ``question`` and ``expected_answer``; and
how records of published datasets are read, for those of science too.

Whoever has rows for that server can use them here as they are; those made here also give the policy its tool.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nemo_gym_prorl.failures import CallerError, is_text
from nemo_gym_prorl.tasks.math.answers import unwrapped
from nemo_gym_prorl.tasks.workbench.workbench import workbench_schemas


TOOLS = ("python",)
"""What the policy may call."""

SYSTEM_PROMPT = """\
You solve mathematical problems. The tool `python` is a persistent Python with numpy, scipy and sympy; use it to \
compute and to check. End with the final answer, and nothing but the answer, in \\boxed{}."""

DATA_SOURCE = "math"
"""Of rows made here: a record does not say what set it is of."""

MAX_QUESTION_CHARS = 20_000
MAX_EXPECTED_CHARS = 2000
"""Longest question and expected answer."""

PROBLEM = ("problem", "question")
ANSWERS = ("answer", "expected_answer", "ground_truth")
"""What fields are called in records, the likeliest first."""

_DAPO = re.compile(
    r"\ASolve the following math problem step by step\. The last line[^\n]*\n+"
    r'|\n+Remember to put your answer on its own line after "Answer:"\.\s*\Z'
)
"""What DAPO-Math-17k says around each problem of where the answer goes; here it goes into a box."""


def row_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a dataset's record.

    Args:
        record: has ``problem`` (or ``question``) and ``answer`` (or ``expected_answer``), with or without
            capitals, or verl's ``prompt`` (a chat) and ``reward_model.ground_truth``; an answer may be a number.

    Raises:
        CallerError: one is missing or empty; names it.
    """
    fields = fields_of(record)
    question = text_of(fields, PROBLEM, record)
    answer = text_of(fields, ANSWERS, record)
    return {
        "responses_create_params": {
            "input": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": question},
            ],
            "tools": workbench_schemas(TOOLS),
            "parallel_tool_calls": False,
        },
        "question": question,
        "expected_answer": answer,
        "data_source": DATA_SOURCE,
    }


def expected_answer(row: Mapping[str, Any]) -> str:
    """The expected answer of a row.

    Raises:
        CallerError: there is none; names the field.
    """
    text_of(row, ("question",))
    return text_of(row, ("expected_answer",))


def fields_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the names of its fields in lower case, and with verl's (the last message of a user in a chat, and
    the rewards' truth) as fields like any other."""
    fields = {str(name).lower(): value for name, value in record.items()}
    prompt, rewards = fields.get("prompt"), fields.get("reward_model")
    turns = [turn for turn in prompt if isinstance(turn, Mapping)] if isinstance(prompt, list) else []
    for said in [turn.get("content") for turn in turns if turn.get("role") == "user"][-1:]:
        fields.setdefault("problem", _DAPO.sub("", said) if isinstance(said, str) else said)
    if isinstance(rewards, Mapping):
        fields.setdefault("answer", rewards.get("ground_truth"))
    return fields


def text_of(
    fields: Mapping[str, Any],
    names: tuple[str, ...],
    record: Mapping[str, Any] | None = None,
    limit: int = MAX_QUESTION_CHARS,
) -> str:
    """The text of the first of these fields that there is; of an answer it may be a number.

    Args:
        fields: of a row or a record.
        names: the likeliest first.
        record: the same as its owner knows it.
        limit: longest text.

    Raises:
        CallerError: there is none, or it is no good; names it.
    """
    name = next((name for name in names if fields.get(name) is not None), None)
    if name is None:
        there = ", ".join(map(str, fields if record is None else record)) or "no fields"
        raise CallerError(f"missing; there are {there}", field=names[0])
    value, is_answer = fields[name], name in ANSWERS
    if isinstance(value, int | float) and not isinstance(value, bool) and is_answer:
        value = repr(value)
    if not isinstance(value, str) or not value.strip():
        raise CallerError("must be text that is not empty", field=name)
    if not is_text(value):
        raise CallerError("holds half a surrogate pair, which is no character", field=name)
    limit = MAX_EXPECTED_CHARS if is_answer else limit
    if len(value) > limit:
        raise CallerError(f"is longer than {limit} characters", field=name)
    if is_answer and not unwrapped(value):
        raise CallerError("has nothing in its box", field=name)
    return value.strip()
