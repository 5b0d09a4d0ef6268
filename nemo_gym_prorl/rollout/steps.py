# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A finished rollout's row, read for people: its turns, what was called in each, what came back, and when.

A row is a flat list of items in which neither turns nor times can be told for certain. So the service counts and times
each turn as it happens (:class:`Step`), and the row has that under ``rollout.steps``: some hundred bytes a turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import orjson


if TYPE_CHECKING:
    from pydantic import TypeAdapter


NO_STEPS = b"[]"


class ToolTime(TypedDict):
    """A tool call that was carried out; seconds since the epoch, and of duration."""

    call_id: str
    started_at: float
    seconds: float


class Step(TypedDict):
    """One turn: when the policy was asked, how long it took, how many output items it wrote, what it says of its
    tokens, and the calls; ``weights``: labels of those that sampled its first and its last token, where told."""

    started_at: float
    seconds: float
    items: int
    input_tokens: int | None
    output_tokens: int | None
    tools: list[ToolTime]
    weights: NotRequired[tuple[str | None, str | None]]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. ``arguments`` is ``None`` where what the policy wrote (``written``) is no JSON object; ``output``
    is ``None`` where the rollout ended before there was any."""

    id: str
    name: str
    written: str
    arguments: dict[str, Any] | None
    output: str | None
    time: ToolTime | None


@dataclass(frozen=True, slots=True)
class TurnRead:
    """One turn: what was thought, said and called. ``step`` is ``None`` in rows that do not say."""

    thought: str
    said: str
    calls: list[Call]
    step: Step | None


def read_turns(row: Mapping[str, Any]) -> list[TurnRead]:
    """The turns of a row, whatever an environment has made of it."""
    try:
        steps = _steps().validate_python(part(row, "rollout", "steps"))
    except ValueError:
        steps = []
    grouped = [*turns(items(part(row, "response", "output")), [step["items"] for step in steps])]
    return [
        _turn(group, steps[number] if len(steps) == len(grouped) else None) for number, group in enumerate(grouped)
    ]


@cache
def _steps() -> TypeAdapter[list[Step]]:
    from pydantic import TypeAdapter  # takes longer than all that `prorl show` does, which reads no steps

    return TypeAdapter(list[Step])


def turns(output: Sequence[Mapping[str, Any]], sizes: Sequence[int] = ()) -> Iterator[list[Mapping[str, Any]]]:
    """The items of a rollout by turn: what the policy wrote, and what it observed then.

    Args:
        output: all of them.
        sizes: how many the policy wrote in each turn. Where they do not fit, a turn begins with what the policy writes
            after an observation, or after the last item of a sampled turn, which is the one that carries its tokens.
    """
    written = sum(not _observed(item) for item in output)
    counted = iter(sizes) if sizes and sum(sizes) == written else None
    turn: list[Mapping[str, Any]] = []
    left = next(counted, 0) if counted else -1
    over = False
    for item in output:
        while counted and not left and not _observed(item):
            yield turn
            turn, left = [], next(counted)
        if over and not _observed(item) and not counted:
            yield turn
            turn, over = [], False
        turn.append(item)
        left -= not _observed(item)
        over = over or _observed(item) or "generation_token_ids" in item
    if turn or counted:
        yield turn
    yield from ([] for _ in counted or ())


def text_of(content: Any) -> str:
    """The text of a message's content, in any of the forms that the Responses API has for it."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(text_of(part) for part in content)
    if isinstance(content, dict):
        return text_of(content["text"]) if "text" in content else orjson.dumps(content).decode()
    return str(content)


def part(row: Mapping[str, Any], name: str, inner: str) -> Any:
    """A field of a field; ``None`` where an environment has something else there."""
    outer = row.get(name)
    return outer.get(inner) if isinstance(outer, dict) else None


def items(listed: Any) -> list[Mapping[str, Any]]:
    """The objects of what should be a list of them."""
    return [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []


def _observed(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "function_call_output"


def _turn(group: Sequence[Mapping[str, Any]], step: Step | None) -> TurnRead:
    answers = {str(item.get("call_id")): text_of(item.get("output")) for item in group if _observed(item)}
    times = {tool["call_id"]: tool for tool in step["tools"]} if step else {}
    thought, said, calls = [], [], []
    for item in group:
        match item.get("type", "message"):
            case "reasoning":
                thought.append(text_of(item.get("summary")) or text_of(item.get("content")))
            case "message":
                said.append(text_of(item.get("content")))
            case "function_call":
                written, call_id = str(item.get("arguments", "")), str(item.get("call_id"))
                name, arguments = str(item.get("name")), _arguments(written)
                calls.append(Call(call_id, name, written, arguments, answers.get(call_id), times.get(call_id)))
            case "function_call_output":
                pass
            case other:
                said.append(f"[{other}]")
    return TurnRead("\n".join(filter(None, thought)), "\n".join(filter(None, said)), calls, step)


def _arguments(written: str) -> dict[str, Any] | None:
    try:
        read = orjson.loads(written)
        orjson.dumps(read)  # some nest deeper than can be written
    except (orjson.JSONDecodeError, TypeError):
        return None
    return read if isinstance(read, dict) else None
