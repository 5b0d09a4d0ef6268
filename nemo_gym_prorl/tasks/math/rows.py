# SPDX-License-Identifier: Apache-2.0
"""Dataset rows of mathematical problems: those of Gym's ``math_with_judge``, ``question`` and ``expected_answer``.

Whoever has rows for that server can use them here as they are; those made here also give the policy its tool.
"""

from __future__ import annotations

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
_ANSWER = ("answer", "expected_answer")


def row_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a dataset's record.

    Args:
        record: has ``problem`` (or ``question``) and ``answer`` (or ``expected_answer``); the latter may
            be a number.

    Raises:
        CallerError: one is missing or empty; names it.
    """
    question = _text(record, _PROBLEM)
    answer = _text(record, _ANSWER)
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
    _text(row, ("question",))
    return _text(row, ("expected_answer",))


def _text(record: Mapping[str, Any], names: tuple[str, ...]) -> str:
    name = next((name for name in names if record.get(name) is not None), None)
    if name is None:
        raise CallerError("missing", field=names[0])
    value = record[name]
    if isinstance(value, int | float) and not isinstance(value, bool) and name in _ANSWER:
        value = repr(value)
    if not isinstance(value, str) or not value.strip():
        raise CallerError("must be text that is not empty", field=name)
    if not is_text(value):
        raise CallerError("holds half a surrogate pair, which is no character", field=name)
    if name in _ANSWER and not unwrapped(value):
        raise CallerError("has nothing in its box", field=name)
    if name in _ANSWER and len(value) > MAX_ANSWER_CHARS:
        raise CallerError(f"is longer than {MAX_ANSWER_CHARS} characters", field=name)
    return value.strip()
