# SPDX-License-Identifier: Apache-2.0
"""The wire form of a conversation in OpenAI's Responses API: what agents send as chat messages, and turns as items.

This is the short form of what Gym's converter does through models of everything, for the items that agents send:
texts, calls and their results, thoughts, and turns of ours that they send back. Whatever else an item may be, or
hold, is not read here: :class:`Unusual` says so, and the long way takes the request. Where something is read, it is
read as Gym's converter reads it (``tests/policy/test_items.py`` holds one against the other).

Items of an answer have the fields that the installed Gym gives them: they are filled into forms that its own classes
made.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_gym_prorl.policy.text.messages import Message
from nemo_gym_prorl.policy.text.parsers import Parsed
from nemo_gym_prorl.policy.tokens.echo import MARK
from nemo_gym_prorl.policy.tokens.history import CARRIED
from nemo_gym_prorl.policy.tokens.ledger import Turn


_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_STATUSES = ("in_progress", "completed", "incomplete")


class Unusual(ValueError):
    """It is not among the forms that are read here."""


def messages_of(items: object, turns: Sequence[Turn] = ()) -> list[Message]:
    """The chat messages of input items; a sampled turn is one of its own.

    Args:
        items: the input.
        turns: those that have marks in their last items.

    Raises:
        Unusual: they have other forms than the usual ones, or none.
    """
    if isinstance(items, str):
        if turns:
            raise Unusual
        return [{"content": items, "role": "user"}]
    if not isinstance(items, list):
        raise Unusual
    messages: list[Message] = []
    said, marks = _Said(), 0
    for item in items:
        if not isinstance(item, dict):
            raise Unusual
        item = dict(item)
        kind, turn = item.pop("type", "message"), item.pop(MARK, None)
        if turn is not None and item.pop("routed_experts", None) is not None:
            raise Unusual
        if kind == "function_call_output":
            new: Message | None = _result(item)
        elif kind == "message" and item.get("role") in ("user", "system", "developer"):
            new = _text(item)
        else:
            new = None
            said.add(kind, item)
        if new is not None:
            if turn is not None or said.after_turn:
                raise Unusual
            messages += said.message()
            messages.append(new)
            said = _Said()
        elif turn is not None:
            messages += said.message() or [{"role": "assistant", "content": ""}]
            messages[-1] = {**messages[-1], CARRIED: turns[turn]}
            marks += 1
            said = _Said(sampled=True)
    if said.after_turn or marks != len(turns):
        raise Unusual
    return [*messages, *said.message()]


class _Said:
    """What the policy said since the last message of others, or since its last turn."""

    def __init__(self, *, sampled: bool = False) -> None:
        self._sampled = sampled
        self._content = ""
        self._calls: list[dict[str, Any]] = []
        self._any = False

    @property
    def after_turn(self) -> bool:
        """Something stands behind a sampled turn, of which Gym's converter would make a part of it."""
        return self._sampled and self._any

    def add(self, kind: object, item: dict[str, Any]) -> None:
        self._any = True
        match kind:
            case "message" if item.get("role") == "assistant":
                self._content += _own_text(item)
            case "reasoning":
                self._content += "".join(f"<think>{text}</think>" for text in _thoughts(item) if text)
            case "function_call":
                self._calls.append(_call(item))
            case _:
                raise Unusual

    def message(self) -> list[Message]:
        if not (self._content or self._calls):
            return []
        return [{"content": self._content or None, "role": "assistant", "tool_calls": self._calls}]


def _only(item: Mapping[str, Any], texts: Sequence[str], free: Sequence[str] = ()) -> None:
    """Its fields are these texts, all of them, and perhaps the others."""
    if not all(isinstance(item.get(name), str) for name in texts) or not item.keys() <= {*texts, *free}:
        raise Unusual


def _known_state(item: Mapping[str, Any], *, optional: bool) -> None:
    status, name = item.get("status", "completed"), item.get("id", "")
    if status not in _STATUSES and not (optional and status is None):
        raise Unusual
    if not isinstance(name, str) and not (optional and name is None):
        raise Unusual


def _text(item: Mapping[str, Any]) -> Message:
    content = item.get("content")
    if isinstance(content, list):
        parts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "input_text":
                raise Unusual
            _only(part, ("text", "type"))
            parts.append({"text": part["text"], "type": "text"})
        content = parts
    elif not isinstance(content, str):
        raise Unusual
    if not item.keys() <= {"content", "role"}:
        raise Unusual
    return {"content": content, "role": item["role"]}


def _result(item: Mapping[str, Any]) -> Message:
    _only(item, ("call_id", "output"), ("id", "status"))
    _known_state(item, optional=True)
    return {"content": item["output"], "role": "tool", "tool_call_id": item["call_id"]}


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    _only(item, ("arguments", "call_id", "name"), ("id", "status"))
    _known_state(item, optional=True)
    function = {"arguments": item["arguments"], "name": item["name"]}
    return {"id": item["call_id"], "function": function, "type": "function"}


def _own_text(item: Mapping[str, Any]) -> str:
    content = item.get("content")
    if isinstance(content, str):
        _only(item, ("content", "role"))
        return content
    _only(item, ("id", "role"), ("content", "status"))
    _known_state(item, optional=False)
    if not isinstance(content, list):
        raise Unusual
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "output_text" or part.get("annotations") != []:
            raise Unusual
        _only(part, ("text", "type"), ("annotations", "logprobs"))
        if part.get("logprobs") is not None:
            raise Unusual
    return "".join(part["text"] for part in content)


def _thoughts(item: Mapping[str, Any]) -> Iterator[str]:
    _only(item, ("id",), ("summary", "encrypted_content", "status", "content"))
    if any(item.get(name) is not None for name in ("encrypted_content", "content", "status")):
        raise Unusual
    summary = item.get("summary")
    if not isinstance(summary, list):
        raise Unusual
    for part in summary:
        if not isinstance(part, dict) or part.get("type") != "summary_text":
            raise Unusual
        _only(part, ("text", "type"))
        yield part["text"]


@dataclass(frozen=True, slots=True)
class Forms:
    """Items as the installed Gym writes them, to be filled in.

    Attributes:
        message: of an assistant, with one text.
        call: of a function.
        thought: with one summary.
        tokens: the fields that an item with tokens has beyond those.
    """

    message: Mapping[str, Any]
    call: Mapping[str, Any]
    thought: Mapping[str, Any]
    tokens: Mapping[str, Any]

    def items(self, message: Message, parsed: Parsed, *, thoughts: bool) -> list[dict[str, Any]]:
        """A turn's items.

        Args:
            message: the turn in chat form.
            parsed: the same, taken apart.
            thoughts: whether thoughts become items of their own.
        """
        content, found = message["content"] or "", []
        if thoughts:
            found, content = _THOUGHT.findall(content), _THOUGHT.sub("", content)
        items: list[dict[str, Any]] = []
        if found:
            (part,) = self.thought["summary"]
            summary = [{**part, "text": text} for text in found]
            items.append({**self.thought, "id": f"rs_{uuid.uuid4().hex}", "summary": summary})
        calls = message.get("tool_calls") or []
        if content or not (items or calls):
            (part,) = self.message["content"]
            items.append({**self.message, "id": f"msg_{uuid.uuid4().hex}", "content": [{**part, "text": content}]})
        for call, read in zip(calls, parsed.calls, strict=True):
            items.append(
                {
                    **self.call,
                    "id": call["id"],
                    "call_id": call["id"],
                    **call["function"],
                    "status": "incomplete" if read.malformed else "completed",
                }
            )
        return items
