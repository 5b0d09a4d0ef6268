# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Sets of real numbers, in whatever way they are written: :math:`x > 2` is :math:`(2, \infty)`, and
:math:`\mathbb{R} \setminus \{0\}` is :math:`x \ne 0`.

``math-verify`` compares an interval with an interval and an inequality with an inequality, and neither with the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy

from nemo_gym_prorl.tasks.math.shapes import CLOSED, HALF_OPEN, SET, TUPLE, shape_of, split


Number = Callable[[str], Any]
"""Reads a number; ``None`` if it is none."""

_SPEAKS = re.compile(
    r"\\(?:cup|cap|setminus|backslash|infty|emptyset|varnothing|n?[lg]eq?|[lg]t|[lg]eqslant|neq?|mathbb|in|mid)(?![a-zA-Z])"
    r"|[<>∅ℝ]|\breal|\bno\b.*solution|\\\{\s*\\\}",
    re.IGNORECASE,
)
_REALS = re.compile(
    r"\\(?:mathbb|mathbf|Bbb)\s*\{?\s*R\s*\}?|ℝ|(?:\\text\s*\{)?\s*(?:all|any)?\s*real(?:\s+(?:numbers?|values?))?"
    r"(?:\s+(?:of\s+)?\$?[a-z]\$?)?\s*\}?",
    re.IGNORECASE,
)
_EMPTY = re.compile(
    r"\\(?:emptyset|varnothing|O)|∅|\\\{\s*\\\}|(?:\\text\s*\{)?\s*(?:the\s+)?(?:empty\s+set|no\s+(?:real\s+)?solutions?)"
    r"\s*\}?",
    re.IGNORECASE,
)
_MEMBER = re.compile(r"\s*(?:[a-zA-Z]|[A-Z]\s*=)\s*(?:\\in(?![a-zA-Z]))?\s*(?P<set>.+)", re.DOTALL)
_BUILT = re.compile(
    r"\\\{\s*(?P<name>[a-zA-Z])\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid(?![a-z])|\||:)\s*(?P<what>.+)\\\}",
    re.DOTALL,
)
_RELATION = re.compile(r"\\(n?[lg]eq?|[lg]t|[lg]eqslant|neq?)(?![a-zA-Z])|([<>])")
_NAME = re.compile(r"\\?[a-zA-Z]+(?:_\w)?(?:\(\w\))?")
_UNION = (r"\cup", r"\lor", r"\vee", "or")
_MEET = (r"\cap", r"\land", r"\wedge", "and")


@dataclass(frozen=True, slots=True)
class RealSet:
    """A set and how it is written.

    Attributes:
        value: the set.
        parts: of how many it is put together.
        name: of the number, where it is written as a relation; else empty.
    """

    value: Any
    parts: int
    name: str = ""


def speaks_of_sets(text: str) -> bool:
    """Whether a text has anything that only sets of numbers, or relations, have."""
    return _SPEAKS.search(text) is not None


def is_empty_set(text: str) -> bool:
    """Whether a text is the empty set, in a word or a sign."""
    return _EMPTY.fullmatch(text.strip()) is not None


def real_set(text: str, number: Number) -> RealSet | None:
    """The set that a text with plain brackets is; ``None`` if it is none of real numbers.

    Args:
        text: relations, intervals, listed sets, the reals, and what unions, intersections and differences make of
            these.
        number: reads an end of an interval.
    """
    text = _plain(text)
    if not text:
        return None
    for separators, join in ((_UNION, sympy.Union), (_MEET, sympy.Intersection)):
        if len(parts := split(text, separators)) > 1:
            read = [real_set(part, number) for part in parts]
            names = {one.name for one in read if one is not None and one.name}
            if len(names) > 1 or any(one is None for one in read):
                return None
            found = [one for one in read if one is not None]
            return RealSet(join(*(one.value for one in found)), sum(one.parts for one in found), *names)
    if len(parts := split(text, (r"\setminus", r"\backslash", "-", "−"))) == 2 and all(parts):
        whole, without = (real_set(part, number) for part in parts)
        if whole is not None and without is not None and not whole.name and not without.name:
            return RealSet(sympy.Complement(whole.value, without.value), whole.parts + without.parts)
    return _atom(text, number)


def same_set(expected: RealSet, said: RealSet, near: Callable[[Any, Any], bool]) -> bool:
    """Whether both are one set, whatever the number is called where only one of them names it."""
    if expected.name and said.name and expected.name != said.name:
        return False
    wanted, given = _pieces(expected.value), _pieces(said.value)
    if wanted is None or given is None:
        return False
    return len(wanted) == len(given) and all(
        one.left_open == other.left_open
        and one.right_open == other.right_open
        and near(one.start, other.start)
        and near(one.end, other.end)
        for one, other in zip(wanted, given, strict=True)
    )


def left_to_work_out(expected: RealSet, said: RealSet) -> bool:
    """Whether what was said is put together of more parts than there are, and than the expected one is."""
    pieces = _pieces(said.value) or []
    listed = all(piece.start == piece.end for piece in pieces)
    return said.parts > max(1 if listed else len(pieces), expected.parts, 1)


def _plain(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*\{\s*,?\s*(and|or)\s*,?\s*\}", r" \1 ", text.strip())
    return re.sub(
        r"(?<![a-zA-Z\\])(and|or)(?![a-zA-Z])", lambda word: {"and": r"\land ", "or": r"\lor "}[word[1]], text
    )


def _atom(text: str, number: Number) -> RealSet | None:
    if _REALS.fullmatch(text):
        return RealSet(sympy.S.Reals, 1)
    if _EMPTY.fullmatch(text):
        return RealSet(sympy.S.EmptySet, 1)
    if built := _BUILT.fullmatch(text):
        inner = real_set(built["what"], number)
        return inner and RealSet(inner.value, inner.parts)
    if _RELATION.search(text):
        return _related(text, number)
    if r"\in" in text and (member := _MEMBER.fullmatch(text)):
        return real_set(member["set"], number)
    shape = shape_of(text)
    if shape is None:
        single = re.fullmatch(r"\\\{(.+)\\\}", text, re.DOTALL)
        value = number(single[1]) if single else None
        return RealSet(sympy.FiniteSet(value), 1) if _is_real(value) else None
    values = [number(member) for member in shape.members]
    if not all(map(_is_real, values)):
        return None
    if shape.brackets == SET:
        return RealSet(sympy.FiniteSet(*values), 1)
    if len(values) == 2 and shape.brackets in (TUPLE, CLOSED, *HALF_OPEN) and values[0] < values[1]:
        closed_at_infinity = (shape.brackets[0] == "[" and values[0].is_infinite) or (
            shape.brackets[1] == "]" and values[1].is_infinite
        )
        if closed_at_infinity:
            return None
        return RealSet(sympy.Interval(*values, shape.brackets[0] == "(", shape.brackets[1] == ")"), 1)
    return None


def _related(text: str, number: Number) -> RealSet | None:
    """``a < x \\le b``, ``x > a``, ``x \\ne a``."""
    pieces = re.split(r"\\(?:n?[lg]eq?|[lg]t|[lg]eqslant|neq?)(?![a-zA-Z])|[<>]", text)
    signs = [found[1] or {"<": "lt", ">": "gt"}[found[2]] for found in _RELATION.finditer(text)]
    sides = [piece.strip() for piece in pieces]
    names = [place for place, side in enumerate(sides) if _NAME.fullmatch(side) and number(side) is None]
    if len(names) != 1 or any(sign.startswith("n") and sign not in ("ne", "neq") for sign in signs):
        return None
    place = names[0]
    values = [number(side) if at != place else None for at, side in enumerate(sides)]
    if not all(_is_real(value) for at, value in enumerate(values) if at != place):
        return None
    if len({sign[0] for sign in signs}) > 1:
        return None
    found = sympy.S.Reals
    for at, sign in enumerate(signs):
        at_left = at + 1 <= place
        value = values[at if at_left else at + 1]
        if abs(place - (at if at_left else at + 1)) > 1:
            continue  # of 0 < 1 < x only what is next to the name
        strict = sign in ("lt", "gt")
        if sign.startswith("n"):
            part: Any = sympy.Complement(sympy.S.Reals, sympy.FiniteSet(value))
        elif (sign[0] == "l") == at_left:
            part = sympy.Interval(value, sympy.oo, strict, True)
        else:
            part = sympy.Interval(-sympy.oo, value, True, strict)
        found = sympy.Intersection(found, part)
    return RealSet(found, 1, sides[place])


def _is_real(value: Any) -> bool:
    return value is not None and isinstance(value, sympy.Expr) and bool(value.is_extended_real) and value.is_number


@dataclass(frozen=True, slots=True)
class _Piece:
    """An interval, or a point."""

    start: Any
    end: Any
    left_open: Any
    right_open: Any


def _pieces(value: Any) -> list[_Piece] | None:
    """From left to right."""
    if value is sympy.S.Reals:
        return [_Piece(-sympy.oo, sympy.oo, True, True)]
    pieces = []
    for part in value.args if isinstance(value, sympy.Union) else [value]:
        if isinstance(part, sympy.FiniteSet):
            pieces += [_Piece(point, point, False, False) for point in part]
        elif isinstance(part, sympy.Interval):
            pieces.append(_Piece(part.start, part.end, bool(part.left_open), bool(part.right_open)))
        elif part is not sympy.S.EmptySet:
            return None
    return sorted(pieces, key=lambda piece: float(piece.start))
