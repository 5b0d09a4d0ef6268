# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Our comparison of mathematical answers beside math-verify and Gym's math_with_judge, on 1,000 made-up pairs.

    python scripts/compare_math.py [--seed 25] [--pairs 1000] [--show]

Pairs are made by rule, so it is known which are right: expected answers as data sets spell them, messages as models
end them, mistakes as models make them. Gym's is its library verifier, without the judge that it can ask after it;
math-verify is called as its README does. ``--show`` prints where ours is not right.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from math import comb, gcd
from typing import Any

from math_verify import parse, verify
from math_verify.metric import math_metric
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

from nemo_gym_prorl.tasks.math.checker import MathChecker


Family = Callable[[random.Random], tuple[str, str, list[str], list[str]]]
"""A question, the expected answer, right answers, wrong ones."""

Pair = tuple[str, str, str, str, str, bool]
"""Family, question, expected answer, answer, message, whether it is right."""

ENDINGS = (
    r"So the answer is $\boxed{ANSWER}$.",
    "**Final answer**\n\n$$\\boxed{ANSWER}$$",
    r"Checking once more, everything fits. \[ \boxed{ANSWER} \]",
    "Therefore,\n\\[\n\\boxed{ANSWER}\n\\]",
    r"\boxed{ANSWER}",
)


def whole(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    n = draw.randint(1000, 99999)
    right = [f"{n:,}", f"{n:,}".replace(",", "{,}"), f"N = {n}", rf"{n}\text{{ coins}}", f"{n}.0", f"m+n={n}"]
    return "How many coins are there?", str(n), right, [str(n + 1), f"-{n}", f"{n}0", rf"{n}\text{{ bags}}", f"{n}!"]


def fraction(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    q = draw.choice([7, 9, 11, 13, 16, 25])
    p = draw.choice([k for k in range(q + 1, 60) if gcd(k, q) == 1])
    right = [rf"\dfrac{{{p}}}{{{q}}}", f"{p}/{q}", rf"{p // q}\frac{{{p % q}}}{{{q}}}", rf"x=\frac{{{p}}}{{{q}}}"]
    wrong = [rf"\frac{{{q}}}{{{p}}}", rf"-\frac{{{p}}}{{{q}}}", rf"\frac{{{p}}}{{{q + 1}}}", f"{p / q:.2f}", f"{p}"]
    return "Find $x$.", rf"\frac{{{p}}}{{{q}}}", right, wrong


def surd(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a, b, c = draw.randint(2, 9), draw.choice([2, 3, 5, 7]), draw.randint(2, 9)
    right = [
        rf"{a}\sqrt{{{b}}}+{c}",
        rf"{c}+\sqrt{{{a * a * b}}}",
        rf"{c} + {a} \sqrt {b}",
        rf"{c}+{a}\cdot\sqrt{{{b}}}",
    ]
    wrong = [rf"{c}-{a}\sqrt{{{b}}}", rf"{a}+{c}\sqrt{{{b + 4}}}", rf"{a + c}\sqrt{{{b}}}", f"{c + a * b**0.5:.1f}"]
    return "What is its length?", rf"{c}+{a}\sqrt{{{b}}}", right, wrong


def quotient_of_surds(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    b, q = draw.choice([2, 3, 5, 7]), draw.choice([2, 3, 4, 6])
    right = [rf"\sqrt{{{b}}}/{q}", rf"\frac{{1}}{{{q}}}\sqrt{{{b}}}", rf"\frac{{{b}}}{{{q}\sqrt{{{b}}}}}"]
    wrong = [rf"-\frac{{\sqrt{{{b}}}}}{{{q}}}", rf"\frac{{{b}}}{{{q}}}", rf"\frac{{\sqrt{{{b}}}}}{{{q + 1}}}"]
    return (
        r"Find $\sin A$.",
        rf"\frac{{\sqrt{{{b}}}}}{{{q}}}",
        [*right, rf"\sin A=\frac{{\sqrt{{{b}}}}}{{{q}}}"],
        wrong,
    )


def polynomial(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a, b = draw.sample(range(2, 9), 2)
    middle = f"+{a - b}x".replace("+-", "-")
    right = [rf"(x+{a})(x-{b})", rf"f(x)=x^2{middle}-{a * b}", rf"x^2-{a * b}{middle}"]
    wrong = [rf"(x-{a})(x+{b})", rf"x^2{middle}+{a * b}", rf"(x+{a})(x+{b})", f"x^2-{a * b}"]
    return "Which quadratic is it?", f"x^2{middle}-{a * b}", right, wrong


def interval(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a, b = sorted(draw.sample(range(-9, 20), 2))
    right = [rf"x\in[{a},{b})", rf"{a}\le x<{b}", rf"\left[{a},\ {b}\right)", rf"{a} \leq x < {b}"]
    wrong = [rf"({a},{b})", rf"[{a},{b}]", rf"{a}<x\le {b}", rf"[{a},\infty)", rf"\{{{a},{b}\}}"]
    return "Solve for $x$.", f"[{a}, {b})", right, wrong


def union(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a, b = sorted(draw.sample(range(-9, 20), 2))
    right = [rf"x<{a} \text{{ or }} x>{b}", rf"({b},\infty)\cup(-\infty,{a})", rf"x\in(-\infty,{a})\cup({b},+\infty)"]
    wrong = [rf"(-\infty,{a}]\cup[{b},\infty)", rf"({a},{b})", rf"x<{a}", rf"(-\infty,{b})\cup({a},\infty)"]
    return "For which $x$ is it positive?", rf"(-\infty, {a}) \cup ({b}, \infty)", right, wrong


def roots(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a, b = draw.sample(range(-12, 13), 2)
    right = [
        rf"\{{{b},{a}\}}",
        f"x={a}, x={b}",
        rf"x={b}\text{{ or }}x={a}",
        rf"{b} \text{{ and }} {a}",
        f"x_1={a},x_2={b}",
    ]
    wrong = [str(a), f"{a},{b + 1}", f"{a + b}", f"{a},{b},{a + 40}", rf"[{min(a, b)},{max(a, b)}]"]
    return "Find all roots.", f"{a}, {b}", right, wrong


def plus_minus(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a = draw.randint(2, 20)
    right = [rf"x=\pm {a}", f"{a}, -{a}", rf"\{{-{a},{a}\}}", rf"x={a}\text{{ or }}x=-{a}"]
    return f"Solve $x^2={a * a}$.", rf"\pm {a}", right, [str(a), f"-{a}", rf"\pm {a + 1}", f"{a},{a}"]


def point(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a, b = draw.sample(range(-12, 13), 2)
    right = [rf"\left({a},{b}\right)", f"x={a},\\ y={b}", f"(x,y)=({a},{b})", f"y={b}, x={a}", rf"({a},\,{b})"]
    wrong = [f"({b},{a})", f"({a},{b + 1})", rf"\{{{a},{b}\}}", f"x={b}, y={a}", str(a)]
    return "Find $(x,y)$.", f"({a}, {b})", right, wrong


def logarithm(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a, b = draw.choice([2, 3, 5]), draw.choice([7, 11, 13])
    right = [rf"\log_{{{a}}}{{{b}}}", rf"\frac{{\ln {b}}}{{\ln {a}}}", rf"\frac{{\log {b}}}{{\log {a}}}"]
    wrong = [rf"\log_{b} {a}", rf"\ln {b}", rf"\frac{{\ln {a}}}{{\ln {b}}}", rf"\log_{a} {b + 1}"]
    return "Solve for $x$.", rf"\log_{a} {b}", right, wrong


def complex_number(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a, b = draw.sample(range(2, 15), 2)
    right = [f"{b}i+{a}", rf"z={a}+{b}i", rf"{a}+{b}\mathrm{{i}}", rf"{a} + {b}i"]
    return "Find $z$.", f"{a}+{b}i", right, [f"{a}-{b}i", f"{b}+{a}i", f"-{a}+{b}i", f"{a}+{b}", rf"{a + b}i"]


def area(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a = draw.randint(3, 60)
    right = [
        rf"{a} \pi",
        rf"{a}\pi \text{{ cm}}^2",
        rf"\pi\cdot {a}",
        rf"A={a}\pi",
        rf"{a}\pi\text{{ square centimeters}}",
    ]
    wrong = [str(a), rf"{a + 1}\pi", rf"\frac{{\pi}}{{{a}}}", rf"{a}\pi^2", rf"{a}\pi\text{{ cm}}^3"]
    return "What is its area in square centimeters?", rf"{a}\pi\text{{ cm}}^2", right, wrong


def power(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a, n = draw.choice([2, 3, 5]), draw.randint(8, 40)
    right = [f"{a}^{n}", rf"{a} ^ {{{n}}}", f"{a**n}", rf"N={a}^{{{n}}}"]
    wrong = [f"{a}^{{{n + 1}}}", f"{n}^{{{a}}}", f"{a}{n}", rf"{a}\cdot {n}", f"{a}^{{{n}}}-1"]
    return "How many are there?", f"{a}^{{{n}}}", right, wrong


def percentage(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a = draw.choice([n for n in range(11, 95) if n % 10])
    right = [f"{a}", rf"{a} \%", rf"{a}\text{{ percent}}", f"0.{a}", f"{a}%"]
    return "By how many percent does it grow?", rf"{a}\%", right, [rf"{a + 1}\%", rf"0.{a}\%", rf"-{a}\%", f"{a}0"]


def money(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a = draw.randint(11, 99)
    right = [rf"\${a}.50", f"{a}.50", rf"{a}.50\text{{ dollars}}", rf"{a}.5", rf"{a}50\text{{ cents}}"]
    return "What does it cost?", rf"\${a}.50", right, [rf"\${a}.05", rf"\${a}", rf"{a}.50\text{{ cents}}", rf"\${a}50"]


def letter(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a, b = draw.sample("ABCDE", 2)
    right = [rf"\textbf{{({a})}}", f"({a})", rf"\text{{{a}}}", rf"\mathrm{{({a})}}", rf"\text{{({a}) }} 12"]
    return "Which of (A) to (E) is it?", a, right, [b, f"({b})", f"{a}, {b}", rf"\text{{{b}}}", rf"\text{{not }} {a}"]


def word(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a, b = draw.sample(["ellipse", "parabola", "hyperbola", "Tuesday", "Friday", "even", "odd", "circle"], 2)
    right = [rf"\text{{{a}}}", rf"\text{{{a.capitalize()}}}", a, rf"\text{{ {a} }}", rf"\textbf{{{a}}}"]
    return "What is it?", rf"\text{{{a}}}", right, [rf"\text{{{b}}}", b, rf"\text{{not {a}}}", "0", f"{a[::-1]}"]


def line(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    m, b = draw.sample(range(2, 12), 2)
    right = [rf"y = {m} x + {b}", f"{m}x-y+{b}=0", f"y={b}+{m}x", f"y-{b}={m}x"]
    return "Find its equation.", f"y={m}x+{b}", right, [f"y={b}x+{m}", f"y=-{m}x+{b}", f"{m}x+y+{b}=0", f"y={m}x"]


def choose(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    n, k = draw.randint(9, 20), draw.randint(2, 4)
    right = [rf"{{{n} \choose {k}}}", rf"\dbinom{{{n}}}{{{k}}}", str(comb(n, k)), f"C({n},{k})"]
    wrong = [rf"\binom{{{n}}}{{{k + 1}}}", rf"\binom{{{n - 1}}}{{{k}}}", rf"\frac{{{n}}}{{{k}}}", str(comb(n, k) + 1)]
    return "How many ways are there?", rf"\binom{{{n}}}{{{k}}}", right, wrong


def matrix(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a, b, c, d = draw.sample(range(-9, 10), 4)

    def written(kind: str, *cells: int) -> str:
        return rf"\begin{{{kind}}} {cells[0]} & {cells[1]} \\ {cells[2]} & {cells[3]} \end{{{kind}}}"

    inner = written("matrix", a, b, c, d)
    right = [written("bmatrix", a, b, c, d), rf"\left(\begin{{array}}{{cc}}{a}&{b}\\{c}&{d}\end{{array}}\right)"]
    right += [f"A={written('pmatrix', a, b, c, d)}", rf"\left[{inner}\right]"]
    wrong = [written("pmatrix", a, c, b, d), written("pmatrix", a, b, c, d + 1), written("vmatrix", a, b, c, d)]
    return "Find $A$.", written("pmatrix", a, b, c, d), right, [*wrong, f"({a},{b},{c},{d})"]


def based(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    digits = bin(draw.randint(40, 500))[2:]
    right = [
        f"{digits}_{{2}}",
        f"({digits})_2",
        rf"{digits}_{{\text{{two}}}}",
        rf"{digits}",
        rf"{digits}_{{\text{{2}}}}",
    ]
    return (
        "Write it in base 2.",
        f"{digits}_2",
        right,
        [f"{digits}_3", f"{digits}0_2", f"1{digits}_2", str(int(digits, 2))],
    )


def letters(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    return draw.choice(
        (
            ("Express it by $R$ and $r$.", "R-r", ["-r+R", "d=R-r"], ["0", "r-R", "R+r", "Rr"]),
            (
                "Find the ratio.",
                r"\frac{R}{r}",
                ["R/r", r"R\cdot\frac1r"],
                ["1", r"\frac{r}{R}", r"\frac{R}{R}", "Rr"],
            ),
            ("Find it by $a$, $b$.", "a-b", ["-b+a", r"\frac{a^2-b^2}{a+b}"], ["a+b", "ab", "b-a", "a"]),
            (
                "Simplify.",
                r"\frac{n(n+1)}{2}",
                [r"\frac{n^2+n}{2}", r"\frac12n(n+1)"],
                [r"\frac{n(n-1)}{2}", "n(n+1)"],
            ),
            ("Simplify.", r"2\sin x\cos x", [r"\sin 2x", r"\sin(2x)"], [r"\sin x\cos x", r"2\sin x", r"\cos 2x"]),
            ("Integrate.", "x^2+C", ["C+x^2", "x^{2} + C"], ["x^3+C", "2x+C", "x^2-x+C"]),
            (
                "Find $V$.",
                r"\frac{4}{3}\pi r^3",
                [r"\frac{4\pi r^3}{3}", r"V=\frac43\pi r^{3}"],
                [r"4\pi r^2", r"\pi r^3"],
            ),
        )
    )


def modulo(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    m = draw.randint(5, 30)
    a = draw.randint(1, m - 1)
    right = [
        rf"x \equiv {a} \pmod {{{m}}}",
        rf"{a}\pmod{{{m}}}",
        rf"x\equiv {a} \mod {m}",
        rf"x\equiv {a + m}\pmod{{{m}}}",
    ]
    wrong = [rf"x\equiv {a + 1}\pmod{{{m}}}", rf"x\equiv {a}\pmod{{{m + 1}}}", rf"x\equiv -{a}\pmod{{{2 * m + 1}}}"]
    return "Solve for $x$.", rf"x \equiv {a} \pmod{{{m}}}", right, wrong


def ratio(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a, b = draw.choice([(2, 3), (3, 5), (5, 7), (4, 9), (7, 8)])
    right = [f"{a} : {b}", rf"{a}\colon {b}", rf"\frac{{{a}}}{{{b}}}", f"{a}/{b}"]
    return "What is the ratio?", f"{a}:{b}", right, [f"{b}:{a}", f"{a}:{b + 1}", rf"\frac{{{b}}}{{{a}}}", str(a)]


def angle(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a = draw.randint(10, 170)
    right = [str(a), rf"{a}^{{\circ}}", f"{a}°", rf"{a}\text{{ degrees}}", rf"\angle ABC={a}^\circ"]
    return (
        "How many degrees is it?",
        rf"{a}^\circ",
        right,
        [rf"{a + 1}^\circ", rf"{180 - a if a != 90 else 91}^\circ", rf"{a}\pi"],
    )


def decimal(draw: random.Random) -> tuple[str, str, list[str], list[str]]:
    a = draw.choice([n for n in range(101, 999) if n % 2 and n % 5])
    right = [rf"\frac{{{a}}}{{100}}", f"{a / 100}0", rf"{a}\times 10^{{-2}}", f"x={a / 100}"]
    return "Find $x$.", str(a / 100), right, [f"{a / 10}", f"{(a + 1) / 100}", f"-{a / 100}", f"{a / 100:.1f}"]


FAMILIES: tuple[Family, ...] = (
    *(whole, fraction, surd, quotient_of_surds, polynomial, interval, union, roots, plus_minus, point, logarithm),
    *(complex_number, area, power, percentage, money, letter, word, line, choose, matrix, based, letters, modulo),
    *(ratio, angle, decimal),
)


def pairs(seed: int, count: int) -> list[Pair]:
    """So many different ones, half of them right."""
    draw, found = random.Random(seed), dict[tuple[str, str], Pair]()

    def more(family: Family) -> Iterator[Pair]:
        question, expected, right, wrong = family(draw)
        gold = draw.choice([expected, expected, f"${expected}$"])
        for is_right, answers in ((True, right), (False, wrong)):
            answer = draw.choice(answers)
            message = draw.choice(ENDINGS).replace("ANSWER", answer)
            yield family.__name__, question, gold, answer, message, is_right

    while len(found) < count:
        for family in FAMILIES:
            found.update({(pair[2], pair[3]): pair for pair in more(family)})
    return list(found.values())[:count]


async def ours(made: list[Pair]) -> list[bool]:
    """Through the checker and its workers."""
    checker = MathChecker()

    async def one(pair: Pair) -> bool:
        return (await checker.check(pair[2], pair[4], pair[1])).right

    try:
        return await asyncio.gather(*map(one, made))
    finally:
        await checker.aclose()


def by_math_verify(pair: Pair) -> bool:
    """As its README does."""
    return bool(verify(parse(f"${pair[2].strip('$')}$"), parse(pair[4])))


@cache
def gyms_server() -> Any:
    """Gym's own module, by its file: here there is a folder of the same name."""
    path = next(file for file in importlib.metadata.files("nemo-gym") or () if file.match("math_with_judge/app.py"))
    spec = importlib.util.spec_from_file_location("gyms_math_with_judge", str(path.locate()))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_gym(pair: Pair) -> bool:
    """As its server does, before it asks a judge."""
    metric = math_metric(
        gold_extraction_target=(LatexExtractionConfig(),),
        pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()),
    )
    return bool(gyms_server()._run_math_verify(metric, pair[2], pair[4])[0] > 0.5)


def main() -> None:
    """Compare and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=25)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    made = pairs(options.seed, options.pairs)
    said = {"ours": asyncio.run(ours(made))}
    with ProcessPoolExecutor(2) as pool:
        said["math_verify"] = list(pool.map(by_math_verify, made, chunksize=20))
        said["Gym's math_with_judge"] = list(pool.map(by_gym, made, chunksize=20))
    right = sum(pair[-1] for pair in made)
    print(f"{len(made)} pairs of {len(FAMILIES)} families, {right} right, seed {options.seed}")
    for name, verdicts in said.items():
        paid = sum(verdict and not pair[-1] for verdict, pair in zip(verdicts, made, strict=True))
        refused = sum(pair[-1] and not verdict for verdict, pair in zip(verdicts, made, strict=True))
        share = 100 * (1 - (paid + refused) / len(made))
        print(f"{name}: {share:.1f} % agree, {paid} false positives, {refused} false negatives")
    if options.show:
        for pair, verdict in zip(made, said["ours"], strict=True):
            if verdict is not pair[-1]:
                print(f"{pair[0]}: {pair[2]!r} {pair[3]!r} is {'right' if pair[-1] else 'wrong'} ({pair[1]})")


if __name__ == "__main__":
    main()
