# SPDX-License-Identifier: Apache-2.0
r"""What stands around a number and is not part of it: units, currencies, what is counted, and words that change what
is said. Pure, and about text only.

``math-verify`` drops them, so that 5 oranges are 5 apples and 5 million are 5. The rule here: a unit that only one of
two answers has is no matter, since questions mostly name it; where both have one they must be the same. Words that
multiply (million) do so, and words that say something else (not, at least, or more) must stand in both or in neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}

_ALIASES = {
    name: unit
    for unit, names in {
        "mm": "mm millimeter millimetre",
        "cm": "cm centimeter centimetre",
        "dm": "dm decimeter decimetre",
        "m": "m meter metre",
        "km": "km kilometer kilometre",
        "in": "in inch inche",
        "ft": "ft foot feet",
        "yd": "yd yard",
        "mi": "mi mile",
        "mg": "mg milligram",
        "g": "g gram",
        "kg": "kg kilogram",
        "lb": "lb pound",
        "oz": "oz ounce",
        "s": "s sec second",
        "min": "min minute",
        "h": "h hr hour",
        "day": "day",
        "week": "wk week",
        "month": "month",
        "year": "yr year",
        "L": "l liter litre",
        "mL": "ml milliliter millilitre",
        "dollar": "dollar usd buck",
        "cent": "cent",
        "euro": "euro eur",
        "degree": "degree deg",
        "radian": "radian rad",
        "unit": "unit",
    }.items()
    for name in names.split()
}
_PER_HOUR = {"mph": "mi/h", "kmph": "km/h", "kph": "km/h", "kmh": "km/h"}
_UNITS = frozenset(_ALIASES.values())
_CURRENCY = {r"\$": "dollar", "€": "euro", r"\euro": "euro", "£": "pound sterling", r"\pounds": "pound sterling"}
_FILLING = frozenset(
    re.findall(r"\w+", "of the a an total is are each all about approximately exactly roughly around")
)
_FUNCTIONS = (
    "sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|arcsin|arccos|arctan|ln|log|lg|exp|sqrt|max|min|gcd|lcm|mod|pi|infinity|oo"
    "|inf|percent|percentage|pct"
)
_COMMAND = r"\\(?:text[a-z]*|math(?:rm|bf|it|sf)|mbox|operatorname|rm)"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_IN_COMMAND = rf"{_COMMAND}\s*\{{[^{{}}\\$]*\}}{_POWER}"
_BARE = rf"(?<![\\a-zA-Z_^])(?!(?:{_FUNCTIONS})(?![a-zA-Z]))[a-zA-Z]{{2,}}\.?(?![a-zA-Z({{_]){_POWER}"
_SLASHED = rf"/\s*(?:{_IN_COMMAND}|[a-zA-Z]+{_POWER})"
_SPACES = r"(?:\s|\\[,;:! ]|~|\\q?quad)*"
_PRIME = r"(?:\^\s*\{\s*\\prime\s*\}|\^\s*\\prime|(?<=\d)'+)"
_DEGREE = r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree(?![a-zA-Z])"
_TRAILING = re.compile(
    rf"(?P<head>.*?[^\s\\]){_SPACES}"
    rf"(?P<unit>(?:{_DEGREE}|{_PRIME})?(?:{_SPACES}(?:\\cdot\s*)?(?:{_IN_COMMAND}|{_BARE}|{_SLASHED}))*)\s*\.?",
    re.DOTALL,
)
_LEADING = re.compile(
    rf"\s*(?:{_COMMAND}\s*\{{\s*)?(?:(?:the|final|answer|value|result|is|equals|approximately|about|exactly|roughly"
    r"|around|approx\.?|there|are|it|so|thus|therefore)\b[\s:,]*)+\}?",
    re.IGNORECASE,
)
_MONEY = re.compile(r"\s*(?P<sign>-?)\s*(?P<money>\\\$|€|£|\\euro(?![a-z])|\\pounds(?![a-z]))\s*(?=[-\d.\\({])")
_PART = re.compile(r"[a-zA-Z]+|\^\s*\{?\s*(-?\d)\s*\}?|/")
_QUALIFYING = re.compile(
    r"(?<!\\)\b(?!(?-i:NO|IF)\b)(?:not|no|never|neither|nor|except|wrong|false|incorrect|wait|rather|instead|least|most|more|less|greater|fewer"
    r"|larger|smaller|under|over|below|above|than|between|non|without|unless|if|either|maybe|possibly|\w+n't)\b"
    r"|\\not(?![a-zA-Z])|\\neg(?![a-zA-Z])",
    re.IGNORECASE,
)
_WORDY = re.compile(rf"{_COMMAND}\s*\{{([^{{}}\\$]*)\}}")
_LONG_WORD = re.compile(rf"(?<![\\a-zA-Z_^{{])(?!(?:{_FUNCTIONS})(?![a-zA-Z]))[a-z]{{3,}}(?![a-zA-Z])")


@dataclass(frozen=True, slots=True)
class Measure:
    """A value and what it is a value of.

    Attributes:
        value: the text without the rest.
        unit: powers of units by their names; empty if there is none.
        scale: what its words multiply it by.
    """

    value: str
    unit: Mapping[str, int]
    scale: int = 1

    @property
    def scale_word(self) -> str:
        """Of the multiplier; empty if there is none."""
        return next((word for word, factor in SCALES.items() if factor == self.scale), "")


def measure_of(text: str) -> Measure:
    """Take an answer apart. What is no number with a unit is its own value."""
    if leading := _LEADING.match(text):
        text = text[leading.end() :]
    unit: dict[str, int] = {}
    if money := _MONEY.match(text):
        unit[_CURRENCY[money["money"]]] = 1
        text = money["sign"] + text[money.end() :]
    found = _TRAILING.fullmatch(text)
    if found is None or not found["unit"] or not re.search(r"\d|\\pi|\\frac|\\sqrt|[a-zA-Z)]$", found["head"]):
        return Measure(text.strip(), unit)
    head, written = found["head"], found["unit"]
    if _glued_letters(head, text[len(head) :], written):
        return Measure(text.strip(), unit)
    powers, scale = _read(written)
    for name, power in powers.items():
        unit[name] = unit.get(name, 0) + power
    return Measure(head.strip(), unit, scale)


def another_unit(expected: Measure, said: Measure) -> bool:
    """Whether both have units that are not the same."""
    wanted, given = dict(expected.unit), dict(said.unit)
    for unit in (wanted, given):
        unit.pop("unit", None)  # square units are any
    if not wanted and given.get("degree") and r"\pi" in expected.value:
        return True
    if not wanted or not given or wanted == given:
        return False
    if any(name in _UNITS or name in _CURRENCY.values() for name in (*wanted, *given)):
        return True
    return not (set(wanted) <= set(given) or set(given) <= set(wanted))


def other_words(expected: str, said: str) -> str:
    """What an answer says beside its value that the expected one does not, or the other way round."""
    for text, other in ((said, expected), (expected, said)):
        if more := _qualifying(text) - _qualifying(other):
            return min(more)
    return ""


def stray_words(expected: str, value: str) -> str:
    """Words within a value, where units are gone; such as the expected answer has are none."""
    right = value.rpartition("=")[2]
    words = " ".join(_WORDY.findall(right))
    if not re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", expected)):
        words += " " + " ".join(_LONG_WORD.findall(right))
    known = {word.lower() for word in re.findall(r"[a-zA-Z]{2,}", expected)} | _FILLING
    stray = [word for word in re.findall(r"[a-zA-Z]{2,}", words) if word.lower() not in known]
    return stray[0] if stray else ""


def _glued_letters(head: str, rest: str, written: str) -> bool:
    """``2ab`` and ``2 xy`` are products of letters."""
    word = re.match(r"[a-zA-Z]+", written)
    if word is None or written.startswith("\\"):
        return False
    known = _ALIASES.get(_singular(word[0].lower())) is not None or word[0].lower() in SCALES
    spaced = rest[: len(rest) - len(rest.lstrip(" \\,;:!~"))] != ""
    return not known and (len(word[0]) < 3 or not spaced)


def _qualifying(text: str) -> set[str]:
    return {found[0].lower() for found in _QUALIFYING.finditer(text)}


def _read(written: str) -> tuple[dict[str, int], int]:
    text = re.sub(_PRIME, " prime ", "0" + written)[1:] if "'" in written or "prime" in written else written
    text = re.sub(_DEGREE, " degree ", _WORDY.sub(r" \1 ", text))
    text = re.sub(r"\\[a-zA-Z]+|\\.", " ", text)
    for short, long in _PER_HOUR.items():
        text = re.sub(rf"(?i)\b{short}\b", long, text)
    text = re.sub(r"\bper\b", "/", text, flags=re.IGNORECASE)
    text = re.sub(r"\bin\b(?=\s+[a-zA-Z])", " ", text)
    powers: dict[str, int] = {}
    sign, factor, last, scale = 1, 1, "", 1
    for part in _PART.finditer(text):
        word = part[0].lower()
        if word == "/":
            sign = -1
        elif part[1]:
            if last:
                powers[last] += sign * (int(part[1]) - 1)
        elif word in ("square", "sq", "cubic", "cu"):
            factor = 2 if word.startswith("sq") else 3
        elif word in ("squared", "cubed"):
            if last:
                powers[last] += sign * (1 if word == "squared" else 2)
        elif _singular(word) in SCALES:
            scale *= SCALES[_singular(word)]
        elif word not in _FILLING:
            last = _ALIASES.get(word) or _ALIASES.get(_singular(word)) or _singular(word)
            if part[0] in ("C", "F") and "degree" in powers:
                last = f"degree {part[0]}"
                powers.pop("degree")
            powers[last] = powers.get(last, 0) + sign * factor
            factor = 1
    return {name: power for name, power in powers.items() if power}, scale


def _singular(word: str) -> str:
    if len(word) > 3 and word.endswith("ies"):
        return word[:-3] + "y"
    return word.removesuffix("s") if len(word) > 2 and not word.endswith("ss") else word
