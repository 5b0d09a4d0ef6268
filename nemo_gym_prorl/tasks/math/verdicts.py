# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What can become of an answer."""

from __future__ import annotations

from enum import StrEnum


ANOTHER_VALUE = "another value"
"""Why an answer is wrong if both could be read, and are not the same."""


class Verdict(StrEnum):
    """What became of an answer; only the first has a reward."""

    RIGHT = "right"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    """The message has none."""
    UNREADABLE = "unreadable"
    """It is no mathematics that can be read, or too long, or broke the reader."""
    UNFINISHED = "unfinished"
    """It leaves the work to the reader, or repeats the question."""
    CONTRADICTORY = "contradictory"
    """It says two things."""
    TIMED_OUT = "timed_out"
    """Comparing it took longer than is allowed."""


Judged = tuple[Verdict, str]
"""What an answer is worth, and why, for a person."""
