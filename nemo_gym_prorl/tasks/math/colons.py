# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What has a colon: a ratio, or a time of day. Pure.

To ``math-verify`` a colon is a stroke, so that half past ten is a third, and ``1:2:3`` a sixth. Here ``10:30`` is a
time if it says so ("a.m."), if the question asks for one, or if nobody would write a ratio like that: with a common
factor, or with a nought before its last digit; unless the question asks for a ratio. Ratios are the same if they are
equal, as ``2:4:6`` and ``1:2:3``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import gcd
from typing import Any

import sympy

from nemo_gym_prorl.tasks.math.answers import canonical
from nemo_gym_prorl.tasks.math.checker import Judged, Verdict
from nemo_gym_prorl.tasks.math.measures import Measure
from nemo_gym_prorl.tasks.math.shapes import split
from nemo_gym_prorl.tasks.math.unfinished import computing, in_final_form, unfinished
from nemo_gym_prorl.tasks.math.values import near_numbers


_AROUND = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf)|mbox)\s*\{|[{}\s~]|\\[,;:! ]")
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?:([ap])\.?m\.?)?", re.IGNORECASE)
_RATIO_ASKED = re.compile(r"\b(?:ratios?|proportions?|odds|scale)\b", re.IGNORECASE)
_RATIO_SHOWN = re.compile(r"\b(?:[A-Z]{2}\s*:\s*[A-Z]{2}|[a-zA-Z]\s*:\s*[a-zA-Z])\b")
_TIME_ASKED = re.compile(r"\b(?:what|which) time\b|\bclock\b|\d\s*[ap]\.?m\b", re.IGNORECASE)
_BRACKETS = re.compile(r"^\s*\((.*)\)\s*$")
_LOWEST_ASKED = re.compile(r"simplif|simplest|lowest|reduce", re.IGNORECASE)


def another_time(expected: str, said: str, question: str) -> str | None:
    """What is wrong with an answer where a time of day is expected, or is said; empty if nothing is, ``None`` if
    neither is one."""
    wanted, given = (_CLOCK.fullmatch(_AROUND.sub("", text)) for text in (expected, said))
    half_days = [found[3].lower() for found in (wanted, given) if found and found[3]]
    if wanted is None or (_asks_for_ratio(question) and not wanted[3]):
        return "a time of day" if half_days else None
    lowest = gcd(int(wanted[1]), int(wanted[2])) == 1 and not wanted[2].startswith("0")
    if lowest and not half_days and not _TIME_ASKED.search(question):
        return None
    same = given is not None and all(int(wanted[part]) == int(given[part]) for part in (1, 2))
    return "" if same and len(set(half_days)) < 2 else "another time"


def ratio_verdict(wanted: Measure, said: Measure, question: str, number: Callable[[str], Any]) -> Judged | None:
    """What to say of a ratio; ``None`` if that is for who compares values, to whom one of two terms is a fraction.

    Args:
        wanted: the expected answer.
        said: the answer.
        question: what was asked.
        number: gives the real number that a text is, ``None`` if it is none.
    """
    golds, givens = _terms(wanted.value), _terms(said.value)
    gold, given = ([number(term) for term in terms] for terms in (golds, givens))
    if len(given) > 1 and len(gold) == 1 and gold[0] is not None and not _asks_for_ratio(question):
        return Verdict.WRONG, "a ratio is no number"
    if len(gold) != len(given):
        return (Verdict.WRONG, "another ratio") if max(len(gold), len(given)) > 2 else None
    if len(gold) == 1 or None in gold or None in given:
        return None
    # Multiplied out, nothing to nothing would equal any other ratio.
    if not all(one.is_finite and not one.is_zero for one in (*gold, *given)):
        alike = all(near_numbers(one, other) for one, other in zip(gold, given, strict=True))
        return (Verdict.RIGHT, "the same ratio") if alike else (Verdict.WRONG, "another ratio")
    in_lowest_terms = all(one.is_Integer for one in given) and sympy.igcd(*given) == 1
    if not in_lowest_terms and (_LOWEST_ASKED.search(question) or canonical(said.value) in canonical(question)):
        return Verdict.UNFINISHED, "it is not in lowest terms"
    if len(gold) == 2:
        return None
    if wanted.scale != said.scale or not all(
        near_numbers(one / gold[0], other / given[0]) for one, other in zip(gold[1:], given[1:], strict=True)
    ):
        return Verdict.WRONG, "another ratio"
    worked_out = (
        in_final_form(canonical(text)) if one.is_rational else not computing(":".join(golds), text, number=True)
        for one, text in zip(given, givens, strict=True)
    )
    if unfinished(sympy.Tuple(*gold), sympy.Tuple(*given)) or not all(worked_out):
        return Verdict.UNFINISHED, "its terms are to be worked out"
    return Verdict.RIGHT, "the same ratio"


def _terms(value: str) -> list[str]:
    """The terms of a ratio; any other value itself, an equation too."""
    if "=" in value:
        return [value]
    for text in (value, *_BRACKETS.findall(value)):
        if len(terms := split(text, (":",))) > 1 and all(terms):
            return terms
    return [value]


def _asks_for_ratio(question: str) -> bool:
    """Whether a number may be said as a ratio."""
    return (_RATIO_ASKED.search(question) or _RATIO_SHOWN.search(question)) is not None
