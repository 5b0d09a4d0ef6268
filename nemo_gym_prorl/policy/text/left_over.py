# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Calls that an engine was to take out of a turn, and left in its text.

An engine without its tool parser says that the policy is done, and its call is scored as an answer. What is found here
must be no opinion: a sample that is refused for what it says would be missing from what is trained on.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from nemo_gym_prorl.policy.text.parsers import FORMATS


_QUOTED = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


def left_over(content: str, tool_format: str, tools: Collection[str]) -> str | None:
    """The tool that the end of a text calls, if it does so beyond doubt.

    Calls that are malformed are the policy's mistake, which engines leave in the text as well; so are those of tools
    that nobody offered. What is in a block of code, or has text behind it, is talk about a call.

    Args:
        content: of a turn that is said to be final, without its thought.
        tool_format: a name in :data:`~nemo_gym_prorl.policy.text.parsers.FORMATS`.
        tools: names of those that were offered.
    """
    plain = _QUOTED.sub("", content)
    rest, calls = FORMATS[tool_format](plain)
    _, quoted_too = FORMATS[tool_format](content)
    if not calls or any(call.malformed or call.name not in tools for call in (*calls, *quoted_too)):
        return None  # engines leave all calls of a turn in its text for the sake of one that they can't read
    if tool_format == "hermes" and plain.count('"arguments"') < len(calls):
        return None  # engines insist on the key, and we don't
    return calls[0].name if plain.startswith(rest.rstrip()) else None
