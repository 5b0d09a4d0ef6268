# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Chat templates, and messages and tools in the form in which vLLM passes them to a template.

A template is a Jinja program over the whole conversation. Templates run in Jinja's sandbox with the helpers that
published templates expect.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2.runtime import LoopContext

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.text.turn_scanner import MALFORMED_NAME, Parsed, read_json


type Message = Mapping[str, Any]
"""Chat message in the form of templates: ``role``, ``content``, and optionally ``tool_calls`` of an assistant."""

type Tools = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's chat format."""

type Conversation = Sequence[Message]

type Render = Callable[[Conversation, bool], str]
"""Function that renders messages, with or without the opening of an assistant turn after them."""


REASONING_BLOCK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
"""Reasoning in a turn's text, as vLLM's clients write it."""

_MALFORMED = "malformed"


def text_of(content: object) -> str:
    """Return the text of a message's content. As in vLLM, each part of a list is on its own line.

    Raises:
        CallerError: a part is not text.
    """
    if isinstance(content, list):
        for part in content:
            if part.get("type") not in ("text", "input_text", "output_text"):
                raise CallerError(f"only text is supported, not {part.get('type')!r}", field="messages.content")
        return "\n".join(part["text"] for part in content)
    return str(content or "")


def for_template(message: Message) -> Message:
    """Return a message with its content as text and the arguments of its calls as objects."""
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    plain["content"] = text_of(message.get("content"))
    if message.get("reasoning_content"):
        plain["reasoning"] = message["reasoning_content"]  # vLLM passes reasoning to templates under both names
    if not message.get("tool_calls"):
        return plain
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = parse_arguments(arguments)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**plain, "tool_calls": calls}


def with_reasoning(message: Message) -> Message:
    """Move an assistant's ``<think>`` blocks to ``reasoning`` and ``reasoning_content``, which templates render."""
    content = str(message.get("content") or "")
    if message["role"] != "assistant" or not (blocks := REASONING_BLOCK.findall(content)):
        return message
    reasoning = "".join(blocks)
    return {
        **message,
        "content": REASONING_BLOCK.sub("", content),
        "reasoning": reasoning,
        "reasoning_content": reasoning,
    }


def parse_arguments(arguments: str) -> Mapping[str, Any]:
    """Return a call's arguments as an object; malformed arguments become the value of the key ``malformed``."""
    try:
        value = read_json(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {_MALFORMED: arguments}


def merge_developer_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages for a template without the role ``developer``, with developer messages as system messages.

    As in vLLM, the system messages before the first answer are joined into one, which many templates require. Later
    system messages keep their order. vLLM would move these to the front, which would change the conversation.
    """
    if not any(message["role"] == "developer" for message in messages):
        return messages
    renamed = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    answered = next((index for index, message in enumerate(renamed) if message["role"] == "assistant"), len(renamed))
    first = [message for message in renamed[:answered] if message["role"] == "system"]
    if not first:
        return renamed
    text = "\n\n".join(filter(None, (text_of(message.get("content")) for message in first)))
    others = [message for message in renamed[:answered] if message["role"] != "system"]
    return [{"role": "system", "content": text}, *others, *renamed[answered:]]


def as_message(parsed: Parsed) -> dict[str, Any]:
    """Return a parsed turn in OpenAI's chat format, its reasoning in ``<think>`` tags as Gym's converters expect."""
    content = parsed.content
    if parsed.reasoning is not None:
        content = f"<think>{parsed.reasoning}</think>{content}"
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": call.id or _call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.calls
        ]
    return message


def _call_id() -> str:
    # Mistral's templates accept only ids of nine letters and digits.
    return uuid.uuid4().hex[:9]


def role_and_text(message: Message) -> list[str]:
    """Return a message's role and stripped text; those of the first messages identify a conversation."""
    return [message["role"], text_of(message.get("content")).strip()]


def is_malformed(function: Mapping[str, Any]) -> bool:
    arguments = function["arguments"]
    return function["name"] == MALFORMED_NAME or (
        isinstance(arguments, str) and _MALFORMED in parse_arguments(arguments)
    )


_OPTIONAL = ("strict", "defer_loading")


def tool_for_template(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool with the keys and the order of vLLM's dump, which many templates print unchanged."""
    function = tool["function"]
    dumped = {name: function.get(name) for name in ("name", "description", "parameters")}
    dumped |= {name: function[name] for name in _OPTIONAL if function.get(name) is not None}
    return {"type": tool.get("type", "function"), "function": dumped}


_REFUSALS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
    RecursionError,  # from macros that follow a recursive JSON schema
    *(MemoryError, RuntimeError),
)


class _Generation(jinja2.ext.Extension):
    """Jinja extension for ``{% generation %}`` blocks, with which some templates mark trainable text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a shortcut past its checks for keys of dicts and for ``loop``; results are the same."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        if type(obj) is LoopContext and attribute in _LOOP_ATTRIBUTES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_ATTRIBUTES = frozenset({"first", "last", "index", "index0", "previtem", "nextitem"})


class ChatTemplate:
    """Compiled Jinja chat template in a sandbox.

    Args:
        source: the template.
        with_tools: template used instead when tools are offered, if the model has one.
        bos_token: value of the template's variable of this name.
        eos_token: value of the template's variable of this name.

    Raises:
        CallerError: a source is not Jinja.
    """

    def __init__(
        self, source: str, with_tools: str | None = None, *, bos_token: str = "", eos_token: str = ""
    ) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception)
        self.source = source + (with_tools or "")
        self.eos_token = eos_token
        try:
            self._template = environment.from_string(source)
            self._with_tools = self._template
            if with_tools is not None:
                self._with_tools = environment.from_string(with_tools)
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise CallerError(f"not a Jinja template: {error}", field="chat_template") from error
        self._variables = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        prompt: bool,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the messages; with ``prompt``, followed by the opening of an assistant turn.

        Args:
            messages: the conversation.
            tools: tools in OpenAI's chat format.
            prompt: whether an assistant turn is opened.
            now: the time of day for the template; default the real time. All turns of a conversation need the same
                time, or midnight would rewrite history.
            variables: further variables of the template.

        Raises:
            CallerError: the template refuses the messages.
        """
        return self.writer(tools, now, variables)([for_template(message) for message in messages], prompt)

    def writer(
        self,
        tools: Tools = (),
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Render:
        """Return a function that renders messages already in the template's form; arguments as in :meth:`render`."""
        plain = [tool_for_template(tool) for tool in tools] or None
        given = {**self._variables, **(variables or {}), "tools": plain}
        clock = (now or datetime.now()).strftime
        template = self._with_tools if plain else self._template

        def write(messages: Sequence[Message], prompt: bool) -> str:
            of_turn = {"messages": messages, "add_generation_prompt": prompt, "strftime_now": clock}
            try:
                return template.render({**given, **of_turn})
            except _REFUSALS as error:
                raise CallerError(f"the chat template refuses these messages: {error}", field="messages") from error

        return write


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, but models are trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
