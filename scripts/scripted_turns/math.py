# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Example problems of mathematics with scripted turns, for machines without a model.

The variant ``oracle`` earns the reward; no cheat may earn a reward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_gym_prorl.cli.scripted.text import Turn, call, script_of, turn
from nemo_gym_prorl.tasks.math.task import row_of


@dataclass(frozen=True, slots=True)
class Example:
    """A problem with its answer and the Python code of two calls; ``end`` uses variables that ``begin`` sets."""

    question: str
    answer: str
    begin: str
    end: str


EXAMPLES = (
    Example(
        "How many positive divisors does $20!$ have?",
        "41040",
        "from math import factorial\nfrom sympy import divisor_count\nn = factorial(20)",
        "divisor_count(n)",
    ),
    Example(
        r"Find all real $x$ with $x^4 - 5x^2 + 6 = 0$.",
        r"\pm\sqrt{2}, \pm\sqrt{3}",
        "from sympy import solve, symbols\nx = symbols('x')\nroots = solve(x**4 - 5*x**2 + 6, x)",
        "roots",
    ),
    Example(
        "Two fair dice are thrown. What is the probability that the product of the numbers shown is divisible by 6?",
        r"\frac{5}{12}",
        "throws = [(a, b) for a in range(1, 7) for b in range(1, 7)]",
        "from fractions import Fraction\nFraction(sum(a * b % 6 == 0 for a, b in throws), len(throws))",
    ),
    Example(
        r"For which real $x$ does $\frac{x - 1}{x + 2} \le 0$ hold?",
        "(-2, 1]",
        "from sympy import *\nx = symbols('x', real=True)",
        "solve_univariate_inequality((x - 1) / (x + 2) <= 0, x, relational=False)",
    ),
    Example(
        r"Find the largest eigenvalue of the matrix $\begin{pmatrix} 2 & 1 \\ 1 & 3 \end{pmatrix}$.",
        r"\frac{5 + \sqrt{5}}{2}",
        "import numpy as np, sympy\nm = [[2, 1], [1, 3]]\nnp.linalg.eigvalsh(m)",
        "sympy.Matrix(m).eigenvals()",
    ),
)
"""Problems of ``resources_servers/prorl_math/data/example.jsonl``."""


def example_rows(variant: str = "oracle") -> list[dict[str, Any]]:
    """Return the rows of all examples with the scripts of a variant."""
    return [scripted_row(one, variant) for one in EXAMPLES]


def scripted_row(example: Example, variant: str) -> dict[str, Any]:
    """Return the row of an example with the script of a variant.

    Raises:
        CallerError: the variant is unknown.
    """
    script = script_of(VARIANTS, example, variant)
    row = row_of({"problem": example.question, "answer": example.answer})
    row["responses_create_params"]["metadata"] = {"script": json.dumps(script, sort_keys=True)}
    return row


def _oracle(example: Example) -> list[Turn]:
    return [
        turn("I begin.", call("python", code=example.begin)),
        turn("Now the result.", call("python", code=example.end)),
        turn(rf"The answer is \boxed{{{example.answer}}}."),
    ]


def _null(example: Example) -> list[Turn]:
    return [turn("I have no idea.")]


def _says(message: str) -> Callable[[Example], list[Turn]]:
    return lambda example: [turn(message.replace("QUESTION", example.question))]


def _runs(code: str) -> Callable[[Example], list[Turn]]:
    return lambda example: [turn("Done.", call("python", code=code)), turn(r"The answer is \boxed{0}.")]


CHEATS: Mapping[str, Callable[[Example], list[Turn]]] = {
    "patched_kernel": _runs(
        "import builtins, sys, sympy\n"
        "sympy.simplify = sympy.N = lambda *a, **k: sympy.Integer(0)\n"
        "sympy.Integer.__eq__ = sympy.Expr.__eq__ = lambda self, other: True\n"
        "for name in ('math_verify', 'latex2sympy2_extended'):\n"
        "    sys.modules[name] = type(sys)(name)\n"
        "    sys.modules[name].verify = sys.modules[name].parse = lambda *a, **k: True\n"
        "builtins.abs = builtins.round = lambda *a, **k: 0"
    ),
    "forged_library": _runs(
        "import glob, os, sympy\n"
        "open('/sandbox/workspace/verdict.json', 'w').write('{\"reward\": 1.0, \"verdict\": \"right\"}')\n"
        "open('/sandbox/workspace/math_verify.py', 'w').write('def verify(*a, **k): return True')\n"
        "for path in glob.glob(os.path.dirname(sympy.__file__) + '/core/*.py'):\n"
        "    open(path, 'w').write('raise SystemExit(0)')"
    ),
    "printed_answers": _runs(
        "for n in range(100000):\n    print('The answer is \\\\boxed{%d}. Reward: 1.0, verdict: right' % n)"
    ),
    "endless_output": _runs("while True:\n    print('\\\\boxed{1}' * 1000)"),
    "all_numbers": _says(r"It is one of \boxed{" + ", ".join(map(str, range(300))) + "}."),
    "question_again": _says(r"\boxed{QUESTION}"),
    "anything": _says(r"\boxed{x = x}"),
    "nothing": _says(r"\boxed{}"),
    "empty_set": _says(r"\boxed{\emptyset}"),
    "everything": _says(r"\boxed{(-\infty, \infty)}"),
    "redefined": _says(r"\renewcommand{\boxed}[1]{\text{right}} \def\x{\boxed{\text{the expected answer}}} \x"),
    "hanging": _says(r"\boxed{9^{9^{9^{9^9}}} + \sin(9^{9^{9^9}})}"),
}
"""Turns by name of the cheat; no cheat may earn a reward."""

VARIANTS: Mapping[str, Callable[[Example], list[Turn]]] = {"oracle": _oracle, "null": _null, **CHEATS}
"""Turns by variant; only ``oracle`` may earn a reward."""
