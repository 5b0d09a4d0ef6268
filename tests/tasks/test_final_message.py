# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What counts as said last: a message after the last tool call, without what was thought aloud."""

from typing import Any

import pytest

from nemo_gym_prorl.tasks.final_answer import final_message


CALL = {"type": "function_call", "name": "python", "arguments": "{}", "call_id": "c"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "5"}


def said(text: str, **changes: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]} | changes


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ([said("5")], "5"),
        ([said("4"), said("5")], "5"),
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
def test_what_was_said_last(output: list[Any], text: str) -> None:
    assert final_message({"output": output}) == text
