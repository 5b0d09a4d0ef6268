# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers and quantities with units: parsing, conversion and comparison; and plain forms of texts. Pure.

A number is parsed from its notation and never evaluated. ``pint`` looks up and converts units. Other answers (a range,
a sum, a list, words) are not parsed here; other rules decide on such answers.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from functools import cache
from typing import Any

import pint

from nemo_gym_prorl.tasks.final_answer import OPENED_BOX, closed_from


MAX_CHARS = 120
MAX_DIGITS = 60
MAX_EXPONENT = 300
"""Maximum characters of a text, digits of a number and absolute exponent; plausible answers are far below."""

RELATIVE_TOLERANCE = 0.01
"""Default maximum deviation of a measured value, relative to the expected value."""

MIN_DIGITS = 3
"""Minimum number of significant digits of a decimal that may represent a fraction."""

_COMMON = """
meter gram second ampere kelvin mole candela hertz newton pascal joule watt coulomb volt farad ohm siemens weber tesla
henry lumen lux becquerel gray sievert katal liter electron_volt unified_atomic_mass_unit dalton bar
standard_atmosphere torr millimeter_Hg calorie minute hour day week month year degree radian steradian percent ppm
angstrom molar dyne erg gauss degree_Celsius degree_Fahrenheit light_year parsec astronomical_unit speed_of_light
inch foot yard mile pound force_pound pound_force_per_square_inch horsepower gallon metric_ton hectare arcminute
arcsecond knot curie poise stokes debye barn british_thermal_unit revolutions_per_minute turn bit byte
"""
COMMON = frozenset(_COMMON.split())
"""Accepted units by pint's names, with or without prefixes. Pint's other units are mostly variables in answers."""

_KINDS = {
    "dose equivalent": frozenset({"sievert", "rem"}),
    "absorbed dose": frozenset({"gray", "rads"}),
    "activity": frozenset({"becquerel", "curie"}),
    "frequency": frozenset({"hertz"}),
    "angle": frozenset({"radian", "degree", "turn", "arcminute", "arcsecond", "revolutions_per_minute"}),
    "luminous flux": frozenset({"lumen", "lux"}),
    "luminous intensity": frozenset({"candela"}),
}
"""Units of equal dimensions that measure different quantities. A unit outside of all sets, as 1/s, matches any."""

_OFFSET = frozenset({"degree_Celsius", "degree_Fahrenheit"})


class Comparison(StrEnum):
    """Result of comparing two quantities."""

    SAME = "same"
    UNIT_MISSING = "unit missing"
    """The numbers agree, and only one of the two has a unit."""
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Quantity:
    """Number with a unit.

    Attributes:
        value: number in ``unit``.
        digits: number of significant digits; ``None`` for an integer or fraction.
        half_step: half of the value of the last significant digit; 0 for a fraction.
        unit: unit in pint's notation; empty without a unit.
        written: unit as written.
        others: other readings of the unit, e.g. metres per square second for ``ms^-2``.
    """

    value: Fraction
    digits: int | None
    half_step: Fraction
    unit: str
    written: str
    others: tuple[str, ...] = ()


_DOLLARS = re.compile(r"\$|\\[()]")
_MICRO = re.compile(r"\\mu(?![A-Za-z])\s*")
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
"""Name of a quantity: letters, with digits in subscripts and powers only."""

MAX_NAME_CHARS = 40
"""Maximum characters of the name of a quantity, before its equals sign."""

_OTHERWISE = re.compile(
    r"\\(?:n?leq?|n?geq?|neq?|[ln]?less|n?gtr|[lg]t|not|ll|gg)(?![a-zA-Z])"
    r"|\b(?:not|no|never|nor|or|wrong|false|less|more|than|least|most|below|above|except|without)\b",
    re.IGNORECASE,
)
"""Words and relations before an equals sign that change the meaning of the equation."""

_UNCERTAINTY = re.compile(r"\s*(?:±|\\pm|\+/-)\s*([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
MAX_UNCERTAINTY = Fraction(1, 20)
"""Maximum uncertainty relative to the value; a larger one makes the answer a range."""

_EXPONENT = r"(?:\*\*\(?[+-]?[0-9]{1,2}\)?)?"
_FACTOR = rf"[A-Za-zµ_]{{1,24}}{_EXPONENT}"
_PRODUCT = rf"{_FACTOR}(?:[*/]{_FACTOR}){{0,8}}"
_PART = rf"(?:\({_PRODUCT}\){_EXPONENT}|{_FACTOR})"
_UNIT = re.compile(rf"(?:1/)?{_PART}(?:[*/]{_PART}){{0,8}}")
"""Text that may be passed to pint: names, small powers, one level of brackets."""

_SYMBOL = re.compile(r"kmol|mmol|mol|kg|km|cm|mm|nm|kJ|kN|kW|kV|kPa|MPa|MeV|keV|eV|Pa|Hz|Wb|rad|sr|[mgsAKJNWVCTFHL]")
_POWER_AND_SYMBOL = re.compile(r"(\*\*[+-]?[0-9])(?=[A-Za-z])")
_GLUED = re.compile(rf"(?<![A-Za-zµ_])([A-Za-z]{{2,12}})({_EXPONENT})(?![A-Za-z_]|\*\*)")
_ALIASES = {"AU": "au", "mph": "mile/hour", "cc": "cm^3", "Wh": "W hour", "kWh": "kW hour", "rev": "turn"}
_REWRITES = (
    (re.compile(rf"(?<![A-Za-z])(?:{'|'.join(_ALIASES)})(?![A-Za-z])"), lambda found: _ALIASES[found[0]]),
    (re.compile(r"\\(?:Omega|ohm)(?![A-Za-z])"), "ohm"),
    (re.compile(r"\\(?:AA|angstrom)(?![A-Za-z])"), "angstrom"),
    (re.compile(r"\\(?:cdot|times)|[·×⋅]"), "*"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"(\1)/(\2)"),
    (re.compile(r"\^\s*\{\s*([+-]?[0-9]{1,2})\s*\}"), r"^\1"),
    (re.compile(r"°\s*C(?![A-Za-z])|degrees?\s+(?:C|Celsius)(?![A-Za-z])", re.IGNORECASE), "degC"),
    (re.compile(r"°\s*F(?![A-Za-z])|degrees?\s+(?:F|Fahrenheit)(?![A-Za-z])", re.IGNORECASE), "degF"),
    (re.compile(r"°"), "degree"),
    (re.compile(r"(?<![A-Za-z])(?:[A-Z][a-z]{3,}|Ohm)(?![A-Za-z])"), lambda found: _uncapitalized(found[0])),
    (re.compile(r"Ω"), "ohm"),
    (re.compile(r"μ"), "µ"),
    (re.compile(r"Å"), "angstrom"),
    (re.compile(r"%"), " percent "),
    (re.compile(r"(?<![A-Za-z])per(?![A-Za-z])"), "/"),
    (re.compile(r"\bsquare\s+([A-Za-z]+)|\b([A-Za-z]+)\s+squared\b"), r"\1\2^2"),
    (re.compile(r"\bcubic\s+([A-Za-z]+)|\b([A-Za-z]+)\s+cubed\b"), r"\1\2^3"),
    (re.compile(r"(?<=[A-Za-z])([+-]?[1-9])(?![0-9A-Za-z])(?<!\^)"), r"^\1"),
    (re.compile(r"[{}]"), ""),
    (re.compile(r"\^"), "**"),
    (re.compile(r"\s*([*/()])\s*"), r"\1"),
    (re.compile(r"\)(?=[A-Za-zµ(])|(?<=[A-Za-zµ0-9)])\s+(?=[A-Za-zµ(])|(?<=[A-Za-zµ])\((?=[A-Za-zµ])"), "*"),
    (re.compile(r"^/"), "1/"),
)
"""Replacements from common notations to pint's notation, in order of application."""


def read(text: str) -> Quantity | None:
    """Parse a quantity in a usual notation, including LaTeX; return ``None`` for any other text."""
    if len(text) > 2 * MAX_CHARS:
        return None
    text = _MICRO.sub("µ", _DOLLARS.sub("", text)).replace("{,}", ",")
    text = plain(_DEGREES.sub("°", _SPACE.sub(" ", text)))
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
        if Fraction(uncertainty[1] + (uncertainty[2] or "")) > abs(value) * MAX_UNCERTAINTY:
            return None
        rest = rest[uncertainty.end() :]
    written = plain(rest).strip(" .")
    units = read_units(written)
    if digits is None and value.denominator != 1 and re.fullmatch(r"(?:[A-Za-z](?:\^\{?[0-9]\}?)?\s*){2,}", written):
        return None  # a fraction times a product of letters is a formula
    return Quantity(value, digits, half_step, units[0], written, tuple(units[1:])) if units else None


def compare(expected: Quantity, said: Quantity, tolerance: float = RELATIVE_TOLERANCE) -> Comparison:
    """Compare a quantity with the expected quantity.

    Integers and fractions without a unit are counts or exact results: they must match exactly, a fraction also as a
    decimal with at least ``MIN_DIGITS`` digits. A measured value may deviate by ``tolerance``, or by half of the last
    digit of an expected value with at least two digits. The readings of the units that agree best count.
    """
    meant = [
        (replace(expected, unit=one), replace(said, unit=other))
        for one in (expected.unit, *expected.others)
        for other in (said.unit, *said.others)
    ]
    compared = [_compare(one, other, tolerance) for one, other in meant]
    return next((one for one in Comparison if one in compared), Comparison.DIFFERENT)


def _compare(expected: Quantity, said: Quantity, tolerance: float) -> Comparison:
    if expected.unit == said.unit:
        return _numbers(expected, said.value, tolerance, rounding=_rounding(said))
    if _other_kinds(expected.unit, said.unit):
        return Comparison.DIFFERENT
    factor_e, factor_s = _dimensionless(expected), _dimensionless(said)
    if factor_e is not None and factor_s is not None:
        factor = factor_s / factor_e
        converted = _numbers(expected, said.value * factor, tolerance, rounding=_rounding(said) * factor)
        if converted is Comparison.SAME:
            return converted
    if not expected.unit or not said.unit:
        agree = _numbers(expected, said.value, tolerance, rounding=_rounding(said)) is Comparison.SAME
        return Comparison.UNIT_MISSING if agree else Comparison.DIFFERENT
    # Gauss is a Gaussian unit, which pint converts only if the unit system is named.
    systems = ("Gaussian",) if "gauss" in f"{expected.unit} {said.unit}" else ()
    try:
        converted = _registry().Quantity(float(said.value), said.unit).to(expected.unit, *systems).magnitude
    except (pint.PintError, OverflowError, ZeroDivisionError):
        return Comparison.DIFFERENT
    if _OFFSET & {expected.unit, said.unit}:
        return _temperatures(expected, said, Fraction(converted), tolerance)
    return _numbers(expected, Fraction(converted), tolerance, measured=True)


def _temperatures(expected: Quantity, said: Quantity, converted: Fraction, tolerance: float) -> Comparison:
    """Compare two temperatures, of which one or both are in degrees Celsius or Fahrenheit.

    The tolerance is relative to the degrees Celsius, since 1 % of 293 K is large compared with 1 % of 20 °C. The
    tolerance is at least half of the value of a last digit, up to half a degree.
    """
    celsius = _registry().Quantity(float(expected.value), expected.unit).to("degree_Celsius").magnitude
    degree = Fraction(9, 5) if expected.unit == "degree_Fahrenheit" else Fraction(1)
    rounding = max(min(one.half_step, Fraction(1, 2)) for one in (expected, said))
    allowed = degree * max(Fraction(abs(celsius)) * Fraction(tolerance), rounding) + Fraction(1, 10**6)
    return Comparison.SAME if abs(converted - expected.value) <= allowed else Comparison.DIFFERENT


def _other_kinds(one: str, other: str) -> bool:
    """Return whether both units are in :data:`_KINDS` and measure different quantities."""
    kinds = _kinds(one), _kinds(other)
    return bool(kinds[0] and kinds[1]) and kinds[0] != kinds[1]


@cache
def _kinds(unit: str) -> frozenset[str]:
    names = _unit_names(_registry().parse_units(unit)) if unit else ()
    return frozenset(kind for kind, known in _KINDS.items() if any(_named(name) & known for name in names))


def _rounding(said: Quantity) -> Fraction:
    """Return the rounding error of a decimal that represents a fraction; 0 below ``MIN_DIGITS`` significant digits."""
    return said.half_step if (said.digits or 0) >= MIN_DIGITS else Fraction(0)


def _numbers(
    expected: Quantity, said: Fraction, tolerance: float, *, measured: bool = False, rounding: Fraction = Fraction(0)
) -> Comparison:
    allowed = Fraction(0)
    if expected.digits is not None or expected.unit or measured:
        allowed = abs(expected.value) * Fraction(tolerance)
        if (expected.digits or 0) >= 2:
            allowed = max(allowed, expected.half_step)
    elif expected.value.denominator != 1:
        allowed = min(rounding, abs(expected.value) * Fraction(tolerance))
    # Allow for floating-point errors of conversions.
    allowed += abs(expected.value) / 10**9
    return Comparison.SAME if abs(said - expected.value) <= allowed else Comparison.DIFFERENT


def _right_side(text: str) -> str:
    """Return ``3 m/s`` of ``v = 3 m/s``; unchanged if a left side is more than a name, such as a number."""
    parts = _EQUALS.split(text)
    if len(parts) == 1:
        return text
    names = [part.strip() for part in parts[:-1]]
    if all(len(name) <= MAX_NAME_CHARS and _NAME.fullmatch(name) and not _OTHERWISE.search(name) for name in names):
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
        # Trailing zeros of an integer may not be significant.
        step *= 10 ** (len(significant) - len(significant.rstrip("0")))
        significant = significant.rstrip("0")
    exact = "." not in digits and scale is None
    return -value if found[1] == "-" else value, None if exact else max(len(significant), 1), step / 2, rest


def _exponent(*notations: str | None) -> int:
    return int(next(notation for notation in notations if notation is not None))


@cache
def _registry() -> Any:
    return pint.UnitRegistry(autoconvert_offset_to_baseunit=True, cache_folder=None)


def read_units(text: str) -> list[str]:
    """Return the readings of a unit in pint's notation, the likeliest first; empty if the text is no unit.

    An empty text is the empty unit. Adjacent symbols are also read as a product (``Nm``, ``ms^-2``), and symbols after
    a slash also as one denominator (``J/mol K``).
    """
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip()
    if not text:
        return [""]
    above, stroke, below = text.partition("/")
    texts = [text]
    if stroke and "/" not in below and "(" not in below and "*" in below.replace("**", ""):
        texts.append(f"{above}/({below})")
    texts += [_GLUED.sub(_apart, _POWER_AND_SYMBOL.sub(r"\1*", one)) for one in texts]
    return list(dict.fromkeys(unit for one in texts if (unit := _read_unit(one)) is not None))


def _apart(found: re.Match[str]) -> str:
    """Return adjacent symbols as a product, the last with the power; known units without a negative power are kept."""
    parts = _SYMBOL.findall(found[1])
    if len(set(parts)) != len(parts) or ("-" not in found[2] and _read_unit(found[1]) is not None):
        return found[0]
    return "*".join(parts) + found[2] if len(parts) > 1 and "".join(parts) == found[1] else found[0]


def _uncapitalized(name: str) -> str:
    """Return ``newtons`` for ``Newtons``; unchanged if the name is a unit (``Mbar``) or no unit in lower case."""
    return name.lower() if _read_unit(name) is None and _read_unit(name.lower()) is not None else name


def _read_unit(text: str) -> str | None:
    if not _UNIT.fullmatch(text):
        return None
    try:
        unit = _registry().parse_units(text)
    except pint.PintError:
        return None
    return str(unit) if all(_is_common(name) for name in _unit_names(unit)) else None


def _unit_names(unit: Any) -> list[str]:
    return [name for name, _ in (1 * unit).unit_items()]


@cache
def _is_common(unit: str) -> bool:
    return bool(_named(unit) & COMMON)


@cache
def _named(unit: str) -> frozenset[str]:
    """Return pint's names of a unit, with and without its prefix."""
    return frozenset((unit, *(name for _, name, _ in _registry().parse_unit_name(unit))))


def _dimensionless(quantity: Quantity) -> Fraction | None:
    """Return the factor of no unit (1) or of percent (1/100); ``None`` for other units."""
    if not quantity.unit:
        return Fraction(1)
    if quantity.unit == "percent":
        return Fraction(1, 100)
    return None


MAX_SYMBOL_CHARS = 3
"""Maximum characters of a word that may be a symbol, whose case matters."""

_SYMBOLS = re.compile(r"[0-9=<>^\\]|(?<![^\W_])[^\W\d_]!")
_INDEX = re.compile(r"_(?:\{([0-9]+)\}|(?=[0-9]))")
_SHORT_WORDS = frozenset(
    ("yes", "no", "not", "and", "or", "the", "of", "is", "it", "all", "one", "two", "six", "ten", "odd")
)
"""Short words that are no symbols, unless in upper case as ``NO``."""
_WORD = re.compile(r"[^\W_]+|[^\w\s.,;:!?'\"()\[\]-]|(?<![^\W_])-|-(?![^\W_])")
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n", strict=True))
_SUPERSCRIPT_RUN = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Invisible fillers and variation selectors, which Unicode classifies as letters and marks."""

_MINUS = str.maketrans(dict.fromkeys("−‒–—﹣-", "-"))
_TEXT = re.compile(
    r"\\(?:text|textbf|textrm|mathrm|mathbf|mathsf|rm|mbox|operatorname|ce)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def without_box(answer: str) -> str:
    """Return the content of a box that is the whole answer; any other answer unchanged."""
    text = _undelimited(answer.strip())
    box = OPENED_BOX.match(text)
    content = None if box is None else closed_from(text, box.end())
    return content.strip() if box and content is not None and box.end() + len(content) + 1 == len(text) else answer


def plain(answer: str) -> str:
    """Return an answer as one line of visible characters without delimiters of mathematics.

    Look-alike characters are merged only if Unicode defines them as compatible (full-width digits, ligatures); a
    Cyrillic A stays and matches nothing. Superscript digits become a power, since ``10²`` is not 102.
    """
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^" + "".join(_SUPERSCRIPTS[char] for char in run[0]), answer)
    text = unicodedata.normalize("NFKC", text.translate(_MINUS)).translate(_MINUS)
    text = "".join(
        char
        for char in text
        if char.isspace() or (unicodedata.category(char)[0] != "C" and _UNSEEN.match(char) is None)
    )
    text = " ".join(text.split())
    before = None
    while before != text:
        before = text
        text = _undelimited(_TEXT.sub(r"\1", text).strip())
    return text


def spaceless(text: str) -> str:
    """Return the plain form of a text (:func:`plain`) without spaces."""
    return "".join(plain(text).split())


def words(text: str) -> str:
    """Return a text for comparison, without punctuation and in lower case where case has no meaning.

    Signs are kept, and the case of words of up to :data:`MAX_SYMBOL_CHARS` characters, which may be symbols: ``Cl-``
    is not ``Cl``, and ``CO`` is not ``Co``. :data:`_SHORT_WORDS` such as ``Yes`` lose their case unless all upper
    case. A text with digits or symbols keeps its case, and loses only spaces and index notation: H_2O is H2O.
    """
    text = plain(text)
    if _SYMBOLS.search(text):
        return _INDEX.sub(r"\1", "".join(text.split()))
    return " ".join(word.casefold() if _is_plain(word) else word for word in _WORD.findall(text))


def _is_plain(word: str) -> bool:
    """Return whether the case of a word has no meaning: a long word, or a common short one not in upper case."""
    return len(word) > MAX_SYMBOL_CHARS or (word.casefold() in _SHORT_WORDS and not word.isupper())


def _undelimited(text: str) -> str:
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    for left, right in _DELIMITERS:
        inner = text[len(left) : -len(right)]
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right) and left not in inner:
            return inner.strip()
    return text
