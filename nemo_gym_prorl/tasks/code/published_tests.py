# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tests in the shapes that data sets publish, made into inputs and outputs. Pure.

Published tests are untrusted: nothing of a data set is executed or unpickled. LiveCodeBench packs its private tests as
base64 of zlib of a pickle of JSON text. The pickle is read opcode by opcode, and only the opcodes that write one text
are accepted. Asserts are read from the syntax tree, and only calls with literal arguments are accepted.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.code.rows import MAX_TEST_BYTES
from nemo_gym_prorl.tasks.records import UnusableRecord, parsed


_TEXT_OPCODES = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"})
_IDLE_OPCODES = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"})
_SCAFFOLDING = (ast.Import, ast.ImportFrom, ast.Pass)


def unpacked(text: str, field: str) -> Any:
    """The tests in JSON text, or in LiveCodeBench's packed form of it.

    Raises:
        CallerError: the text is neither, or holds more than a problem may have; names the field.
    """
    if text.lstrip()[:1] in ("[", "{"):
        return _json(text, field)
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(text, validate=True), 2 * MAX_TEST_BYTES)
        if stream.unconsumed_tail:
            raise CallerError(f"unpacks to more than {2 * MAX_TEST_BYTES} bytes", field=field)
        texts = list[str]()
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in _TEXT_OPCODES:
                texts.append(str(argument))
            elif opcode.name not in _IDLE_OPCODES:
                raise CallerError(f"is a pickle of more than one text ({opcode.name})", field=field)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise CallerError(f"is neither JSON nor packed tests: {error}", field=field) from error
    if len(texts) != 1:
        raise CallerError(f"is a pickle of {len(texts)} texts, not of one", field=field)
    return _json(texts[0], field)


def of_cases(cases: Any, field: str, function: str | None = None) -> dict[str, Any]:
    """Tests from a list of objects with ``input`` and ``output`` (LiveCodeBench, DeepCoder, PrimeIntellect, open-r1).

    Args:
        cases: the objects; ``fn_name``, or ``func_name`` in ``metadata``, names the function to call.
        field: where they are.
        function: the function to call, if the cases do not say it.

    Raises:
        CallerError: it is no such list, or its cases differ in what they call; names the field.
    """
    if not isinstance(cases, list) or not all(isinstance(case, Mapping) for case in cases):
        raise CallerError("must be a list of objects with input and output", field=field)
    names = {_function_of(case) or function for case in cases}
    if len(names) > 1:
        raise CallerError("calls more than one function", field=field)
    called = next(iter(names), None)
    if called is None and any(
        case.get("type", case.get("testtype")) in ("function_call", "functional") for case in cases
    ):
        raise CallerError("names no function to call", field=field)
    tests = {"inputs": [case.get("input") for case in cases], "outputs": [case.get("output") for case in cases]}
    return tests | ({"fn_name": called} if called else {})


def of_asserts(source: str, field: str, candidates: Sequence[str] = ()) -> dict[str, Any]:
    """Tests from asserts that compare the result of a call with a value (HumanEval, MBPP, KodCode, AceCode, LeetCode).

    Args:
        source: Python; it is parsed and never run.
        field: where it is.
        candidates: names that stand for the function, the last one for its real name.

    Raises:
        CallerError: it is no Python; names the field.
        UnusableRecord: a test does more than that.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CallerError(f"is not Python: {error}", field=field) from error
    inputs, outputs, names = list[Any](), list[Any](), set[str]()
    for name, arguments, expected in _compared(tree.body, field):
        names.add(candidates[-1] if name in candidates else name)
        inputs.append(arguments)
        outputs.append(json.dumps(expected))
    if len(names) > 1:
        raise UnusableRecord("its tests call more than one function", field=field)
    if not names:
        raise UnusableRecord("its tests have no assert", field=field)
    return {"inputs": inputs, "outputs": outputs, "fn_name": names.pop()}


def as_json_text(tests: Mapping[str, Any]) -> dict[str, Any]:
    """Tests of a function with all arguments and results as JSON text, which has integers of any size."""
    inputs = [
        "\n".join(map(json.dumps, given)) if isinstance(given, list) and given else given for given in tests["inputs"]
    ]
    return {"inputs": inputs, "outputs": [_result(value) for value in tests["outputs"]], "fn_name": tests["fn_name"]}


def _result(value: Any) -> str:
    """Some sets have results as JSON text, others as values, and text that is no JSON is a value."""
    if isinstance(value, str):
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            return json.dumps(value)
        return value
    return json.dumps(value)


def _json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CallerError(f"is not JSON: {error}", field=field) from error


def _function_of(case: Mapping[str, Any]) -> str | None:
    metadata = parsed(case.get("metadata"))
    name = case.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    return str(name) if name else None


def _compared(body: Sequence[ast.stmt], field: str) -> Iterator[tuple[str, list[Any], Any]]:
    """The function, the arguments and the expected result of each assert."""
    for statement in body:
        match statement:
            case ast.FunctionDef(body=inner):
                yield from _compared(inner, field)
            case (
                ast.Assert(
                    test=ast.Compare(left=ast.Call() as call, ops=[ast.Eq() | ast.Is()], comparators=[expected])
                )
                | ast.Assert(
                    test=ast.Compare(left=expected, ops=[ast.Eq() | ast.Is()], comparators=[ast.Call() as call])
                )
            ):
                name = _called(call.func)
                if name is None or any(word.arg is None for word in call.keywords):
                    raise UnusableRecord("its tests call more than a function by its name", field=field)
                arguments = [*call.args, *(word.value for word in call.keywords)]
                yield name, [_literal(value, field, tuples=False) for value in arguments], _literal(expected, field)
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Assign(targets=[ast.Name(id="METADATA")]):  # HumanEval's
                pass
            case _ if not isinstance(statement, _SCAFFOLDING):
                raise UnusableRecord("its tests do more than compare the result of a call with a value", field=field)


def _called(function: ast.expr) -> str | None:
    """The name in ``f``, ``solution.f`` or ``Solution().f``; ``None`` for a method of anything else."""
    match function:
        case (
            ast.Name(id=name)
            | ast.Attribute(value=ast.Name(id="solution"), attr=name)
            | ast.Attribute(value=ast.Call(func=ast.Name(id="Solution"), args=[], keywords=[]), attr=name)
        ):
            return name
    return None


def _literal(node: ast.expr, field: str, *, tuples: bool = True) -> Any:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise UnusableRecord("its tests compute what they pass or expect", field=field) from None
    if not _is_json(value, tuples=tuples):
        raise UnusableRecord("its tests have values that JSON does not have", field=field)
    return value


def _is_json(value: Any, *, tuples: bool) -> bool:
    if isinstance(value, list) or (tuples and isinstance(value, tuple)):
        return all(_is_json(part, tuples=tuples) for part in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(part, tuples=tuples) for key, part in value.items())
    return value is None or isinstance(value, bool | int | float | str)
