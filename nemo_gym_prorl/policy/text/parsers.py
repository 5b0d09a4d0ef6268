# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Text of the policy to thought, content and tool calls, for the formats that models write.

A parser is a pure function of the text and never raises: policies in training write anything. A call that cannot be
understood is still a call, with the reason attached, so that the agent answers it with an observation and the policy
learns of its mistake. Text that is no call stays content, character for character.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import from_json


MALFORMED_NAME = "malformed_tool_call"
"""Function name of a call that does not say which function it means."""


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


type Format = Callable[[str], tuple[str, list[ToolCall]]]
"""Splits text into content and calls."""


def parse(text: str, tool_format: str, *, thoughts: bool = True, in_thought: bool = False) -> Parsed:
    """Take a turn apart.

    Args:
        text: what the policy wrote, without the end-of-turn token.
        tool_format: a name in :data:`FORMATS`.
        thoughts: look for a ``<think>`` block.
        in_thought: the prompt had already opened the block.
    """
    thought, rest = _thought_in(text, in_thought=in_thought) if thoughts else (None, text)
    content, calls = FORMATS[tool_format](rest)
    return Parsed(thought, content, tuple(calls))


def _thought_in(text: str, *, in_thought: bool = False) -> tuple[str | None, str]:
    """The thought with which a text begins, and the rest. An unfinished one is all: sampling ended inside it."""
    body = text if in_thought else text.lstrip()
    if not (in_thought or body.startswith("<think>")):
        return None, text
    thought, _, rest = body.removeprefix("<think>").partition("</think>")
    return thought, rest


def parsed_by_engine(message: Mapping[str, Any]) -> Parsed:
    """A turn that the engine has already taken apart, in OpenAI's chat format."""
    calls = []
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"].get("name"), call["function"].get("arguments", "")
        calls.append(replace(_call(name, arguments, str(arguments)), id=call.get("id")))
    content = message.get("content") or ""
    thought = message.get("reasoning_content") or message.get("reasoning")
    if thought is None:
        thought, content = _thought_in(content)
    return Parsed(thought, content, tuple(calls))


def read_json(text: str) -> Any:
    """JSON that a policy wrote.

    Raises:
        ValueError: it is none, or none that everybody can read: nested over 200 deep, numbers of thousands of digits,
            half a surrogate pair, ``NaN``.
    """
    return from_json(text, allow_inf_nan=False)


def _call(name: object, arguments: object, raw: str) -> ToolCall:
    """A call out of parsed JSON, or the reason why it is none."""
    if not isinstance(name, str) or not name:
        return ToolCall(MALFORMED_NAME, raw, "it names no function")
    text = arguments if isinstance(arguments, str) else None
    if text is not None:
        raw = text
        try:
            arguments = read_json(text)
        except ValueError as error:
            return ToolCall(name, text, f"its arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(name, raw, "its arguments are not a JSON object")
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return ToolCall(name, raw, "its arguments hold a number that is too large")
    # Arguments that came as text stay as they are: an engine that renders history must see what it wrote.
    return ToolCall(name, text if text is not None else written)


def _json_call(raw: str) -> ToolCall:
    try:
        value = read_json(raw)
    except ValueError as error:
        name = re.search(r'"name"\s*:\s*"([^"]+)"', raw)
        return ToolCall(name[1] if name else MALFORMED_NAME, raw, f"it is not JSON: {error}")
    return _object_call(value, raw)


def _object_call(value: object, raw: str) -> ToolCall:
    if not isinstance(value, dict):
        return ToolCall(MALFORMED_NAME, raw, "it is not a JSON object")
    return _call(value.get("name"), value.get("arguments", value.get("parameters", {})), raw)


def _blocks(text: str, opening: str, closing: str) -> tuple[str, list[str]]:
    """Split off the blocks between two markers; the last one may lack its closing one."""
    head, *blocks = text.split(opening)
    if not blocks:
        return text, []
    bodies, rest = [], []
    for block in blocks:
        body, _, after = block.partition(closing)
        bodies.append(body.strip())
        rest.append(after)
    content = head + "".join(rest)
    return content if content.strip() else "", bodies


def hermes(text: str) -> tuple[str, list[ToolCall]]:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen 2.5, Qwen 3."""
    content, bodies = _blocks(text, "<tool_call>", "</tool_call>")
    return content, [_json_call(body) for body in bodies]


_XML_FUNCTION = re.compile(r"<function=([^>]+)>(.*?)(?:</function>|$)", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


def qwen3_coder(text: str) -> tuple[str, list[ToolCall]]:
    """``<tool_call><function=f><parameter=x>…</parameter></function></tool_call>``: Qwen3-Coder.

    A parameter that reads as JSON is taken as JSON, anything else as text.
    """
    content, bodies = _blocks(text, "<tool_call>", "</tool_call>")
    return content, [_xml_call(body) for body in bodies]


def _xml_call(raw: str) -> ToolCall:
    function = _XML_FUNCTION.search(raw)
    if function is None:
        return ToolCall(MALFORMED_NAME, raw, "it has no <function=name> block")
    arguments: dict[str, object] = {}
    for name, value in _XML_PARAMETER.findall(function[2]):
        value = value.removeprefix("\n").removesuffix("\n")
        try:
            arguments[name.strip()] = read_json(value)
        except ValueError:
            arguments[name.strip()] = value
    if not arguments and function[2].strip():
        return ToolCall(function[1].strip(), raw, "it has no <parameter=name> block")
    return _call(function[1].strip(), arguments, raw)


_LLAMA_ALONE = re.compile(r'\s*\{\s*"(?:name|type)"')
_LLAMA_IN_TEXT = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:'
)
_BETWEEN = re.compile(r"[\s;,]*(?=\{)")
_JSON = json.JSONDecoder()


def llama_json(text: str) -> tuple[str, list[ToolCall]]:
    """``{"name": …, "parameters": {…}}``, perhaps several, and after ``<|python_tag|>``: Llama 3.1 and later.

    Text may stand around them. An object behind text is a call if it has arguments.
    """
    content, tag, body = text.partition("<|python_tag|>")
    if not tag:
        found = _LLAMA_ALONE.match(text) or _LLAMA_IN_TEXT.search(text)
        if found is None:
            return text, []
        content, body = text[: found.start()], text[found.start() :]
    calls: list[ToolCall] = []
    body = body.strip()
    while body and (not calls or body.startswith("{")):
        try:
            end = _JSON.raw_decode(body)[1]
        except (ValueError, RecursionError):
            end = len(body)
        calls.append(_json_call(body[:end]))
        between = _BETWEEN.match(body, end)
        body = body[between.end() if between else end :]
    content += body
    return content if content.strip(" \n;") else "", calls


_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")


def mistral(text: str) -> tuple[str, list[ToolCall]]:
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}`` of later versions.

    There may be ``[CALL_ID]…`` behind the name. A call keeps the id that the policy gave it if it is of Mistral's
    kind, which its templates insist on, and no other call of the turn has it.
    """
    content, marker, body = text.partition("[TOOL_CALLS]")
    if not marker:
        return text, []
    body = body.strip()
    if "[ARGS]" in body:
        calls = []
        for part in body.split("[TOOL_CALLS]"):
            head, _, arguments = part.partition("[ARGS]")
            name, _, own = head.partition("[CALL_ID]")
            calls.append((_call(name.strip(), arguments.strip(), part), own.strip()))
        return content, _with_own_ids(calls)
    try:
        values = read_json(body)
    except ValueError:
        return content, [_json_call(body)]
    return content, _with_own_ids(
        (
            _object_call(value, json.dumps(value, ensure_ascii=False)),
            value.get("id") if isinstance(value, dict) else "",
        )
        for value in (values if isinstance(values, list) else [values])
    )


def _with_own_ids(calls: Iterable[tuple[ToolCall, object]]) -> list[ToolCall]:
    known: list[ToolCall] = []
    for call, own in calls:
        if isinstance(own, str) and _MISTRAL_ID.fullmatch(own) and all(own != other.id for other in known):
            known.append(replace(call, id=own))
        else:
            known.append(call)
    return known


_PYTHON_LIST = re.compile(r"\[\s*([^\W\d][\w.-]*)\s*\(")
_PYTHON_LONGEST = 100_000
"""Characters of a list of calls that are read at most: Python's own reader takes its time with more."""
_PYTHON_DEEPEST = 100
_JSON_NAMES = {"true": True, "false": False, "null": None}


def pythonic(text: str) -> tuple[str, list[ToolCall]]:
    """``[f(a=1), g(b="x")]`` as the whole turn: Llama 3.2 and 4.

    Nothing is run: values are literals, of Python or of JSON, and arguments have names.
    """
    body = text.strip()
    for opening, closing in (("<|python_tag|>", ""), ("<|python_start|>", "<|python_end|>")):
        body = body.removeprefix(opening).removesuffix(closing).strip()
    start = _PYTHON_LIST.match(body)
    if start is None:
        return text, []
    if len(body) > _PYTHON_LONGEST:
        return "", [ToolCall(start[1], body, f"it is longer than {_PYTHON_LONGEST} characters")]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\\d" in a string, say: our log is not the policy's
            listed = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        return "", [ToolCall(start[1], body, f"it is not a list of calls in Python: {error}")]
    if not isinstance(listed, ast.List):
        return "", [ToolCall(start[1], body, "there is something after the list of calls")]
    return "", [_python_call(node, body) for node in listed.elts]


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
                raise ValueError(f"{keyword.arg} is there twice")
            arguments[keyword.arg] = _python_value(keyword.value, _PYTHON_DEEPEST)
    except ValueError as error:
        return ToolCall(name, raw, f"its arguments are not named literals: {error}")
    return _call(name, arguments, raw)


def _dotted(node: ast.expr) -> str | None:
    """The name of a function, perhaps in a module."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else None


def _python_value(node: ast.expr, depth: int) -> object:
    """The value of a literal that JSON can say.

    Raises:
        ValueError: it is none.
    """
    if depth == 0:
        raise ValueError(f"nested over {_PYTHON_DEEPEST} deep")
    match node:
        case ast.Constant(value=str() as text):
            text.encode()  # half a surrogate pair is nothing that others can read
            return text
        case ast.Constant(value=bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=(int() | float()) as number)):
            return -number
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_python_value(part, depth - 1) for part in parts]
        case ast.Dict(keys=keys, values=values):
            names = [_python_value(key, depth - 1) if key else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("the keys of an object must be texts")
            return {str(name): _python_value(value, depth - 1) for name, value in zip(names, values, strict=True)}
        case _:
            raise ValueError(type(node).__name__)


def plain(text: str) -> tuple[str, list[ToolCall]]:
    """No tool calls: everything is content."""
    return text, []


FORMATS: dict[str, Format] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "llama_json": llama_json,
    "mistral": mistral,
    "pythonic": pythonic,
    "plain": plain,
}
"""Tool-call formats by the name that a configuration gives them."""
