# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Argument values of tool calls: JSON, Python literals, and bare text typed by the tool's schema.

Formats such as Qwen3-Coder's write each parameter as bare text, so ``5`` may be a number or a string. The tool's JSON
schema decides (:class:`ToolSchemas`), as in vLLM's parsers: a parameter that is declared a string stays the text that
the policy wrote, white space included.

All functions are pure, and raise nothing but :class:`ValueError` for any text.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json


MAX_PYTHON_CHARS = 100_000
"""Longest Python literal that is read; Python's own parser needs quadratic memory for some inputs."""
_MAX_DEPTH = 100
_MAX_BRANCHES = 16
"""Branches of a union that are looked at on each of its levels, so that a schema cannot take long."""
_JSON_NAMES = {"true": True, "false": False, "null": None}
ITEM = "[]"
_STRING = "string"
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")


def read_json(text: str) -> Any:
    """Return the value of strict JSON.

    Raises:
        ValueError: the text is no JSON, is nested deeper than 200 levels, or holds ``NaN``, half a surrogate pair or a
            number of thousands of digits.
    """
    try:
        return from_json(text, allow_inf_nan=False)
    except TypeError as error:  # half a surrogate pair in the text itself
        raise ValueError(str(error)) from error


def read_python(text: str) -> Any:
    """Return the value of a Python literal that JSON can express; nothing is executed.

    Raises:
        ValueError: the text is anything else, or longer than :data:`MAX_PYTHON_CHARS`.
    """
    return python_value(parse_expression(text))


def parse_expression(text: str) -> ast.expr:
    """Return the syntax tree of one Python expression.

    Raises:
        ValueError: the text is none, or longer than :data:`MAX_PYTHON_CHARS`.
    """
    if len(text) > MAX_PYTHON_CHARS:
        raise ValueError(f"longer than {MAX_PYTHON_CHARS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes such as "\\d" are the policy's, not our log's
            return ast.parse(text, mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from error


def python_value(node: ast.expr, depth: int = _MAX_DEPTH) -> Any:
    """Return the value of a literal's syntax tree; ``true``, ``false`` and ``null`` count as literals.

    Raises:
        ValueError: the node is no literal that JSON can express.
    """
    if depth == 0:
        raise ValueError(f"nested over {_MAX_DEPTH} deep")
    match node:
        case ast.Constant(value=str() as text):
            text.encode()  # half a surrogate pair is a UnicodeEncodeError, which is a ValueError
            return text
        case ast.Constant(value=bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=(int() | float()) as number)):
            return -number
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [python_value(part, depth - 1) for part in parts]
        case ast.Dict(keys=keys, values=values):
            names = [python_value(key, depth - 1) if key else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("the keys of an object must be texts")
            return {str(name): python_value(value, depth - 1) for name, value in zip(names, values, strict=True)}
        case _:
            raise ValueError(type(node).__name__)


class ToolSchemas:
    """JSON schemas of the parameters of the offered tools, by tool and parameter name.

    Args:
        tools: tools in OpenAI's chat format.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._of: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function") or {}
            schema = function.get("parameters")
            self._of[str(function.get("name"))] = schema if isinstance(schema, Mapping) else {}

    def __contains__(self, name: object) -> bool:
        return name in self._of

    def types(self, tool: str, path: Sequence[str]) -> frozenset[str]:
        """Return the JSON types declared at a path below a tool's parameters (:data:`ITEM` for an array's elements).

        Empty where none is declared.
        """
        root = self._of.get(tool, {})
        schema: Any = root
        for name in path:
            schema = _resolved(schema, root).get("items") if name == ITEM else _property(schema, name, root)
        return _types(schema, root)

    def typed(self, tool: str, path: Sequence[str], text: str) -> Any:
        """Return the bare text at a path below a tool's parameters as a value of its declared type.

        A string stays as written. Any other type is read as JSON or as a Python literal (templates write ``True``).
        Text that fits no declared type stays text, for the tool to refuse. An undeclared parameter is JSON where
        possible, else text.
        """
        types = self.types(tool, path)
        if types and types <= {_STRING, "null"}:
            return None if "null" in types and text.strip() in ("null", "None") else text
        for read in (read_json, read_python) if types else (read_json,):
            try:
                value = read(text.strip())
            except ValueError:
                continue
            if not types or (_types_of(value) & types and not isinstance(value, str)):
                return value
        return text


def _property(schema: Any, name: str, root: Mapping[str, Any]) -> Any:
    """The schema of one property of an object schema; ``{}`` where there is none."""
    properties = _resolved(schema, root).get("properties")
    return (properties.get(name) if isinstance(properties, Mapping) else None) or {}


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema behind its local ``$ref``; ``{}`` for one that cannot be followed."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for name in reference.removeprefix("#/").split("/"):
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return {}


def _types(schema: Any, root: Mapping[str, Any], depth: int = 3) -> frozenset[str]:
    """All JSON types that a schema declares, through unions, constants and references; empty for any type."""
    schema = _resolved(schema, root)
    declared = schema.get("type")
    listed = declared if isinstance(declared, list) else [declared]
    found = {kind for kind in listed if isinstance(kind, str)}
    if not found:
        enum = schema.get("enum")
        constants = [*(enum if isinstance(enum, list) else ()), *([schema["const"]] if "const" in schema else ())]
        found = {kind for constant in constants for kind in _types_of(constant)}
    for name in _ALTERNATIVES:
        branches = schema.get(name)
        if not found and isinstance(branches, list) and depth:
            parts = [_types(branch, root, depth - 1) for branch in branches[:_MAX_BRANCHES]]
            found |= frozenset().union(*parts) if all(parts) or name == "allOf" else set()
    return frozenset(found)


def _types_of(value: object) -> frozenset[str]:
    match value:
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", *(("integer",) if value.is_integer() else ())})
        case str():
            return frozenset({_STRING})
        case None:
            return frozenset({"null"})
        case list():
            return frozenset({"array"})
        case _:
            return frozenset({"object"})
