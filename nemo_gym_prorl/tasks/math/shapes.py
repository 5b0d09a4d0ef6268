# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Structure of answers: list, set, tuple, interval, vector or matrix; and sets of real numbers. Pure.

``math-verify`` treats ``(1, 2)``, ``\{1, 2\}``, ``1, 2`` and ``1, 1, 2`` as equal. Therefore this module splits an
answer into brackets and members, and only members are compared as values:

- tuples, vectors (angle brackets, a row or a column) and named values are ordered;
- sets have neither order nor repetition; lists of several answers have no order, but repetition counts;
- two members in round brackets are a pair or an interval, two in square brackets are an interval.

``math-verify`` never equates an interval with an inequality. :func:`real_set` reads a set of real numbers in either
notation: :math:`x > 2` is :math:`(2, \infty)`, and :math:`\mathbb{R} \setminus \{0\}` is :math:`x \ne 0`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any

import sympy


LIST, SET, TUPLE, CLOSED, VECTOR, MATRIX = "", "{}", "()", "[]", "<>", "matrix"
HALF_OPEN = ("[)", "(]")

_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?")
_SPELLED = (
    (re.compile(r"\\lbrace(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"⟨"), r"\\langle "),
    (re.compile(r"⟩"), r"\\rangle "),
)
_TOKEN = re.compile(r"\\(?:begin|end)\s*\{\w+\*?\}|\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPEN = {"(": "(", "[": "[", r"\{": "{", r"\langle": "<", "{": "group"}
_CLOSE = {")": ")", "]": "]", r"\}": "}", r"\rangle": ">", "}": "group"}
_ALSO = re.compile(
    r"\\(?:text|mathrm|textrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"
)
_MATRIX = re.compile(r"\\begin\s*\{([pbB]?(?:small)?matrix|array)\}(?:\s*\{[clr|\s]*\})?(.*)\\end\s*\{\1\}", re.DOTALL)
_CASES = re.compile(
    r"(?:[^=&]*=)?\s*(?:\\begin\s*\{[dr]?cases\}(?P<cases>.*)\\end\s*\{[dr]?cases\}"
    r"|\\\{\s*\\begin\s*\{(?P<kind>array|aligned|matrix)\}(?:\s*\{[clr|\s]*\})?(?P<rows>.*)\\end\s*\{(?P=kind)\})",
    re.DOTALL,
)
_CONDITION = re.compile(
    r"\\(?:text[a-z]*|mathrm|mbox)\s*\{\s*(?:,\s*)?(?:if|when|for|where|is)?\s*([^{}]*?)[\s.,;]*\}|\b(?:if|when|for|where)\b"
)
_NAMED = re.compile(r"\s*(?P<name>[^=<>]*?)\s*(?:=|\\in(?![a-zA-Z]))\s*(?P<value>.+)", re.DOTALL)
_IS_NAME = re.compile(
    r"\(?(?:\\(?:text|mathrm|mathbf|vec)\s*\{[^{}]*\}|\\?[a-zA-Z]+)(?:_(?:\w|\{\w+\}))?'*"
    r"(?:\s*,\s*\\?[a-zA-Z]+(?:_(?:\w|\{\w+\}))?)*\)?(?:\(\w\))?"
)
_TUPLE_OF_NAMES = re.compile(r"\(\s*([a-zA-Z](?:_\{?\w\}?)?(?:\s*,\s*[a-zA-Z](?:_\{?\w\}?)?)+)\s*(?:\\right)?\s*\)")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
_WORDS = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|it|sf)|mbox)\s*\{[^{}\d]*\}")
_SPACES = re.compile(r"^(?:\s|\\q?quad(?![a-z])|\\[,;:! ])+|(?:\s|\\q?quad|\\[,;:! ])+$")
_STOPS = re.compile(r"^(?:\s|,|\\[,;:! ]|\\q?quad)+|(?:[\s.,;]|\\[,;:! ]|\\q?quad)+$")
_GREATER = re.compile(r"(>|\\(?:gt|geq?|geqslant)(?![a-zA-Z]))")
_NO_CHAIN = re.compile(
    r"[<=,;|&]|\\(?:lt|leq?|leqslant|neq?|quad|qquad|to|rangle)(?![a-zA-Z])"
    r"|\\text\s*\{(?!\w{1,12}\s*\})|(?<![a-zA-Z\\])(?:and|or|if|for)(?![a-zA-Z])"
)
_DOTS = re.compile(r"\\[lcv]?dots[cbm]?(?![a-zA-Z])|\.\.\.|…")


@dataclass(frozen=True, slots=True)
class Shape:
    """Structure of an answer with several members.

    Attributes:
        brackets: brackets around the members: :data:`LIST` for none, :data:`SET`, :data:`TUPLE`, :data:`CLOSED`, one
            of :data:`HALF_OPEN`, :data:`VECTOR`, :data:`MATRIX`.
        members: texts of the members in order; the entries of a matrix row by row.
        columns: number of columns of a matrix or vector in matrix notation; otherwise 0.
        names: names of the members on the left side, as in ``(x, y) = (2, 3)``; otherwise empty.
    """

    brackets: str
    members: tuple[str, ...]
    columns: int = 0
    names: tuple[str, ...] = ()

    @property
    def ordered(self) -> bool:
        """Return whether the order of the members counts, and the answer is certainly no interval."""
        return self.brackets in (TUPLE, VECTOR) or (self.brackets == CLOSED and len(self.members) != 2)


def readings(text: str) -> list[str]:
    """Return the readings of a text. ``1,234`` is a number or a list, so a text may have two."""
    text = plain_brackets(text)
    if re.search(r"[(\[{]", _WORDS.sub("", text)) and ", " not in text:
        return [text]
    joined = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    return [text] if joined == text else [joined, text]


def plain_brackets(text: str) -> str:
    """Return a text with one spelling for each bracket, without commands for the size of brackets."""
    text = _SIZES.sub("", text)
    text = re.sub(
        r"^\s*[\[(]\s*(\\begin\s*\{(array|matrix)\}.*\\end\s*\{\2\})\s*[\])]\s*$", r"\1", text, flags=re.DOTALL
    )
    for pattern, replacement in _SPELLED:
        text = pattern.sub(replacement, text)
    return text.strip()


def shape_of(text: str) -> Shape | None:
    """Return the structure of a text with plain brackets; ``None`` for a single value or an unknown structure."""
    text = text.strip()
    if _DOTS.search(text):
        return None
    if (cases := cases_of(text)) and not any(condition for _, condition in cases):
        return Shape(LIST, tuple(value for value, _ in cases))
    several = ";" if len(split(text, (";",))) > 1 else ","
    parts = [part for part in split(text, (several,), also=True) if part]
    if len(parts) > 1:
        members = tuple(sign for part in parts for sign in plus_minus_values(part))
        return Shape(LIST, members)
    if (named := _NAMED.fullmatch(text)) and _IS_NAME.fullmatch(named["name"]):
        inner = shape_of(named["value"])
        names = tuple(re.sub(r"\s", "", name) for name in re.sub(r"[()]", "", named["name"]).split(","))
        if inner is not None and len(names) == len(inner.members) > 1 and not inner.names:
            return replace(inner, names=names) if len(set(names)) == len(names) else None
        return inner if inner is not None and (inner.brackets != LIST or _pair(text) is None) else None
    if matrix := _MATRIX.fullmatch(text):
        rows = [split(row, ("&",)) for row in split(matrix[2], (r"\\",)) if row]
        if not rows or len({len(row) for row in rows}) != 1:
            return None
        columns = len(rows[0])
        vector = columns == 1 or len(rows) == 1
        return Shape(VECTOR if vector else MATRIX, tuple(cell for row in rows for cell in row), columns)
    around = _pair(text)
    if len(both := plus_minus_values(text)) > 1 and (around is None or around[0] != SET):
        return Shape(LIST, tuple(both))
    if around is None:
        return None
    brackets, inner_text = around
    members = tuple(part for part in split(inner_text, (",", ";")) if part)
    if brackets == SET:
        members = tuple(sign for part in members for sign in plus_minus_values(part))
    if brackets == TUPLE and len(members) == 1:
        return shape_of(members[0])
    if brackets in (CLOSED, *HALF_OPEN) and len(members) < 2:
        return None
    return Shape(brackets, members)


def cases_of(text: str) -> list[tuple[str, str]] | None:
    """Return values and conditions of a piecewise answer, or a system's rows with empty conditions; else ``None``."""
    found = _CASES.fullmatch(text.strip())
    if found is None:
        return None
    rows = [split(row, ("&",)) for row in split(found["cases"] or found["rows"] or "", ("\\\\",)) if row]
    conditions = (_CONDITION.sub(lambda part: f" {part[1] or ''} ", " ".join(row[1:])) for row in rows)
    return [
        (_STOPS.sub("", row[0]), _STOPS.sub("", condition)) for row, condition in zip(rows, conditions, strict=True)
    ]


def inside_square_brackets(text: str) -> str | None:
    """Return the content of square brackets around the whole text; ``None`` without such brackets."""
    around = _pair(text.strip())
    return around[1] if around is not None and around[0] == CLOSED else None


def split_chained_equation(text: str) -> Shape | None:
    """Return ``x = y = 1`` as the list ``x = 1, y = 1``; ``None`` for any other text."""
    *names, value = (part.strip() for part in text.split("="))
    if len(names) < 2 or not value or not all(map(_IS_NAME.fullmatch, names)):
        return None
    return Shape(LIST, tuple(f"{name}={value}" for name in names))


def as_ascending_chain(text: str) -> str:
    """Return a chain ``c > b \\ge a`` as ``a \\le b < c``; any other text unchanged."""
    *parts, last = _GREATER.split(text)
    if len(parts) < 4 or _NO_CHAIN.search(text):
        return text
    turned = {">": "<", r"\gt": "<"}
    return "".join(turned.get(part, r"\le ") if at % 2 else part for at, part in enumerate([last, *reversed(parts)]))


def has_ellipsis(text: str) -> bool:
    return _DOTS.search(text) is not None


def split(text: str, separators: tuple[str, ...], *, also: bool = False) -> list[str]:
    """Split a text at separators outside brackets; with ``also``, "and" and "or" are separators too."""
    if also:
        text = _ALSO.sub(separators[0], text)
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in _OPEN or token[0].startswith(r"\begin"):
            depth += 1
        elif token[0] in _CLOSE or token[0].startswith(r"\end"):
            depth -= 1
        elif not depth and token[0] in separators:
            parts.append(text[start : token.start()])
            start = token.end()
    return [_SPACES.sub("", part) for part in (*parts, text[start:])]


def plus_minus_values(text: str) -> list[str]:
    r"""Return the texts of the two values of ``a \pm b``; any other text as the only item."""
    if not re.search(r"\\[pm][pm](?![a-zA-Z])|±", text) or _DOTS.search(text):
        return [text]
    upper = re.sub(r"\\pm(?![a-zA-Z])|±", "+", re.sub(r"\\mp(?![a-zA-Z])", "-", text))
    lower = re.sub(r"\\pm(?![a-zA-Z])|±", "-", re.sub(r"\\mp(?![a-zA-Z])", "+", text))
    return [re.sub(r"(^|[=({,]\s*)\+", r"\1", upper), lower]


def name_and_value(member: str) -> tuple[str, str] | None:
    """Return ``x`` and ``5`` of ``x = 5``; ``None`` for any other text."""
    named = _NAMED.fullmatch(member)
    return (named["name"].strip(), named["value"]) if named and _IS_NAME.fullmatch(named["name"]) else None


def names_in(question: str, names: Set[str]) -> list[str]:
    """Return ``names`` in the order of a question's first tuple of exactly these names; empty without a tuple."""
    for found in _TUPLE_OF_NAMES.finditer(question):
        listed = [re.sub(r"\s", "", name) for name in found[1].split(",")]
        if len(listed) == len(names) and set(listed) == names:
            return listed
    return []


def _pair(text: str) -> tuple[str, str] | None:
    """Return the kind of brackets around the whole text, and the content; ``None`` without such brackets."""
    depth, first = 0, ""
    for token in _TOKEN.finditer(text):
        if token[0] in _OPEN:
            if not depth:
                if first:
                    return None
                first, inner = _OPEN[token[0]], token.end()
            depth += 1
        elif token[0] in _CLOSE:
            depth -= 1
            if not depth and token.end() == len(text):
                brackets = first + _CLOSE[token[0]]
                return ("" if first == "group" else brackets), text[inner : token.start()]
        if not depth and not token[0].isspace() and token.end() < len(text) and (not first or token[0] not in _CLOSE):
            return None
        if depth < 0:
            return None
    return None


Number = Callable[[str], Any]
"""Parser of a number, which returns a sympy number, or ``None`` for other texts."""

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
    """Set of real numbers, with facts about its notation.

    Attributes:
        value: sympy set.
        parts: number of sets that the text combines, for example by a union.
        name: name of the variable, if the set is written as a relation; otherwise empty.
    """

    value: Any
    parts: int
    name: str = ""


def mentions_sets(text: str) -> bool:
    """Return whether a text has notation of sets of numbers or of relations."""
    return _SPEAKS.search(text) is not None


def is_empty_set(text: str) -> bool:
    """Return whether a text is the empty set, in words or as a sign."""
    return _EMPTY.fullmatch(text.strip()) is not None


def real_set(text: str, number: Number) -> RealSet | None:
    """Return the set of real numbers that a text denotes; ``None`` for other texts.

    Args:
        text: relations, intervals, listed sets and the reals, combined by unions, intersections and differences.
            Brackets are plain (:func:`plain_brackets`).
        number: parser of the numbers.
    """
    text = _plain(text)
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
    """Return whether sets are equal; ``near`` compares endpoints. If both name a variable, the names must agree."""
    if expected.name and said.name and expected.name != said.name:
        return False
    wanted, given = _pieces(expected.value), _pieces(said.value)
    return len(wanted) == len(given) and all(
        open_ends == other_open_ends and near(start, other_start) and near(end, other_end)
        for (start, end, *open_ends), (other_start, other_end, *other_open_ends) in zip(wanted, given, strict=True)
    )


def has_unmerged_parts(expected: RealSet, said: RealSet) -> bool:
    """Return whether an answer combines more sets than necessary, and more than the expected answer combines."""
    pieces = _pieces(said.value)
    listed = all(start == end for start, end, *_ in pieces)
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
    """Return the numbers that satisfy a relation like ``a < x \\le b`` or ``x \\ne a``; ``None`` for other texts."""
    pieces = re.split(r"\\(?:n?[lg]eq?|[lg]t|[lg]eqslant|neq?)(?![a-zA-Z])|[<>]", text)
    signs = [found[1] or {"<": "lt", ">": "gt"}[found[2]] for found in _RELATION.finditer(text)]
    sides = [piece.strip() for piece in pieces]
    names = [index for index, side in enumerate(sides) if _NAME.fullmatch(side) and number(side) is None]
    if len(names) != 1 or any(sign.startswith("n") and sign not in ("ne", "neq") for sign in signs):
        return None
    name_at = names[0]
    values = [number(side) if at != name_at else None for at, side in enumerate(sides)]
    if not all(_is_real(value) for at, value in enumerate(values) if at != name_at):
        return None
    if len({sign[0] for sign in signs}) > 1:
        return None
    found = sympy.S.Reals
    for at, sign in enumerate(signs):
        at_left = at + 1 <= name_at
        value = values[at if at_left else at + 1]
        strict = sign in ("lt", "gt")
        if sign.startswith("n"):
            part: Any = sympy.Complement(sympy.S.Reals, sympy.FiniteSet(value))
        elif (sign[0] == "l") == at_left:
            part = sympy.Interval(value, sympy.oo, strict, True)
        else:
            part = sympy.Interval(-sympy.oo, value, True, strict)
        found = sympy.Intersection(found, part)
    return RealSet(found, 1, sides[name_at])


def _is_real(value: Any) -> bool:
    return value is not None and isinstance(value, sympy.Expr) and bool(value.is_extended_real) and value.is_number


def _pieces(value: Any) -> list[tuple[Any, Any, bool, bool]]:
    """Return start, end, and whether each is open, of the intervals of a set from left to right; a point has equal
    ends."""
    pieces = []
    for part in value.args if isinstance(value, sympy.Union) else [value]:
        if isinstance(part, sympy.FiniteSet):
            pieces += [(point, point, False, False) for point in part]
        elif part is not sympy.S.EmptySet:
            pieces.append((part.start, part.end, bool(part.left_open), bool(part.right_open)))
    return sorted(pieces, key=lambda piece: float(piece[0]))
