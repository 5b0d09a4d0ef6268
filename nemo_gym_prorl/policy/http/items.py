# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What agents send in OpenAI's Responses API, as chat messages.

Agents send texts, calls and their results, thoughts, and turns of ours that they send back, with their tokens or
without. These are read as Gym 0.7's converter reads them (``tests/policy/test_items.py`` holds one against the other),
but each sampled turn stays a message of its own, also where the converter would join it to its neighbours. Whatever
else an item may be, or hold, is refused by its name. Items of an answer are Gym's converter's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.text.messages import Message
from nemo_gym_prorl.policy.tokens.echo import MARK
from nemo_gym_prorl.policy.tokens.history import CARRIED
from nemo_gym_prorl.policy.tokens.ledger import Turn


_STATUSES = ("in_progress", "completed", "incomplete", None)
_TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_STATE = ("id", "status")


def messages_of(items: object, turns: Sequence[Turn] = ()) -> list[Message]:
    """The chat messages of input items; a sampled turn is one of its own.

    Args:
        items: the input.
        turns: those that have marks in their last items.

    Raises:
        CallerError: they have other forms than these; names the field.
    """
    messages: list[Message] = []
    said, marks = _Said(), 0
    if isinstance(items, str):
        messages.append({"content": items, "role": "user"})
    elif not isinstance(items, list):
        raise CallerError("must be a text or a list of items", field="input")
    for index, given in enumerate(items if isinstance(items, list) else ()):
        at = f"input.{index}"
        if not isinstance(given, dict):
            raise CallerError("must be an object", field=at)
        item = dict(given)
        kind, tokens = item.pop("type", "message"), _tokens(item, turns, at)
        marks += CARRIED in tokens
        if kind == "function_call_output":
            new: Message | None = _result(item, at)
        elif kind == "message" and item.get("role") in ("user", "system", "developer"):
            new = _text(item, at)
        else:
            new = None
            said.add(kind, item, at)
        if new is not None:
            if tokens:
                raise CallerError("only what the policy said has tokens", field=at)
            messages += [*said.message(), new]
            said = _Said()
        elif tokens:
            messages += said.message()
            messages[-1] = {**messages[-1], **tokens}
            said = _Said()
    if marks != len(turns):
        raise CallerError("token ids stand where they are no item's", field="input")
    return [*messages, *said.message()]


class _Said:
    """What the policy said since the last message of others, or since its last turn."""

    def __init__(self) -> None:
        self._anything = False
        self._content = ""
        self._calls: list[dict[str, Any]] = []

    def add(self, kind: object, item: dict[str, Any], at: str) -> None:
        self._anything = True
        match kind:
            case "message" if item.get("role") == "assistant":
                self._content += _own_text(item, at)
            case "reasoning":
                self._content += "".join(f"<think>{text}</think>" for text in _thoughts(item, at) if text)
            case "function_call":
                self._calls.append(_call(item, at))
            case "message":
                raise CallerError("must be user, system, developer or assistant", field=f"{at}.role")
            case _:
                known = "message, reasoning, function_call or function_call_output"
                raise CallerError(f"{kind!r:.100} is none of {known}", field=f"{at}.type")

    def message(self) -> list[Message]:
        if not self._anything:
            return []
        calls = {"tool_calls": self._calls} if self._calls else {}
        return [{"content": self._content or None, "role": "assistant", **calls}]


def _tokens(item: dict[str, Any], turns: Sequence[Turn], at: str) -> dict[str, Any]:
    """What an item says of the turn that ends with it, taken out of it: a turn of ours, or one's tokens."""
    mark, given = item.pop(MARK, None), {name: item.pop(name, None) for name in _TOKENS}
    if item.pop("routed_experts", None) is not None:
        raise CallerError("no engine here can be told: leave it out", field=f"{at}.routed_experts")
    if mark is not None:
        return {CARRIED: turns[mark]}
    for name, kinds in zip(_TOKENS, ((int,), (int,), (int, float)), strict=True):
        numbers = given[name]
        if numbers is not None and not (isinstance(numbers, list) and all(type(one) in kinds for one in numbers)):
            raise CallerError("must be a list of numbers", field=f"{at}.{name}")
    return {name: numbers for name, numbers in given.items() if numbers}


def _only(item: Mapping[str, Any], at: str, texts: Sequence[str], free: Sequence[str] = ()) -> None:
    """Its fields are these texts, all of them, and perhaps the others; of any other nothing is asked.

    Raises:
        CallerError: names the field.
    """
    for name in texts:
        if not isinstance(item.get(name), str):
            raise CallerError("must be a text", field=f"{at}.{name}")
    for name, value in item.items():
        if value is not None and name not in texts and name not in free:
            raise CallerError("cannot be shown to the policy: leave it out", field=f"{at}.{name}")
    if not isinstance(item.get("id"), str | None):
        raise CallerError("must be a text", field=f"{at}.id")
    if item.get("status") not in _STATUSES:
        raise CallerError("must be in_progress, completed or incomplete", field=f"{at}.status")


def _parts(parts: object, at: str, kinds: Sequence[str]) -> list[str]:
    """The texts of a list of parts."""
    if not isinstance(parts, list):
        raise CallerError("must be a text or a list of parts", field=at)
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            wanted = " or ".join(kinds)
            raise CallerError(f"only text is supported ({wanted}), not {kind!r:.100}", field=f"{at}.{index}.type")
        _only(part, f"{at}.{index}", ("text", "type"), () if part.get("annotations") else ("annotations",))
    return [part["text"] for part in parts]


def _text(item: Mapping[str, Any], at: str) -> Message:
    content = item.get("content")
    _only(item, at, ("role",), ("content", *_STATE))
    if not isinstance(content, str):
        texts = _parts(content, f"{at}.content", ("input_text",))
        content = [{"text": text, "type": "text"} for text in texts]
    return {"content": content, "role": item["role"]}


def _result(item: Mapping[str, Any], at: str) -> Message:
    _only(item, at, ("call_id", "output"), _STATE)
    return {"content": item["output"], "role": "tool", "tool_call_id": item["call_id"]}


def _call(item: Mapping[str, Any], at: str) -> dict[str, Any]:
    _only(item, at, ("arguments", "call_id", "name"), _STATE)
    function = {"arguments": item["arguments"], "name": item["name"]}
    return {"id": item["call_id"], "function": function, "type": "function"}


def _own_text(item: Mapping[str, Any], at: str) -> str:
    content = item.get("content")
    _only(item, at, ("role",), ("content", *_STATE))
    if isinstance(content, str):
        return content
    return "".join(_parts(content, f"{at}.content", ("output_text", "input_text")))


def _thoughts(item: Mapping[str, Any], at: str) -> list[str]:
    # Gym's converter turns the empty signature of a thinking block of ours into an empty text.
    _only(
        {name: value for name, value in item.items() if value or name != "encrypted_content"},
        at,
        (),
        ("summary", *_STATE),
    )
    return _parts(item.get("summary"), f"{at}.summary", ("summary_text",))
