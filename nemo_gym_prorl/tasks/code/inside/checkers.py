# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Comparison of untrusted answers with expected answers. Pure.

Answers are untrusted text or JSON values: no answer may cause an exception or superlinear time.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any


NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
PADDED = re.compile(r"[+-]?0[0-9]")
MAX_NUMBER_DIGITS = 5000
"""Maximum characters of a number; longer tokens are compared as text to bound the time of decimal arithmetic."""

DEFAULT_TOLERANCE = 1e-6  # absolute and relative, of numbers with a fraction or exponent

LONG_INTEGER = "prorl_long_integer"
"""Key of an object that encodes an integer with more digits than Python reads by default."""

_ANY_CASE = ("yes", "no")
"""Words that contests compare without case: a whole line for ``lines``, a token for ``float``."""


def number(token: str) -> Decimal | None:
    """Return a token's exact number; ``None`` if the token is no number or too long."""
    if len(token) > MAX_NUMBER_DIGITS or not NUMBER.fullmatch(token):
        return None
    return Decimal(token)


def same_token(token: str, expected: str) -> bool:
    """Compare tokens as text or exact numbers: ``1.50`` equals ``1.5``, but ``07`` (padded) does not equal ``7``."""
    if token == expected:
        return True
    if PADDED.match(expected) or PADDED.match(token):
        return False
    value = number(token)
    return value is not None and value == number(expected)


def same_tokens(tokens: list[str], expected: list[str]) -> bool:
    return len(tokens) == len(expected) and all(map(same_token, tokens, expected))


def exact(output: str, expected: str) -> bool:
    return output == expected


def lines(output: str, expected: str, *, strict: bool = False) -> bool:
    """Compare texts line by line, without white space around lines and texts; tokens as in :func:`same_token`.

    Unless ``strict``, ``YES`` equals ``yes``, and numbers may differ by :data:`DEFAULT_TOLERANCE` if one has a
    fraction or exponent, as in Gym's grader.
    """
    if output == expected:
        return True
    said, wanted = output.strip().split("\n"), expected.strip().split("\n")
    return len(said) == len(wanted) and all(
        same_line(one.strip(), other.strip(), strict)
        for one, other in zip(said, wanted)  # noqa: B905 - Python 3.8
    )


def same_line(line: str, expected: str, strict: bool) -> bool:
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
    """Return whether a number with a fraction or exponent is within the absolute tolerance of an expected number.

    No relative tolerance applies, so large expected integers need exact equality.
    """
    value, wanted = number(token), number(expected)
    if value is None or wanted is None or not set(token) & set(".eE"):
        return False
    return abs(value - wanted) <= Decimal(DEFAULT_TOLERANCE)


def tokens(output: str, expected: str) -> bool:
    """Compare texts by their tokens (:func:`same_token`), so that line breaks and spaces do not matter."""
    return output == expected or same_tokens(output.split(), expected.split())


def close(token: str, expected: str, absolute: float, relative: float) -> bool:
    """Return whether tokens are equal, or within a tolerance if the expected number has a fraction or exponent."""
    if same_token(token, expected):
        return True
    value, wanted = number(token), number(expected)
    if value is None or wanted is None or not set(expected) & set(".eE"):
        return False
    return math.isclose(float(value), float(wanted), rel_tol=relative, abs_tol=absolute)


def floats(output: str, expected: str, absolute: float, relative: float) -> bool:
    """Compare texts token by token, numbers with :func:`close`; ``YES`` equals ``yes``."""
    said, wanted = output.split(), expected.split()
    return len(said) == len(wanted) and all(
        close(one, other, absolute, relative) or (other.lower() in _ANY_CASE and one.lower() == other.lower())
        for one, other in zip(said, wanted)  # noqa: B905 - Python 3.8
    )


def same_value(value: Any, expected: Any, absolute: float, relative: float, strict: bool = False) -> bool:
    """Compare JSON values; floats in the expected value have a tolerance.

    A fractional number may differ from an expected integer by ``absolute``, unless ``strict``. ``1.0`` equals ``1``,
    as in the data sets' own graders; ``true`` does not equal ``1``.
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
            return False
        return abs(value - expected) <= absolute
    except OverflowError:  # an integer too large for a float
        return False


def outputs_match(output: str, expected: str, checker: dict[str, Any], *, strict: bool = False) -> bool:
    """Compare a program's output by the checker's ``kind``; ``strict`` applies to ``lines`` only."""
    kind = checker["kind"]
    if kind == "lines":
        return lines(output, expected, strict=strict)
    if kind == "float":
        return floats(output, expected, checker["absolute"], checker["relative"])
    return {"tokens": tokens, "exact": exact}[kind](output, expected)


def values_match(value: Any, expected: Any, checker: dict[str, Any], *, strict: bool = False) -> bool:
    """Compare a function's result; with ``wrapped``, an expected list of one element also matches the element.

    ``strict`` lowers the relative tolerance to :data:`DEFAULT_TOLERANCE`, and compares as in :func:`same_value`.
    """
    absolute = checker.get("absolute", DEFAULT_TOLERANCE)
    relative = checker.get("relative", DEFAULT_TOLERANCE)
    if strict:
        relative = min(relative, DEFAULT_TOLERANCE)
    if same_value(value, expected, absolute, relative, strict):
        return True
    wrapped = checker.get("wrapped") and isinstance(expected, list) and len(expected) == 1
    return bool(wrapped) and same_value(value, expected[0], absolute, relative, strict)
