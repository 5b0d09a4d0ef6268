# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Whether an answer is the expected one. Pure; only plain text and plain values come here, whoever printed them.

An answer is whatever a candidate chose to print: nothing in it may raise, or take more than time in proportion to its
length.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any


NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
PADDED = re.compile(r"[+-]?0[0-9]")
MAX_NUMBER_DIGITS = 5000
"""Digits; a longer token is compared as text."""

DEFAULT_TOLERANCE = 1e-6

LONG_INTEGER = "prorl_long_integer"
"""Key of an object that stands for an integer with more digits than Python reads by default."""

_ANY_CASE = ("yes", "no")
"""Lines whose case contests ignore."""


def number(token: str) -> Decimal | None:
    """The number that a token is, if it is one."""
    if len(token) > MAX_NUMBER_DIGITS or not NUMBER.fullmatch(token):
        return None
    return Decimal(token)


def same_token(token: str, expected: str) -> bool:
    """Equal as text, or as exact numbers: ``1.50`` is ``1.5``. Where digits are padded with zeros, text."""
    if token == expected:
        return True
    if PADDED.match(expected) or PADDED.match(token):
        return False
    value = number(token)
    return value is not None and value == number(expected)


def same_tokens(tokens: list[str], expected: list[str]) -> bool:
    """Each by :func:`same_token`."""
    return len(tokens) == len(expected) and all(map(same_token, tokens, expected))


def exact(output: str, expected: str) -> bool:
    """Each character."""
    return output == expected


def lines(output: str, expected: str, *, strict: bool = False) -> bool:
    """Line by line, without blanks around lines and around the whole.

    Numbers may differ by :data:`DEFAULT_TOLERANCE` if one of the two has a fraction, and ``YES`` is ``yes``, as to
    Gym's grader; not if ``strict``.
    """
    if output == expected:
        return True
    said, wanted = output.strip().split("\n"), expected.strip().split("\n")
    return len(said) == len(wanted) and all(
        same_line(one.strip(), other.strip(), strict)
        for one, other in zip(said, wanted)  # noqa: B905 - Python 3.8
    )


def same_line(line: str, expected: str, strict: bool) -> bool:
    """One line without blanks around it, see :func:`lines`."""
    if line == expected or same_tokens(line.split(), expected.split()):
        return True
    if strict:
        return False
    if expected.lower() in _ANY_CASE:
        return line.lower() == expected.lower()
    said, wanted = line.split(), expected.split()
    return len(said) == len(wanted) and all(
        close(one, other, DEFAULT_TOLERANCE, DEFAULT_TOLERANCE) or near_integer(one, other)
        for one, other in zip(said, wanted)  # noqa: B905 - Python 3.8
    )


def near_integer(token: str, expected: str) -> bool:
    """A fractional number near an expected integer, whatever its size: a rounded large one is another number."""
    value, wanted = number(token), number(expected)
    if value is None or wanted is None or not set(token) & set(".eE"):
        return False
    return abs(value - wanted) <= Decimal(DEFAULT_TOLERANCE)


def tokens(output: str, expected: str) -> bool:
    """Word by word, whatever is between them."""
    return output == expected or same_tokens(output.split(), expected.split())


def close(token: str, expected: str, absolute: float, relative: float) -> bool:
    """Equal, or within the larger of both tolerances of a number that is expected with a fraction or an exponent."""
    if same_token(token, expected):
        return True
    value, wanted = number(token), number(expected)
    if value is None or wanted is None or not set(expected) & set(".eE"):
        return False
    return math.isclose(float(value), float(wanted), rel_tol=relative, abs_tol=absolute)


def floats(output: str, expected: str, absolute: float, relative: float) -> bool:
    """Word by word, numbers within a tolerance."""
    said, wanted = output.split(), expected.split()
    return len(said) == len(wanted) and all(
        close(one, other, absolute, relative)
        for one, other in zip(said, wanted)  # noqa: B905 - Python 3.8
    )


def same_value(value: Any, expected: Any, absolute: float, relative: float, strict: bool = False) -> bool:
    """What a function returned, as JSON has it; within a tolerance where a fractional number is expected.

    A fractional number may be as near to an expected integer as ``absolute``, whatever its size; not if ``strict``.

    ``1.0`` is ``1``, as to the data sets' own graders, which compare by ``==``; ``true`` is ``1`` to them, not here.
    """
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(same_value(one, other, absolute, relative, strict) for one, other in zip(value, expected))  # noqa: B905
        )
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(same_value(value[key], expected[key], absolute, relative, strict) for key in expected)
        )
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if value == expected:
        return True
    if type(value) not in (int, float) or not isinstance(expected, (int, float)):
        return False
    try:
        if isinstance(expected, float):
            return math.isclose(value, expected, rel_tol=relative, abs_tol=absolute)
        if strict or not isinstance(value, float) or value.is_integer():
            return False  # whole numbers are exact
        return abs(value - expected) <= absolute
    except OverflowError:  # an integer beyond all floats
        return False


def right(output: str, expected: str, checker: dict[str, Any], *, strict: bool = False) -> bool:
    """By the checker of that kind: ``lines``, ``tokens``, ``exact`` or ``float``; ``strict`` matters to ``lines``."""
    kind = checker["kind"]
    if kind == "lines":
        return lines(output, expected, strict=strict)
    if kind == "float":
        return floats(output, expected, checker["absolute"], checker["relative"])
    return {"tokens": tokens, "exact": exact}[kind](output, expected)


def right_value(value: Any, expected: Any, checker: dict[str, Any], *, strict: bool = False) -> bool:
    """What a function returned; ``wrapped``: the expected value may stand in a list of its own."""
    absolute = checker.get("absolute", DEFAULT_TOLERANCE)
    relative = checker.get("relative", DEFAULT_TOLERANCE)
    if strict:
        relative = min(relative, DEFAULT_TOLERANCE)
    if same_value(value, expected, absolute, relative, strict):
        return True
    wrapped = checker.get("wrapped") and isinstance(expected, list) and len(expected) == 1
    return bool(wrapped) and same_value(value, expected[0], absolute, relative, strict)
