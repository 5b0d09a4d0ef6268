# SPDX-License-Identifier: Apache-2.0
r"""The units that answers have, how they convert, and how they are read. Pure; for mathematics and for science.

The list is closed: what is not in it is no unit, since letters are mostly variables. A percent sign and words like
million are in it too, as numbers. Symbols stand as they are spelt (5 mW are not 5 MW), names in any case, in the
plural, and those with ``!`` with SI prefixes as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache


_TABLE = """
!m meter metre = m; !g gram gramme = 1/1000 kg; !s second sec = s; !A ampere amp = A; !K kelvin = K; !mol mole = mol
!cd candela = cd : luminous intensity; rad radian = 1 : angle; bit = bit; byte = 8 bit
kB = 8e3 bit; MB = 8e6 bit; GB = 8e9 bit; TB = 8e12 bit
!N newton = kg m s^-2; !Pa pascal = N m^-2; !J joule = N m; !W watt = J s^-1; !C coulomb = A s; !V volt = W A^-1
!F farad = C V^-1; !ohm = V A^-1; !S siemens = A V^-1; !Wb weber = V s; !T tesla = Wb m^-2; !H henry = Wb A^-1
kat katal = mol s^-1
!Hz hertz = s^-1 : frequency; !Bq becquerel = s^-1 : activity; Ci curie = 37000000000 s^-1 : activity
!Gy gray = J kg^-1 : absorbed dose; !Sv sievert = J kg^-1 : dose equivalent; rem = 1/100 J kg^-1 : dose equivalent
lm lumen = cd : luminous flux; lx lux = cd m^-2 : luminous flux
!L l liter litre = 1/1000 m^3; !M molar = 1000 mol m^-3; t tonne = 1000 kg; u amu = 1.66053906892e-27 kg
!Da dalton = 1.66053906892e-27 kg; slug = 14.593902937 kg; molal = mol kg^-1
!eV electronvolt electron_volt = 1.602176634e-19 J; !Wh = 3600 J; !cal calorie = 4.184 J; erg = 1e-7 J
BTU Btu btu = 1055.05585262 J; hp horsepower = 745.69987158227 W; dyn dyne = 1e-5 N; lbf = 4.4482216152605 N
!P poise = 1/10 Pa s; !St stokes = 1e-4 m^2 s^-1; !G gauss = 1e-4 T; D debye = 3.33564e-30 C m
Oe oersted = 79.577471545948 A m^-1; Mx maxwell = 1e-8 Wb; !Ah = 3600 C; !Jy jansky = 1e-26 W m^-2 Hz^-1
!Ry rydberg = 13.60569312299 eV; hartree = 27.211386245981 eV; dB decibel = dB
!bar = 100000 Pa; atm atmosphere = 101325 Pa; Torr torr mmHg = 133.322368421 Pa; psi = 6894.757293168 Pa
angstrom = 1e-10 m; in inch inche = 0.0254 m; ft foot feet = 0.3048 m; yd yard = 0.9144 m; mi mile = 1609.344 m
au AU astronomical_unit = 149597870700 m; ly lightyear light_year = 9460730472580800 m
!pc parsec = 3.0856775814913673e16 m; ha hectare = 10000 m^2; acre = 4046.8564224 m^2; b barn = 1e-28 m^2
nmi = 1852 m; micron = 1e-6 m; fermi = 1e-15 m; qt quart = 0.000946352946 m^3; pt pint = 0.000473176473 m^3
cc = 1e-6 m^3; gal gallon = 0.003785411784 m^3; lb pound = 0.45359237 kg; oz ounce = 0.028349523125 kg
min minute = 60 s; h hr hour = 3600 s; d day = 86400 s; wk week = 604800 s; month = 2629800 s; yr year = 31557600 s
decade = 315576000 s; century = 3155760000 s
c speed_of_light = 299792458 m s^-1; kn knot = 1852/3600 m s^-1; mph = 1609.344/3600 m s^-1
kmh kph kmph = 1000/3600 m s^-1
deg degree = pi/180 : angle; arcmin arcminute = pi/10800 : angle; arcsec arcsecond = pi/648000 : angle
turn rev revolution = pi/0.5 : angle; rpm = pi/30 s^-1 : angle; sr steradian = 1
degC celsius = degC; degF fahrenheit = degF
unit = 1; dollar usd buck = dollar; cent = 1/100 dollar; euro eur = euro; sterling = sterling
"""
"""Symbols and names, what one of it is, and what it is a unit of, where others of its dimension are not."""

_NUMBERS = {
    "percent": "1/100", "percentage": "1/100", "pct": "1/100", "ppm": "1e-6", "ppb": "1e-9", "dozen": "12",
    "hundred": "100", "thousand": "1e3", "million": "1e6", "billion": "1e9", "trillion": "1e12",
}  # fmt: skip
_PREFIXES = {
    "T": 12, "G": 9, "M": 6, "k": 3, "h": 2, "d": -1, "c": -2, "m": -3, "µ": -6, "u": -6, "n": -9, "p": -12, "f": -15,
    "tera": 12, "giga": 9, "mega": 6, "kilo": 3, "hecto": 2, "deci": -1, "centi": -2, "milli": -3, "micro": -6,
    "nano": -9, "pico": -12, "femto": -15,
}  # fmt: skip
_DEGREES = {"degC": Fraction(1), "degF": Fraction(5, 9)}
"""Kelvin in each, where they stand beside other units; alone they are scales with a zero of their own."""

_TEXT = re.compile(
    r"\\(?:text[a-z]*|math(?:rm|bf|it|sf)|mbox|operatorname|rm)\s*\{((?:[^{}$]|\{[^{}]*\})*)\}(?!\s*\{)"
)
_REWRITES = (
    (re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"(\1)/(\2)"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\(?:[,;:! ]|cdot|times|q?quad)|[~·×⋅*]"), " "),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|\\circ|°|\bdegrees?\b|\bdeg\b"), " degree "),
    (re.compile(r"degree\s+([CF])(?:elsius|ahrenheit)?(?![A-Za-z])"), r" deg\1 "),
    (re.compile(r"\\?%"), " percent "),
    (re.compile(r"\\?\$"), " dollar "),
    (re.compile(r"\\(?:Omega|ohm)(?![A-Za-z])|Ω"), "ohm"),
    (re.compile(r"\\mu(?![A-Za-z])\s*|μ"), "µ"),
    (re.compile(r"\\(?:AA|angstrom)(?![A-Za-z])|Å"), "angstrom"),
    (re.compile(r"(?<![A-Za-z])per(?![A-Za-z])"), "/"),
    (re.compile(r"^\s*1\s*/"), "/"),
)
"""From what people write to words, powers, strokes and brackets."""

_POWER = r"\s*\^\s*[({]?\s*([+-]?\d)\s*[)}]?(?!\d)"
_TOKEN = re.compile(rf"\s*(?:([A-Za-zµ_]+)\.?(?:{_POWER}|([+-]?[1-9])(?![\d.]))?|(/)|(\()|(\))(?:{_POWER})?)\s*")
_SYMBOL = re.compile(r"kmol|mmol|mol|kg|km|cm|mm|nm|kJ|kN|kW|kV|kPa|MPa|MeV|keV|eV|Pa|Hz|Wb|rad|sr|[mgsAKJNWVCTFHL]")


@dataclass(frozen=True, slots=True)
class Unit:
    """What a number is a number of.

    Attributes:
        factor: how many of the base units one is.
        powers: of the base units; empty for an angle, and where there is none.
        kinds: what it is a unit of, where its dimension leaves that open.
        count: what words like million, and percent signs, multiply by.
        nouns: what is counted.
    """

    factor: Fraction = Fraction(1)
    powers: Mapping[str, int] = field(default_factory=dict)
    kinds: frozenset[str] = frozenset()
    count: Fraction = Fraction(1)
    nouns: frozenset[str] = frozenset()

    @property
    def plain(self) -> bool:
        """Whether it is a number, and of nothing."""
        return not (self.powers or self.kinds or self.nouns)

    def times(self, other: Unit, power: int = 1) -> Unit:
        """The product with a power of another one."""
        powers = {name: self.powers.get(name, 0) for name in {**self.powers, **other.powers}}
        powers = {name: value + power * other.powers.get(name, 0) for name, value in powers.items()}
        return Unit(
            self.factor * other.factor**power,
            {name: value for name, value in powers.items() if value},
            self.kinds | other.kinds,
            self.count * other.count**power,
            self.nouns | {f"{noun}^{power}" if power != 1 else noun for noun in other.nouns},
        )


def read_units(text: str, counted: Callable[[str], str | None] = lambda word: None) -> list[Unit]:
    """What a text may mean as a unit, the likeliest first; nothing if it is none.

    Symbols that stand side by side are read one by one as well (``Nm``, ``ms^-2``), and of several behind a stroke all
    may be below it (``J/mol K``).

    Args:
        text: it, with or without LaTeX around its words.
        counted: gives the noun that a word is, empty for one that says nothing, ``None`` for any other.
    """
    text = _TEXT.sub(r" \1 ", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    tokens, end = [], 0
    while found := _TOKEN.match(text, end):
        tokens.append(found)
        end = found.end()
    if end < len(text.rstrip()) or text.rstrip().endswith("/"):
        return []
    found_units: list[Unit] = []
    for apart in (False, True):
        for all_below in (False, True):
            unit = _product(iter(tokens), counted, apart=apart, all_below=all_below)
            if unit is not None and unit not in found_units:
                found_units.append(unit)
    return found_units


def known_unit(word: str) -> Unit | None:
    """The unit or the number of a word; ``None`` if it is none."""
    symbol = _listed().get(word) or _prefixed(word)
    if symbol is not None or len(word) < 3:
        return symbol
    name = word.lower()
    return _listed().get(name) or _listed().get(name.removesuffix("s")) or _prefixed(name.removesuffix("s"))


def _product(
    tokens: Iterator[re.Match[str]],
    counted: Callable[[str], str | None],
    *,
    apart: bool,
    all_below: bool,
    inside: bool = False,
) -> Unit | None:
    """Up to the end or, inside of one, the bracket that closes."""
    product, last, sign, raised = Unit(), Unit(), 1, 1
    for token in tokens:
        word, power = token[1], int(token[2] or token[3] or token[7] or 1)
        if token[4]:
            sign = -1
            continue
        if token[6]:
            return Unit().times(product, power) if inside else None
        if token[5]:
            found = _product(tokens, counted, apart=apart, all_below=all_below, inside=True)
        elif (name := word.lower()) in ("square", "sq", "cubic", "cu"):
            raised = 2 if name.startswith("sq") else 3
            continue
        elif name in ("squared", "cubed"):
            if not last.powers:
                return None
            product = product.times(last, 1 if name == "squared" else 2)
            continue
        else:
            found = known_unit(word)
            if found is None and (noun := counted(word)) is not None:
                if not noun:
                    continue
                found = Unit(nouns=frozenset((noun,)))
            symbols = _SYMBOL.findall(word) if apart and (found is None or power < 0) else []
            if len(symbols) == len(set(symbols)) > 1 and "".join(symbols) == word:
                for symbol in symbols[:-1]:
                    product = product.times(known_unit(symbol) or Unit(), sign)
                found = known_unit(symbols[-1])
        if found is None or (found.nouns and power != 1):
            return None  # powers are those of units
        last = Unit().times(found, power * raised * sign)
        product = product.times(last)
        raised, sign = 1, sign if all_below else 1
    if raised != 1 or inside:
        return None
    if product.powers.keys() & _DEGREES and product.powers not in ({"degC": 1}, {"degF": 1}):
        for scale, kelvin in _DEGREES.items():
            power = product.powers.get(scale, 0)
            product = product.times(Unit(1 / kelvin, {scale: 1, "K": -1}), -power)
    return product


@cache
def _listed() -> dict[str, Unit]:
    units: dict[str, Unit] = {"kg": Unit(powers={"kg": 1})} | {
        name: Unit(count=Fraction(number)) for name, number in _NUMBERS.items()
    }
    for entry in re.split(r"[;\n]\s*", _TABLE.strip()):
        names, _, meaning = entry.partition(" = ")
        meaning, _, kind = meaning.partition(" : ")
        unit = Unit(kinds=frozenset((kind,)) if kind else frozenset())
        for part in meaning.split():
            symbol, _, power = part.partition("^")
            if symbol[0].isdigit() or symbol.startswith("pi"):
                above, _, below = symbol.partition("/")
                number = Fraction(math.pi) if above == "pi" else Fraction(above)
                unit = unit.times(Unit(number / Fraction(below or 1)))
            else:
                unit = unit.times(units.get(symbol) or Unit(powers={symbol: 1}), int(power or 1))
        units |= dict.fromkeys(names.removeprefix("!").split(), unit)
    return units


@cache
def _with_prefixes() -> frozenset[str]:
    return frozenset(name for names in re.findall(r"!(.*?) = ", _TABLE) for name in names.split())


def _prefixed(word: str) -> Unit | None:
    for prefix, power in _PREFIXES.items():
        rest = word.removeprefix(prefix)
        if rest != word and rest in _with_prefixes() and (len(rest) > 2 if len(prefix) > 2 else len(rest) < 4):
            return _listed()[rest].times(Unit(Fraction(10) ** power))
    return None
