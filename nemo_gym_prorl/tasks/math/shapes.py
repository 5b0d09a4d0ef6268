# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""What an answer consists of: a list, a set, a tuple, an interval, a vector, a matrix. Pure, and about text only.

``math-verify`` takes ``(1, 2)``, ``\{1, 2\}``, ``1, 2`` and ``1, 1, 2`` for one another. An answer is therefore taken
apart here, where its brackets can be seen, and only its members are compared as values:

- a tuple, a vector (angle brackets, a row or a column) and named values have an order;
- a set has neither order nor repeated members, a list of several answers has no order but does repeat;
- two members in round brackets may be an interval as well, two in square brackets are one.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass, replace


LIST, SET, TUPLE, CLOSED, VECTOR, MATRIX = "", "{}", "()", "[]", "<>", "matrix"
HALF_OPEN = ("[)", "(]")

_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?")
_SPELLED = (
    (re.compile(r"\\lbrace(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"⟨"), r"\\langle "),
    (re.compile(r"⟩"), r"\\rangle "),
    (re.compile(r"^\s*<(?=[^<>]*,[^<>]*>\s*$)"), r"\\langle "),
    (re.compile(r"(?<=\S)>\s*$"), r"\\rangle "),
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
    """An answer that consists of several.

    Attributes:
        brackets: around them: :data:`LIST` for none, :data:`SET`, :data:`TUPLE`, :data:`CLOSED`, one of
            :data:`HALF_OPEN`, :data:`VECTOR`, :data:`MATRIX`.
        members: their texts, in order; those of a matrix by rows.
        columns: of a matrix or vector that is written as one; else 0.
        names: of its members, where they stand on its left: ``(x, y) = (2, 3)``; else empty.
    """

    brackets: str
    members: tuple[str, ...]
    columns: int = 0
    names: tuple[str, ...] = ()

    @property
    def ordered(self) -> bool:
        """Whether it says which comes first, and is no interval for certain."""
        return self.brackets in (TUPLE, VECTOR) or (self.brackets == CLOSED and len(self.members) != 2)


def readings(text: str) -> list[str]:
    """A text, and the same where its commas are those of thousands: of ``1,234`` nobody can tell."""
    text = plain_brackets(text)
    if re.search(r"[(\[{]", text) and ", " not in text:
        return [text]
    joined = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    return [text] if joined == text else [joined, text]


def plain_brackets(text: str) -> str:
    """Without sizes of brackets, and with one spelling for each."""
    text = _SIZES.sub("", text)
    text = re.sub(
        r"^\s*[\[(]\s*(\\begin\s*\{(array|matrix)\}.*\\end\s*\{\2\})\s*[\])]\s*$", r"\1", text, flags=re.DOTALL
    )
    for pattern, replacement in _SPELLED[:4]:
        text = pattern.sub(replacement, text)
    if _SPELLED[4][0].search(text):
        for pattern, replacement in _SPELLED[4:]:
            text = pattern.sub(replacement, text)
    return text.strip()


def shape_of(text: str) -> Shape | None:
    """What a text with plain brackets consists of; ``None`` if it is one value, or nothing that can be told."""
    text = text.strip()
    if _DOTS.search(text):
        return None
    if (cases := cases_of(text)) and not any(condition for _, condition in cases):
        return Shape(LIST, tuple(value for value, _ in cases))
    several = ";" if len(split(text, (";",))) > 1 else ","
    parts = [part for part in split(text, (several,), also=True) if part]
    if len(parts) > 1:
        members = tuple(sign for part in parts for sign in signs(part))
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
    if len(both := signs(text)) > 1 and (around is None or around[0] != SET):
        return Shape(LIST, tuple(both))
    if around is None:
        return None
    brackets, inner_text = around
    members = tuple(part for part in split(inner_text, (",", ";")) if part)
    if brackets == SET:
        members = tuple(sign for part in members for sign in signs(part))
    if brackets == TUPLE and len(members) == 1:
        return shape_of(members[0])
    if brackets in (CLOSED, *HALF_OPEN) and len(members) < 2:
        return None
    if brackets not in (LIST, SET, TUPLE, CLOSED, *HALF_OPEN, VECTOR):
        return None
    return Shape(brackets, members)


def cases_of(text: str) -> list[tuple[str, str]] | None:
    """The values of a piecewise answer with their conditions, or the rows of a system with none."""
    found = _CASES.fullmatch(text.strip())
    if found is None:
        return None
    rows = [split(row, ("&",)) for row in split(found["cases"] or found["rows"] or "", ("\\\\",)) if row]
    conditions = (_CONDITION.sub(lambda part: f" {part[1] or ''} ", " ".join(row[1:])) for row in rows)
    return [
        (_STOPS.sub("", row[0]), _STOPS.sub("", condition)) for row, condition in zip(rows, conditions, strict=True)
    ]


def in_square(text: str) -> str | None:
    """What stands in square brackets around a whole text."""
    around = _pair(text.strip())
    return around[1] if around is not None and around[0] == CLOSED else None


def chained(text: str) -> Shape | None:
    """``x = y = 1`` as ``x = 1, y = 1``."""
    *names, value = (part.strip() for part in text.split("="))
    if len(names) < 2 or not value or not all(map(_IS_NAME.fullmatch, names)):
        return None
    return Shape(LIST, tuple(f"{name}={value}" for name in names))


def ascending(text: str) -> str:
    """``c > b \\ge a`` as ``a \\le b < c``: a chain of two relations or more, all of them of that kind."""
    *parts, last = _GREATER.split(text)
    if len(parts) < 4 or _NO_CHAIN.search(text):
        return text
    turned = {">": "<", r"\gt": "<"}
    return "".join(turned.get(part, r"\le ") if at % 2 else part for at, part in enumerate([last, *reversed(parts)]))


def goes_on(text: str) -> bool:
    """Whether it has dots for what is left out."""
    return _DOTS.search(text) is not None


def split(text: str, separators: tuple[str, ...], *, also: bool = False) -> list[str]:
    """The parts of a text between separators that stand in no bracket; with ``also`` "and" and "or" are some."""
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


def signs(text: str) -> list[str]:
    r"""``a \pm b`` as its two values; any other text as it is."""
    if not re.search(r"\\[pm][pm](?![a-zA-Z])|±", text) or _DOTS.search(text):
        return [text]
    upper = re.sub(r"\\pm(?![a-zA-Z])|±", "+", re.sub(r"\\mp(?![a-zA-Z])", "-", text))
    lower = re.sub(r"\\pm(?![a-zA-Z])|±", "-", re.sub(r"\\mp(?![a-zA-Z])", "+", text))
    return [re.sub(r"(^|[=({,]\s*)\+", r"\1", upper), lower]


def name_and_value(member: str) -> tuple[str, str] | None:
    """``x`` and ``5`` of ``x = 5``."""
    named = _NAMED.fullmatch(member)
    return (named["name"].strip(), named["value"]) if named and _IS_NAME.fullmatch(named["name"]) else None


def names_in(question: str, names: Set[str]) -> list[str]:
    """These names in the order of the first tuple of them that a question has; empty if it has none."""
    for found in _TUPLE_OF_NAMES.finditer(question):
        listed = [re.sub(r"\s", "", name) for name in found[1].split(",")]
        if len(listed) == len(names) and set(listed) == names:
            return listed
    return []


def _pair(text: str) -> tuple[str, str] | None:
    """The brackets around a whole text, and what stands between."""
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
