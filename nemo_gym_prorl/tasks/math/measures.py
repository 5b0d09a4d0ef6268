# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Units, currencies, counted nouns and scale words around a number. Pure; values stay text.

Words after a number are classified as follows:

- A unit must be in the table of known units. A counted noun (apples) must be in the question or the expected answer,
  or in a short list, because 12 pairs are not 12.
- Words that multiply, compare, count or join are neither units nor nouns. Letters that may be a product are neither.
- All other text is part of the value: ``3/x`` is not 3, and ``5\text{ thirds}`` is not 5.

``math-verify`` drops units, so 5 oranges would equal 5 apples, and 5 million would equal 5. Here two units must be
equal. A unit that only one of two answers has is ignored, because most questions name the unit. Scale words (million)
multiply. A value with any other text cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nemo_gym_prorl.tasks.math.spelling import with_named_symbols


SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}

_UNIT_NAMES = """
mm: mm millimeter millimetre; cm: cm centimeter centimetre; dm: dm decimeter decimetre; m: m meter metre;
km: km kilometer kilometre; in: in inch inche; ft: ft foot feet; yd: yd yard; mi: mi mile; mg: mg milligram;
g: g gram; kg: kg kilogram; lb: lb pound; oz: oz ounce; s: s sec second; min: min minute; h: h hr hour; day: day;
week: wk week; month: month; year: yr year; L: l liter litre; mL: ml milliliter millilitre;
dollar: dollar usd buck; cent: cent; euro: euro eur; degree: degree deg; radian: radian rad; unit: unit; am: am;
pm: pm; N: n newton; J: j joule; W: w watt; V: v volt; Hz: hz hertz; Pa: pa pascal; mol: mol mole; knot: knot;
acre: acre; cup: cup
"""
ALIASES = {
    name: unit.strip()
    for unit, _, names in (line.partition(":") for line in _UNIT_NAMES.split(";"))
    for name in names.split()
}
"""Unit symbols by name; names are in lower case and in the singular."""

PER_HOUR = {"mph": "mi/h", "kmph": "km/h", "kph": "km/h", "kmh": "km/h"}
UNITS = frozenset(ALIASES.values())
CURRENCY = {
    r"\$": "dollar",
    "USD": "dollar",
    "€": "euro",
    r"\euro": "euro",
    "£": "pound sterling",
    r"\pounds": "pound sterling",
}
FILLING = frozenset(re.findall(r"\w+", "of the a an total is are each all about approximately exactly roughly around"))

_SYMBOLS = frozenset(["m", "g", "s", "h", "L", "l", "N", "J", "W", "V"])
"""Units of one letter."""

_GLUED_SYMBOLS = frozenset(("cm", "kg", "km", "mm", "ft", "mph", "kmph", "kph"))
"""Units that may follow a number without a space, because they are unlikely to be a product of letters."""

_BEFORE_UNITS = frozenset(("per", "sq", "square", "cubic", "cu"))

_NO_NOUNS = frozenset(
    """
    plus minus times over by divided multiplied and or up down to from with without less more than but also
    nor not zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty
    sixty seventy eighty ninety half halves third thirds quarter quarters double triple twice thrice squared
    cubed square cube power powers root roots factorial choose mod modulo base exponent raised point recurring
    repeating repeated negative positive percent percentage sin cos tan cot sec csc sinh cosh tanh
    arcsin arccos arctan ln log lg exp sqrt max gcd lcm pi infinity inf equals equal is are was if when where
    then else only between through exactly roughly until till about alpha beta gamma delta theta lambda sigma
    omega phi psi rho tau mu nu eta xi kappa zeta epsilon score gross so
    never neither either except unless wrong false incorrect wait rather instead under over above greater fewer
    larger smaller maybe possibly
    """.split()  # noqa: SIM905
)
_COUNTED = frozenset("people person student child children way point solution value element digit unit left".split())  # noqa: SIM905
"""Nouns that an answer may count even if the question lacks them."""

_ORDINAL = re.compile(r"\w+(?:ths?|teen)|first")
_WORD = re.compile(r"[^\W\d_]+")
_SYLLABLE = re.compile(r"[ぁ-ヿ一-鿿가-힣]")
_COUNTERS = frozenset("个個只隻支枝张張条條人名位头頭棵朵辆輛件本枚匹冊册台歳岁歲次回页頁개명마리권장대살")
"""Common counter words of Chinese, Japanese and Korean; units and currencies must be in the question."""

_NO_COUNTERS = frozenset("十百千万萬亿億半倍分之不非或和余多십백천만억반배")
_UNIT_TEXT = re.compile(r"(?:[\s/.^{}-]|\\[,;:! ])*(?:[^\W\d_]+\.?(?:\^?\{?-?[1-9]\}?)?(?:[\s/^{}·*-]|\\[,;:! ])*)+")


def nouns_of(text: str) -> frozenset[str]:
    """Return the words of a text with their singular forms: nouns that an answer may count."""
    forms = (form for word in _WORD.findall(text) for form in _forms(word.lower()))
    return frozenset((*forms, *_SYLLABLE.findall(text)))


def _is_unit(text: str, nouns: frozenset[str], *, in_text: bool, glued: bool, below: bool, follows: bool) -> bool:
    """Return whether a text is a unit or a counted noun, and nothing else.

    In ``\\text{}`` (``in_text``) letters are words. ``glued`` text follows a number without a space.
    """
    if not _UNIT_TEXT.fullmatch(text):
        return False
    if syllables := _SYLLABLE.findall(text):
        counted = {*syllables} <= (nouns | _COUNTERS) - _NO_COUNTERS
        return counted and any(map(_SYLLABLE.fullmatch, nouns))
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
    if not words or (words[-1].lower() in _BEFORE_UNITS and not follows):
        return False
    # Only units have powers; counted nouns do not.
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
    """Return the singular of an English noun in lower case."""
    if len(word) > 3 and word.endswith("ies"):
        return word[:-3] + "y"
    return word.removesuffix("s") if len(word) > 2 and not word.endswith("ss") else word


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
_PRIME_SIGN = "primesign"  # name of the unit in 5'; prime numbers may be counted
_DEGREE = r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree(?![a-zA-Z])"
_DEGREES_BEFORE = re.compile(rf"(?:{_DEGREE}){_SPACES}$")
_TRAILING = re.compile(
    rf"(?P<head>.*?[^\s\\]){_SPACES}"
    rf"(?P<unit>(?:{_DEGREE}|{_PRIME})?(?:{_SPACES}(?:\\cdot\s*)?(?:{_IN_COMMAND}|{_SPEED}|{_BARE}|{_SLASHED}))*)\s*\.?",
    re.DOTALL,
)
_LEADING = re.compile(
    rf"\s*(?:(?P<opened>{_COMMAND}\s*\{{)\s*)?(?:(?:the|final|answer|value|result|is|equals|approximately|about|exactly|roughly"
    r"|around|approx\.?|there|are|it|so|thus|therefore|minimum|maximum|smallest|largest|greatest|total|area|perimeter"
    r"|volume|probability)\b[\s:,]*)+(?(opened)\}[\s:]*)",
    re.IGNORECASE,
)
_CLOSING = re.compile(
    rf"{_COMMAND}\s*\{{\s*is\s+(?:the\s+)?(?:(?:final|correct|only|smallest|largest|greatest|minimum|maximum)\s*)*"
    r"(?:(?:answer|result|value|solution|number|one)\s*)?\.?\s*\}\s*$",
    re.IGNORECASE,
)
_MONEY = re.compile(r"\s*(?P<sign>-?)\s*(?P<money>\\\$|€|£|USD|\\euro(?![a-z])|\\pounds(?![a-z]))\s*(?=[-\d.\\({])")
_ONE_OF_IT = re.compile(rf"(?P<angle>{_DEGREE}|{_PRIME})|{_IN_COMMAND}|{_SPEED}|{_BARE}|{_SLASHED}", re.DOTALL)
_PART = re.compile(rf"{_SYLLABLE.pattern}|[^\W\d_]+|\^\s*\{{?\s*(-?\d)\s*\}}?|/")
_WORDY = re.compile(rf"{_COMMAND}\s*\{{([^{{}}\\$]*)\}}")
_TEXT = re.compile(rf"{_COMMAND}\s*\{{([^{{}}]*)")


@dataclass(frozen=True, slots=True)
class Measure:
    """Value with unit and scale.

    Attributes:
        value: text of the value without unit and scale words.
        unit: powers by unit name; empty without a unit.
        scale: factor of scale words.
    """

    value: str
    unit: Mapping[str, int]
    scale: int = 1

    @property
    def scale_word(self) -> str:
        """Scale word of the factor; empty if there is none."""
        return next((word for word, factor in SCALES.items() if factor == self.scale), "")


def measure_of(text: str, nouns: frozenset[str] = frozenset()) -> Measure:
    """Split an answer into value, unit and scale. Without a recognised unit, the whole text is the value.

    Args:
        text: answer.
        nouns: nouns that the answer may count, as from :func:`nouns_of`.
    """
    text = _CLOSING.sub("", text)
    if leading := _LEADING.match(text):
        text = text[leading.end() :]
    unit: dict[str, int] = {}
    if money := _MONEY.match(text):
        unit[CURRENCY[money["money"]]] = 1
        text = money["sign"] + text[money.end() :]
    begin = _unit_at(text, nouns, after_unit=bool(unit))
    powers, scale = _read(text[begin:])
    for name, power in powers.items():
        unit[name] = power if name in CURRENCY.values() else unit.get(name, 0) + power
    return Measure(_END_SPACES.sub("", text[:begin]).strip(), unit, scale)


def in_cents(expected: Measure, said: Measure) -> tuple[Measure, Measure]:
    """Return both answers, both in cents if one is in dollars and the other in cents."""
    if {*expected.unit.items(), *said.unit.items()} != {("dollar", 1), ("cent", 1)}:
        return expected, said
    one, other = (
        replace(one, unit={"cent": 1}, scale=one.scale * 100) if "dollar" in one.unit else one
        for one in (expected, said)
    )
    return one, other


def units_differ(expected: Measure, said: Measure) -> bool:
    """Return whether the units of two answers contradict each other.

    A missing unit contradicts only primes (as in 5'), and degrees if the expected value contains pi.
    """
    wanted, given = dict(expected.unit), dict(said.unit)
    for unit in (wanted, given):
        unit.pop("unit", None)  # "units" means any unit
    if (_PRIME_SIGN in wanted) != (_PRIME_SIGN in given):
        return True
    if not wanted and given.get("degree") and r"\pi" in expected.value:
        return True
    if not wanted or not given or wanted == given:
        return False
    if any(name in UNITS or name in CURRENCY.values() for name in (*wanted, *given)):
        return True
    return not (set(wanted) <= set(given) or set(given) <= set(wanted))


def stray_text(value: str) -> str:
    """Return the content of the first text command in a value (without its unit); empty if there is none.

    Text left of an equals sign counts only beside a digit or ``not``.
    """
    left, _, right = with_named_symbols(value).rpartition("=")
    texts = [*_TEXT.findall(right), *(_TEXT.findall(left) if re.search(r"\d|\bnot\b", left) else ())]
    return texts[0].strip() or "text" if texts else ""


def _unit_at(text: str, nouns: frozenset[str], *, after_unit: bool) -> int:
    """Return the index at which the unit at the end of a text begins; ``len(text)`` if there is no unit.

    A slash belongs to the unit if another unit precedes the slash. With ``after_unit`` (a unit such as a currency
    precedes the number) the unit may also begin with a slash.
    """
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
        if not (part["angle"] or scale) and not _is_unit(
            inner, nouns, in_text="\\" in part[0], glued=glued, below=part[0][0] == "/", follows=follows
        ):
            break
        if part[0][0] != "/" or (after_unit and part.start() == found.start("unit")):
            begin = part.start()
    return begin


def _read(written: str) -> tuple[dict[str, int], int]:
    text = re.sub(_PRIME, f" {_PRIME_SIGN} ", "0" + written)[1:] if "'" in written or "prime" in written else written
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
