# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Calls that an engine was to take out of a turn, and left in its text.

An engine without its tool parser says that the policy is done, and its call is scored as an answer. What is found here
must be no opinion: a sample that is refused for what it says would be missing from what is trained on.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from nemo_gym_prorl.policy.text.parsers import Format, parse


_QUOTED = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


def left_over(content: str, form: Format, tools: Collection[str]) -> str | None:
    """The tool that the end of a text calls, if it does so beyond doubt.

    Calls that are malformed are the policy's mistake, which engines leave in the text as well; so are those of tools
    that nobody offered. What is in a block of code, or has text behind it, is talk about a call.

    Args:
        content: of a turn that is said to be final, without its thought.
        form: how the model writes calls.
        tools: names of those that were offered.
    """
    plain = _QUOTED.sub("", content)
    found, quoted_too = parse(plain, form, thoughts=False), parse(content, form, thoughts=False).calls
    rest, calls = found.content, found.calls
    if not calls or any(call.malformed or call.name not in tools for call in (*calls, *quoted_too)):
        return None  # engines leave all calls of a turn in its text for the sake of one that they can't read
    if "<tool_call>{" in "".join(plain.split()) and plain.count('"arguments"') < len(calls):
        return None  # engines insist on the key, and we don't
    return calls[0].name if plain.startswith(rest.rstrip()) else None
