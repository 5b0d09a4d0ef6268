# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Ways to write an answer, right and wrong ones, made from a few problems by rule."""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from nemo_gym_prorl.tasks.stem.problems import Kind, Problem, problem_of


@dataclass(frozen=True)
class Variant:
    """One answer to one problem."""

    problem: Problem
    answer: str
    right: bool

    @property
    def id(self) -> str:
        return f"{self.problem.question}|{self.problem.expected}|{self.answer}|{'right' if self.right else 'wrong'}"


def problem(expected: str, question: str = "What is it?", **options: str) -> Problem:
    row = {"question": question, "expected_answer": expected}
    return problem_of(row | ({"options": [options]} if options else {}))


# Expected quantity; the same value in other units; units of other dimensions.
QUANTITIES = (
    ("2.50e3 m", {"2.50 km": 1, "2.50e5 cm": 1, "2500 m": 1, "2.50e6 mm": 1}, ("s", "kg", "m^2")),
    ("4.18 kJ/mol", {"4180 J/mol": 1, "1.00 kcal/mol": 1, "4.18e3 J mol^-1": 1}, ("kJ", "J/K", "mol/kJ")),
    ("3.00e8 m/s", {"3.00e5 km/s": 1, "3.00e10 cm/s": 1, "1 c": 1}, ("m", "m/s^2", "s/m")),
    ("25.0 °C", {"298.15 K": 1, "77 °F": 1}, ("J", "m", "Pa")),
    ("1.60e-19 J", {"1.00 eV": 1, "1.60e-12 erg": 1}, ("W", "V", "C")),
    ("101.3 kPa", {"1.000 atm": 1, "1.013 bar": 1, "760 mmHg": 1, "101300 N/m^2": 1}, ("N", "J", "kg/m^3")),
    ("0.529 Å", {"52.9 pm": 1, "5.29e-11 m": 1, "0.0529 nm": 1}, ("s", "m^3", "eV")),
    ("9.81 m/s^2", {"981 cm/s^2": 1, "9.81 N/kg": 1}, ("m/s", "N", "kg")),
    ("45.0 degree", {"0.7854 rad": 1}, ("m", "J", "s")),
    ("12.0 %", {"0.12": 1, "12.0 percent": 1}, ("m", "g", "s")),
)
CHOICES = {"A": "0.5 m/s", "B": "1.5 m/s", "C": "alpha decay", "D": "beta decay", "E": "-0.5 m/s"}


def notations(value: Decimal, unit: str) -> Iterator[str]:
    """One quantity in the notations that people use."""
    mantissa, _, exponent = f"{value:e}".partition("e")
    power = int(exponent)
    latex = unit.replace("%", r"\%").replace("°C", r"^\circ\mathrm{C}").replace("Å", r"\AA")
    yield f"{value} {unit}"
    yield f"{value}{unit}"
    yield rf"{mantissa} \times 10^{{{power}}} \text{{ {latex} }}" if "^" not in latex else f"{mantissa}e{power} {unit}"
    yield f"{mantissa}×10^{power} {unit}"
    yield f"x = {mantissa} * 10**{power} {unit}"
    yield f"approximately {mantissa}E{power:+d} {unit}"
    yield f"${value:f}\\,${unit}" if "^" not in unit else f"{value:f} {unit}."


def quantity_variants() -> Iterator[Variant]:
    for expected, others, dimensions in QUANTITIES:
        asked = problem(expected)
        number, unit = expected.split(" ", 1)
        value = Decimal(number)
        for text in notations(value, unit):
            yield Variant(asked, text, True)
        for text in others:
            yield Variant(asked, text, True)
        for factor, right in (("1.004", True), ("1.1", False), ("10", False), ("-1", False), ("0.001", False)):
            yield Variant(asked, f"{value * Decimal(factor)} {unit}", right)
        for dimension in dimensions:
            yield Variant(asked, f"{number} {dimension}", False)
        yield Variant(asked, rf"\Delta x_1 = {number} ± {value / 50} {unit}", True)
        for other in ("!", "<", ">", r"\le ", r"\neq", "not", "is never ", "x≠y", "-7 kg ", "it is 7 kg or m "):
            yield Variant(asked, f"{other}={number} {unit}", False)
        yield Variant(asked, f"{number} ± {value * 2} {unit}", False)
        yield Variant(problem(expected, f"Give it in {unit}."), number, True)
        if unit != "%":
            yield Variant(asked, number, False)


def number_variants() -> Iterator[Variant]:
    counts, measured, fraction = problem("5"), problem("0.333"), problem(r"\frac{1}{3}")
    for text, right in {
        "5": True, "5.0": True, "+5": True, "$5$": True, "n = 5": True, "10/2": True, r"\text{5}": True, "５": True,
        "5.01": False, "-5": False, "50": False, "5e1": False, "4": False, "5^2": False, "5²": False, "0.5": False,
    }.items():  # fmt: skip
        yield Variant(counts, text, right)
    for text, right in {
        "1/3": True, r"\frac13": True, "0.333": True, "0.3333": True, "33.3 %": True,
        r"\dfrac{1}{3}": True,
        "0.3": False, "0.35": False, "3.33": False, "1/4": False, "-1/3": False,
    }.items():  # fmt: skip
        yield Variant(measured, text, right)
        yield Variant(fraction, text, right)
    yield Variant(measured, "0.33", True)
    yield Variant(fraction, "0.33", False)


def choice_variants() -> Iterator[Variant]:
    asked = problem("B", "Which?", **CHOICES)
    for text, right in {
        "B": True, "b": True, "(B)": True, "B.": True, "[B]": True, "Option B": True, r"\text{B}": True, "$B$": True,
        "B: 1.5 m/s": True, "(B) 1.5 m/s": True, "1.5 m/s": True, "150 cm/s": True, "1.50 m/s": True,
        "Answer: B": True,
        "**B**": False, "A": False, "AB": False, "A, B": False, "B or C": False, "A B C D E": False, "ABCDE": False,
        "B: 0.5 m/s": False, "A: 1.5 m/s": False, "-1.5 m/s": False, "1.5": False, "F": False, "В": False, "Β": False,
        "all of them": False, "0.5 m/s or 1.5 m/s": False, "not B": False, "15 m/s": False, "alpha decay": False,
    }.items():  # fmt: skip
        yield Variant(asked, text, right)
    worded = problem("C", "Which?", **CHOICES)
    for text, right in {
        "alpha decay": True, "Alpha Decay": True, "alpha-decay": True, "C) alpha decay": True,
        r"\text{alpha decay}": True,
        "beta decay": False, "alpha decay, beta decay": False, "decay": False, "alpha": False, "C) beta decay": False,
    }.items():  # fmt: skip
        yield Variant(worded, text, right)
    signed = problem("E", "Which?", **CHOICES)
    for text, right in {"-0.5 m/s": True, "−0.5 m/s": True, "-50 cm/s": True, "0.5 m/s": False, "A": False}.items():
        yield Variant(signed, text, right)
    letter = problem("D", "Which is noble: (A) iron, (B) gold, (C) oxygen, (D) neon?")
    assert letter.kind is Kind.CHOICE
    for text, right in {"D": True, "(d)": True, "option D": True, "A": False, "C or D": False, "Ｄ": True}.items():
        yield Variant(letter, text, right)


OPEN_LETTERS = {
    "Which vitamin prevents scurvy?": "C",
    "What is the symbol of carbon?": "C",
    "What is the symbol of fluorine?": "F",
    "Which blood group has both antigens, AB, and which only the first?": "A",
    "Which point, A or B, is higher? Point A. is at 3 m.": "A",
    "What is the symbol of iodine?": "I",
}
"""Open questions whose expected answer is one letter."""


def letter_variants() -> Iterator[Variant]:
    for question, letter in OPEN_LETTERS.items():
        asked = problem(letter, question)
        assert asked.kind is Kind.TEXT, question
        for text, right in {letter: True, f"({letter})": True, f"${letter}$": True, "Z": False}.items():
            yield Variant(asked, text, right)
    shown = problem("J", "Which?\n" + "\n".join(f"{letter}) word {letter}" for letter in "ABCDEFGHIJ"))
    for text, right in {
        "J": True, "(j)": True, "word J": True, "J) word J": True, "J. word J": True, "I": False, "word I": False,
        "J) word I": False, "I, J": False,
    }.items():  # fmt: skip
        yield Variant(shown, text, right)


def formula_variants() -> Iterator[Variant]:
    asked = problem(r"\frac{1}{2} m v^2")
    for text, right in {
        r"\frac{1}{2}mv^2": True, r"\frac{m v^2}{2}": True, r"0.5 m v^2": True,
        r"m v^2": False, r"\frac{1}{2} m v": False, r"\frac{1}{2} m v^3": False, r"-\frac{1}{2} m v^2": False,
    }.items():  # fmt: skip
        yield Variant(asked, text, right)


ROMAN = {"A": "I", "B": "II", "C": "III", "D": "I and II"}
FORMS: dict[str, dict[str, bool]] = {
    "5 Gy": {"5 Sv": False},
    "5 Sv": {"5 Gy": False},
    "5 Hz": {"5 Bq": False},
    "5 Bq": {"5 Hz": False, "5 1/s": True},
    "5.0 Hz": {"5.0 s^-1": True},
    "5.0 Gy": {"5.0 J/kg": True},
    "5.0 mSv": {"0.0050 Sv": True, "5.0 mGy": False},
    "6.28 rad/s": {"6.28 Hz": False, "6.28 s^-1": True},
    "60 rpm": {"6.28 rad/s": True, "1.0 Hz": False},
    "5 lm": {"5 cd": False},
    "5.0 kBq": {"5.0 kHz": False},
    "293 K": {"22 °C": False, "20 °C": True, "19.85 °C": True},
    "20 °C": {"293 K": True, "295 K": False, "22 °C": False},
    "5 °C": {"278 K": True},
    "0 °C": {"273 K": True, "273.15 K": True, "275 K": False},
    "273.15 K": {"0 °C": True},
    "68 °F": {"20 °C": True, "21 °C": False},
    "1200 K": {"1205 K": True, "927 °C": True},
    "100 °C": {"212 °F": True},
    "-40 °C": {"-40 °F": True},
    "25 °C": {"25 K": False},
    "300 K": {"32 °C": False},
    "9.81 m/s^2": {"9.81 ms^-2": True, "9.81 ms^{-2}": True, r"9.81\,\mathrm{ms^{-2}}": True},
    "9.81 ms^-2": {"9.81 m/s^2": True},
    "3.0 m/s": {"3.0 ms^-1": True},
    "3.0 ms": {"3.0 ms": True, "0.0030 s": True},
    "8.31 J/(mol K)": {
        "8.31 J/mol K": True,
        r"8.31\ \mathrm{J\,mol^{-1}\,K^{-1}}": True,
        "8.31 Jmol^-1K^-1": True,
        "8.31 J/mol·K": True,
        "8.31 J/mol/K": True,
        "8.31 J/mol": False,
        "8.31 J K/mol": False,
    },
    "8.31 J/mol K": {"8.31 J/(mol K)": True},
    "5.0 N m": {"5.0 Nm": True},
    "5.0 J": {"5.0 Nm": True},
    "5.0 N/m": {"5.0 Nm^-1": True},
    "5.0 kg m/s": {"5.0 kgms^-1": True},
    "6.63e-34 J s": {"6.63e-34 Js": True},
    "5.0 W/m^2": {"5.0 Wm^-2": True},
    "5.0 kW h": {"5.0 kWh": True},
    "3.0 m": {"3.0 mm": False},
    "5 m^2": {"5 mm": False},
    "5 m s": {"5 ms": False},
    "5 m^-1": {"5 mm^-2": False},
    "5 min": {"5 m": False},
    "5 kg": {"5": False},
    "5": {"5 kg": False},
    "1.0 mol": {"1.0 M": False},
    "5 A": {"5 a": False},
    "5 mW": {"5 MW": False},
    "5 pm": {"5 Pm": False},
    "1/2": {"0.5": True, "101/200": False, "0.503": False},
    "5/3": {"1.67": True, "1.667": True, "1.68": False, "1.7": False},
    "3/4": {"0.7575": False},
    "CH_3CN": {"CH_3NC": False, "CH_3CN": True, "CH3CN": True, r"\ce{CH3CN}": True, r"\mathrm{CH_3CN}": True},
    "H_2O": {"H2O": True, "H_{2}O": True, "H₂O": True, r"\text{H}_2\text{O}": True, "H_2O_2": False, "h2o": False},
    "H_2SO_4": {"H2SO4": True, "H_2SO_3": False, "HSO4": False},
    "Ca(OH)_2": {"Ca(OH)2": True, "Ca(OH)": False, "CaOH_2": False},
    "SO_4^{2-}": {"SO4^2-": True, r"SO_4^{2-}": True, "SO_4^{2+}": False, "SO_3^{2-}": False},
    "[Fe(CN)_6]^{3-}": {"[Fe(CN)6]^3-": True, "[Fe(CN)_6]^{4-}": False},
    r"\vec{F}=q\vec{v}\times\vec{B}": {r"\vec{F}=q\vec{B}\times\vec{v}": False},
    r"\nabla\cdot E": {r"\nabla\times E": False},
    "x^2+1=0": {"x^2+2=0": False},
    "x''": {"x'": False},
    r"\Delta H = 0": {"H=0": False, "0": True},
    "T_1/T": {"T_1": False},
    "50 %": {"50": False},
    "0.50": {"50 %": True},
    "2.0e3 J": {"2 kJ": True},
    "2.0 kJ": {"-2.0 kJ": False},
    "5 m": {"5 m^2": False},
    "5.0 C": {"5.0 °C": False},
    "5.0 K": {"5.0 °C": False},
    "10 g": {"10 G": False},
    "1000": {"1,000": True},
    "1,000": {"1000": True},
    "1.000": {"1,000": False},
    "3 m/s": {"3 m s": False},
    "5.0 V": {"5.0 v": False},
    "5 h": {"5 hours": True},
    "5 years": {"5 yr": True},
    "5.0 dB": {"5.0 B": False},
    "7": {"7.0": True},
    "7.2": {"7.25": True, "7.3": False},
    "pH 7.0": {"7.0": False},
    "7.0": {"pH = 7.0": True},
    "6.02e23": {"6.02e24": False},
    "4.0 eV": {"4.0 V": False},
    "90°": {"90": False, "1.5708": False, r"\pi/2 rad": False},
    "90 degrees": {"1.571 rad": True},
    "2 N": {"2 n": False},
    "2.0 Ω": {"2.0 ohm": True},
    "1.0 atm": {"760 torr": True},
    "5 cm^3": {"5 mL": True},
    "5.0 L": {"5000 cm^3": True},
    "3 x 10^8 m/s": {"3e8 m/s": True},
    "5.0 m/s east": {"5.0 m/s west": False},
}
"""Quantities that mean the same, and such as only look like it: other kinds, other scales, units without a space."""

ROMAN_FORMS: dict[str, dict[str, bool]] = {
    "A": {"I": True, "II": False, "(I)": True, "A": True, "B": False},
    "B": {"II": True, "A": False},
    "D": {"I and II": True, "I, II": False},
}


def form_variants() -> Iterator[Variant]:
    for expected, answers in FORMS.items():
        yield from (Variant(problem(expected), text, right) for text, right in answers.items())
    for expected, answers in ROMAN_FORMS.items():
        yield from (
            Variant(problem(expected, "Which numeral?", **ROMAN), text, right) for text, right in answers.items()
        )


def all_variants() -> list[Variant]:
    return [
        *quantity_variants(),
        *number_variants(),
        *choice_variants(),
        *letter_variants(),
        *formula_variants(),
        *form_variants(),
    ]
