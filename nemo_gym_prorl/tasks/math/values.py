# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Equality of parsed values, stricter than ``math-verify``, and detection of unfinished computations.

``math-verify`` compares numbers to six decimals, so ``0.0`` would equal :math:`10^{-9}`, and :math:`2^{-99}` would
equal :math:`2^{-98}`. ``math-verify`` compares relations by their real solutions, so all relations without solutions
would be equal. ``math-verify`` reads no letter as the imaginary unit.

A finished number is an integer, decimal, fraction, mixed number or percentage, or has one power. Other operations and
functions (``\sum_{k=1}^{100} k``, ``17 \cdot 23 + 5``) are finished only if the expected answer has them too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import sympy
from latex2sympy2_extended.logic import And
from math_verify import verify


EXTRA_OPERATIONS = 6
"""Number of operations that an answer may have beyond twice as many as the expected answer, to allow other forms."""

_COMPUTING = re.compile(
    r"\\(binom|[dt]binom|d?choose|sum|int|i+nt|oint|prod|lim|max|min|gcd|lcm|b?mod|pmod|det|lfloor|lceil|sup|inf(?!ty))"
    r"(?![a-zA-Z])|(?<![a-zA-Z])(max|min|gcd|lcm|mod|floor|ceil)(?=[\s(]|$)|\\begin\s*\{([vV]matrix)\}"
    r"|(?<![a-zA-Z\\])([CP])(?=\s*\(\s*\d+\s*,\s*\d+\s*\))|[_^]\{?\d+\}?\s*([CP])\s*_|!(?!=)"
)
_COUNTING = frozenset(("binom", "a factorial"))
"""Operations that are finished in a formula, and in a number if the expected answer has one of them."""

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


def extra_operations(gold: str, text: str, *, number: bool) -> str:
    """Return the operations that the expected text lacks, joined by commas.

    ``number`` states whether the expected answer is a number; functions count as operations only then.
    """
    more, wanted = _computing(text) - _computing(gold), _computing(gold)
    if not number or wanted & _COUNTING:
        more -= _COUNTING
    if number:
        more |= {name for name, pattern in _FUNCTIONS.items() if pattern.search(text) and not pattern.search(gold)}
    return ", ".join(sorted(more))


def in_final_form(text: str) -> bool:
    """Return whether a text in canonical spelling is an integer, a decimal or a fraction in lowest terms."""
    found = _LOWEST.fullmatch(text)
    if found is None:
        return False
    above, below = found[1] or found[3], found[2] or found[4]
    return above is None or sympy.igcd(int(above), int(below)) == 1


def unfinished_part(gold: Any, answer: Any) -> str:
    """Return the reason why an answer is less finished than the expected answer; empty if it is not."""
    wanted, given = list(leaves(gold)), list(leaves(answer))
    if is_relation(gold):
        return ""
    if all(map(_is_simple, wanted)):
        left = next((leaf for leaf in given if not _is_simple(leaf)), None)
        return "" if left is None else "a value is not worked out"
    most = EXTRA_OPERATIONS + 2 * sum(sympy.count_ops(leaf) for leaf in wanted)
    return "" if sum(sympy.count_ops(leaf) for leaf in given) <= most else "it has far more operations than needed"


def is_relation(expression: Any) -> bool:
    """Return whether an expression is an equation, an inequality, or a conjunction of them."""
    return isinstance(expression, sympy.Rel | And)


def leaves(expression: Any) -> Iterator[Any]:
    """Yield the values in an answer: members of a list, set or matrix, ends of an interval, and 5 for ``x = 5``."""
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
    """Return whether a value is a finished number, a name or infinity."""
    if isinstance(leaf, sympy.Set):
        return True
    if leaf.is_Mul:
        factors = [factor for factor in leaf.args if factor != -1]
        if all(factor.is_Symbol or factor == sympy.E for factor in factors):
            return True  # math-verify reads words as products of letters
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


EXACT_DIGITS = 80  # significant digits of exact numbers, so that NEAR_EXACT is far above rounding errors
NEAR_EXACT = sympy.Float("1e-60", EXACT_DIGITS)
"""Maximum relative difference of equal exact numbers; fractions must be identical."""

NEAR_DECIMAL = sympy.Float("1e-3")
"""Maximum relative difference if one number is a decimal; math-verify has also compared six decimals."""

NEAR_FLOAT = sympy.Float("1e-14")
"""Maximum relative difference if one number has more than six decimals, about the precision of a double."""

NEAR_ZERO = sympy.Float("1e-6")
"""Maximum absolute difference of a decimal from an expected 0."""


def values_equal(gold: Any, answer: Any) -> bool:
    if is_relation(gold) and is_relation(answer) and gold.free_symbols != answer.free_symbols:
        return False
    if (numbers := _complex_numbers(gold, answer)) is not None:
        return numbers_equal(*numbers)
    if all(isinstance(one, sympy.Symbol) or one == sympy.E for one in (gold, answer)):
        return bool(gold == answer)  # math-verify ignores the case of longer names and of E
    if not verify([gold], [answer], timeout_seconds=None):
        return False
    if isinstance(gold, sympy.Rel) and isinstance(answer, sympy.Rel):
        return _same_relation(gold, answer)
    return _near(gold, answer)


def numbers_equal(one: Any, other: Any, tolerance: Any = None) -> bool:
    """Return whether two numbers are equal up to a relative ``tolerance``; true if one of them is no number.

    A ``tolerance`` of ``None`` stands for the precision with which the numbers are written.
    """
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


def contradicting_sides(gold: Any, answer: Any) -> list[Any]:
    """Return the sides of an answer's equations that differ from its value; empty if a relation is expected."""
    if is_relation(gold) or not isinstance(answer, And | sympy.Equality):
        return []
    equations = [one for one in (answer.args if isinstance(answer, And) else [answer]) if isinstance(one, sympy.Eq)]
    [value, *_more] = list(leaves(answer)) or [None]
    sides = [side for equation in equations for side in equation.args if not side.free_symbols]
    return [side for side in sides if not numbers_equal(value, side)]


def _near(gold: Any, answer: Any) -> bool:
    """Return whether answers that math-verify calls equal agree to the precision of their numbers as written."""
    wanted, given = list(leaves(gold)), list(leaves(answer))
    if len(wanted) != len(given) or wanted == given or is_relation(gold):
        return True
    return all(any(numbers_equal(one, other) for other in given) for one in wanted)


def _is_decimal(number: Any) -> bool:
    """Return whether a number is a fraction over a power of ten with more than six decimals."""
    return bool(number.is_Rational and number.q >= 10**7 and str(number.q).strip("0") == "1")


def _complex_numbers(gold: Any, answer: Any) -> tuple[Any, Any] | None:
    """Return both values with ``i`` as the imaginary unit; ``None`` if they are not comparable as complex numbers.

    Comparable: ``i`` is the expected value's only symbol, the answer has no other symbol, neither has decimals, and
    the answer is in polar form only if the expected value is.
    """
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
    """Return whether two relations that math-verify calls equal are multiples of each other."""
    if not all(isinstance(side, sympy.Expr) for side in (*gold.args, *answer.args)):
        return bool(gold == answer)  # sides that are sets or tuples cannot be subtracted
    one, other = (relation.lhs - relation.rhs for relation in (gold, answer))
    wanted, given = (sympy.fraction(sympy.together(side))[0] for side in (one, other))
    ratio = sympy.cancel(wanted / given) if given != 0 else sympy.Integer(0)
    return bool(ratio != 0 and not ratio.free_symbols)
