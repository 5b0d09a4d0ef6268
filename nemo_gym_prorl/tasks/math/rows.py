# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Dataset rows of mathematical problems: those of Gym's ``math_with_judge``, ``question`` and ``expected_answer``.

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

MAX_ANSWER_CHARS = 2000
"""Longest expected answer."""

_PROBLEM = ("problem", "question")
_DAPO = re.compile(
    r"\ASolve the following math problem step by step\. The last line[^\n]*\n+"
    r'|\n+Remember to put your answer on its own line after "Answer:"\.\s*\Z'
)
"""What DAPO-Math-17k says around each problem of where the answer goes; here it goes into a box."""

_ANSWER = ("answer", "expected_answer")


def row_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a dataset's record.

    Args:
        record: has ``problem`` (or ``question``) and ``answer`` (or ``expected_answer``), with or without
            capitals, or verl's ``prompt`` (a chat) and ``reward_model.ground_truth``; an answer may be a number.

    Raises:
        CallerError: one is missing or empty; names it.
    """
    plain = _plain(record)
    question = _text(plain, _PROBLEM, record)
    answer = _text(plain, _ANSWER, record)
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
    _text(row, ("question",), row)
    return _text(row, ("expected_answer",), row)


def missing(record: Mapping[str, Any], name: str) -> CallerError:
    """What is said of a record without a field that has to be there."""
    return CallerError(f"missing; there are {', '.join(map(str, record)) or 'no fields'}", field=name)


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the names of its fields in lower case, and with verl's as fields like any other."""
    plain = {str(name).lower(): value for name, value in record.items()}
    if (said := asked_in(plain.get("prompt"))) is not None:
        plain.setdefault("problem", _DAPO.sub("", said) if isinstance(said, str) else said)
    if (truth := truth_of(plain)) is not None:
        plain.setdefault("answer", truth)
    return plain


def asked_in(prompt: object) -> object:
    """The last message of a user in a chat, as verl's records have it; ``None`` if there is none."""
    turns = prompt if isinstance(prompt, list) else []
    said = [turn.get("content") for turn in turns if isinstance(turn, Mapping) and turn.get("role") == "user"]
    return said[-1] if said else None


def truth_of(record: Mapping[str, Any]) -> object:
    """The answer in a record of verl's; ``None`` if there is none."""
    rewards = record.get("reward_model")
    return rewards.get("ground_truth") if isinstance(rewards, Mapping) else None


def _text(record: Mapping[str, Any], names: tuple[str, ...], given: Mapping[str, Any]) -> str:
    """The text of the first of these fields that there is; ``given`` is the record as its owner knows it."""
    name = next((name for name in names if record.get(name) is not None), None)
    if name is None:
        raise missing(given, names[0])
    value = record[name]
    if isinstance(value, int | float) and not isinstance(value, bool) and name in _ANSWER:
        value = repr(value)
    if not isinstance(value, str) or not value.strip():
        raise CallerError("must be text that is not empty", field=name)
    if not is_text(value):
        raise CallerError("holds half a surrogate pair, which is no character", field=name)
    if name in _ANSWER and len(value) > MAX_ANSWER_CHARS:
        raise CallerError(f"is longer than {MAX_ANSWER_CHARS} characters", field=name)
    if name in _ANSWER and not unwrapped(value):
        raise CallerError("has nothing in its box", field=name)
    return value.strip()
