# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Extraction of answers from messages, and comparison of answers.

A row of ``answers.jsonl`` has a kind, the expected answer, the answer, whether the answer is right (or the verdict),
and the question if it matters. A row of ``messages.jsonl`` has a message, its answer, and letters of options.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.final_answer import extract_final_answer, last_message_text
from nemo_gym_prorl.tasks.math.checker import MathVerdict
from nemo_gym_prorl.tasks.math.comparison import compare_with_itself, judge
from nemo_gym_prorl.tasks.math.task import expected_answer
from nemo_gym_prorl.tasks.stem.problems import problem_of
from tests.tasks.rows_file import table


TEXT = st.text(alphabet="ab5{}\\ $.=boxed", max_size=60)
ANSWERS = table(__file__, "answers.jsonl")
KINDS = list(dict.fromkeys(row[0] for row in ANSWERS))


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_judged_as_the_table_says(kind: str) -> None:
    mistakes = []
    for _, expected, answer, wanted, *question in (row for row in ANSWERS if row[0] == kind):
        verdict, why = judge(expected, answer, *question)
        if (verdict if isinstance(wanted, str) else verdict is MathVerdict.RIGHT) != wanted:
            mistakes.append((expected, answer, *question, verdict, why))
    assert mistakes == []


def test_expected_answers_as_data_sets_spell_them_are_gradeable() -> None:
    for expected in [*dict.fromkeys(row[1] for row in ANSWERS)][::4]:
        compare_with_itself(expected)


@pytest.mark.parametrize("row", table(__file__, "messages.jsonl"), ids=lambda row: row[0][:40])
def test_where_the_answer_is(row: list[Any]) -> None:
    message, answer, *letters = row
    assert extract_final_answer(message, *letters) == answer


CALL = {"type": "function_call", "name": "python", "arguments": "{}", "call_id": "c"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "5"}


def said(text: str, **changes: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]} | changes


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ([said("4"), CALL, OUTPUT, said("5")], "5"),
        ([said("5"), CALL], ""),
        ([said("5"), CALL, OUTPUT], ""),
        ([said("5"), {"type": "reasoning", "summary": []}], "5"),
        ([said("5", content="6")], "6"),
        ([said("5", content=[{"type": "refusal", "refusal": "7"}])], ""),
        ([said("5"), said("6", role="user")], "5"),
        ([said("<think>4</think>5")], "5"),
        (["no item", said("5")], "5"),
        ([], ""),
    ],
)
def test_the_last_message_counts_if_no_tool_call_follows(output: list[Any], text: str) -> None:
    assert last_message_text({"output": output}) == text


@given(TEXT, st.recursive(st.just("5"), lambda inner: inner.map("a{{{}}}".format), max_leaves=5))
def test_the_last_closed_box_is_the_answer(before: str, content: str) -> None:
    assert extract_final_answer(f"{before} so \\boxed{{{content}}} that is it") == content


@pytest.mark.parametrize("needed", [expected_answer, problem_of], ids=["math", "stem"])
@pytest.mark.parametrize("long", [r"\boxed{" + "{" * 10**6, r"\boxed{" + "{}" * 500_000], ids=["open", "pairs"])
def test_a_flood_of_braces_costs_no_time(needed: Callable[[dict[str, Any]], Any], long: str) -> None:
    """The event loop parses answers and expected answers."""
    begin = time.process_time()
    with pytest.raises(CallerError, match="longer than"):
        needed({"question": "What?", "expected_answer": long})
    assert not extract_final_answer(long)
    assert time.process_time() - begin < 2
