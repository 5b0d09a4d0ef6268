# SPDX-License-Identifier: Apache-2.0
"""What has a colon: a ratio, or a time of day. Pure, and about text only.

To ``math-verify`` a colon is a stroke, so that half past ten is a third, and ``1:2:3`` a sixth. Here ``10:30`` is a
time if it says so ("a.m."), or if nobody would write a ratio like that, with a common factor; unless the question asks
for one. Ratios are the same if they are equal, as ``2:4:6`` and ``1:2:3``, which is for who compares values.
"""

from __future__ import annotations

import re
from math import gcd

from nemo_gym_prorl.tasks.math.shapes import split


_AROUND = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf)|mbox)\s*\{|[{}\s~]|\\[,;:! ]")
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?:([ap])\.?m\.?)?", re.IGNORECASE)
_RATIO_ASKED = re.compile(r"ratio|proportion|odds|\bscale\b", re.IGNORECASE)
_LOWEST_ASKED = re.compile(r"simplif|simplest|lowest|reduce", re.IGNORECASE)


def another_time(expected: str, said: str, question: str) -> str | None:
    """What is wrong with an answer where a time of day is expected, or is said; empty if nothing is, ``None`` if
    neither is one."""
    wanted, given = (_CLOCK.fullmatch(_AROUND.sub("", text)) for text in (expected, said))
    half_days = [found[3].lower() for found in (wanted, given) if found and found[3]]
    if wanted is None or (asks_for_ratio(question) and not wanted[3]):
        return "a time of day" if half_days else None
    if not half_days and gcd(int(wanted[1]), int(wanted[2])) == 1:
        return None
    same = given is not None and all(int(wanted[part]) == int(given[part]) for part in (1, 2))
    return "" if same and len(set(half_days)) < 2 else "another time"


def ratio_of(value: str) -> list[str]:
    """The terms of a ratio; of any other value itself."""
    terms = split(value.rpartition("=")[2], (":",))
    return terms if len(terms) > 1 and all(terms) else [value]


def asks_for_ratio(question: str) -> bool:
    """Whether a number may be said as a ratio."""
    return _RATIO_ASKED.search(question) is not None


def asks_for_lowest_terms(question: str) -> bool:
    """Whether a ratio with a common factor is not the answer yet."""
    return _LOWEST_ASKED.search(question) is not None
