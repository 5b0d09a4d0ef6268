# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Single mutations of a source file. Pure.

A mutation replaces a few characters inside a function and preserves comments and layout, so the reverse patch looks
hand-written. The package's tests decide whether a mutation changes behaviour.
"""

from __future__ import annotations

import ast
import io
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.Div: "*",
}
_WEAK = (ast.Lambda, ast.GeneratorExp, ast.IfExp, ast.BoolOp, ast.NamedExpr, ast.Compare, ast.Starred)
"""Expressions that need parentheses as operands."""

_UNTOUCHED = ("__repr__", "__str__", "main")


@dataclass(frozen=True, slots=True, order=True)
class Mutation:
    """One mutation.

    Attributes:
        start: start position in characters.
        end: end position of the replaced text.
        text: replacement.
        kind: kind of the mutation.
        function: dotted name of the mutated function.
    """

    start: int
    end: int
    text: str
    kind: str
    function: str


def mutations(source: str) -> list[Mutation]:
    """Return all mutations in the order of the file.

    Raises:
        SyntaxError: the file is not valid Python.
    """
    return sorted(_Finder(source).find())


def drawn(source: str, seed: str) -> list[Mutation]:
    """Return all mutations in a seeded random order that alternates between kinds."""
    chance = random.Random(seed)
    kinds: dict[str, list[Mutation]] = {}
    for one in mutations(source):
        kinds.setdefault(one.kind, []).append(one)
    for found in kinds.values():
        chance.shuffle(found)
    queues = list(kinds.values())
    chance.shuffle(queues)
    order = []
    while queues:
        order += [queue.pop() for queue in queues]
        queues = [queue for queue in queues if queue]
    return order


def apply(source: str, chosen: Sequence[Mutation]) -> str:
    """Apply mutations.

    Raises:
        ValueError: two mutations overlap.
    """
    before = len(source) + 1
    for one in sorted(chosen, reverse=True):
        if one.end > before:
            raise ValueError(f"{one.kind} in {one.function} overlaps with another")
        source = source[: one.start] + one.text + source[one.end :]
        before = one.start
    return source


class _Finder:
    def __init__(self, source: str) -> None:
        self._source = source
        self._tree = ast.parse(source)
        # ast counts lines like the compiler and columns in bytes.
        lines = list(io.StringIO(source, newline=""))
        self._lines = [line.encode() for line in lines]
        self._starts = [0, *itertools.accumulate(map(len, lines))]

    def find(self) -> Iterator[Mutation]:
        yield from self._functions(self._tree.body, "")

    def _functions(self, body: Sequence[ast.stmt], prefix: str) -> Iterator[Mutation]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from self._functions(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in _UNTOUCHED:
                for statement in node.body:
                    yield from self._statement(statement, f"{prefix}{node.name}")

    def _statement(self, top: ast.stmt, function: str) -> Iterator[Mutation]:
        for node in ast.walk(top):
            for kind, old, text in self._changes(node):
                start, end = self._span(old)
                if self._source[start:end] != text:
                    yield Mutation(start, end, text, kind, function)

    def _changes(self, node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                yield "comparison", node, f"{self._operand(left)} {_COMPARISONS[type(op)]} {self._operand(right)}"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS and not self._is_text(node):
                yield "operator", node, f"({self._operand(left)} {_OPERATORS[type(op)]} {self._operand(right)})"
            case ast.BoolOp(op=op, values=values):
                word = " or " if isinstance(op, ast.And) else " and "
                yield "boolean", node, f"({word.join(self._operand(value) for value in values)})"
            case ast.Constant(value=bool(value)):
                yield "constant", node, str(not value)
            case ast.Constant(value=int(value)) if abs(value) < 1000:
                yield "off by one", node, str(value + 1)
            case ast.If(test=test) | ast.While(test=test):
                yield "branch", test, f"not ({self._text(test)})"
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield "return", value, "None"
            case ast.AugAssign() | ast.Expr(value=ast.Call()) | ast.Delete():
                yield "removed statement", node, "pass"
            case ast.Call(args=[first, second, *_], func=func) if not isinstance(first, ast.Starred):
                yield from self._swapped(node, func, first, second)
            case _:
                pass

    def _swapped(
        self, node: ast.Call, func: ast.expr, first: ast.expr, second: ast.expr
    ) -> Iterator[tuple[str, ast.expr, str]]:
        name = func.id if isinstance(func, ast.Name) else ""
        if isinstance(second, ast.Starred) or name in ("isinstance", "issubclass", "getattr", "hasattr"):
            return
        (start, end), (one, one_end), (two, two_end) = self._span(node), self._span(first), self._span(second)
        text = self._source
        swapped = text[start:one] + text[two:two_end] + text[one_end:two] + text[one:one_end] + text[two_end:end]
        yield "swapped arguments", node, swapped

    def _is_text(self, node: ast.BinOp) -> bool:
        """Return whether a node concatenates strings, for which another operator would fail trivially."""
        return any(isinstance(one, ast.Constant | ast.JoinedStr) and self._is_string(one) for one in ast.walk(node))

    @staticmethod
    def _is_string(node: ast.Constant | ast.JoinedStr) -> bool:
        return isinstance(node, ast.JoinedStr) or isinstance(node.value, str | bytes)

    def _operand(self, node: ast.expr) -> str:
        return f"({self._text(node)})" if isinstance(node, _WEAK) else self._text(node)

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._source[start:end]

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._place(node.lineno, node.col_offset), self._place(node.end_lineno, node.end_col_offset)

    def _place(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1][:column].decode())
