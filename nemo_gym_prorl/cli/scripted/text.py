# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Script format, tokenizer and chat template of the scripted policy: pure functions.

Scripts test an environment end to end: a correct solution must be rewarded, and each attempt to cheat must not. A
script is JSON:
``{"turns": [{"content": str | null, "tool_calls": [{"name": str, "arguments": object}, ...]}, ...]}``. The last turn
calls no tool, which ends the rollout.

Tests of trainers need tokens that behave like a model's. The tokenizer has one token per UTF-8 byte. If clients return
messages unchanged, the chat template has the prefix property on which token-exact training relies:

    prompt ids of turn k+1 start with (prompt ids of turn k + generated ids of turn k)

The two special tokens are the byte values 254 and 255, which UTF-8 never uses, so no text can forge a turn boundary.

The protocol has no session, so the next turn is derived from the conversation. Ids of tool calls contain the index of
their turn, because clients may split a message with parallel calls. Without such ids, assistant messages are counted.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any

import orjson
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from nemo_gym_prorl.failures import CallerError


MODEL_NAME = "prorl-scripted-policy"

END_OF_TURN = 254
"""Token id that ends every message, and every complete generation."""

START_OF_TURN = 255
"""Token id that starts every message."""

VOCABULARY_SIZE = 256

_START = bytes([START_OF_TURN])
_END = bytes([END_OF_TURN])
_GENERATION_PROMPT = _START + b"assistant\n"
_CALL_ID = re.compile(r"call_(\d+)_\d+_[0-9a-f]{8}")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

NO_SCRIPT_TEXT = (
    f"I am {MODEL_NAME}: I play back scripts and have no language model. This request has no script: set "
    "metadata.script, or point the model server at a model."
)


class ScriptError(ValueError):
    """Invalid field of a request."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


def _as_json_text(value: Any) -> Any:
    return orjson.dumps(value).decode() if isinstance(value, dict) else value


_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, slots=True, config=_STRICT)
class ToolCall:
    """One scripted tool call; ``arguments`` is JSON text, as in OpenAI's protocol, or an object."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[str, BeforeValidator(_as_json_text)] = "{}"


@dataclass(frozen=True, slots=True, config=_STRICT)
class ScriptTurn:
    """One scripted assistant turn.

    Attributes:
        content: the text, possibly with a leading ``<think>…</think>`` block.
        latency_s: seconds before the answer.
    """

    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    latency_s: Annotated[float, Field(ge=0)] = 0.0

    @property
    def body(self) -> bytes:
        """Text and tool calls of this turn as the model generates them, without the end-of-turn token."""
        return _assistant_body(None, self.content, ((call.name, call.arguments) for call in self.tool_calls))


@dataclass(frozen=True, slots=True, config=_STRICT)
class Script:
    """Scripted turns of one rollout, in order."""

    turns: tuple[ScriptTurn, ...]

    def turn(self, index: int) -> ScriptTurn:
        """Return the turn at an index; past the end, a message that the script has ended, without tool calls."""
        if index < len(self.turns):
            return self.turns[index]
        return ScriptTurn(f"I am {MODEL_NAME}; my script of {len(self.turns)} turn(s) has ended.")


NO_SCRIPT_TURN = ScriptTurn(NO_SCRIPT_TEXT)
_SCRIPT = TypeAdapter(Script)


@lru_cache(maxsize=512)
def parse_script(text: str) -> Script:
    """Parse the JSON text in ``metadata.script``.

    Raises:
        ScriptError: the text is not a script; names the field.
    """
    try:
        return _SCRIPT.validate_json(text)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in wrong["loc"])
        raise ScriptError(f"metadata.script{path}", wrong["msg"]) from error


def next_turn(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the script's turn that follows ``messages``.

    It is one more than the turn in the last tool-call id of this server, plus the number of later assistant messages.
    Without such an id, it is the number of assistant messages.
    """
    index = 0
    for message in messages:
        if message.get("role") != "assistant":
            continue
        calls = message.get("tool_calls") or ()
        matches = (_CALL_ID.fullmatch(str(call.get("id", ""))) for call in calls)
        turns = [int(match[1]) + 1 for match in matches if match]
        index = max(turns) if turns else index + 1
    return index


def call_id(turn: int, position: int) -> str:
    """Return a new tool-call id that contains the turn's index, for :func:`next_turn`."""
    return f"call_{turn}_{position}_{secrets.token_hex(4)}"


def render_prompt(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> bytes:
    """Render the chat template up to the next assistant turn; each byte is a token.

    Raises:
        ScriptError: a message is malformed; names the message.
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
    # vLLM has renamed reasoning_content to reasoning; Gym sends both.
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


def encode_ids(rendered: bytes) -> list[int]:
    return list(rendered)


def finish(body: bytes, max_tokens: int) -> tuple[bytes, bool]:
    """Return the tokens generated for ``body`` within ``max_tokens``, and whether the turn is complete.

    A complete turn ends with the end-of-turn token. A truncated turn never ends inside a character, so that the text
    of the turn encodes to the same tokens.
    """
    if len(body) < max_tokens:
        return body + _END, True
    return body[:max_tokens].decode(errors="ignore").encode(), False


Turn = dict[str, Any]


def turn(content: str | None, *calls: dict[str, Any]) -> Turn:
    return {"content": content, "tool_calls": list(calls)}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def script_of[Problem](
    variants: Mapping[str, Callable[[Problem], list[Turn]]], problem: Problem, variant: str
) -> dict[str, list[Turn]]:
    """Return the script of one variant for a problem; raises CallerError if the variant is unknown."""
    if variant not in variants:
        raise CallerError(f"no script {variant!r}; scripts: {', '.join(variants)}", field="variant")
    return {"turns": variants[variant](problem)}
