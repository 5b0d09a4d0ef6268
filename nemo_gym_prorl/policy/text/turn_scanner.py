# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Parse the text of a sampled turn into reasoning, content and tool calls with typed arguments.

One scanner serves all formats of :mod:`.formats`. The scanner skips reasoning, finds the marker that opens a call, and
passes the text after the marker to the format's reader. Readers are pure and never raise, because policies in training
write arbitrary text.

Invariants:

- Text that is neither a call nor a dropped marker stays content, character for character. White space that is the
  only content beside calls is dropped.
- A call that cannot be parsed is still a call, with the reason in :attr:`ToolCall.malformed`. The agent answers such a
  call with an observation, so that the policy can learn from its mistake.
- A call that the token limit cut off is malformed, even if it can be parsed.
- No call is read inside reasoning. A complete call at the end of unfinished reasoning ends the reasoning, as in vLLM's
  parsers.

Formats such as Qwen3-Coder's write each parameter as bare text, so ``5`` may be a number or a string. The tool's JSON
schema decides (:class:`ToolSchemas`), as in vLLM's parsers. A parameter that is declared a string keeps its exact
text, white space included.

An engine that parses turns itself, but runs without its tool parser, returns a call as part of a final answer.
:func:`unparsed_tool_call` detects only unambiguous cases, because refusing a sample for its content biases training.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import from_json


MAX_PYTHON_CHARS = 100_000
"""Longest Python literal that is parsed; CPython's parser needs quadratic memory for some inputs."""
_MAX_DEPTH = 100  # levels of a literal, or references in a row; bounds recursion and cycles of references
_MAX_BRANCHES = 16
"""Maximum of branches that are examined on each level of a union in a schema, to bound time."""
_JSON_NAMES = {"true": True, "false": False, "null": None}
ARRAY_ITEM = "[]"  # stands for the elements of an array in a path of parameter names
_STRING = "string"
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")


def read_json(text: str) -> Any:
    """Return the value of strict JSON.

    Raises:
        ValueError: invalid JSON, nesting above 200 levels, ``NaN``, a lone surrogate, or a number of thousands of
            digits.
    """
    try:
        return from_json(text, allow_inf_nan=False)
    except TypeError as error:  # pydantic's error for a lone surrogate
        raise ValueError(str(error)) from error


def read_python(text: str) -> Any:
    """Return the value of a Python literal that JSON can express, without executing code.

    Raises:
        ValueError: the text is not such a literal, or is longer than :data:`MAX_PYTHON_CHARS`.
    """
    return python_value(parse_expression(text))


def parse_expression(text: str) -> ast.expr:
    """Return the syntax tree of one Python expression.

    Raises:
        ValueError: the text is not an expression, or is longer than :data:`MAX_PYTHON_CHARS`.
    """
    if len(text) > MAX_PYTHON_CHARS:
        raise ValueError(f"longer than {MAX_PYTHON_CHARS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the policy's invalid escapes, such as "\\d", are noise
            return ast.parse(text, mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from error


def python_value(node: ast.expr, depth: int = _MAX_DEPTH) -> Any:
    """Return the value of a literal's syntax tree; ``true``, ``false`` and ``null`` count as literals.

    Raises:
        ValueError: the node is not a literal that JSON can express.
    """
    if depth == 0:
        raise ValueError(f"nested over {_MAX_DEPTH} deep")
    match node:
        case ast.Constant(value=str() as text):
            text.encode()  # a lone surrogate raises UnicodeEncodeError, which is a ValueError
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
                raise ValueError("keys of an object must be strings")
            return {str(name): python_value(value, depth - 1) for name, value in zip(names, values, strict=True)}
        case _:
            raise ValueError(type(node).__name__)


class ToolSchemas:
    """JSON schemas of the parameters of tools (in OpenAI's chat format), by the tool's name."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._of: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function") or {}
            schema = function.get("parameters")
            self._of[str(function.get("name"))] = schema if isinstance(schema, Mapping) else {}

    def __contains__(self, name: object) -> bool:
        return name in self._of

    def types(self, tool: str, path: Sequence[str]) -> frozenset[str]:
        """Return the JSON types declared at a path below a tool's parameters; empty if none are declared."""
        root = self._of.get(tool, {})
        schema: Any = root
        for name in path:
            schema = _resolved(schema, root).get("items") if name == ARRAY_ITEM else _property(schema, name, root)
        return _types(schema, root)

    def typed(self, tool: str, path: Sequence[str], text: str) -> Any:
        """Convert the bare text at a path below a tool's parameters to its declared type.

        Strings keep their text. Other types are read as JSON or as a Python literal (templates write ``True``). Text
        that fits no declared type stays text, so that the tool rejects it. An undeclared parameter is read as JSON if
        possible.
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
    properties = _resolved(schema, root).get("properties")
    return (properties.get(name) if isinstance(properties, Mapping) else None) or {}


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow a schema's local ``$ref``; ``{}`` if the reference cannot be resolved."""
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
    """Return the JSON types that a schema allows, through ``depth`` levels of unions; empty if it allows any type."""
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


MALFORMED_NAME = "malformed_tool_call"
CUT = "the token limit cut it off"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call.

    Attributes:
        name: name of the function; :data:`MALFORMED_NAME` if the text names none.
        arguments: a JSON object as text, or the original text of malformed arguments.
        malformed: why the call cannot be executed; ``None`` for a valid call.
        id: the call's id as the policy wrote it; ``None`` if the format has no ids.
    """

    name: str
    arguments: str
    malformed: str | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed assistant turn; ``reasoning`` is ``None`` if the turn has no reasoning block."""

    reasoning: str | None
    content: str
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class ReaderResult:
    """Result of a reader for the text after a call's opening marker.

    Attributes:
        calls: the calls; empty if the text is not a call.
        end: index after the last call.
        closed: whether the format's closing marker follows the last call; true for a format without such a marker.
        unterminated: whether the text ends within the arguments, so that apparent further calls may be arguments.
    """

    calls: list[ToolCall]
    end: int
    closed: bool = True
    unterminated: bool = False


type Reader = Callable[[str, re.Match[str], ToolSchemas], ReaderResult]
"""Function that reads the calls after an opening marker, from the turn's text, the marker's match and the schemas."""


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """Turn format of one or several model families.

    Attributes:
        opens: pattern of a call's opening marker; a group ``name`` may hold the function's name.
        read: reader of the text after the marker.
        think: the opening and the closing marker of reasoning.
        dropped_markers: pattern of markers that are removed from the content, such as those around an answer.
        call_id_pattern: pattern of call ids that the policy writes and that the template expects back.
        unmarked: whether calls may have no marker, so that a call cannot end reasoning.
        split: function that splits a whole turn into reasoning, content and calls; replaces all other attributes.
    """

    opens: re.Pattern[str]
    read: Reader
    think: tuple[str, str] = ("<think>", "</think>")
    dropped_markers: re.Pattern[str] | None = None
    call_id_pattern: re.Pattern[str] | None = None
    unmarked: bool = False
    split: Callable[[str], tuple[str | None, str, ReaderResult]] | None = None


def parse(
    text: str,
    form: TurnFormat,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    reads_reasoning: bool = True,
    in_reasoning: bool = False,
    calls: bool = True,
    cut: bool = False,
) -> Parsed:
    """Parse a turn's text into reasoning, content and tool calls.

    Args:
        text: the policy's text, without the end-of-turn token.
        form: format of the model family.
        tools: the offered tools in OpenAI's chat format, whose schemas type bare parameters.
        reads_reasoning: whether leading reasoning is separated from the content.
        in_reasoning: whether the prompt already opened the reasoning.
        calls: whether calls are read; otherwise they stay content, or are dropped by a format with ``split``.
        cut: whether the token limit ended the turn.
    """
    if form.split is not None:
        reasoning, content, found = form.split(text)
        complete = _cut(found.calls, found.closed or not cut) if calls else []
        return Parsed(reasoning, content, tuple(_with_own_ids(complete, None)))
    schemas = ToolSchemas(tools)
    reasoning, rest = _split_reasoning(text, form, in_reasoning=in_reasoning) if reads_reasoning else (None, text)
    if calls and reasoning is not None and not rest and not cut and not form.unmarked:
        reasoning, rest = _ended_by_call(reasoning, form, schemas)
    content, read = _scan(rest, form, schemas, reads_reasoning=reads_reasoning, cut=cut) if calls else (rest, [])
    if form.dropped_markers is not None:
        content = form.dropped_markers.sub("", content)
    if read and not content.strip():
        content = ""
    return Parsed(reasoning, content, tuple(_with_own_ids(read, form.call_id_pattern)))


def _split_reasoning(text: str, form: TurnFormat, *, in_reasoning: bool = False) -> tuple[str | None, str]:
    """Return a text's leading reasoning (``None`` without any), and the rest, empty if the reasoning is unfinished."""
    opening, closing = form.think
    body = text if in_reasoning else text.lstrip()
    if not in_reasoning and body.startswith(closing):
        return "", body.removeprefix(closing)  # some models close reasoning without opening it
    if not (in_reasoning or body.startswith(opening)):
        return None, text
    reasoning, _, rest = body.removeprefix(opening).partition(closing)
    return reasoning, rest


def _ended_by_call(reasoning: str, form: TurnFormat, schemas: ToolSchemas) -> tuple[str, str]:
    """Split unfinished reasoning before the complete calls at its end; the second part is empty without such calls."""
    opening = form.opens.search(reasoning)
    if opening is None or not opening[0].strip():
        return reasoning, ""
    content, calls = _scan(reasoning[opening.start() :], form, schemas, reads_reasoning=False, cut=True)
    complete = calls and not content.strip() and not any(call.malformed for call in calls)
    return (reasoning[: opening.start()], reasoning[opening.start() :]) if complete else (reasoning, "")


def _scan(
    text: str, form: TurnFormat, schemas: ToolSchemas, *, reads_reasoning: bool, cut: bool
) -> tuple[str, list[ToolCall]]:
    content: list[str] = []
    calls: list[ToolCall] = []
    closed, at, start = True, 0, -1
    while (opening := form.opens.search(text, at)) is not None:
        if reads_reasoning and start < at:
            start = text.find(form.think[0], at)
            start = len(text) if start < 0 else start
        if reads_reasoning and start < opening.start():
            end = text.find(form.think[1], start)
            end = len(text) if end < 0 else end + len(form.think[1])
            content.append(text[at:end])
            at = end
            continue
        found = form.read(text, opening, schemas)
        end = max(found.end, opening.end(), opening.start() + 1)
        if cut and found.unterminated:
            end = len(text)
        content.append(text[at : opening.start() if found.calls else end])
        calls += found.calls
        if found.calls:
            closed = found.closed and not found.unterminated
        at = end
    content.append(text[at:])
    return "".join(content), _cut(calls, closed or not cut)


def _cut(calls: list[ToolCall], complete: bool) -> list[ToolCall]:
    """Return the calls; unless ``complete``, the last call becomes malformed and loses its final brace."""
    if complete or not calls:
        return calls
    *others, last = calls
    if last.malformed is None:
        last = replace(last, malformed=CUT, arguments=last.arguments.removesuffix("}"))
    return [*others, last]


def _with_own_ids(calls: Sequence[ToolCall], pattern: re.Pattern[str] | None) -> list[ToolCall]:
    """Return the calls, keeping only ids that match the pattern and are unique in the turn."""
    known: set[str] = set()
    kept = []
    for call in calls:
        good = pattern is not None and call.id is not None and pattern.fullmatch(call.id) and call.id not in known
        known.add(call.id or "")
        kept.append(call if good else replace(call, id=None))
    return kept


def parsed_by_engine(message: Mapping[str, Any]) -> Parsed:
    """Return a turn that the engine already parsed into OpenAI's chat format."""
    calls = []
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"].get("name"), call["function"].get("arguments", "")
        calls.append(replace(as_call(name, arguments, str(arguments)), id=call.get("id")))
    content = message.get("content") or ""
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning is None and content.lstrip().startswith("<think>"):
        reasoning, _, content = content.lstrip().removeprefix("<think>").partition("</think>")
    return Parsed(reasoning, content, tuple(calls))


def as_call(name: object, arguments: object, raw: str, own_id: object = None) -> ToolCall:
    """Return a call; malformed without a name, or if ``arguments`` is neither an object nor JSON text of an object.

    A malformed call keeps textual ``arguments`` if it has a name; otherwise its arguments are ``raw``.
    """
    own = own_id if isinstance(own_id, str) else None
    if not isinstance(name, str) or not name:
        return ToolCall(MALFORMED_NAME, raw, "it names no function", own)
    text = arguments if isinstance(arguments, str) else None
    if text is not None:
        raw = text
        try:
            arguments = read_json(text)
        except ValueError as error:
            return ToolCall(name, text, f"its arguments are not JSON: {error}", own)
    if not isinstance(arguments, dict):
        return ToolCall(name, raw, "its arguments are not a JSON object", own)
    try:
        encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        encoded.encode()
    except ValueError:
        return ToolCall(name, raw, "its arguments hold a number that is too large, or half a character", own)
    # Textual arguments stay unchanged: an engine that renders history must see its own text.
    return ToolCall(name, text if text is not None else encoded, None, own)


_QUOTED = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


def unparsed_tool_call(content: str, form: TurnFormat, tools: Collection[str]) -> str | None:
    """Return the name of the first tool that is called at the end of a text; ``None`` without an unambiguous call.

    Malformed calls and calls of tools besides ``tools`` are the policy's mistakes, which engines leave in the text as
    well. A call in a code block, or before other text, is quoted and not meant as a call.
    """
    plain = _QUOTED.sub("", content)
    found, quoted_too = parse(plain, form, reads_reasoning=False), parse(content, form, reads_reasoning=False).calls
    rest, calls = found.content, found.calls
    if not calls or any(call.malformed or call.name not in tools for call in (*calls, *quoted_too)):
        return None  # engines leave all calls of a turn in the text if any call cannot be parsed
    if "<tool_call>{" in "".join(plain.split()) and plain.count('"arguments"') < len(calls):
        return None  # engines require the key "arguments", the readers of this package do not
    return calls[0].name if plain.startswith(rest.rstrip()) else None
