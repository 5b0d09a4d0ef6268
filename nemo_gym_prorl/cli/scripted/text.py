# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The scripted policy's script, tokenizer and chat template: pure functions, no I/O.

A policy that reads its lines from a script is only worth something to a trainer's test if its tokens behave like a
model's. So there is a real tokenizer (one token per UTF-8 byte) and one chat template, chosen such that the chain
holds which token-exact training rests on:

    prompt ids of turn k+1 start with (prompt ids of turn k + generated ids of turn k)

whenever the messages come back unchanged. The two special tokens are the byte values 254 and 255, which UTF-8 never
uses: a text can't forge a turn boundary, and rendering to ids is one ``bytes`` join.

Which turn comes next is read from the conversation, since the wire protocol has no session. Tool-call ids carry their
turn, because clients may split one assistant message with parallel calls into several; where no id speaks, assistant
messages are counted.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any

import orjson
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass


MODEL_NAME = "prorl-scripted-policy"
"""The name under which the policy is served. It says what it is."""

END_OF_TURN = 254
"""Token id that ends every message; as the last generated token it means "stop"."""

START_OF_TURN = 255
"""Token id that begins every message."""

VOCABULARY_SIZE = 256

_START = bytes([START_OF_TURN])
_END = bytes([END_OF_TURN])
_GENERATION_PROMPT = _START + b"assistant\n"
_CALL_ID = re.compile(r"call_(\d+)_\d+_[0-9a-f]{8}")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

NO_SCRIPT_TEXT = (
    f"I am {MODEL_NAME}: I play back scripted turns and understand nothing. This request carries no script; put one "
    "into metadata.script, or point the model server at a real endpoint."
)


class ScriptError(ValueError):
    """A request is wrong.

    Args:
        field: path of the offending field.
        reason: what is wrong with it.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


def _written(given: Any) -> Any:
    return orjson.dumps(given).decode() if isinstance(given, dict) else given


_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, slots=True, config=_STRICT)
class ToolCall:
    """One scripted tool call; ``arguments`` is JSON text, as on the wire, or an object."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[str, BeforeValidator(_written)] = "{}"


@dataclass(frozen=True, slots=True, config=_STRICT)
class ScriptTurn:
    """One scripted assistant turn.

    Attributes:
        content: the text, possibly with a leading ``<think>…</think>`` block.
        tool_calls: the calls made together in this turn.
        latency_s: seconds to wait before answering, in addition to the server's own latency.
    """

    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    latency_s: Annotated[float, Field(ge=0)] = 0.0

    @property
    def body(self) -> bytes:
        """What the policy generates for this turn, without the end-of-turn token."""
        return _assistant_body(None, self.content, ((call.name, call.arguments) for call in self.tool_calls))


@dataclass(frozen=True, slots=True, config=_STRICT)
class Script:
    """The turns of one rollout, in order."""

    turns: tuple[ScriptTurn, ...]

    def turn(self, index: int) -> ScriptTurn:
        """The turn to play; past the end, a closing message without tool calls."""
        if index < len(self.turns):
            return self.turns[index]
        return ScriptTurn(f"I am {MODEL_NAME}, and my script of {len(self.turns)} turn(s) has ended.")


NO_SCRIPT_TURN = ScriptTurn(NO_SCRIPT_TEXT)
_SCRIPT = TypeAdapter(Script)


@lru_cache(maxsize=512)
def parse_script(text: str) -> Script:
    """Return the script that ``metadata.script`` holds as JSON text.

    Raises:
        ScriptError: it is no script; the error names the field.
    """
    try:
        return _SCRIPT.validate_json(text)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in wrong["loc"])
        raise ScriptError(f"metadata.script{path}", wrong["msg"]) from error


def next_turn(messages: Sequence[Mapping[str, Any]]) -> int:
    """Index of the turn to play after ``messages``.

    The last message with tool calls of ours tells its turn; assistant messages without tool calls that follow it each
    count as one more. Without any such id, all assistant messages count.
    """
    index = 0
    for message in messages:
        if message.get("role") != "assistant":
            continue
        calls = message.get("tool_calls") or ()
        matches = (_CALL_ID.fullmatch(str(call.get("id", ""))) for call in calls)
        told = [int(match[1]) + 1 for match in matches if match]
        index = max(told) if told else index + 1
    return index


def call_id(turn: int, position: int) -> str:
    """A fresh tool-call id from which :func:`next_turn` reads the turn."""
    return f"call_{turn}_{position}_{secrets.token_hex(4)}"


def render_prompt(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> bytes:
    """The prompt for one more assistant turn, as bytes; :func:`encode_ids` turns them into token ids.

    Raises:
        ScriptError: a message is malformed; the error names it.
    """
    parts: list[bytes] = []
    if tools:
        parts += [_START, b"tools\n", orjson.dumps(tools), _END, b"\n"]
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in _ROLES:
            raise ScriptError(f"messages[{i}].role", f"must be one of {', '.join(sorted(_ROLES))}")
        parts += [_START, str(role).encode(), b"\n", _render_message(message, f"messages[{i}]"), _END, b"\n"]
    parts.append(_GENERATION_PROMPT)
    return b"".join(parts)


def _render_message(message: Mapping[str, Any], where: str) -> bytes:
    content = _text(message.get("content"), f"{where}.content")
    if message["role"] != "assistant":
        return content.encode()
    # Newer vLLM calls it reasoning, older reasoning_content; Gym sends both.
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    try:
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        return _assistant_body(reasoning, content, calls)
    except (KeyError, TypeError, AttributeError) as error:
        raise ScriptError(f"{where}.tool_calls", "each must have function.name and function.arguments") from error


def _assistant_body(reasoning: str | None, content: str | None, calls: Iterable[tuple[str, str]]) -> bytes:
    text = f"<think>{reasoning}</think>" if reasoning else ""
    text += content or ""
    for name, arguments in calls:
        text += f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return text.encode()


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in content)
    raise ScriptError(where, "must be a string, null or a list of content parts")


def generated_turns(prompt: bytes) -> int:
    """How many assistant turns a rendered prompt already holds; the open one at its end does not count."""
    return prompt.count(_GENERATION_PROMPT) - prompt.endswith(_GENERATION_PROMPT)


def encode_ids(rendered: bytes) -> list[int]:
    """Token ids of rendered bytes."""
    return list(rendered)


def decode_ids(ids: Sequence[int]) -> bytes:
    """Rendered bytes of token ids.

    Raises:
        ScriptError: an id is outside the vocabulary.
    """
    try:
        return bytes(ids)
    except (ValueError, TypeError) as error:
        raise ScriptError("prompt", f"token ids must be integers in [0, {VOCABULARY_SIZE})") from error


def finish(body: bytes, max_tokens: int) -> tuple[bytes, bool]:
    """The tokens generated for ``body`` within ``max_tokens``, and whether they are the whole turn.

    A whole turn ends with the end-of-turn token. A cut one never ends inside a character: its text has to come back
    as the same tokens.
    """
    if len(body) < max_tokens:
        return body + _END, True
    return body[:max_tokens].decode(errors="ignore").encode(), False
