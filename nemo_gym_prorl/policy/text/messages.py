# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Messages and tools on their way from the wire into a chat template, in the form in which vLLM hands them over, and
sampled turns on their way back."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.text.arguments import read_json
from nemo_gym_prorl.policy.text.parsers import MALFORMED_NAME, Parsed


type Message = Mapping[str, Any]
"""A chat message as templates know it: ``role``, ``content``, and for an assistant perhaps ``tool_calls``."""

type Tools = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's chat format."""


THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
"""A thought in a turn's text, as vLLM's clients write it."""

_MALFORMED = "malformed"


def text_of(content: object) -> str:
    """The text of a message, which may come in parts; vLLM puts each on a line of its own.

    Raises:
        CallerError: a part is no text.
    """
    if isinstance(content, list):
        for part in content:
            if part.get("type") not in ("text", "input_text", "output_text"):
                raise CallerError(f"only text is supported, not {part.get('type')!r}", field="messages.content")
        return "\n".join(part["text"] for part in content)
    return str(content or "")


def for_template(message: Message) -> Message:
    """Templates want text where the wire may carry parts, and a tool call's arguments as an object, not as JSON."""
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    plain["content"] = text_of(message.get("content"))
    if message.get("reasoning_content"):
        plain["reasoning"] = message["reasoning_content"]  # vLLM gives a thought to templates under both names
    if not message.get("tool_calls"):
        return plain
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = arguments_of(arguments)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**plain, "tool_calls": calls}


def with_reasoning(message: Message) -> Message:
    """Return a message whose thought is in fields of its own, for templates that write thoughts in other markers."""
    content = str(message.get("content") or "")
    if message["role"] != "assistant" or not (thoughts := THOUGHT.findall(content)):
        return message
    thought = "".join(thoughts)
    return {**message, "content": THOUGHT.sub("", content), "reasoning": thought, "reasoning_content": thought}


def arguments_of(arguments: str) -> Mapping[str, Any]:
    """A call's arguments; templates go through the names of an object, which a malformed call may lack."""
    try:
        value = read_json(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {_MALFORMED: arguments}


def without_developers(messages: Sequence[Message]) -> Sequence[Message]:
    """Messages for a template that has no role ``developer``: those are the system's, as vLLM has it.

    As there, the system's messages in front of the first answer become one, which many templates want. Later ones
    stay where they are, where vLLM would move them to the front as well: that would be another conversation.
    """
    if not any(message["role"] == "developer" for message in messages):
        return messages
    said = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    answered = next((index for index, message in enumerate(said) if message["role"] == "assistant"), len(said))
    first = [message for message in said[:answered] if message["role"] == "system"]
    if not first:
        return said
    text = "\n\n".join(filter(None, (text_of(message.get("content")) for message in first)))
    others = [message for message in said[:answered] if message["role"] != "system"]
    return [{"role": "system", "content": text}, *others, *said[answered:]]


def as_message(parsed: Parsed) -> dict[str, Any]:
    """OpenAI's form of a turn, its thought in ``<think>`` tags as Gym's converters expect it."""
    content = parsed.content
    if parsed.thought is not None:
        content = f"<think>{parsed.thought}</think>{content}"
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
    # Nine letters and digits: Mistral's templates refuse anything else.
    return uuid.uuid4().hex[:9]


def head_of(message: Message) -> list[str]:
    """A message by its role and text, as two that begin a conversation are told from others."""
    return [message["role"], text_of(message.get("content")).strip()]


def is_malformed(function: Mapping[str, Any]) -> bool:
    """Whether a call in a message is one that the policy wrote wrong."""
    arguments = function["arguments"]
    return function["name"] == MALFORMED_NAME or (isinstance(arguments, str) and _MALFORMED in arguments_of(arguments))


_OPTIONAL = ("strict", "defer_loading")


def tool_for_template(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool with the keys and in the order in which vLLM dumps it: many templates write it as it is.

    Raises:
        CallerError: it is no function with a name.
    """
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise CallerError("every tool must be a function with a name", field="tools")
    dumped = {name: function.get(name) for name in ("name", "description", "parameters")}
    dumped |= {name: function[name] for name in _OPTIONAL if function.get(name) is not None}
    return {"type": tool.get("type", "function"), "function": dumped}
