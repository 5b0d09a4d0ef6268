# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""What an answer leaves to be worked out: ``\sum_{k=1}^{100} k`` for 5050, ``17 \cdot 23 + 5``, ``\log_2 8``.

A number may be written as integer, decimal, fraction, mixed number, percent or with one power. What else an answer may
have is what the expected one has: its operations, its functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import sympy
from latex2sympy2_extended.logic import And


OPERATIONS_MORE = 6
"""Besides twice as many as the expected answer has, an answer may have so many operations."""

_COMPUTING = re.compile(
    r"\\(binom|[dt]binom|d?choose|sum|int|i+nt|oint|prod|lim|max|min|gcd|lcm|b?mod|pmod|det|lfloor|lceil|sup|inf(?!ty))"
    r"(?![a-zA-Z])|(?<![a-zA-Z])(max|min|gcd|lcm|mod|floor|ceil)(?=[\s(]|$)|\\begin\s*\{([vV]matrix)\}"
    r"|(?<![a-zA-Z\\])([CP])(?=\s*\(\s*\d+\s*,\s*\d+\s*\))|[_^]\{?\d+\}?\s*([CP])\s*_|!(?!=)"
)
_COUNTING = frozenset(("binom", "a factorial"))
"""One of them is as good as the other, and both are as good as a polynomial."""

_FUNCTIONS = {
    "a logarithm": re.compile(r"\\?(?<![a-zA-Z])(?:log|ln|lg)(?![a-zA-Z])"),
    "an angle's function": re.compile(
        r"(?<!arc)(?<!a)(?:sin|cos|tan|cot|sec|csc)h?(?![a-zA-Z])(?!\s*\^\s*\{?\s*-\s*1)"
    ),
    "an inverse function": re.compile(
        r"(?:arc|(?<![a-zA-Z])a)(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])"
        r"|(?:sin|cos|tan|cot|sec|csc)\s*\^\s*\{?\s*-\s*1"
    ),
}
_LOWEST = re.compile(r"-?\\frac\{(\d{1,20})\}\{(\d{1,20})\}|-?(\d{1,20})/(\d{1,20})|-?\d+(?:\.\d+)?")


def computing(gold: str, text: str, *, number: bool) -> str:
    """What a text has to be worked out by and the expected one has not; functions only where that is a number."""
    more, wanted = _computing(text) - _computing(gold), _computing(gold)
    if not number or wanted & _COUNTING:
        more -= _COUNTING
    if number:
        more |= {name for name, pattern in _FUNCTIONS.items() if pattern.search(text) and not pattern.search(gold)}
    return ", ".join(sorted(more))


def in_final_form(text: str) -> bool:
    """Whether a text in canonical spelling is an integer, a decimal or a fraction in lowest terms."""
    found = _LOWEST.fullmatch(text)
    if found is None:
        return False
    above, below = found[1] or found[3], found[2] or found[4]
    return above is None or sympy.igcd(int(above), int(below)) == 1


def unfinished(gold: Any, answer: Any) -> str:
    """What is left to be worked out of an answer that the expected one has worked out."""
    wanted, given = list(leaves(gold)), list(leaves(answer))
    if is_relation(gold):
        return ""
    if all(map(_is_simple, wanted)):
        left = next((leaf for leaf in given if not _is_simple(leaf)), None)
        return "" if left is None else "a value is not worked out"
    most = OPERATIONS_MORE + 2 * sum(sympy.count_ops(leaf) for leaf in wanted)
    return "" if sum(sympy.count_ops(leaf) for leaf in given) <= most else "it has far more operations than needed"


def is_relation(expression: Any) -> bool:
    """Whether it is an equation, an inequality, or some of them together."""
    return isinstance(expression, sympy.Rel | And)


def leaves(expression: Any) -> Iterator[Any]:
    """The values that an answer consists of: of a list, set, interval or matrix its members, of ``x = 5`` the 5."""
    if isinstance(expression, And):
        yield from leaves(expression._unsorted_args[-1])
    elif isinstance(expression, sympy.Equality):
        yield from leaves(expression.rhs)
    elif expression in (sympy.S.Reals, sympy.S.Integers, sympy.S.Naturals, sympy.S.EmptySet):
        yield expression
    elif isinstance(expression, sympy.Interval):
        yield from (expression.start, expression.end)
    elif isinstance(expression, sympy.MatrixBase):
        yield from expression.flat()
    elif isinstance(expression, sympy.FiniteSet | sympy.Tuple | sympy.Union | sympy.Intersection | sympy.Rel):
        for member in expression.args:
            yield from leaves(member)
    else:
        yield expression


def _is_simple(leaf: Any) -> bool:
    """A number in one of the ways of writing one, a name, infinity."""
    if isinstance(leaf, sympy.Set):
        return True
    if leaf.is_Mul:
        factors = [factor for factor in leaf.args if factor != -1]
        if all(factor.is_Symbol or factor == sympy.E for factor in factors):
            return True  # words are read as products of letters
        powers = [factor for factor in factors if factor.is_Pow]
        numbers = [factor for factor in factors if factor.is_Number]
        one_power = len(powers) == 1 and powers[0].base.is_Number and powers[0].exp.is_Integer
        divided = one_power and powers[0].exp == -1
        return (
            len(powers) + len(numbers) == len(factors) <= 2
            and (not powers or divided or (one_power and powers[0].base == 10) or len(factors) == 1)
            and (bool(powers) or len(numbers) < 2)
        )
    if leaf.is_Pow:
        return bool(leaf.base.is_Number and leaf.exp.is_Integer)
    return not leaf.args


def _computing(text: str) -> set[str]:
    return {next(filter(None, found.groups()), "a factorial") for found in _COMPUTING.finditer(text)}
