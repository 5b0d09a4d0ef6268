# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The words of units, and which words are some.

Another word is what is counted (apples) only if the question or the expected answer has it, or it is one of a few:
12 pairs are not 12. Whatever multiplies, compares, counts or joins is none, nor are letters that may be a product.
"""

from __future__ import annotations

import re


SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}

ALIASES = {
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
        "am": "am",
        "pm": "pm",
        "N": "n newton",
        "J": "j joule",
        "W": "w watt",
        "V": "v volt",
        "Hz": "hz hertz",
        "Pa": "pa pascal",
        "mol": "mol mole",
        "knot": "knot",
        "acre": "acre",
    }.items()
    for name in names.split()
}
PER_HOUR = {"mph": "mi/h", "kmph": "km/h", "kph": "km/h", "kmh": "km/h"}
UNITS = frozenset(ALIASES.values())
CURRENCY = {r"\$": "dollar", "€": "euro", r"\euro": "euro", "£": "pound sterling", r"\pounds": "pound sterling"}
FILLING = frozenset(re.findall(r"\w+", "of the a an total is are each all about approximately exactly roughly around"))

_SYMBOLS = frozenset(["m", "g", "s", "h", "L", "l", "N", "J", "W", "V"])
"""Units of one letter."""

_GLUED_SYMBOLS = frozenset(("cm", "kg", "km", "mm", "ft", "mph", "kmph", "kph"))
"""Those that stand at a number without a space and are no product of letters."""

_BEFORE_UNITS = frozenset(("per", "sq", "square", "cubic", "cu"))

_NO_NOUNS = frozenset(
    """
    plus minus times over by divided multiplied and or up down to from with without less more than but also
    nor not zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty
    sixty seventy eighty ninety half halves third thirds quarter quarters double triple twice thrice squared
    cubed square cube power powers root roots factorial choose mod modulo base exponent raised point recurring
    repeating repeated negative positive prime percent percentage sin cos tan cot sec csc sinh cosh tanh
    arcsin arccos arctan ln log lg exp sqrt max gcd lcm pi infinity inf equals equal is are was if when where
    then else only between through exactly roughly until till about alpha beta gamma delta theta lambda sigma
    omega phi psi rho tau mu nu eta xi kappa zeta epsilon score gross so
    never neither either except unless wrong false incorrect wait rather instead under over above greater fewer
    larger smaller maybe possibly
    """.split()  # noqa: SIM905
)
_COUNTED = frozenset("people person student child children way point solution value element digit unit".split())  # noqa: SIM905
"""What may be counted though the question does not say so; all else is no unit: a pair is two."""

_ORDINAL = re.compile(r"\w+(?:ths?|teen)|first")
_WORD = re.compile(r"[A-Za-z]+")
_UNIT_TEXT = re.compile(r"(?:[\s/.^{}-]|\\[,;:! ])*(?:[A-Za-z]+\.?(?:\^?\{?-?[1-9]\}?)?(?:[\s/^{}·*-]|\\[,;:! ])*)+")


def nouns_of(text: str) -> frozenset[str]:
    """What a text may count: its words, in the singular."""
    return frozenset(form for word in _WORD.findall(text) for form in _forms(word.lower()))


def is_unit(
    text: str, nouns: frozenset[str], *, in_text: bool, glued: bool = False, below: bool = False, follows: bool = False
) -> bool:
    """Whether a text is a unit, or what is counted, and nothing else.

    Args:
        text: it, powers included.
        nouns: what is counted, besides what always may be.
        in_text: it stands in ``\\text{}`` or the like, where letters are words.
        glued: it stands at a number without a space.
        below: it stands behind a stroke.
        follows: another unit follows.
    """
    if not _UNIT_TEXT.fullmatch(text):
        return False
    words, known = _WORD.findall(text), False
    for word in words:
        if word.lower() in ("squared", "cubed"):
            if not known:
                return False
            continue
        known = _is_known(word) and not (len(word) == 1 and not (in_text or below or "/" in text))
        if glued and not in_text and len(word) < 4 and word not in _GLUED_SYMBOLS:
            return False
        if not (known or _is_counted(word, nouns, in_text=in_text)):
            return False
    # Powers are those of units: apples squared are none.
    if not words or (words[-1].lower() in _BEFORE_UNITS and not follows):
        return False
    return known or words[-1].lower() in ("squared", "cubed") or not re.search(r"\d", text)


def _is_known(word: str) -> bool:
    if len(word) == 1:
        return word in _SYMBOLS
    lower = word.lower()
    return any(one in names for one in (lower, singular(lower)) for names in (ALIASES, SCALES, PER_HOUR)) or (
        lower in _BEFORE_UNITS
    )


def _is_counted(word: str, nouns: frozenset[str], *, in_text: bool) -> bool:
    lower = word.lower()
    if in_text and lower in FILLING - {"is", "are", "a"}:
        return True
    least = 3 if in_text else 4
    return (
        len(word) >= least
        and word[1:].islower()
        and not _forms(lower).isdisjoint(_COUNTED | nouns)
        and lower not in _NO_NOUNS
        and _ORDINAL.fullmatch(lower) is None
    )


def _forms(word: str) -> frozenset[str]:
    return frozenset((word, singular(word), word.removesuffix("s")))


def singular(word: str) -> str:
    """Of a noun in lower case."""
    if len(word) > 3 and word.endswith("ies"):
        return word[:-3] + "y"
    return word.removesuffix("s") if len(word) > 2 and not word.endswith("ss") else word
