# SPDX-License-Identifier: Apache-2.0
r"""What stands around a number and is not part of it: units, currencies, what is counted. Pure, and about text only.

``math-verify`` drops it, so that 5 oranges are 5 apples and 5 million are 5. The rule here: a unit that only one of
two answers has is no matter, since questions mostly name it; where both have one it must be one of the same dimension,
and they are compared in it. Words that multiply (million) do so. All else is part of the value: ``3/x`` is no 3, nor
is ``5\text{ thirds}`` 5.

A unit is one of :mod:`.units`; as letters are products more often, only those that nobody takes for one. Another word
is what is counted (apples) only if the question or the expected answer has it, or it is one of a few: 12 pairs are not
12.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nemo_gym_prorl.tasks.math.notation import symbols
from nemo_gym_prorl.tasks.math.units import Unit, known_unit, read_units


_COMMAND = r"\\(?:text[a-z]*|math(?:rm|bf|it|sf)|mbox|operatorname|rm)"
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
_CURRENCY = {r"\$": "dollar", "€": "euro", r"\euro": "euro", "£": "sterling", r"\pounds": "sterling"}
_START = re.compile(rf"{_COMMAND}\s*\{{|\^\s*\{{?\s*\\circ|\\degree(?![a-zA-Z])|(?<![\\a-zA-Z_^])[a-zA-Z]|\\?%|/")
"""Where a unit may begin; with a stroke only behind a currency."""

_NUMBER_BEFORE = re.compile(r"(?:\d|[a-zA-Z)}\]])\.?$")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ|\\degree")
_GAP = re.compile(r"(?:\s|\\[,;:! ]|~|\\q?quad|\\cdot)+$")
_IN_TEXT = re.compile(rf"{_COMMAND}\s*\{{([^{{}}\\$]*)\}}")
_STRAY = re.compile(rf"{_COMMAND}(?![a-zA-Z])|\d\s*(?:'|\^?\s*\{{?\s*\\prime)")
_WORD = re.compile(r"[A-Za-z]+")
_LETTERS = frozenset("mgshLlNJWV")
"""Units of one letter that are units here: in text, or without in a quotient."""

_BARE = frozenset("mm cm dm km in ft yd mi mg kg lb oz hr yr ml mL mph kph kmph day per sq cu of the".split())  # noqa: SIM905
_GLUED = frozenset(("cm", "kg", "km", "mm", "ft", "mph", "kmph", "kph"))
"""Short ones that are units without a text around them, and those of these that may stand at their number; all others
may be a product of letters, or a function."""

_FILLING = frozenset("of the an total each all about approximately exactly roughly around in".split())  # noqa: SIM905
_COUNTED = frozenset("people person student child children way point solution value element digit".split())  # noqa: SIM905
"""What may be counted though the question does not say so; all else is no unit: a pair is two."""

_NO_NOUNS = frozenset(
    """
    plus minus times over by divided multiplied and or up down to from with without less more than but also
    nor not zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty
    sixty seventy eighty ninety half halves third thirds quarter quarters double triple twice thrice squared
    cubed square cube power powers root roots factorial choose mod modulo base exponent raised point recurring
    repeating repeated negative positive prime sin cos tan cot sec csc sinh cosh tanh
    arcsin arccos arctan ln log lg exp sqrt max gcd lcm pi infinity inf equals equal is are was if when where
    then else only between through exactly roughly until till about alpha beta gamma delta theta lambda sigma
    omega phi psi rho tau mu nu eta xi kappa zeta epsilon score gross so
    never neither either except unless wrong false incorrect wait rather instead under over above greater fewer
    larger smaller maybe possibly
    """.split()  # noqa: SIM905
)
_ORDINAL = re.compile(r"\w+(?:ths?|teen)|first")


@dataclass(frozen=True, slots=True)
class Measure:
    """A value and what it is a value of.

    Attributes:
        value: the text without the rest.
        unit: of it.
        words: the unit's words, in lower case.
    """

    value: str
    unit: Unit
    words: frozenset[str] = frozenset()


def measure_of(text: str, nouns: frozenset[str] = frozenset()) -> Measure:
    """Take an answer apart; ``nouns`` may be counted. What is no number with a unit is its own value."""
    text = _CLOSING.sub("", text)
    if leading := _LEADING.match(text):
        text = text[leading.end() :]
    money = _MONEY.match(text)
    currency = Unit()
    if money:
        currency = known_unit(_CURRENCY[money["money"]]) or currency
        text = money["sign"] + text[money.end() :]
    for start in _START.finditer(text):
        value, tail = _GAP.sub("", text[: start.start()]), text[start.start() :]
        if not _NUMBER_BEFORE.search(value) or (tail[0] == "/" and not money):
            continue
        if not _are_units(tail, nouns, glued=len(value) == start.start()):
            continue
        if units := read_units(tail, lambda word: _noun(word, nouns)):
            words = frozenset(re.findall(r"[a-z]+|%", tail.lower()))
            return Measure(value, currency.times(units[0]), words)
    return Measure(text.strip(), currency)


def another_unit(expected: Measure, said: Measure) -> bool:
    """Whether both have units that are not of the same thing."""
    wanted, given = expected.unit, said.unit
    if wanted.plain and given.kinds and r"\pi" in expected.value:
        return True  # an angle in radians, and one in degrees
    if wanted.plain or given.plain:
        return False
    return (wanted.powers, wanted.kinds) != (given.powers, given.kinds) or not (
        wanted.nouns <= given.nouns or given.nouns <= wanted.nouns
    )


def stray_text(value: str) -> bool:
    """Whether there is text within a value, or a number's prime, where units are gone; its name may be text."""
    return _STRAY.search(re.sub(rf"^{_COMMAND}\s*\{{[a-zA-Z\s]*\}}\s*=", "", symbols(value))) is not None


def nouns_of(text: str) -> frozenset[str]:
    """What a text may count: its words, in the singular."""
    return frozenset(form for word in _WORD.findall(text) for form in _forms(word.lower()))


def _are_units(tail: str, nouns: frozenset[str], *, glued: bool) -> bool:
    """Whether the words of a text may be those of a unit, as they are set."""
    for content in _IN_TEXT.findall(tail):
        for word in _WORD.findall(content):
            if len(word) == 1 and word not in _LETTERS and not (word in "CF" and _DEGREES.match(tail)):
                return False
            if len(word) > 1 and word.isupper():  # points
                return False
    bare = _IN_TEXT.sub(lambda found: " " * len(found[0]), tail)
    for found in _WORD.finditer(re.sub(r"\\[a-zA-Z]+", lambda command: " " * len(command[0]), bare)):
        word, at_start = found[0], found.start() == 0
        if len(word) == 1:
            in_quotient = re.search(r"/\s*$", bare[: found.start()]) or re.match(r"\s*/", bare[found.end() :])
            if word not in _LETTERS or not in_quotient or (at_start and glued):
                return False
        elif len(word) < 4 and word not in (_GLUED if at_start and glued else _BARE):
            return False
    return True


def _noun(word: str, nouns: frozenset[str]) -> str | None:
    """What is counted, in the singular; empty for a word that says nothing, ``None`` for any other."""
    lower = word.lower()
    if lower in _FILLING:
        return ""
    counted = (
        len(word) > 2
        and word[1:].islower()
        and not _forms(lower).isdisjoint(_COUNTED | nouns)
        and lower not in _NO_NOUNS
        and _ORDINAL.fullmatch(lower) is None
    )
    return min(_forms(lower), key=len) if counted else None


def _forms(word: str) -> frozenset[str]:
    """A noun in lower case, and in the singular."""
    return frozenset((word, word.removesuffix("s"), word[:-3] + "y" if word.endswith("ies") else word))
