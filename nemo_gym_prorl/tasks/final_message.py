# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a policy said last, where the answer is in the text. Pure.

One rule for all families: the last message counts, and only if no tool is called with it or after it. What a policy
says while it still works is no answer; nor is what it thinks aloud.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


_TOOLS = ("function_call", "function_call_output")


def final_message(response: Mapping[str, Any]) -> str:
    """The text of a Responses object's last message after its last tool call; empty if there is none."""
    text = ""
    for item in response.get("output") or ():
        if not isinstance(item, Mapping):
            continue
        if item.get("type") in _TOOLS:
            text = ""
        elif item.get("type") == "message" and item.get("role", "assistant") == "assistant":
            text = _text_of(item.get("content"))
    return text.rpartition("</think>")[2]


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = (part for part in content or () if isinstance(part, Mapping) and part.get("type") == "output_text")
    return "".join(text for part in parts if isinstance(text := part.get("text"), str))
