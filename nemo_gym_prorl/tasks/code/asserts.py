# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Convert asserts of published data sets to tests of a function. Pure; the source is parsed and never run.

Accepted are calls with literal arguments: compared with a literal, within a tolerance (``abs(f(1) - 0.5) < 1e-6``,
``math.isclose``, ``pytest.approx``), or as the whole assert if the function returns booleans. A builtin such as
``sorted`` may get the result first. Arithmetic with literals is folded, and names are replaced by their values.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.code.code_rows import MAX_PYTHON_CHARS
from nemo_gym_prorl.tasks.dataset_records import UnusableRecord


_BUILTINS: dict[str, Any] = {"list": list, "set": set, "sorted": sorted, "tuple": tuple}
"""Builtins that tests call to make the values that they pass or expect."""
_APPLIED = ("len", "list", "set", "sorted")  # builtins that tests call with the function's result
_SCAFFOLDING = (ast.Import, ast.ImportFrom, ast.Pass)
_SIGNED = ("starter_code", "prompt", "question", "text", "code", "solution", "completion")
"""Fields that may define the function under test; fields that the policy sees come first."""
_COLON = re.compile(":")
_NOT_IN_JSON = "its tests have values that JSON does not have"
_NO_COMPARISON = "its tests do more than compare the result of a call with a value"
_SHARED_CHARS = 100  # of a value that several asserts use by name, to bound memory
_FOLDED_CHARS = 1 << 12
"""Maximum characters or items of a value that tests compute from literals, to bound memory."""
_ARITHMETIC = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}  # fmt: skip
EXACT = (1e-6, 1e-6)
"""Absolute and relative tolerance of fractional results that tests compare for equality."""


def of_asserts(
    source: str, field: str, candidates: Sequence[str] = (), record: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Convert asserts that compare the result of a call with a value (HumanEval, MBPP, KodCode, AceCode, LeetCode).

    Args:
        source: Python source, which is parsed and never run.
        field: name of the field, for errors.
        candidates: names of the function under test; the last one is its real name.
        record: record whose texts may define the function. Arguments passed by name, and asserts that only check
            whether the result is true, need the definition.

    Returns:
        ``inputs``, ``outputs`` (JSON text), ``fn_name``, and ``arguments`` and ``checker`` if the defaults do not fit.

    Raises:
        CallerError: the source is not Python; names the field.
        UnusableRecord: a test is no such assert, the tests differ in function or tolerance, or there are none.
    """
    tree = _tree(source)
    if isinstance(tree, Exception):
        raise CallerError(f"is not Python: {tree}", field=field) from tree
    lines = source.split("\n")
    inputs, outputs, names = list[Any](), list[Any](), set[tuple[str, str | None]]()
    definitions = cache(lambda name: [*_definitions(record or {}, name)])
    tolerances, truths, boolean = set[tuple[float, float]](), list[str](), False
    for statement in _statements(tree.body, {}):
        example = "".join(lines[statement.lineno - 1 : statement.lineno]).strip()
        try:
            test = _comparison(statement)
            name = _called(test.call.func)
            if name is None or any(word.arg is None for word in test.call.keywords):
                raise UnusableRecord("its tests call more than a function by its name")
            name = candidates[-1] if name in candidates else name
            inputs.append([_argument(value) for value in _positional(test.call, definitions(name))])
            expected = _expected(test.expected, sets=test.applied == "set")
            expected = _floats(expected) if test.tolerance else expected
        except UnusableRecord as error:
            raise UnusableRecord(error.complaint, field=field, example=example) from None
        names.add((name, test.applied))
        outputs.append(json.dumps(expected))
        tolerances.add(test.tolerance or EXACT)
        truths += [example] if test.truth else []
        boolean |= isinstance(expected, bool) and not test.truth
    if len(names) > 1:
        example = ", ".join(sorted(f"{applied}({name})" if applied else name for name, applied in names))
        raise UnusableRecord("its tests call more than one function", field=field, example=example)
    if not names:
        raise UnusableRecord("its tests have no assert", field=field)
    [(called, applied)] = names
    if truths and not boolean and not (definitions(called) and all(map(_returns_bool, definitions(called)))):
        raise UnusableRecord(
            "its tests check whether a result that may be no boolean is true", field=field, example=truths[0]
        )
    tests: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "fn_name": called}
    if not all(_is_json(value, tuples=False) for given in inputs for value in given):
        tests |= {"inputs": [_python_text(given, field) for given in inputs], "arguments": "python"}
    checker = {"kind": "float"} | ({"applied": applied} if applied else {})
    if tolerances == {EXACT}:
        return tests | ({"checker": checker} if applied else {})
    absolute, relative = map(min, zip(*tolerances, strict=True))
    # Results compared for equality (EXACT) may share a smaller tolerance of other tests, but no larger one.
    if len(tolerances - {EXACT}) > 1 or (EXACT in tolerances and (absolute, relative) not in tolerances - {EXACT}):
        raise UnusableRecord("its tests have different tolerances", field=field)
    return tests | {"checker": checker | {"absolute": absolute, "relative": relative}}


def _tree(source: str) -> ast.Module | Exception:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return error


def _statements(body: Sequence[ast.stmt], values: dict[str, ast.expr | None]) -> Iterator[ast.stmt]:
    """Yield the statements of tests with names replaced by values, without imports, docstrings and assignments."""
    functions = {one.name for one in body if isinstance(one, ast.FunctionDef)}
    for statement in body:
        match statement:
            case ast.FunctionDef(body=inner, args=parameters):
                names = [one.arg for one in ast.walk(parameters) if isinstance(one, ast.arg)]
                yield from _statements(inner, values | dict.fromkeys(names))
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Expr(value=ast.Call(func=ast.Name(id=name))) if name in functions:  # HumanEval-X calls its tests
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                is_call = isinstance(value, ast.Call) and _called(value.func) not in _BUILTINS
                values[name] = _inlined(value, values) if is_call else value
            case _ if not isinstance(statement, _SCAFFOLDING):
                yield _inlined(statement, values)


def _inlined[N: ast.AST](node: N, values: dict[str, ast.expr | None]) -> N:
    """Replace names in a node by their values. A value that a function may change is inserted once only.

    Names in inserted values are not replaced, because nested values would grow exponentially.
    """

    def value_of(part: Any) -> Any:
        value = values.get(part.id) if isinstance(part, ast.Name) else None
        if value is None or hasattr(value, "inserted"):
            return part
        is_constructor = isinstance(value, ast.Call) and not (value.args or value.keywords)
        if len(ast.unparse(value)) > _SHARED_CHARS or not (
            is_constructor or isinstance(value, ast.UnaryOp | ast.Constant)
        ):
            value.inserted = True  # type: ignore[attr-defined]
        return value

    for parent in [*ast.walk(node)]:
        for field, part in ast.iter_fields(parent):
            setattr(parent, field, [*map(value_of, part)] if isinstance(part, list) else value_of(part))
    return node


class _Test(NamedTuple):
    """An assert on the result of a call.

    Attributes:
        applied: builtin such as ``sorted`` that converts the call's result before the comparison; ``None`` for none.
        tolerance: absolute and relative tolerance of the result; ``None`` for equality.
        truth: whether the assert only checks whether the result is true or false, as in ``assert f(1)``.
    """

    call: ast.Call
    expected: ast.expr
    applied: str | None = None
    tolerance: tuple[float, float] | None = None
    truth: bool = False


def _comparison(statement: ast.stmt) -> _Test:
    match statement.test if isinstance(statement, ast.Assert) else None:
        case ast.Compare(one, [ast.Eq()], [ast.Call(ast.Name("approx") | ast.Attribute(_, "approx"), [other], words)]):
            given = _tolerances(words, "abs", "rel")
            relative = given.get("rel", 0.0 if "abs" in given else 1e-6)
            return _Test(*_sides(one, other), tolerance=(given.get("abs", 1e-12), relative))
        case ast.Compare(left=one, ops=[ast.Eq() | ast.Is()], comparators=[other]):
            return _Test(*_sides(one, other))
        case ast.Compare(
            left=ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=one, op=ast.Sub(), right=other)]),
            ops=[ast.Lt() | ast.LtE() as order],
            comparators=[limit],
        ):
            if (bound := _float(_evaluated(limit))) <= 0:
                raise UnusableRecord(_NO_COMPARISON)
            below = math.nextafter(bound, 0) if isinstance(order, ast.Lt) else bound
            return _Test(*_sides(one, other), tolerance=(below, 0.0))
        case ast.Call(
            func=ast.Name(id="isclose") | ast.Attribute(value=ast.Name(id="math"), attr="isclose"),
            args=[one, other],
            keywords=words,
        ):
            given = _tolerances(words, "abs_tol", "rel_tol")
            return _Test(*_sides(one, other), tolerance=(given.get("abs_tol", 0.0), given.get("rel_tol", 1e-9)))
        case ast.Call() as call:
            return _Test(call, ast.Constant(True), truth=True)
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call() as call):
            return _Test(call, ast.Constant(False), truth=True)
    raise UnusableRecord(_NO_COMPARISON)


def _tolerances(words: Sequence[ast.keyword], *names: str) -> dict[str, float]:
    given = {str(word.arg): _float(_evaluated(word.value)) for word in words}
    if not given.keys() <= {*names} or min(given.values(), default=0.0) < 0:
        raise UnusableRecord(_NO_COMPARISON)
    return given


def _sides(one: ast.expr, other: ast.expr) -> tuple[ast.Call, ast.expr, str | None]:
    """Return the call, the expected result, and the builtin that gets the call's result (``None`` for no builtin)."""
    made = (*_BUILTINS, "float", "range")
    for side, expected in ((one, other), (other, one)):
        match side:
            case ast.Call(ast.Name(name), [ast.Call(f) as call], []) if name in _APPLIED and _called(f) not in made:
                return call, expected, name
            case ast.Call(f) if _called(f) not in made:
                return side, expected, None
    raise UnusableRecord(_NO_COMPARISON)


def _returns_bool(function: ast.FunctionDef) -> bool:
    """Return whether a function returns only booleans, by its annotation or by its return statements."""
    if isinstance(function.returns, ast.Name):
        return function.returns.id == "bool"
    nodes = [*ast.walk(function)]
    results = [node.value for node in nodes if isinstance(node, ast.Return)]
    yields = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes)
    return isinstance(function.body[-1], ast.Return) and not yields and all(map(_is_boolean, results))


def _is_boolean(node: ast.expr | None) -> bool:
    match node:
        case ast.BoolOp(values=values):
            return all(map(_is_boolean, values))
        case (
            ast.Compare()
            | ast.UnaryOp(op=ast.Not())
            | ast.Constant(value=bool())
            | ast.Call(func=ast.Name(id="all" | "any" | "bool" | "isinstance"))
        ):
            return True
    return False


def _positional(call: ast.Call, definitions: Sequence[ast.FunctionDef]) -> list[ast.expr]:
    """Return a call's arguments in the order of the function's parameters; defaults fill gaps."""
    if not call.keywords:
        return call.args
    if len({tuple(one.arg for one in function.args.args) for function in definitions}) != 1:
        reason = (
            "its tests pass arguments by name, and the record has no definition of the function, or different ones"
        )
        raise UnusableRecord(reason)
    signature = definitions[0].args
    names = [one.arg for one in (*signature.posonlyargs, *signature.args)]
    values = dict(zip(reversed(names), reversed(signature.defaults), strict=False))
    if names[:1] == ["self"]:
        del names[0]
    given = dict(zip(names, call.args, strict=False)) | {str(word.arg): word.value for word in call.keywords}
    needed = names[: 1 + max((index for index, one in enumerate(names) if one in given), default=0)]
    values |= given
    if (
        len(given) < len(call.args) + len(call.keywords)
        or not given.keys() <= {*names}
        or not values.keys() >= {*needed}
    ):
        raise UnusableRecord("its tests pass arguments that do not fit the function's positional parameters")
    return [values[one] for one in needed]


def _definitions(record: Mapping[str, Any], name: str) -> Iterator[ast.FunctionDef]:
    """Yield the definitions of a function in a record's texts. In a text that is not Python, the body is ``pass``."""
    for field in _SIGNED:
        text = record.get(field)
        if not isinstance(text, str) or not (found := re.search(rf"\bdef {name}\s*\(", text)):
            continue
        begin = found.start()
        heads = (text[begin : colon.end()] + " pass" for colon in _COLON.finditer(text, begin, begin + 2000))
        for source in (text, *heads):
            if isinstance(tree := _tree(source), ast.Module):
                nodes = ast.walk(tree)
                yield from (node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name)
                break


def _called(function: ast.expr) -> str | None:
    """Return the name in ``f``, ``solution.f`` or ``Solution().f``; ``None`` for other calls."""
    match function:
        case (
            ast.Name(id=name)
            | ast.Attribute(value=ast.Name(id="solution"), attr=name)
            | ast.Attribute(value=ast.Call(func=ast.Name(id="Solution"), args=[], keywords=[]), attr=name)
        ):
            return name
    return None


def _argument(node: ast.expr) -> Any:
    """Return an argument, which may also be a tuple, a set, or a dictionary with any keys."""
    value = _evaluated(node)
    if not (_is_json(value, tuples=False) or _is_literal(value)):
        raise UnusableRecord(_NOT_IN_JSON)
    return value


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False


def _python(value: Any) -> str:
    match value:
        case set():
            return f"{{{', '.join(sorted(map(_python, value)))}}}" if value else "set()"
        case tuple():
            return f"({', '.join(map(_python, value))}{',' * (len(value) == 1)})"
        case list():
            return f"[{', '.join(map(_python, value))}]"
        case dict():
            return f"{{{', '.join(f'{_python(key)}: {_python(one)}' for key, one in value.items())}}}"
    return repr(value)


def _python_text(given: Sequence[Any], field: str) -> str:
    """Return arguments as Python literals, one per line. The text does not depend on the order of sets."""
    text = "\n".join(map(_python, given))
    if len(text) > MAX_PYTHON_CHARS or not all(map(_is_literal, given)):
        raise UnusableRecord(_NOT_IN_JSON, field=field, example=text[:80])
    return text


def _expected(node: ast.expr, *, sets: bool) -> Any:
    """Return an expected result: a JSON value, in which a tuple counts as a list; a set is sorted if ``sets``."""
    value = _evaluated(node, sets=sets)
    if not _is_json(value, tuples=True):
        raise UnusableRecord(_NOT_IN_JSON)
    return value


def _evaluated(node: ast.expr, *, sets: bool = False) -> Any:
    try:
        value = ast.literal_eval(_Folder().visit(node))
        return sorted(value) if sets and isinstance(value, set) else value
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, MemoryError):
        raise UnusableRecord("its tests compute what they pass or expect") from None


def _float(value: Any) -> float:
    # float() would fail for an integer that is larger than the largest float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise UnusableRecord("its tests have a tolerance for a value that is no number")
    return float(value)


def _floats(value: Any) -> Any:
    return [*map(_floats, value)] if isinstance(value, list | tuple) else _float(value)


class _Folder(ast.NodeTransformer):
    """Replace arithmetic with literals, ``float("inf")`` and calls such as ``list(range(3))`` by bounded values."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        one, other = (ast.literal_eval(self.visit(side)) for side in (node.left, node.right))
        if isinstance(node.op, ast.Mult) and isinstance(one, int):
            one, other = other, one
        repeats = isinstance(node.op, ast.Pow) or not isinstance(one, int | float)
        if repeats and isinstance(other, int) and len(repr(one)) * abs(other) > _FOLDED_CHARS:
            raise ValueError("too large")
        value = _ARITHMETIC[type(node.op)](one, other)
        repr(value)  # raises ValueError for an integer with too many digits for JSON text
        return ast.Constant(value)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        match node:
            case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value="inf" | "Infinity" | "infinity")]):
                return ast.Constant(math.inf)
            case ast.Call(func=ast.Name(id="list"), args=[ast.Call(func=ast.Name(id="range"), args=parts)]):
                numbers = range(*(ast.literal_eval(self.visit(part)) for part in parts))
                if len(numbers) <= _FOLDED_CHARS:
                    return ast.List([ast.Constant(number) for number in numbers])
            case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]) if name in _BUILTINS:
                return ast.Constant(_BUILTINS[name](ast.literal_eval(self.visit(inner))))
        return node


def _is_json(value: Any, *, tuples: bool) -> bool:
    if isinstance(value, list) or (tuples and isinstance(value, tuple)):
        return all(_is_json(part, tuples=tuples) for part in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(part, tuples=tuples) for key, part in value.items())
    return value is None or (isinstance(value, bool | int | float | str) and value == value)  # no NaN
