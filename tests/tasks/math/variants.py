# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Answers by the hundred: for values drawn at random, the ways to write them, and near misses."""

import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import chain
from math import gcd, isqrt


Variant = tuple[str, str, bool]
"""An expected answer, an answer, and whether it is right."""

SEED = 12


def integers(draw: random.Random) -> Iterator[Variant]:
    n = draw.randint(11, 999)
    big = draw.randint(10_000, 9_999_999)
    right = [f"{n}.0", f"${n}$", rf"\({n}\)", f"x = {n}", rf"m + n = {n}", rf"\{{{n}\}}", f"0{n}", rf"\text{{{n}}}"]
    right += [rf"{n}^\circ", rf"{n}\text{{ cm}}", f"{n}.", rf"{3 * n}/3", rf"{n}.00", rf"\mathbf{{{n}}}", rf"n={n}"]
    wrong = [str(n + 1), str(-n), f"{n}.1", f"{n}0", str(n)[:-1], f"{n}, {n + 1}", rf"{n} \text{{ or }} {n + 1}"]
    wrong += [
        f"{n + 1} = {n}",
        f"({n}, {n + 1})",
        rf"{n}\%",
        rf"{n} \pm 1",
        rf"\pm {n}",
        f"{n}!",
        f"{n} {n + 1}",
        f"{n}x",
    ]
    wrong += [rf"{n}\sqrt{{2}}", rf"x \le {n}", rf"x \ne {n}", f"{n - 1}+1", rf"\max({n}, 3)", rf"{n}^2", "", "x"]
    wrong += [rf"{n} \approx {2 * n}", rf"\text{{{n} or {n + 1}}}", rf"\frac{{1}}{{{n}}}", r"\emptyset", "x = x"]
    yield from _of(str(n), right, wrong)
    right = [f"{big:,}", f"{big:,}".replace(",", "{,}"), f"{big:,}".replace(",", r"\,"), f"{big:,}".replace(",", " ")]
    yield from _of(str(big), right, [f"{big:,}"[:-1], str(big + 1), f"{big / 1000}"])


def fractions(draw: random.Random) -> Iterator[Variant]:
    q = draw.choice([3, 7, 9, 11, 13])
    p = draw.choice([k for k in range(2, 40) if gcd(k, q) == 1 and k % q])
    value, k = Fraction(p, q), draw.randint(2, 9)
    right = [f"{p}/{q}", rf"\dfrac{{{p}}}{{{q}}}", rf"\tfrac{{{p}}}{{{q}}}", rf"\frac{{{k * p}}}{{{k * q}}}"]
    right += [f"{float(value):.8f}", rf"x = \frac{{{p}}}{{{q}}}", rf"\frac{{{p}}}{{{q}}} \approx {float(value):.2f}"]
    if p > q:
        right += [rf"{p // q}\frac{{{p % q}}}{{{q}}}", f"{p // q} {p % q}/{q}"]
    wrong = [
        f"{q}/{p}",
        f"{p + 1}/{q}",
        f"-{p}/{q}",
        f"{float(value):.2f}",
        str(p),
        rf"\frac{{{p}}}{{{q}}}, \frac{{1}}{{{q}}}",
    ]
    wrong += [
        rf"\frac{{{p}}}{{{q}}} = \frac{{{p + 1}}}{{{q}}}",
        rf"{p}:{q + 1}",
        rf"{p}\%",
        rf"\binom{{{p + q}}}{{{q}}}",
    ]
    yield from _of(rf"\frac{{{p}}}{{{q}}}", right, wrong)


def decimals(draw: random.Random) -> Iterator[Variant]:
    hundredths = draw.choice([n for n in range(101, 999) if n % 10])
    value = hundredths / 100
    right = [rf"\frac{{{hundredths}}}{{100}}", rf"{hundredths}\%", f"{hundredths}%", f"{value}0", rf"${value}$"]
    right += [rf"{hundredths} \times 10^{{-2}}", f"{hundredths}e-2", rf"{hundredths} \text{{ percent}}"]
    wrong = [str(hundredths), f"{value + 0.01:.2f}", f"{value:.1f}", rf"{value}\%", f"-{value}", f"{value}, 1"]
    yield from _of(str(value), right, wrong)
    right = [rf"{value}", rf"{value}%", rf"{hundredths / 10000}"]
    yield from _of(rf"{value}\%", right, [rf"{value + 1:.2f}\%", f"{hundredths}", rf"-{value}\%"])


def tiny(draw: random.Random) -> Iterator[Variant]:
    n = draw.randint(20, 99)
    yield from _of(
        rf"\frac{{1}}{{2^{{{n}}}}}", [f"2^{{-{n}}}"], [rf"\frac{{1}}{{2^{{{n + 1}}}}}", "0", "0.0", f"2^{{{n}}}"]
    )


def surds(draw: random.Random) -> Iterator[Variant]:
    a, b = draw.randint(2, 9), draw.choice([2, 3, 5, 6, 7, 10])
    value = a * b**0.5
    right = [
        rf"{a} \sqrt {{{b}}}",
        rf"{a}\cdot\sqrt{{{b}}}",
        rf"\sqrt{{{a * a * b}}}",
        f"{value:.7f}",
        rf"\sqrt{{{b}}}\cdot {a}",
    ]
    right += [
        rf"{a}√{b}" if b < 10 else rf"{a}\sqrt{{{b}}}",
        rf"{a} \cdot {b}^{{1/2}}",
        rf"{a}\sqrt{{{b}}} \approx {value:.2f}",
    ]
    wrong = [
        rf"{a}\sqrt{{{b + 1}}}",
        rf"{a + 1}\sqrt{{{b}}}",
        f"{value:.2f}",
        rf"-{a}\sqrt{{{b}}}",
        rf"\pm {a}\sqrt{{{b}}}",
    ]
    wrong += [rf"\sqrt{{{a * b + 1000}}}", rf"{a}\sqrt[3]{{{b}}}", str(isqrt(a * a * b))]
    yield from _of(rf"{a}\sqrt{{{b}}}", right, wrong)


def sets(draw: random.Random) -> Iterator[Variant]:
    a, b, c = draw.sample(range(-9, 30), 3)
    right = [f"{c}, {a}, {b}", rf"\{{{b}, {c}, {a}\}}", rf"{a}, {b} \text{{ and }} {c}", f"x = {a}, x = {c}, x = {b}"]
    right += [rf"\left\{{{a}, {b}, {c}\right\}}", rf"{b}, {a}, \text{{ or }} {c}", rf"x \in \{{{a}, {b}, {c}\}}"]
    wrong = [
        f"{a}, {b}",
        f"{a}, {b}, {c}, {max(a, b, c) + 1}",
        f"{a}, {b}, {c + 100}",
        f"{a}",
        rf"[{min(a, b, c)}, 30]",
    ]
    wrong += [rf"\{{{a}, {b}\}} \cup \{{{c + 50}\}}", f"{a + b + c}"]
    yield from _of(f"{a}, {b}, {c}", right, wrong)


def intervals(draw: random.Random) -> Iterator[Variant]:
    a, b = sorted(draw.sample(range(-9, 30), 2))
    right = [rf"\left[{a}, {b}\right)", rf"$[{a},{b})$", rf"x \in [{a}, {b})", rf"[{a},\,{b})"]
    wrong = [
        f"({a}, {b})",
        f"[{a}, {b}]",
        f"({a}, {b}]",
        f"[{a}, {b + 1})",
        f"{a}, {b}",
        r"(-\infty, \infty)",
        rf"[{a}, \infty)",
    ]
    yield from _of(f"[{a}, {b})", right, wrong)
    right = [f"{a} < x", rf"({a}, \infty)", rf"x \in ({a}, +\infty)"]
    yield from _of(
        f"x > {a}", right, [f"x < {a}", rf"x \ge {a}", f"x > {a + 1}", f"x = {a}", rf"[{a}, \infty)", "x = x"]
    )


def tuples(draw: random.Random) -> Iterator[Variant]:
    a, b, c = draw.sample(range(-9, 30), 3)
    right = [rf"\left({a}, {b}, {c}\right)", f"({a},{b},{c})", rf"(x, y, z) = ({a}, {b}, {c})"]
    yield from _of(
        f"({a}, {b}, {c})",
        right,
        [f"({b}, {a}, {c})", f"({a}, {b})", f"({a}, {b}, {c + 1})", f"({a}, {b}, -{abs(c) + 1})"],
    )
    right = [f"y = {b}, x = {a}", f"({a}, {b})", f"{a}, {b}"]
    yield from _of(
        f"x = {a}, y = {b}", right, [f"x = {b}, y = {a}", f"({b}, {a})", f"{b}, {a}", f"x = {a}", f"x = {a}, y = {c}"]
    )


def expressions(draw: random.Random) -> Iterator[Variant]:
    a, b = draw.sample(range(2, 12), 2)
    right = [f"{a * b} - {a + b}x + x^2", f"(x - {a})(x - {b})", f"(x-{b})(x-{a})", f"y = x^2 - {a + b}x + {a * b}"]
    wrong = [
        f"x^2 + {a + b}x + {a * b}",
        f"(x + {a})(x - {b})",
        f"x^2 - {a + b}x",
        f"y^2 - {a + b}y + {a * b}",
        f"x^2 - {a + b}x + {a * b} = 0, 1",
    ]
    yield from _of(f"x^2 - {a + b}x + {a * b}", right, wrong)
    right = [rf"\frac{{\pi {a}}}{{{b}}}", rf"\frac{{{a}}}{{{b}}}\pi", rf"{a}\pi/{b}"]
    yield from _of(
        rf"\frac{{{a}\pi}}{{{b}}}",
        right,
        [rf"\frac{{{b}\pi}}{{{a}}}", rf"\frac{{{a}}}{{{b}}}", rf"{a}\pi", f"{a * 3.14 / b:.2f}"],
    )
    yield from _of(f"{a}+{b}i", [f"{b}i+{a}", rf"{a} + {b} i"], [f"{a}-{b}i", f"{b}+{a}i", f"{a + b}i", f"{a + b}"])
    matrix = rf"\begin{{pmatrix}} {a} & 1 \\ {b} & 0 \end{{pmatrix}}"
    right = [rf"\begin{{bmatrix}} {a} & 1 \\ {b} & 0 \end{{bmatrix}}"]
    yield from _of(matrix, right, [rf"\begin{{pmatrix}} {a} & {b} \\ 1 & 0 \end{{pmatrix}}", f"({a}, 1, {b}, 0)"])


def words_and_units(draw: random.Random) -> Iterator[Variant]:
    n, day = draw.randint(2, 99), draw.choice(["Monday", "Tuesday", "Friday"])
    yield from _of(
        rf"\text{{{day}}}",
        [day, rf"\textbf{{{day}}}", rf"\mathrm{{{day}}}"],
        ["Sunday", r"\text{Sunday}", f"{day}, Sunday"],
    )
    right = [f"{n} cm", rf"{n}\,\mathrm{{cm}}", str(n), rf"{n}\text{{ centimeters}}"]
    yield from _of(
        rf"{n} \text{{ cm}}", right, [rf"{n} \text{{ m}}", rf"{n}\text{{ kg}}", rf"{n + 1}\text{{ cm}}", rf"{n} km"]
    )
    choice = draw.choice("ABCD")
    yield from _of(
        choice,
        [f"({choice})", rf"\text{{{choice}}}", rf"\textbf{{({choice})}}"],
        ["E", "A, B, C, D", r"A \text{ or } E"],
    )


FAMILIES: dict[str, Callable[[random.Random], Iterator[Variant]]] = {
    family.__name__: family
    for family in (integers, fractions, decimals, tiny, surds, sets, intervals, tuples, expressions, words_and_units)
}


def variants(family: str, draws: int = 2) -> list[Variant]:
    """The variants of a family, for so many draws of its values; the same every time."""
    draw = random.Random(f"{SEED} {family}")
    return list(dict.fromkeys(chain.from_iterable(FAMILIES[family](draw) for _ in range(draws))))


def _of(expected: str, right: list[str], wrong: list[str]) -> Iterator[Variant]:
    yield expected, expected, True
    yield from ((expected, answer, True) for answer in right)
    yield from ((expected, answer, False) for answer in wrong)
