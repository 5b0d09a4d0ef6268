# SPDX-License-Identifier: Apache-2.0
"""Numbers and quantities with units: read, converted, compared. Pure.

A number is read by its notation and never evaluated; its unit is one of :mod:`~..math.units`. What is no
plain quantity (a range, a sum, a list, words) is not read at all, and is for other checks to judge.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction

from nemo_gym_prorl.tasks.math.units import Unit, read_units
from nemo_gym_prorl.tasks.stem.answers import plain


MAX_CHARS = 120
MAX_DIGITS = 60
MAX_EXPONENT = 300
"""Longer texts and numbers beyond these are no quantities that anybody would answer."""

RELATIVE_TOLERANCE = 0.01
"""How far a measured value may be off, of the expected one."""


LEAST_DIGITS = 3
"""So many a decimal must have that stands for a fraction."""

_KELVIN = {"K": (Fraction(1), Fraction(0)), "degC": (Fraction(1), Fraction("273.15"))} | {
    "degF": (Fraction(5, 9), Fraction("459.67") * 5 / 9)
}
"""A degree of each scale in kelvin, and where its zero is."""


class Comparison(StrEnum):
    """What became of two quantities."""

    SAME = "same"
    UNIT_MISSING = "unit missing"
    """The numbers agree, and one of the two has a unit."""
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with a unit.

    Attributes:
        value: the number.
        digits: significant digits; ``None`` if it was given exactly, as a whole number or a fraction.
        half_step: half of what its last digit stands for; 0 if it is exact.
        units: what its unit may mean, the likeliest first: ``ms^-2`` is meters by square seconds, too.
        written: the unit as it was written; empty if there is none.
    """

    value: Fraction
    digits: int | None
    half_step: Fraction
    units: tuple[Unit, ...]
    written: str


_DOLLARS = re.compile(r"\$|\\[()]")
_SPACE = re.compile(r"\\[,;:! ]|\\q?quad|~|\\hspace\{[^}]*\}")
_POWER = r"(?:\^|\*\*)\s*(?:\{\s*([+-]?[0-9]{1,4})\s*\}|\(\s*([+-]?[0-9]{1,4})\s*\)|([+-]?[0-9]{1,4}))"
_NUMBER = re.compile(r"([+-]?)\s*([0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9]+\.?[0-9]*|\.[0-9]+)")
_SCALE = re.compile(rf"[eE]([+-]?[0-9]{{1,4}})(?![0-9.])|\s*(?:\\times|\\cdot|[x×*·])\s*10\s*{_POWER}")
_POWER_OF_TEN = re.compile(rf"([+-]?)\s*10\s*{_POWER}")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|\\circ")
_FRACTION = re.compile(
    r"([+-]?)\s*(?:\\[dt]?frac\s*(?:\{\s*([0-9]{1,20})\s*\}|([0-9]))\s*(?:\{\s*([0-9]{1,20})\s*\}|([0-9]))|([0-9]{1,20})\s*[/⁄]\s*([0-9]{1,20}))(?![0-9.])"
)
_ABOUT = re.compile(r"(?:approximately|approx\.?|about|roughly|around|≈|\\approx|\\sim|~)\s*", re.IGNORECASE)
_EQUALS = re.compile(r"(?:=|≈|\\approx|\\simeq|\\cong)")
_NAME = re.compile(r"(?:[^\W\d_]|[\\{}()*/ ,.']|[_^]\{?[0-9]?)+")
"""Letters, with digits in subscripts and powers only."""

MAX_NAME = 40

_OTHERWISE = re.compile(
    r"\\(?:n?leq?|n?geq?|neq?|[ln]?less|n?gtr|[lg]t|not|ll|gg)(?![a-zA-Z])"
    r"|\b(?:not|no|never|nor|or|wrong|false|less|more|than|least|most|below|above|except|without)\b",
    re.IGNORECASE,
)
"""What stands before an equals sign and makes it say something else."""

_UNCERTAINTY = re.compile(r"\s*(?:±|\\pm|\+/-)\s*([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
MOST_UNCERTAIN = Fraction(1, 20)
"""Of its value; who is less sure does not say one."""


def read(text: str) -> Quantity | None:
    """A quantity in one of its usual notations, LaTeX included; ``None`` if the text is anything else."""
    if len(text) > 2 * MAX_CHARS:
        return None
    text = plain(_DEGREES.sub("°", _SPACE.sub(" ", _DOLLARS.sub("", text).replace("{,}", ","))))
    if len(text) > MAX_CHARS:
        return None
    text = _right_side(text)
    if about := _ABOUT.match(text):
        text = text[about.end() :]
    number = _read_number(text)
    if number is None:
        return None
    value, digits, half_step, rest = number
    if uncertainty := _UNCERTAINTY.match(rest):
        if Fraction(uncertainty[1] + (uncertainty[2] or "")) > abs(value) * MOST_UNCERTAIN:
            return None
        rest = rest[uncertainty.end() :]
    written = plain(rest).strip(" .")
    units = read_units(written)
    if digits is None and value.denominator != 1 and re.fullmatch(r"(?:[A-Za-z](?:\^\{?[0-9]\}?)?\s*){2,}", written):
        return None  # a fraction of a product of letters is a formula
    return Quantity(value, digits, half_step, tuple(units), written) if units else None


def compare(expected: Quantity, said: Quantity, tolerance: float = RELATIVE_TOLERANCE) -> Comparison:
    """Whether what was said is the expected quantity.

    Whole numbers and fractions without a unit are counts or exact results, and must be met exactly, or to the
    places that were given. A measured value may be off by ``tolerance`` of it, or by half of the last digit of the
    expected value where that has two digits or more.
    """
    compared = [_compare(expected, one, said, other, tolerance) for one in expected.units for other in said.units]
    return next((one for one in Comparison if one in compared), Comparison.DIFFERENT)


def _compare(expected: Quantity, unit: Unit, said: Quantity, said_unit: Unit, tolerance: float) -> Comparison:
    """With each unit read in one way."""
    if unit.kinds and said_unit.kinds and unit.kinds != said_unit.kinds:
        return Comparison.DIFFERENT
    if unit.plain and said_unit.plain:
        factor = said_unit.count / unit.count
        compared = _numbers(expected, said.value * factor, tolerance, rounding=_rounding(said) * factor)
        if compared is Comparison.SAME:
            return compared
    if not expected.written or not said.written:
        agree = _numbers(expected, said.value, tolerance, rounding=_rounding(said)) is Comparison.SAME
        return Comparison.UNIT_MISSING if agree else Comparison.DIFFERENT
    scale, said_scale = (next(iter(one.powers), "") for one in (unit, said_unit))
    alone = unit.powers == {scale: 1} and said_unit.powers == {said_scale: 1}
    if alone and scale != said_scale and {scale, said_scale} <= _KELVIN.keys():
        return _temperatures(expected, scale, said, said_scale, tolerance)
    if unit.powers != said_unit.powers:
        return Comparison.DIFFERENT
    factor = said_unit.factor * said_unit.count / (unit.factor * unit.count)
    return _numbers(expected, said.value * factor, tolerance, rounding=_rounding(said), measured=True)


def _temperatures(expected: Quantity, scale: str, said: Quantity, said_scale: str, tolerance: float) -> Comparison:
    """On two scales, of which one does not begin at absolute zero: a hundredth of 293 K is much, of 20 degrees little.
    What counts is the part of the degrees Celsius, or half a degree of whoever gives no decimals."""
    degree, zero = _KELVIN[scale]
    said_degree, said_zero = _KELVIN[said_scale]
    kelvin, said_kelvin = expected.value * degree + zero, said.value * said_degree + said_zero
    rounding = degree * max(min(one.half_step, Fraction(1, 2)) for one in (expected, said))
    allowed = max(abs(kelvin - _KELVIN["degC"][1]) * Fraction(tolerance), rounding) + Fraction(1, 10**6)
    return Comparison.SAME if abs(said_kelvin - kelvin) <= allowed else Comparison.DIFFERENT


def _rounding(said: Quantity) -> Fraction:
    """How far what was said may be off a fraction: it is rounded to three digits or more."""
    return said.half_step if (said.digits or 0) >= LEAST_DIGITS else Fraction(0)


def _numbers(
    expected: Quantity, said: Fraction, tolerance: float, *, measured: bool = False, rounding: Fraction = Fraction(0)
) -> Comparison:
    allowed = Fraction(0)
    if expected.digits is not None or expected.written or measured:
        allowed = abs(expected.value) * Fraction(tolerance)
        if (expected.digits or 0) >= 2:
            allowed = max(allowed, expected.half_step)
    elif expected.value.denominator != 1:
        allowed = min(rounding, abs(expected.value) * Fraction(tolerance))
    # A conversion may be by a number that is not exact, as that of degrees.
    allowed += abs(expected.value) / 10**9
    return Comparison.SAME if abs(said - expected.value) <= allowed else Comparison.DIFFERENT


def _right_side(text: str) -> str:
    """``v = 3 m/s`` without ``v =``: a name, or a formula, may stand on the left, no other number."""
    parts = _EQUALS.split(text)
    if len(parts) == 1:
        return text
    names = [part.strip() for part in parts[:-1]]
    if all(len(name) <= MAX_NAME and _NAME.fullmatch(name) and not _OTHERWISE.search(name) for name in names):
        return parts[-1].strip()
    return text


def _read_number(text: str) -> tuple[Fraction, int | None, Fraction, str] | None:
    if found := _FRACTION.match(text):
        sign, above, below = found[1], found[2] or found[3] or found[6], found[4] or found[5] or found[7]
        if int(below) == 0:
            return None
        value = Fraction(int(above), int(below))
        return -value if sign == "-" else value, None, Fraction(0), text[found.end() :]
    if power := _POWER_OF_TEN.match(text):
        exponent = _exponent(*power.groups()[1:])
        value = Fraction(10) ** min(exponent, MAX_EXPONENT)
        rest = text[power.end() :]
        return (-value if power[1] == "-" else value, 1, value / 2, rest) if abs(exponent) <= MAX_EXPONENT else None
    found = _NUMBER.match(text)
    if found is None:
        return None
    digits, rest = found[2].replace(",", ""), text[found.end() :]
    scale = _SCALE.match(rest)
    exponent = _exponent(*scale.groups()) if scale else 0
    rest = rest[scale.end() :] if scale else rest
    if len(digits) > MAX_DIGITS or abs(exponent) > MAX_EXPONENT or rest.startswith((",", ".", "^", "**")):
        return None
    whole, _, decimals = digits.partition(".")
    value = Fraction(Decimal(digits)) * Fraction(10) ** exponent
    step = Fraction(10) ** (exponent - len(decimals))
    significant = (whole + decimals).lstrip("0")
    if "." not in digits:
        # Zeros at the end of a whole number may be there for its size only.
        step *= 10 ** (len(significant) - len(significant.rstrip("0")))
        significant = significant.rstrip("0")
    exact = "." not in digits and scale is None
    return -value if found[1] == "-" else value, None if exact else max(len(significant), 1), step / 2, rest


def _exponent(*notations: str | None) -> int:
    return int(next(notation for notation in notations if notation is not None))
