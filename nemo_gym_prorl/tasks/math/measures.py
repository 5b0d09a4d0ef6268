# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""What stands around a number and is not part of it: units, currencies, what is counted. Pure, and about text only.

What stands behind a number is a unit only if it is known for one (:mod:`.unit_words`). All else is part of the value:
``3/x`` is no 3, nor is ``5\text{ thirds}`` 5.

``math-verify`` drops them, so that 5 oranges are 5 apples and 5 million are 5. The rule here: a unit that only one of
two answers has is no matter, since questions mostly name it; where both have one they must be the same. Words that
multiply (million) do so, and any other text leaves no value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nemo_gym_prorl.tasks.math.notation import symbols
from nemo_gym_prorl.tasks.math.unit_words import ALIASES, CURRENCY, FILLING, PER_HOUR, SCALES, UNITS, is_unit, singular


_FUNCTIONS = (
    "sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|arcsin|arccos|arctan|ln|log|lg|exp|sqrt|max|min|gcd|lcm|mod|pi|infinity|oo"
    "|inf|percent|percentage|pct"
)
_COMMAND = r"\\(?:text[a-z]*|math(?:rm|bf|it|sf)|mbox|operatorname|rm)"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_IN_COMMAND = rf"{_COMMAND}\s*\{{[^{{}}\\$]*\}}{_POWER}"
_BARE = rf"(?<![\\a-zA-Z_^])(?!(?:{_FUNCTIONS})(?![a-zA-Z]))[a-zA-Z]{{2,}}\.?(?![a-zA-Z({{_]){_POWER}"
_SLASHED = rf"/\s*(?:{_IN_COMMAND}|[a-zA-Z]+(?![a-zA-Z]){_POWER})"
_SPEED = rf"(?<![a-zA-Z\d}}])(?:[a-zA-Z]\s*/\s*[a-zA-Z]{{1,2}}(?![a-zA-Z])){_POWER}"
_SPACES = r"(?:\s|\\[,;:! ]|~|\\q?quad)*"
_END_SPACES = re.compile(rf"(?:{_SPACES}(?:\\cdot)?)+$")
_PRIME = r"(?<=\d)(?:\^\s*\{\s*\\prime\s*\}|\^\s*\\prime|'+)"
_DEGREE = r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree(?![a-zA-Z])"
_DEGREES_BEFORE = re.compile(rf"(?:{_DEGREE}){_SPACES}$")
_TRAILING = re.compile(
    rf"(?P<head>.*?[^\s\\]){_SPACES}"
    rf"(?P<unit>(?:{_DEGREE}|{_PRIME})?(?:{_SPACES}(?:\\cdot\s*)?(?:{_IN_COMMAND}|{_SPEED}|{_BARE}|{_SLASHED}))*)\s*\.?",
    re.DOTALL,
)
_LEADING = re.compile(
    rf"\s*(?:{_COMMAND}\s*\{{\s*)?(?:(?:the|final|answer|value|result|is|equals|approximately|about|exactly|roughly"
    r"|around|approx\.?|there|are|it|so|thus|therefore|minimum|maximum|smallest|largest|greatest|total|area|perimeter"
    r"|volume|probability)\b[\s:,]*)+(?:\}[\s:]*)?",
    re.IGNORECASE,
)
_CLOSING = re.compile(
    rf"{_COMMAND}\s*\{{\s*is\s+(?:the\s+)?(?:(?:final|correct|only|smallest|largest|greatest|minimum|maximum)\s*)*"
    r"(?:(?:answer|result|value|solution|number|one)\s*)?\.?\s*\}\s*$",
    re.IGNORECASE,
)
_MONEY = re.compile(r"\s*(?P<sign>-?)\s*(?P<money>\\\$|€|£|\\euro(?![a-z])|\\pounds(?![a-z]))\s*(?=[-\d.\\({])")
_ONE_OF_IT = re.compile(rf"(?P<angle>{_DEGREE}|{_PRIME})|{_IN_COMMAND}|{_SPEED}|{_BARE}|{_SLASHED}", re.DOTALL)
_PART = re.compile(r"[a-zA-Z]+|\^\s*\{?\s*(-?\d)\s*\}?|/")
_WORDY = re.compile(rf"{_COMMAND}\s*\{{([^{{}}\\$]*)\}}")
_TEXT = re.compile(rf"{_COMMAND}\s*\{{([^{{}}]*)")


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


def measure_of(text: str, nouns: frozenset[str] = frozenset()) -> Measure:
    """Take an answer apart; ``nouns`` may be counted. What is no number with a unit is its own value."""
    text = _CLOSING.sub("", text)
    if leading := _LEADING.match(text):
        text = text[leading.end() :]
    unit: dict[str, int] = {}
    if money := _MONEY.match(text):
        unit[CURRENCY[money["money"]]] = 1
        text = money["sign"] + text[money.end() :]
    begin = _unit_at(text, nouns, after_unit=bool(unit))
    if begin == len(text):
        return Measure(text.strip(), unit)
    powers, scale = _read(text[begin:])
    for name, power in powers.items():
        unit[name] = unit.get(name, 0) + power
    return Measure(_END_SPACES.sub("", text[:begin]), unit, scale)


def in_cents(expected: Measure, said: Measure) -> tuple[Measure, Measure]:
    """Both, with dollars as cents if the other one is in cents."""
    if {*expected.unit.items(), *said.unit.items()} != {("dollar", 1), ("cent", 1)}:
        return expected, said
    one, other = (
        replace(one, unit={"cent": 1}, scale=one.scale * 100) if "dollar" in one.unit else one
        for one in (expected, said)
    )
    return one, other


def another_unit(expected: Measure, said: Measure) -> bool:
    """Whether both have units that are not the same."""
    wanted, given = dict(expected.unit), dict(said.unit)
    for unit in (wanted, given):
        unit.pop("unit", None)  # square units are any
    if ("prime" in wanted) != ("prime" in given):
        return True
    if not wanted and given.get("degree") and r"\pi" in expected.value:
        return True
    if not wanted or not given or wanted == given:
        return False
    if any(name in UNITS or name in CURRENCY.values() for name in (*wanted, *given)):
        return True
    return not (set(wanted) <= set(given) or set(given) <= set(wanted))


def stray_text(value: str) -> str:
    """Text within a value, where units are gone: what it is called may be one, and a number may stand in one."""
    left, _, right = symbols(value).rpartition("=")
    texts = [*_TEXT.findall(right), *(_TEXT.findall(left) if re.search(r"\d|\bnot\b", left) else ())]
    return texts[0].strip() or "text" if texts else ""


def _unit_at(text: str, nouns: frozenset[str], *, after_unit: bool) -> int:
    """Where the unit at the end of a text begins; its end if there is none. A stroke is part of one only behind
    another."""
    found = _TRAILING.fullmatch(text)
    if found is None or not found["unit"] or not re.search(r"\d|\\pi|\\frac|\\sqrt|[a-zA-Z)]$", found["head"]):
        return len(text)
    begin = len(text)
    for part in reversed(list(_ONE_OF_IT.finditer(text, found.start("unit")))):
        before = text[: part.start()]
        glued = part[0][0].isalpha() and before == _END_SPACES.sub("", before)
        inner = re.sub(rf"^/\s*|{_COMMAND}\s*\{{|\}}", "", part[0])
        scale = inner.strip() in ("C", "F") and _DEGREES_BEFORE.search(before)
        follows = begin < len(text)
        if not (part["angle"] or scale) and not is_unit(
            inner, nouns, in_text="\\" in part[0], glued=glued, below=part[0][0] == "/", follows=follows
        ):
            break
        if part[0][0] != "/" or (after_unit and part.start() == found.start("unit")):
            begin = part.start()
    return begin


def _read(written: str) -> tuple[dict[str, int], int]:
    text = re.sub(_PRIME, " prime ", "0" + written)[1:] if "'" in written or "prime" in written else written
    text = re.sub(_DEGREE, " degree ", _WORDY.sub(r" \1 ", text))
    text = re.sub(r"\\[a-zA-Z]+|\\.", " ", text)
    for short, long in PER_HOUR.items():
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
        elif singular(word) in SCALES:
            scale *= SCALES[singular(word)]
        elif word not in FILLING:
            last = ALIASES.get(word) or ALIASES.get(singular(word)) or singular(word)
            if part[0] in ("C", "F") and "degree" in powers:
                last = f"degree {part[0]}"
                powers.pop("degree")
            powers[last] = powers.get(last, 0) + sign * factor
            factor = 1
    return {name: power for name, power in powers.items() if power}, scale
