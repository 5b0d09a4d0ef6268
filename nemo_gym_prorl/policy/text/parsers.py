# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Text of a sampled turn to thought, content and tool calls, whose arguments are typed by the tools' schemas.

One scanner serves all formats of :mod:`.formats`: it skips thoughts, finds the marker that opens a call, and hands the
text behind it to the format's reader. Readers are pure and never raise, since policies in training write anything.

Invariants:

- Text that is no call stays content, character for character.
- A call that cannot be understood is still a call, with the reason in :attr:`ToolCall.malformed`. The agent answers
  such a call with an observation, and the policy learns from that.
- A call that the token limit cut off is malformed, however much of it can be read.
- No call is read from inside a thought. A complete call at the end of an unfinished thought ends the thought, as in
  vLLM's parsers.

Formats such as Qwen3-Coder's write each parameter as bare text, so ``5`` may be a number or a string. The tool's JSON
schema decides (:class:`ToolSchemas`), as in vLLM's parsers: a parameter that is declared a string stays the text that
the policy wrote, white space included.

An engine that takes turns apart itself, but runs without its tool parser, reports a call as a final answer.
:func:`unparsed_tool_call` recognises one only beyond doubt: to refuse a sample for what it says would bias training.
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


MALFORMED_NAME = "malformed_tool_call"
"""Function name of a call that does not say which function it means."""
CUT = "the token limit cut it off"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call.

    Attributes:
        name: the function; :data:`MALFORMED_NAME` if the text names none.
        arguments: a JSON object as text, or the text as written if it is none.
        malformed: why the call cannot be carried out; ``None`` for a good one.
        id: the call's id, where the format has one.
    """

    name: str
    arguments: str
    malformed: str | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """One assistant turn, taken apart."""

    thought: str | None
    content: str
    calls: tuple[ToolCall, ...]

    @property
    def malformed(self) -> bool:
        return any(call.malformed for call in self.calls)


@dataclass(frozen=True, slots=True)
class Found:
    """What a reader made of the text behind a call's opening marker.

    Attributes:
        calls: the calls; empty if the text is no call after all.
        end: index behind the last of them.
        closed: whether the text closes the last call with the format's own marker.
        runs_out: the text ends within the arguments, so that what looks like further calls may be part of them.
    """

    calls: list[ToolCall]
    end: int
    closed: bool = True
    runs_out: bool = False


type Reader = Callable[[str, re.Match[str], ToolSchemas], Found]
"""Reads the calls behind an opening marker, which is the match."""


@dataclass(frozen=True, slots=True)
class Format:
    """How one or several model families write a turn.

    Attributes:
        opens: matches what opens a call; a group ``name`` may hold the function's name.
        read: reads what follows.
        think: the markers around a thought.
        sheds: matches markers that are no part of the content, such as those around an answer.
        own_ids: matches ids that the policy gives its calls and that its template wants back.
        unmarked: calls have no marker of their own, so none ends a thought.
        split: takes a turn apart into thought, content and calls in its own way; replaces all of the above.
    """

    opens: re.Pattern[str]
    read: Reader
    think: tuple[str, str] = ("<think>", "</think>")
    sheds: re.Pattern[str] | None = None
    own_ids: re.Pattern[str] | None = None
    unmarked: bool = False
    split: Callable[[str], tuple[str | None, str, Found]] | None = None


def parse(
    text: str,
    form: Format,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    thoughts: bool = True,
    in_thought: bool = False,
    calls: bool = True,
    cut: bool = False,
) -> Parsed:
    """Take a turn apart.

    Args:
        text: what the policy wrote, without the end-of-turn token.
        form: how its family writes.
        tools: the offered tools in OpenAI's chat format, whose schemas type bare parameters.
        thoughts: whether a thought at the beginning is taken as one.
        in_thought: the prompt had already opened the thought.
        calls: whether calls are read; else they stay content.
        cut: the token limit ended the turn.
    """
    if form.split is not None:
        own_thought, said, found = form.split(text)
        whole = _cut(found.calls, found.closed or not cut) if calls else []
        return Parsed(own_thought, said, tuple(_with_own_ids(whole, None)))
    schemas = ToolSchemas(tools)
    thought, rest = _split_thought(text, form, in_thought=in_thought) if thoughts else (None, text)
    if calls and thought is not None and not rest and not cut and not form.unmarked:
        thought, rest = _ended_by_call(thought, form, schemas)
    content, read = _scan(rest, form, schemas, thoughts=thoughts, cut=cut) if calls else (rest, [])
    if form.sheds is not None:
        content = form.sheds.sub("", content)
    if read and not content.strip():
        content = ""
    return Parsed(thought, content, tuple(_with_own_ids(read, form.own_ids)))


def _split_thought(text: str, form: Format, *, in_thought: bool = False) -> tuple[str | None, str]:
    """The thought with which a text begins, and the rest. An unfinished thought is all of the text."""
    opening, closing = form.think
    body = text if in_thought else text.lstrip()
    if not in_thought and body.startswith(closing):
        return "", body.removeprefix(closing)  # some models close a thought that they do not begin
    if not (in_thought or body.startswith(opening)):
        return None, text
    thought, _, rest = body.removeprefix(opening).partition(closing)
    return thought, rest


def _ended_by_call(thought: str, form: Format, schemas: ToolSchemas) -> tuple[str, str]:
    """An unfinished thought without the complete calls at its end, and those."""
    opening = form.opens.search(thought)
    if opening is None or not opening[0].strip():
        return thought, ""
    content, calls = _scan(thought[opening.start() :], form, schemas, thoughts=False, cut=True)
    whole = calls and not content.strip() and not any(call.malformed for call in calls)
    return (thought[: opening.start()], thought[opening.start() :]) if whole else (thought, "")


def _scan(text: str, form: Format, schemas: ToolSchemas, *, thoughts: bool, cut: bool) -> tuple[str, list[ToolCall]]:
    """The content and the calls of a text behind its thought."""
    content: list[str] = []
    calls: list[ToolCall] = []
    closed, at, start = True, 0, -1
    while (opening := form.opens.search(text, at)) is not None:
        if thoughts and start < at:
            start = text.find(form.think[0], at)
            start = len(text) if start < 0 else start
        if thoughts and start < opening.start():
            end = text.find(form.think[1], start)
            end = len(text) if end < 0 else end + len(form.think[1])
            content.append(text[at:end])
            at = end
            continue
        found = form.read(text, opening, schemas)
        end = max(found.end, opening.end(), opening.start() + 1)
        if cut and found.runs_out:
            end = len(text)
        content.append(text[at : opening.start() if found.calls else end])
        calls += found.calls
        if found.calls:
            closed = found.closed and not found.runs_out
        at = end
    content.append(text[at:])
    return "".join(content), _cut(calls, closed or not cut)


def _cut(calls: list[ToolCall], whole: bool) -> list[ToolCall]:
    """The calls, of which the last is malformed, with an unfinished object as its arguments, unless it is whole."""
    if whole or not calls:
        return calls
    *others, last = calls
    if last.malformed is None:
        last = replace(last, malformed=CUT, arguments=last.arguments.removesuffix("}"))
    return [*others, last]


def _with_own_ids(calls: Sequence[ToolCall], pattern: re.Pattern[str] | None) -> list[ToolCall]:
    """The calls with the ids that the policy gave them, where these match the pattern and are unique in the turn."""
    known: set[str] = set()
    kept = []
    for call in calls:
        good = pattern is not None and call.id is not None and pattern.fullmatch(call.id) and call.id not in known
        known.add(call.id or "")
        kept.append(call if good else replace(call, id=None))
    return kept


def parsed_by_engine(message: Mapping[str, Any]) -> Parsed:
    """A turn that the engine has already taken apart, in OpenAI's chat format."""
    calls = []
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"].get("name"), call["function"].get("arguments", "")
        calls.append(replace(as_call(name, arguments, str(arguments)), id=call.get("id")))
    content = message.get("content") or ""
    thought = message.get("reasoning") or message.get("reasoning_content")
    if thought is None and content.lstrip().startswith("<think>"):
        thought, _, content = content.lstrip().removeprefix("<think>").partition("</think>")
    return Parsed(thought, content, tuple(calls))


def as_call(name: object, arguments: object, raw: str, own_id: object = None) -> ToolCall:
    """Return a call of parsed JSON, or of arguments that still are JSON text, with the reason if it is none."""
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
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()
    except ValueError:
        return ToolCall(name, raw, "its arguments hold a number that is too large, or half a character", own)
    # Arguments that came as text stay as they are: an engine that renders history must see what it wrote.
    return ToolCall(name, text if text is not None else written, None, own)


_QUOTED = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


def unparsed_tool_call(content: str, form: Format, tools: Collection[str]) -> str | None:
    """The tool that the end of a text calls, if it does so beyond doubt.

    Calls that are malformed are the policy's mistake, which engines leave in the text as well; so are those of tools
    that nobody offered. What is in a block of code, or has text behind it, is talk about a call.

    Args:
        content: of a turn that is said to be final, without its thought.
        form: how the model writes calls.
        tools: names of those that were offered.
    """
    plain = _QUOTED.sub("", content)
    found, quoted_too = parse(plain, form, thoughts=False), parse(content, form, thoughts=False).calls
    rest, calls = found.content, found.calls
    if not calls or any(call.malformed or call.name not in tools for call in (*calls, *quoted_too)):
        return None  # engines leave all calls of a turn in its text for the sake of one that they can't read
    if "<tool_call>{" in "".join(plain.split()) and plain.count('"arguments"') < len(calls):
        return None  # engines insist on the key, and we don't
    return calls[0].name if plain.startswith(rest.rstrip()) else None
