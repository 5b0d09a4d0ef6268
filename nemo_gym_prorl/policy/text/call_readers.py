# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Readers of tool calls in JSON, tagged parameters, nested elements, Python, and Gemma's and Harmony's notations.

Public functions return a :data:`~nemo_gym_prorl.policy.text.turn_scanner.Reader`, except :func:`harmony`, which splits
a whole turn. :mod:`.formats` combines readers with opening markers. Readers run in time linear in the text, because
the text is untrusted.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

from nemo_gym_prorl.policy.text.turn_scanner import (
    ARRAY_ITEM,
    MALFORMED_NAME,
    Reader,
    ReaderResult,
    ToolCall,
    ToolSchemas,
    as_call,
    parse_expression,
    python_value,
    read_json,
)


_NAME = re.compile(r"[\w.:/-]+")
_MAX_DEPTH = 100  # nesting levels of a value; recursive readers would otherwise meet Python's recursion limit
_DECODER = json.JSONDecoder(strict=False)
_BETWEEN = re.compile(r"[\s;,]*")


def _skip(text: str, at: int) -> int:
    """Return the first index from ``at`` on that holds neither white space, ``;`` nor ``,``."""
    found = _BETWEEN.match(text, at)
    return found.end() if found else at


def _json_end(text: str, at: int) -> int | None:
    """Return the index after the JSON value at ``at``; -1 if the text is cut off before the end of the value; ``None``
    for other invalid JSON, for a literal that is cut off (``tru``), and for excessive nesting."""
    try:
        return _DECODER.raw_decode(text, at)[1]
    except json.JSONDecodeError as error:
        return -1 if error.msg.startswith("Unterminated string") or error.pos >= len(text) else None
    except (ValueError, RecursionError):
        return None


def _object_call(value: object, raw: str) -> ToolCall:
    if not isinstance(value, dict):
        return ToolCall(MALFORMED_NAME, raw, "it is not a JSON object")
    if len(value) == 1 and not value.keys() & {"name", "tool_name", "arguments", "parameters"}:
        return as_call(*next(iter(value.items())), raw)  # Apertus writes {"NAME": {ARGUMENTS}}
    name = value.get("name", value.get("tool_name"))
    return as_call(name, value.get("arguments", value.get("parameters", {})), raw, value.get("id"))


def _json_calls(raw: str) -> list[ToolCall]:
    """Return the calls in JSON text: an object, or a list of objects. Invalid JSON becomes one malformed call."""
    try:
        value = read_json(raw)
    except ValueError as error:
        name = re.search(r'"(?:tool_)?name"\s*:\s*"([^"]+)"', raw)
        return [ToolCall(name[1] if name else MALFORMED_NAME, raw, f"it is not JSON: {error}")]
    if not isinstance(value, list):
        return [_object_call(value, raw)]
    return [_object_call(one, json.dumps(one, ensure_ascii=False)) for one in value]


def json_until(closing: str = "") -> Reader:
    """Return a reader of JSON objects, or of lists of objects, up to a closing marker.

    Without ``closing`` the calls end with the last JSON value. A closing marker inside a JSON string is ignored.
    """

    def read(text: str, opening: re.Match[str], schemas: ToolSchemas) -> ReaderResult:
        calls: list[ToolCall] = []
        at = end = _skip(text, opening.end())
        unterminated = False
        continuations = (closing, "{", "[", opening[0] or "\0")
        while not calls or text.startswith(("{", "["), at):
            start, ends = at, _json_end(text, at)
            unterminated, ends = unterminated or ends == -1, None if ends == -1 else ends
            end = at = len(text) if ends is None else ends
            at = _skip(text, at)
            if ends is None or (closing and at < len(text) and not text.startswith(continuations, at)):
                # Invalid JSON, or text after a value: the calls end at the next closing marker, or with the turn.
                marker = text.find(closing, start if ends is None else at) if closing else -1
                end = at = len(text) if marker < 0 else marker
            calls += _json_calls(text[start:end].strip())
        if closing and text.startswith(closing, at):
            return ReaderResult(calls, at + len(closing), unterminated=unterminated)
        reopened = bool(opening[0]) and text.startswith(opening[0], at)
        return ReaderResult(calls, at if closing else end, closed=reopened or not closing, unterminated=unterminated)

    return read


def named_json(head: str = "", closing: str = "", fence: str = "") -> Reader:
    """Return a reader of a function's name, its arguments as JSON, and a closing marker.

    Args:
        head: pattern between the opening marker and the arguments, with the group ``name`` and optionally ``id``;
            empty if the opening marker holds the name.
        closing: pattern of a call's end; empty if the last brace of the arguments ends the call.
        fence: optional pattern between the arguments and the closing marker.
    """
    headed = re.compile(head, re.DOTALL)
    closes, closer = re.compile(rf"\s*+(?:{fence}\s*+)?(?:{closing})"), re.compile(closing)

    def read(text: str, opening: re.Match[str], schemas: ToolSchemas) -> ReaderResult:
        about = headed.match(text, opening.end())
        groups = opening.groupdict() | (about.groupdict() if about else {})
        own = (groups.get("id") or "").strip()
        name = (groups.get("name") or own.removeprefix("functions.").partition(":")[0]).strip()
        at = about.end() if about else opening.end()
        end = _json_end(text, at)
        unterminated, end = end == -1, None if end == -1 else end
        closed = closes.match(text, end) if end is not None else None
        if end is None or closed is None:
            later = closer.search(text, at) if closing else None
            if later is not None or end is None or text[end:].strip():
                end = later.start() if later else len(text)
            closed = later
        raw = text[at:end].strip()
        call = as_call(name if _NAME.fullmatch(name) else None, raw, raw, own or None)
        return ReaderResult([call], closed.end() if closed and closing else end, closed is not None, unterminated)

    return read


@dataclass(frozen=True, slots=True)
class ParameterTags:
    """Patterns of the tags after a call's opening tag.

    Attributes:
        parameter: a parameter's opening tag, with the group ``key`` and optionally ``kind``: ``true`` or ``string``
            for text, another value for JSON.
        value_end: a parameter's closing tag.
        call_end: a call's closing tag.
        block_end: closing tag of a block of calls; the default matches nothing.
        lines: whether one line break at either end of a value belongs to the tags.
        cdata: whether a value may be a CDATA section.
    """

    parameter: str
    value_end: str
    call_end: str
    block_end: str = r"(?!)"
    lines: bool = False
    cdata: bool = False


_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)


def tagged(tags: ParameterTags) -> Reader:
    """Return a reader of bare parameters, typed by the tool's schema unless their tags declare the type.

    A value may contain its own closing tag, as an XML file may. The value ends at the first closing tag that is
    followed by another tag or by the end of the turn.
    """
    unnamed = re.sub(r"\(\?P<\w+>", "(?:", tags.parameter)
    tag, boundary = re.compile(rf"\s*(?:{tags.parameter})"), re.compile(rf"(?P<end>{tags.value_end})|{unnamed}")
    closes = re.compile(rf"\s*(?:(?:{tags.call_end})(?:\s*(?:{tags.block_end}))?|(?:{tags.block_end}))")
    follows = re.compile(rf"\s*(?:{unnamed}|{tags.call_end}|{tags.block_end}|\Z)")
    stop = re.compile(rf"{unnamed}|{tags.call_end}|{tags.block_end}")

    def value_of(text: str, at: int) -> tuple[str, int] | None:
        """Return the bare value at ``at`` and the index after its closing tag; ``None`` if no tag ends the value."""
        first: re.Match[str] | None = None
        for found in boundary.finditer(text, at):
            if found["end"] is None:
                first = first or found  # the value ends at its first closing tag, or without one at this opening tag
                return text[at : first.start()], first.end() if first["end"] is not None else first.start()
            if follows.match(text, found.end()):
                return text[at : found.start()], found.end()
            first = first or found
        return (text[at : first.start()], first.end()) if first else None

    def read(text: str, opening: re.Match[str], schemas: ToolSchemas) -> ReaderResult:
        name = (opening.groupdict().get("name") or "").strip()
        arguments: dict[str, Any] = {}
        at, garbage, unclosed = opening.end(), False, ""
        while (end := closes.match(text, at)) is None and at < len(text):
            if (found := tag.match(text, at)) is not None:
                key, kind = found["key"].strip(), found.groupdict().get("kind")
                value = value_of(text, found.end())
                if value is None:
                    unclosed, at = f"it ends within the parameter {key!r}", len(text)
                    break
                bare, at = value
                arguments[key] = _typed(bare, kind, schemas, name, key, tags)
                continue
            next_tag = stop.search(text, at)
            to = next_tag.start() if next_tag else len(text)
            garbage, at = garbage or bool(text[at:to].strip()), to
        raw = text[opening.start() : at].strip()
        if not _NAME.fullmatch(name):
            call = ToolCall(MALFORMED_NAME, raw, "it names no function")
        elif unclosed or (garbage and not arguments):
            call = ToolCall(name, raw, unclosed or "there is text where its parameters should be")
        else:
            call = as_call(name, arguments, raw)
        return ReaderResult([call], end.end() if end else at, end is not None)

    return read


def _typed(bare: str, kind: str | None, schemas: ToolSchemas, name: str, key: str, tags: ParameterTags) -> Any:
    if tags.lines:
        bare = bare.removeprefix("\n").removesuffix("\n")
    if tags.cdata and (quoted := _CDATA.fullmatch(bare)) is not None:
        bare = quoted[1]
    if kind in ("true", "string"):
        return bare
    if kind is not None:
        try:
            return read_json(bare)
        except ValueError:
            return bare
    return schemas.typed(name, [key], bare)


def elements(mark: str, call_end: str, block_end: str) -> Reader:
    """Return a reader of arguments that are written as nested XML-like elements (MiniMax M3).

    An element with child elements is an array if the tool's schema declares an array or the first child is named
    ``item``, else an object.

    Args:
        mark: text before each tag.
        call_end: closing tag of a call.
        block_end: closing tag of a block of calls, which may be missing.
    """
    opens = re.compile(re.escape(mark) + r"<([^/<>\s][^<>]*)>")
    space, closes = (
        re.compile(r"\s*"),
        re.compile(rf"\s*{re.escape(mark)}{call_end}(?:\s*{re.escape(mark)}{block_end})?"),
    )

    def element(text: str, at: int, schemas: ToolSchemas, tool: str, path: list[str]) -> tuple[Any, int]:
        """Return the value of the element whose opening tag ends at ``at``, and the index after its closing tag."""
        if len(path) > _MAX_DEPTH:
            raise ValueError(f"nested over {_MAX_DEPTH} deep")
        name = path[-1] if path[-1] != ARRAY_ITEM else "item"
        inner = opens.match(text, space.match(text, at).end())  # type: ignore[union-attr]
        if inner is None:
            end = text.find(mark, at)
            bare, end = text[at:end], end
            kinds = schemas.types(tool, path)
            value: Any = (
                {"array": [], "object": {}}.get(next(iter(kinds), ""), "") if not bare and len(kinds) == 1 else None
            )
            value = value if value is not None else schemas.typed(tool, path, bare)
        else:
            array = "array" in schemas.types(tool, path) or inner[1] == "item"
            items: list[Any] = []
            fields: dict[str, Any] = {}
            end = inner.start()
            while (inner := opens.match(text, space.match(text, end).end())) is not None:  # type: ignore[union-attr]
                one, end = element(text, inner.end(), schemas, tool, [*path, ARRAY_ITEM if array else inner[1]])
                items.append(one)
                fields[inner[1]] = one
            end = space.match(text, end).end()  # type: ignore[union-attr]
            value = items if array else fields
        close = f"{mark}</{name}>"
        if end < 0 or not text.startswith(close, end):
            raise ValueError(f"the element {name!r} is not closed")
        return value, end + len(close)

    def read(text: str, opening: re.Match[str], schemas: ToolSchemas) -> ReaderResult:
        name, at = opening["name"].strip(), opening.end()
        arguments: dict[str, Any] = {}
        try:
            while (found := opens.match(text, space.match(text, at).end())) is not None:  # type: ignore[union-attr]
                arguments[found[1]], at = element(text, found.end(), schemas, name, [found[1]])
        except ValueError as error:
            later = text.find(f"{mark}{call_end}", at)
            end = len(text) if later < 0 else later + len(mark) + len(call_end)
            return ReaderResult([ToolCall(name, text[opening.start() : end], str(error))], end, later >= 0)
        closed = closes.match(text, at)
        call = as_call(name, arguments, text[opening.start() : at])
        return ReaderResult([call], closed.end() if closed else at, closed is not None)

    return read


def python_list(closing: str = "") -> Reader:
    """Return a reader of ``[f(a=1), g(b="x")]`` up to a closing marker or the end of the turn. No code is executed."""

    def read(text: str, opening: re.Match[str], schemas: ToolSchemas) -> ReaderResult:
        end = text.find(closing, opening.end()) if closing else -1
        closed = end >= 0
        end = end if closed else len(text)
        body = text[opening.end() if closing else opening.start() : end].strip()
        if not closing:
            for marker in ("<|python_tag|>", "<|python_start|>"):
                body = body.removeprefix(marker).removesuffix("<|python_end|>").strip()
        return ReaderResult(_python_calls(body), end + len(closing) if closed else end, closed or not closing)

    return read


def _python_calls(body: str) -> list[ToolCall]:
    start = re.match(r"\[\s*([^\W\d][\w.-]*)\s*\(", body)
    name = start[1] if start else MALFORMED_NAME
    try:
        listed = parse_expression(body)
    except ValueError as error:
        return [ToolCall(name, body, f"it is not a list of calls in Python: {error}")]
    if not isinstance(listed, ast.List):
        return [ToolCall(name, body, "there is text after the list of calls")]
    return [_python_call(node, body) for node in listed.elts]


def _python_call(node: ast.expr, raw: str) -> ToolCall:
    name = _dotted(node.func) if isinstance(node, ast.Call) else None
    if not isinstance(node, ast.Call) or name is None:
        return ToolCall(MALFORMED_NAME, raw, "it is not a call of a named function")
    arguments: dict[str, object] = {}
    try:
        if node.args:
            raise ValueError("an argument has no name")
        for keyword in node.keywords:
            if keyword.arg is None:
                raise ValueError("** is not allowed")
            if keyword.arg in arguments:
                raise ValueError(f"the argument {keyword.arg} is given twice")
            arguments[keyword.arg] = python_value(keyword.value)
    except ValueError as error:
        return ToolCall(name, raw, f"its arguments are not named literals: {error}")
    return as_call(name, arguments, raw)


def _dotted(node: ast.expr) -> str | None:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else None


_QUOTE = '<|"|>'
_BARE = re.compile(r"[^,{}\[\]<]*")
_KEY = re.compile(r'(?:<\|"\|>)?([^,:{}\[\]<>|]{1,200})(?:<\|"\|>)?:')


class _Unterminated(ValueError):
    """The text ends within a value."""


def gemma(closing: str) -> Reader:
    """Return a reader of ``call:f{key:<|"|>text<|"|>,n:1,list:[true]}``, Gemma 4's notation, up to ``closing``."""

    def value(text: str, at: int, depth: int) -> tuple[Any, int]:
        """Return the value at ``at`` and the index after it.

        Raises:
            ValueError: the value is missing, malformed, unterminated, or nested too deep.
        """
        if depth == 0:
            raise ValueError(f"nested over {_MAX_DEPTH} deep")
        if text.startswith(_QUOTE, at):
            end = text.find(_QUOTE, at + len(_QUOTE))
            if end < 0:
                raise _Unterminated("a string is not terminated")
            return text[at + len(_QUOTE) : end], end + len(_QUOTE)
        if text.startswith("{", at):
            return fields(text, at + 1, depth - 1)
        if text.startswith("[", at):
            items, at = [], _skip(text, at + 1)
            while not text.startswith("]", at):
                one, at = value(text, at, depth - 1)
                items.append(one)
                at = after_separator(text, at, "]")
            return items, at + 1
        bare = _BARE.match(text, at)
        if bare is None or not bare[0].strip():
            raise ValueError("a value is missing")
        return read_json(bare[0].strip()), bare.end()

    def fields(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
        """Return the object whose opening brace ends at ``at``, and the index after its closing brace."""
        found: dict[str, Any] = {}
        at = _skip(text, at)
        while not text.startswith("}", at):
            key = _KEY.match(text, at)
            if key is None:
                raise (ValueError if at < len(text) else _Unterminated)("an object is not terminated")
            found[key[1].strip()], at = value(text, _skip(text, key.end()), depth)
            at = after_separator(text, at, "}")
        return found, at + 1

    def after_separator(text: str, at: int, end: str) -> int:
        """Return the index after the separator behind a value, or the index of the container's closing bracket."""
        at = _skip(text, at)
        if text.startswith(end, at) or text.startswith((",", "\n"), at - 1):
            return at
        raise (ValueError if at < len(text) else _Unterminated)("a separator is missing after a value")

    def read(text: str, opening: re.Match[str], schemas: ToolSchemas) -> ReaderResult:
        name, unterminated = opening["name"].strip(), False
        try:
            arguments, end = fields(text, opening.end(), _MAX_DEPTH)
            call = as_call(name, arguments, text[opening.start() : end])
        except ValueError as error:
            end, unterminated = text.find(closing, opening.end()), isinstance(error, _Unterminated)
            end = len(text) if end < 0 else end
            call = ToolCall(name, text[opening.start() : end], str(error))
        closed = text.startswith(closing, end)
        return ReaderResult([call], end + len(closing) if closed else end, closed, unterminated)

    return read


_HARMONY = re.compile(
    r"(?:<\|start\|>assistant|(?=\s*(?:to=|<\|channel\|>)))"
    r"(?P<head>(?:(?!<\|(?:message|start|end|call|return)\|>).){0,500})<\|message\|>"
    r"(?P<body>.*?)(?P<end><\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)


def harmony(text: str) -> tuple[str | None, str, ReaderResult]:
    """Split a turn of OpenAI's Harmony format into reasoning (``None`` without any), content and calls.

    The channel ``analysis`` is reasoning, a message to ``functions.NAME`` is a call, and other messages are content.
    """
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    closed, at = True, 0
    while (message := _HARMONY.match(text, at)) is not None and message.end() > at:
        head, body = message["head"], message["body"]
        recipient = re.search(r"to=functions\.([\w.-]+)", head)
        if recipient is not None:
            calls.append(as_call(recipient[1], body.strip() or "{}", body))
            closed = message["end"] == "<|call|>" or bool(body.strip() and not calls[-1].malformed)
        else:
            (reasoning if "<|channel|>analysis" in head else content).append(body)
        at = message.end()
    content.append(text[at:])
    return "\n".join(reasoning) if reasoning else None, "".join(content), ReaderResult(calls, at, closed)
