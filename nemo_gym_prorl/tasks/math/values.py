# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Whether two parsed values are the same, where ``math-verify`` is too generous; and what one leaves to work out.

``math-verify`` compares numbers to six decimals, by which ``0.0`` is :math:`10^{-9}` and :math:`2^{-99}` is
:math:`2^{-98}`; and relations by their real solutions, so that all that have none are the same. It takes no letter for
the imaginary unit.

A number may be written as integer, decimal, fraction, mixed number, percent or with one power. What else an answer may
have (``\sum_{k=1}^{100} k``, ``17 \cdot 23 + 5``) is what the expected one has: its operations, its functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import sympy
from latex2sympy2_extended.logic import And
from math_verify import verify


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


EXACT_DIGITS = 80
NEAR_EXACT = sympy.Float("1e-60", EXACT_DIGITS)
"""Relative difference of exact numbers that are taken for the same; of fractions, none."""

NEAR_DECIMAL = sympy.Float("1e-3")
"""The same where one is a decimal fraction; to six decimals they agree anyhow."""

NEAR_FLOAT = sympy.Float("1e-14")
"""The same where one is written with so many decimals that a machine's number holds no more."""

NEAR_ZERO = sympy.Float("1e-6")

_POINTS = (sympy.Rational(-7, 2), sympy.Integer(-1), sympy.Rational(1, 3), sympy.Integer(2), sympy.Rational(11, 2))
MOST_POINTS = 250


def same(gold: Any, answer: Any) -> bool:
    """Whether two values, or relations, are the same."""
    if is_relation(gold) and is_relation(answer) and gold.free_symbols != answer.free_symbols:
        return False
    if (numbers := _complex_numbers(gold, answer)) is not None:
        return near_numbers(*numbers)
    if all(isinstance(one, sympy.Symbol) or one == sympy.E for one in (gold, answer)):
        return bool(gold == answer)  # it takes longer names, and E, for small letters
    if not verify([gold], [answer], timeout_seconds=None):
        return False
    if isinstance(gold, sympy.Rel) and isinstance(answer, sympy.Rel):
        return _same_relation(gold, answer)
    return _near(gold, answer)


def near_numbers(one: Any, other: Any, tolerance: Any = None) -> bool:
    """Whether two numbers are the same as far as they are written; what is no number is not looked at."""
    if not all(isinstance(x, sympy.Expr) and x.is_number for x in (one, other)):
        return True
    if one == other:
        return True
    one, other = one.doit(), other.doit()
    exact = tolerance is None and not (one.has(sympy.Float) or other.has(sympy.Float))
    if exact and one.is_Rational and other.is_Rational:
        return bool(one == other)
    a, b = (sympy.N(x, EXACT_DIGITS) for x in (one, other))
    if not (a.is_finite and b.is_finite):
        return bool(a == b)
    if a == 0:
        return bool(abs(b) < (NEAR_EXACT if exact else NEAR_ZERO))
    if tolerance is None:
        floats = one.has(sympy.Float) or other.has(sympy.Float)
        if not (exact or _is_decimal(one) or _is_decimal(other)):
            tolerance = NEAR_DECIMAL
        else:
            tolerance = NEAR_FLOAT if floats else NEAR_EXACT
    return bool(abs(a - b) <= tolerance * abs(a))


def other_sides(gold: Any, answer: Any) -> list[Any]:
    """Numbers that an answer says its value is equal to, and that differ from it."""
    if is_relation(gold) or not isinstance(answer, And | sympy.Equality):
        return []
    equations = [one for one in (answer.args if isinstance(answer, And) else [answer]) if isinstance(one, sympy.Eq)]
    [value, *_more] = list(leaves(answer)) or [None]
    sides = [side for equation in equations for side in equation.args if not side.free_symbols]
    return [side for side in sides if not near_numbers(value, side)]


def _near(gold: Any, answer: Any) -> bool:
    """Whether numbers that agree to six decimals agree as far as they should."""
    wanted, given = list(leaves(gold)), list(leaves(answer))
    if len(wanted) != len(given) or wanted == given or is_relation(gold):
        return True
    return all(any(near_numbers(one, other) for other in given) for one in wanted)


def _is_decimal(number: Any) -> bool:
    """A fraction over a power of ten that more than six decimals write in full."""
    return bool(number.is_Rational and number.q >= 10**7 and str(number.q).strip("0") == "1")


def _complex_numbers(gold: Any, answer: Any) -> tuple[Any, Any] | None:
    """Both as numbers, where the expected one has the imaginary unit; not if only the answer is in polar form."""
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return None
    if {symbol.name for symbol in gold.free_symbols} != {"i"} or (answer.has(sympy.exp) and not gold.has(sympy.exp)):
        return None
    if not {symbol.name for symbol in answer.free_symbols} <= {"i"}:
        return None
    one, other = (number.subs({symbol: sympy.I for symbol in number.free_symbols}) for number in (gold, answer))
    if one.has(sympy.Float) or other.has(sympy.Float):
        return None
    return one, other


def _same_relation(gold: Any, answer: Any) -> bool:
    """Of relations with the same solutions: whether they differ by a factor, or have solutions at all."""
    if not all(isinstance(side, sympy.Expr) for side in (*gold.args, *answer.args)):
        return bool(gold == answer)  # of sets or tuples, which have no difference
    one, other = (relation.lhs - relation.rhs for relation in (gold, answer))
    wanted, given = (sympy.fraction(sympy.together(side))[0] for side in (one, other))
    ratio = sympy.cancel(wanted / given) if given != 0 else sympy.Integer(0)
    if ratio != 0 and not ratio.free_symbols:
        return True
    if isinstance(gold, sympy.Eq):
        values = [value for value in _sampled(one) if value.is_real]
        return any(value > 0 for value in values) and any(value < 0 for value in values)
    return len({bool(value) for value in _sampled(gold) if value in (sympy.true, sympy.false)}) == 2


def _sampled(expression: Any) -> Iterator[Any]:
    """What comes out at some points."""
    symbols = sorted(expression.free_symbols, key=str)
    for point in islice(product(_POINTS, repeat=len(symbols)), MOST_POINTS):
        value = expression.subs(dict(zip(symbols, point, strict=True)))
        yield sympy.N(value) if isinstance(value, sympy.Expr) else value
