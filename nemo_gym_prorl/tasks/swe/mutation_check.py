# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Detect solutions that pass tests regardless of the expected values. Pure.

Each deciding test is run again with one expected value changed. A correct solution must fail the changed test. A
solution that hardcodes values, overrides comparison, forges records or prints a runner's lines passes both versions.

The changed value is an operand of ``==``, ``is`` or ``in`` in an assertion, an argument of an asserting call, a cell
of a table, or an expected exception. A test may never reach the changed line. So a changed test that passes is
evidence only if the test fails with the row's reference fix.

A sample of the tests that must keep passing is changed too, since a solution may replace the code that they test. A
failing line is appended to a test in which no expected value is found.

A correct solution may take another path through a test than the reference fix. So expectations that depend on the path
are never changed: one side of ``or``, a branch, a callback, or a bound.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from nemo_gym_prorl.tasks.swe.report import PASSING


_COMPARES = re.compile(
    r"^(?!.*(?:Not[A-Z]|not_|(?i:less|greater)))(?:.*(?i:equal|close|approx|regex|called)|assertIs$|assertIn$)"
)
"""Names of calls that compare their first two arguments; not ``check``, which may assert properties of an input."""

_TOLERANT = re.compile(r"close|approx|almost", re.IGNORECASE)
"""Names of comparisons with a tolerance."""

_ONE_ARGUMENT = re.compile(r"approx|called")
_RAISES = re.compile(r"raises|warns", re.IGNORECASE)
_EXPECTED_TO_FAIL = re.compile(r"xfail|expected_?failure", re.IGNORECASE)
_EXPECTATION = re.compile(r"expect|exp(_|$)|want|desired|correct|answer", re.IGNORECASE)
_BUILDERS = re.compile(r"[A-Z].*|array|asarray|approx|set|frozenset|dict|list|tuple|date|datetime|timedelta|dedent")
"""Names of calls that build an expected value; other calls may be the code under test."""

_OTHER_EXCEPTION = "BufferError"
_CONDITIONAL = ast.If | ast.IfExp | ast.Match | ast.While | ast.ExceptHandler | ast.ClassDef | ast.Lambda
_OPTIONAL = ast.Or | ast.Not | ast.comprehension
"""Operators whose operands a correct solution may not evaluate or satisfy."""

MAX_OTHER_TESTS = 20
"""Maximum number of changed tests of PASS_TO_PASS; bounds the time."""

_HELPERS = ("check", "case", "make", "run", "helper", "given", "do")
_LETTERS = "bcdfghjkmnpqrstvwxz"
MAX_SOURCE_BYTES = 1 << 20  # larger test files are not changed, to bound memory
_MAX_INT_BITS = 10_000
"""Integers with more bits are not changed: Python refuses to print more than 4300 digits."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Edit = tuple[int, int, bytes]
"""Replacement in a source: start and end offsets in bytes, and the new bytes."""


@dataclass(frozen=True, slots=True)
class MutationCheck:
    """Deciding tests to change, without parameters, and a sample of the tests that must keep passing. With
    ``fail_at_end``, a failing line is appended to each test instead."""

    tests: tuple[str, ...]
    others: tuple[str, ...]
    seed: str
    fail_at_end: bool = False

    def mutate(self, path: str, source: bytes) -> tuple[bytes, frozenset[str]]:
        """Return a test file with changed expectations, and the names of the changed tests.

        Tests of the file that are not in this check are renamed if possible, so that no runner collects them. A file
        without a changed test, or with a syntax error, is returned unchanged.
        """
        try:
            tree = ast.parse(source.decode())  # columns of ast are UTF-8 bytes, so other encodings are refused
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return source, frozenset()
        text, tables = _Source(source), _set_once(tree)
        dice = Random(f"{self.seed} {path}")
        words: dict[str, dict[str, None]] = {}
        for test in (*self.tests, *self.others):
            for word in (*re.findall(r"\w+", test), test):
                words.setdefault(word, {})[test] = None
        edits, changed = list[Edit](), set[str]()
        for function in _tests(tree):
            tests = words.get(function.name) or words.get((ast.get_docstring(function) or "").partition("\n")[0])
            if tests is None:
                edits += text.rename_as_helper(function, dice)
                continue
            alternatives = [] if self.fail_at_end else _mutations(function, tables, text, dice)
            if alternatives := alternatives or text.append_failure(function):
                edits += dice.choice(alternatives)
                changed |= tests.keys()
        return (text.edited(edits), frozenset(changed)) if changed else (source, frozenset())

    def outcomes(
        self, changed: Collection[str], maps: Sequence[Mapping[str, str]]
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Return the changed tests of which no case passed, and those of which a case passed in all maps (status by
        test with parameters; one map per source)."""
        names = [name for seen in maps for name in seen]
        passed = {name for name in names if all(seen.get(name) in PASSING for seen in maps)}
        ran, good = ({name.partition("[")[0] for name in some} & frozenset(changed) for some in (names, passed))
        return frozenset(ran - good), frozenset(good)


def mutation_check_for(tests: Iterable[str], seed: str, others: Iterable[str] = ()) -> MutationCheck:
    """Return the check for deciding tests and a random sample of at most :data:`MAX_OTHER_TESTS` other tests."""
    deciding, passing = (dict.fromkeys(test.partition("[")[0] for test in names) for names in (tests, others))
    left = [test for test in passing if test not in deciding]
    return MutationCheck(tuple(deciding), tuple(Random(seed).sample(left, min(len(left), MAX_OTHER_TESTS))), seed)


class _Source:
    """Source of a test file; returns edits of syntax nodes, and applies edits."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._lines = [0, *(found.end() for found in re.finditer(rb"\r\n|\r|\n", source))]
        self._words = Counter(re.findall(r"\w+", source.decode()))

    def at(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def to(self, node: ast.expr, text: str) -> Edit:
        return (*self.at(node), text.encode())

    def negated(self, node: ast.expr) -> Edit:
        start, end = self.at(node)
        return start, end, b"(not (%s))" % self._source[start:end]

    def rename_as_helper(self, function: Function, dice: Random) -> list[Edit]:
        """Return the edit that replaces ``test`` in a function's name, so that no runner collects the function.

        Empty if the file repeats the old name or contains the new one, if the function is a fixture, or if the source
        spells the name differently.
        """
        said = dice.choice(_HELPERS)
        taken = self._words[said + function.name.removeprefix("test")]
        if self._words[function.name] > 1 or taken or "fixture" in map(_name, function.decorator_list):
            return []
        start = self._source.find(function.name.encode(), self.at(function)[0])
        # Not found if the source spells the name differently: ast normalizes identifiers to NFKC.
        return [(start, start + 4, said.encode())] if start >= 0 else []

    def append_failure(self, function: Function) -> list[list[Edit]]:
        """Return the edit that appends a failing line; none if the test may return early or is expected to fail."""
        nodes = list(ast.walk(function))
        ends = any(isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) for node in nodes)
        if ends or any(_EXPECTED_TO_FAIL.search(_name(node)) for node in nodes):
            return []
        start, end = self.at(last := function.body[-1])
        has_a_block = hasattr(last, "body") or isinstance(last, ast.Match)
        line = b"\n" + self._source[self._lines[last.lineno - 1] : start] if has_a_block else b"; "
        return [[(end, end, line + b"assert 0")]]

    def edited(self, edits: Iterable[Edit]) -> bytes:
        parts, at = list[bytes](), 0
        # Several tests may change the same cell of a table: the last edit counts.
        for (start, end), text in sorted({(start, end): text for start, end, text in edits}.items()):
            parts += [self._source[at:start], text]
            at = end
        return b"".join([*parts, self._source[at:]])


def _tests(tree: ast.Module | ast.ClassDef) -> Iterator[Function]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from _tests(node)
        elif isinstance(node, Function) and node.name.startswith("test"):
            yield node


def _mutations(function: Function, tables: Mapping[str, ast.expr], text: _Source, dice: Random) -> list[list[Edit]]:
    """Return the possible changes of a test's expectation; one change is a list of edits."""
    evaluated = list(_evaluated(function))
    roots = [node.test for node in evaluated if isinstance(node, ast.Assert)]
    calls = [node for node in evaluated if isinstance(node, ast.Call) and "assert" in _name(node)]
    wanted = [*roots, *(call for call in calls if _name(call) != "assertFalse")]
    found = _expected(wanted, _table_values(function, tables))
    alternatives = [[edit for node in nodes for edit in _replace(node, text, dice, close)] for nodes, close in found]
    for node in evaluated:
        if isinstance(node, ast.Call) and _RAISES.search(_name(node)) and node.args:
            alternatives.append([text.to(node.args[0], _OTHER_EXCEPTION)])
    if possible := [edits for edits in alternatives if edits]:
        return possible
    truths = [call.args[0] for call in calls if call.args and _name(call) in ("assertTrue", "assertFalse")]
    return [[text.negated(root)] for root in [*roots, *truths]]


def _evaluated(root: ast.AST) -> Iterator[ast.AST]:
    """Yield the syntax nodes that every passing run of a test evaluates, whatever the solution."""
    called = {
        node.func.id for node in ast.walk(root) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    waiting = deque([root])
    while waiting:
        yield (node := waiting.popleft())
        parts = list(ast.iter_child_nodes(node))
        callback = isinstance(node, Function) and node is not root and node.name not in called
        if not (callback or isinstance(node, _CONDITIONAL) or any(isinstance(part, _OPTIONAL) for part in parts)):
            waiting += parts


def _expected(roots: Iterable[ast.expr], names: Mapping[str, list[ast.expr]]) -> Iterator[tuple[list[ast.expr], bool]]:
    """Yield the expected values of each assertion, and whether the comparison has a tolerance."""
    for root in roots:
        for node in _evaluated(root):
            operands: Sequence[ast.expr] = ()
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.Is | ast.In):
                operands = [node.left, node.comparators[0]]
            elif isinstance(node, ast.Call) and _COMPARES.search(_name(node)):
                operands = node.args[: 1 if _ONE_ARGUMENT.search(_name(node)) else 2]
            if _name(node) == "assertIn" or (isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In)):
                operands = operands[:1]
            tolerant = any(_TOLERANT.search(_name(part)) for part in (node, *operands))
            if len(operands) == 2:
                yield _expected_operand(operands[0], operands[1], names), tolerant
            elif operands and _is_literal(operands[0]):
                yield [operands[0]], tolerant


def _expected_operand(left: ast.expr, right: ast.expr, names: Mapping[str, list[ast.expr]]) -> list[ast.expr]:
    """Return the expected values among two operands: a literal, else a variable's values, else a built value."""
    for node in (right, left):
        if _is_literal(node):
            return [node]
    for node in (right, left):
        if isinstance(node, ast.Name) and node.id in names:
            return names[node.id]
    return [node for node in (right, left) if _is_value(node)][:1]


def _table_values(function: Function, tables: Mapping[str, ast.expr]) -> dict[str, list[ast.expr]]:
    """Return expected values by variable name: table columns, and variables named like an expectation."""
    assigned = _set_once(function).items()
    found = {name: [value] for name, value in assigned if _EXPECTATION.search(name) and _is_value(value)}
    for node in [*function.decorator_list, *ast.walk(function)]:
        if isinstance(node, ast.Call) and _name(node) == "parametrize" and len(node.args) > 1:
            names, rows = _column_names(node.args[0]), node.args[1]
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Tuple):
            names, rows = [getattr(part, "id", "") for part in node.target.elts], node.iter
        else:
            continue
        cells = [_cells(row) if len(names) > 1 else [row] for row in _rows(rows, tables)]
        for column, name in enumerate(names):
            found[name] = [row[column] for row in cells if column < len(row) and _is_value(row[column])]
    return found


def _set_once(node: ast.AST) -> dict[str, ast.expr]:
    named = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    stored = Counter(part.id for part in named if isinstance(part.ctx, ast.Store))
    found = [part for part in ast.walk(node) if isinstance(part, ast.Assign)]
    values = {target.id: part.value for part in found for target in part.targets if isinstance(target, ast.Name)}
    return {name: value for name, value in values.items() if stored[name] == 1}


def _rows(node: ast.expr, tables: Mapping[str, ast.expr]) -> list[ast.expr]:
    if isinstance(node, ast.Name):
        node = tables.get(node.id, node)
    if isinstance(node, ast.BinOp):
        return [*_rows(node.left, tables), *_rows(node.right, tables)]
    return node.elts if isinstance(node, ast.List | ast.Tuple) else []


def _column_names(node: ast.expr) -> list[str]:
    said = ast.literal_eval(node) if _is_literal(node) else ""
    if isinstance(said, str):
        return re.findall(r"\w+", said)
    return [str(name) for name in said] if isinstance(said, list | tuple) else []


def _cells(row: ast.expr) -> list[ast.expr]:
    if isinstance(row, ast.List | ast.Tuple):
        return row.elts
    return row.args if isinstance(row, ast.Call) else []  # arguments of pytest.param


def _is_value(node: ast.expr) -> bool:
    calls = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
    of_texts = [call for call in calls if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Constant)]
    return all(call in of_texts or _BUILDERS.fullmatch(_name(call)) for call in calls) and any(_constants(node))


def _replace(expected: ast.expr, text: _Source, dice: Random, tolerant: bool) -> list[Edit]:
    constants = list(_constants(expected))
    if not constants:
        return []
    chosen = dice.choice(constants)
    return [text.to(chosen, repr(_different_value(chosen.value, dice, tolerant)))]


def _constants(node: ast.AST) -> Iterator[ast.Constant]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Constant) and node.value is not ...:
            if not isinstance(node.value, int) or node.value.bit_length() <= _MAX_INT_BITS:
                yield node
        elif isinstance(node, ast.Call) and _ONE_ARGUMENT.search(_name(node)):
            waiting += node.args[:1]
        elif not isinstance(node, ast.JoinedStr):
            waiting += ast.iter_child_nodes(node)


def _different_value(value: object, dice: Random, tolerant: bool = False) -> object:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, float | complex) or (isinstance(value, int) and tolerant):
        return value + (abs(value) + 1) * dice.randint(103, 997)  # exceeds any tolerance
    if isinstance(value, int):
        return value + dice.randint(3, 97)
    if isinstance(value, bytes):
        return str(_different_value(value.decode("latin-1"), dice)).encode("latin-1")
    said = str(value)
    digits = [found.start() for found in re.finditer("[0-9]", said)]
    at = dice.choice(digits) if digits else dice.randint(0, len(said))
    if digits:  # a short text gets three new digits: with one, it might occur in a longer output by chance
        others = sorted(set("123456789") - {said[at]})
        return said[:at] + "".join(dice.choices(others, k=1 if len(said) > 3 else 3)) + said[at + 1 :]
    return said[:at] + "".join(dice.choices(_LETTERS, k=3)) + said[at:]


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _name(node: ast.AST) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
