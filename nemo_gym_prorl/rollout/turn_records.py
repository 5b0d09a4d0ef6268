# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Turns of a rollout: recorded timings, the parser of finished rows, and the writer of Gym's trajectory record.

A row is a flat list of items, from which turns and times cannot be derived reliably. So the service records each turn
as it happens (:class:`TurnTiming`), in the row's ``rollout.steps``: some hundred bytes per turn.

``ng_trajectory`` is the conversation in the form that Gym's health checks and its ATIF export read, from Gym 0.7 on.
Each turn repeats all earlier turns, so the record's size is quadratic in the turns. Only Gym's collector and ``prorl
submit`` receive the record, never a trainer. The exporter rejects a whole file if one row has an incomplete step, so
each record is completed:

- Text that the policy writes beside tool calls is appended to its reasoning: a step has either text or tool calls.
- A tool call without an answer gets a placeholder answer; arguments that are not a JSON object are stored in
  ``malformed``.
- A failed rollout, or one without a turn, ends with an answer that states the reason, marked as local and without
  tokens. The health checks report such a row as unhealthy.
- If the last turn was cut short or a limit ended the rollout, the last model call has a ``response`` with the reason.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import orjson


if TYPE_CHECKING:
    from pydantic import TypeAdapter


ROLLOUT_OPTIONS_KEY = "rollout"
"""Row field with the options of ``POST /v1/rollouts`` besides ``row``."""

NO_STEPS = b"[]"


class ToolCallTiming(TypedDict):
    """Start (seconds since the epoch) and duration of an executed tool call."""

    call_id: str
    started_at: float
    seconds: float


class TurnTiming(TypedDict):
    """Timing of one turn: start (seconds since the epoch) and duration of the model call, number of output items,
    token counts, and tool calls. ``weights``: labels of the weights that sampled the turn's first and last token, if
    the model server reports labels."""

    started_at: float
    seconds: float
    items: int
    input_tokens: int | None
    output_tokens: int | None
    tools: list[ToolCallTiming]
    weights: NotRequired[tuple[str | None, str | None]]


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """Tool call of a turn. ``arguments`` is ``None`` if the policy's text (``written``) is not a JSON object;
    ``output`` is ``None`` if the rollout ended first; ``time`` is ``None`` without a recorded timing."""

    id: str
    name: str
    written: str
    arguments: dict[str, Any] | None
    output: str | None
    time: ToolCallTiming | None


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """Turn of a finished row: reasoning, text and tool calls. ``step`` is ``None`` in rows without timings."""

    thought: str
    said: str
    calls: list[ParsedCall]
    step: TurnTiming | None


def read_turns(row: Mapping[str, Any]) -> list[ParsedTurn]:
    """Parse the turns of a finished row of any environment. Timings are attached only if their number of turns
    matches."""
    try:
        steps = _steps().validate_python(part(row, "rollout", "steps"))
    except ValueError:
        steps = []
    grouped = [*turns(items(part(row, "response", "output")), [step["items"] for step in steps])]
    return [
        _turn(group, steps[number] if len(steps) == len(grouped) else None) for number, group in enumerate(grouped)
    ]


@cache
def _steps() -> TypeAdapter[list[TurnTiming]]:
    from pydantic import TypeAdapter  # lazy: the import would dominate the start of `prorl show`

    return TypeAdapter(list[TurnTiming])


def turns(output: Sequence[Mapping[str, Any]], sizes: Sequence[int] = ()) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the items of each turn: the policy's output items, and the observations that follow.

    Args:
        output: all output items.
        sizes: number of the policy's items per turn. If their sum is not the number of the policy's items, a turn
            starts with the policy's first item after an observation, or after an item with token ids.
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
    """Return the text of a message's content, which may have any form of the Responses API; other objects as JSON."""
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
    """Return the field ``inner`` of the object ``row[name]``; ``None`` if that is missing or not an object."""
    outer = row.get(name)
    return outer.get(inner) if isinstance(outer, dict) else None


def items(listed: Any) -> list[Mapping[str, Any]]:
    """Return the objects of a list; empty for any other type."""
    return [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []


def _observed(item: Mapping[str, Any]) -> bool:
    """Return whether an item is input of the policy: a tool's output, or a user, system or developer message."""
    return item.get("type") == "function_call_output" or item.get("role") in ("user", "system", "developer")


def _turn(group: Sequence[Mapping[str, Any]], step: TurnTiming | None) -> ParsedTurn:
    answers = {str(item.get("call_id")): text_of(item.get("output")) for item in group if "output" in item}
    times = {tool["call_id"]: tool for tool in step["tools"]} if step else {}
    thought, said, calls = [], [], []
    for item in group:
        match item.get("type", "message"):
            case "reasoning":
                thought.append(text_of(item.get("summary")) or text_of(item.get("content")))
            case "message" if not _observed(item):
                said.append(text_of(item.get("content")))
            case "function_call":
                written, call_id = str(item.get("arguments", "")), str(item.get("call_id"))
                name, arguments = str(item.get("name")), _arguments(written)
                calls.append(ParsedCall(call_id, name, written, arguments, answers.get(call_id), times.get(call_id)))
            case "function_call_output" | "message":
                pass
            case other:
                said.append(f"[{other}]")
    return ParsedTurn("\n".join(filter(None, thought)), "\n".join(filter(None, said)), calls, step)


def _arguments(written: str) -> dict[str, Any] | None:
    try:
        read = orjson.loads(written)
        orjson.dumps(read)  # raises for nesting that orjson reads but cannot write
    except (orjson.JSONDecodeError, TypeError):
        return None
    return read if isinstance(read, dict) else None


TRAJECTORY = "ng_trajectory"
_INVOCATION = "root"
_NOT_ANSWERED = "(not answered: the rollout ended)"


@cache
def gym_reads_trajectories() -> bool:
    """Return whether the installed Gym reads ``ng_trajectory``; Gym before 0.7 ignores the key."""
    return importlib.util.find_spec("nemo_gym.rollout_observability") is not None


def ng_trajectory(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trajectory record of a finished row that has the collector's indices and the field ``rollout``."""
    record = _Record(row)
    for turn in read_turns(row):
        record.add(turn)
    record.close()
    return record.written()


class _Record:
    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row
        about = row.get(ROLLOUT_OPTIONS_KEY)
        self._about: dict[str, Any] = about if isinstance(about, dict) else {}
        self._task_id, self._rollout_id = _identity(row)
        model = part(row, "response", "model")
        self._model = model if isinstance(model, str) and model.strip() else None
        self._said = [*_prompt(row)]
        self._turns: list[dict[str, Any]] = []
        self._model_calls: list[dict[str, Any]] = []
        self._tool_calls: list[dict[str, Any]] = []
        self._call_ids: set[str] = set()
        created = part(row, "response", "created_at")
        self._now = float(created) if isinstance(created, int | float) else 0.0

    def add(self, turn: ParsedTurn) -> None:
        call: dict[str, Any] = {"response_metadata": {"model": self._model, "status_code": 200}}
        if turn.step is not None:
            self._now, seconds = turn.step["started_at"], turn.step["seconds"]
            call |= {
                "started_at": self._now,
                "completed_at": self._now + seconds,
                "duration_ms": seconds * 1000,
                "token_stats": {
                    "prompt_tokens": turn.step["input_tokens"],
                    "completion_tokens": turn.step["output_tokens"],
                },
            }
        thought = [turn.thought, turn.said] if turn.calls else [turn.thought]
        calls = [*self._calls(turn)]
        answer = [call for call, _ in calls] or [self._message(turn.said)]
        self._turn("\n\n".join(filter(None, thought)), answer, call)
        self._said += [output for _, output in calls]

    def close(self) -> None:
        """Add the end of a rollout that failed, or that did not end by the policy's choice."""
        failure = self._about.get("failure")
        told = failure if isinstance(failure, dict) else {}
        kind = self._row.get("failure_kind") or told.get("kind")
        ended = self._about.get("finish_reason")
        if kind is None and self._turns:
            incomplete = part(self._row, "response", "incomplete_details")
            if incomplete or ended not in ("stop", None):
                self._model_calls[-1]["response"] = {
                    "status": "incomplete" if incomplete else "completed",
                    "incomplete_details": incomplete,
                    "metadata": {"rollout_finish_reason": ended},
                }
            return
        why = self._row.get("failure_reason") or told.get("reason") or "the policy sampled nothing"
        reason = str(kind or ended or "unknown")
        metadata = {"upstream_attempted": False, "response_source": "local", "local_response_reason": reason}
        tokens = {"prompt_tokens": 0, "completion_tokens": 0}
        answer = self._message(f"(written by the service, not by the policy) {reason}: {why}")
        self._turn("", [answer], {"response_metadata": metadata, "token_stats": tokens})

    def written(self) -> dict[str, Any]:
        invocation = {
            "kind": "agent_invocation",
            "invocation_id": _INVOCATION,
            "status": "completed",
            "model_calls": [{"model_call_id": call["model_call_id"]} for call in self._model_calls],
            "conversation": self._said,
        }
        return {
            "schema_version": "1.0",
            "task_id": self._task_id,
            "rollout_id": self._rollout_id,
            "invocations": [invocation],
            "turns": self._turns,
            "model_calls": self._model_calls,
            "tool_calls": self._tool_calls,
            "gaps": [],
        }

    def _turn(self, thought: str, answer: list[dict[str, Any]], call: dict[str, Any]) -> None:
        number = len(self._turns) + 1
        reasoning = [
            {"type": "reasoning", "id": f"rs_{number}", "summary": [{"type": "summary_text", "text": text}]}
            for text in [thought]
            if text
        ]
        call_id = f"{self._rollout_id}:{number}"
        self._model_calls.append({"model_call_id": call_id, **call})
        self._turns.append(
            {
                "invocation_id": _INVOCATION,
                "task_id": self._task_id,
                "rollout_id": self._rollout_id,
                "turn_no": number,
                "timestamp": self._now,
                "question": [*self._said],
                "answer": answer,
                "reasoning_content": reasoning or None,
                "step_count": len(self._tool_calls),
                "model_calls": [{"model_call_id": call_id}],
            }
        )
        self._said += reasoning + answer

    def _calls(self, turn: ParsedTurn) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the call and the output item of each tool call; empty and repeated ids are made unique."""
        for call in turn.calls:
            call_id = call.id
            while not call_id.strip() or call_id in self._call_ids:
                call_id = f"{call_id}#{len(self._tool_calls)}"
            self._call_ids.add(call_id)
            name = call.name if call.name.strip() else "(no name)"
            arguments = {"malformed": call.written} if call.arguments is None else call.arguments
            output = _NOT_ANSWERED if call.output is None else call.output
            times: dict[str, Any] = {"timing_source": "harness"}
            if call.time is not None:
                started, seconds = call.time["started_at"], call.time["seconds"]
                times |= {"started_at": started, "completed_at": started + seconds, "duration_ms": seconds * 1000}
            self._tool_calls.append(
                {
                    "kind": "tool_call",
                    "invocation_id": _INVOCATION,
                    "tool_call_id": call_id,
                    "tool_name": name,
                    "status": "completed",
                    "output": output,
                    **times,
                }
            )
            written = orjson.dumps(arguments).decode()
            yield (
                {"type": "function_call", "call_id": call_id, "name": name, "arguments": written},
                {"type": "function_call_output", "call_id": call_id, "output": output},
            )

    def _message(self, text: str) -> dict[str, Any]:
        return {
            "type": "message",
            "id": f"msg_{len(self._turns) + 1}",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": text, "annotations": []}],
        }


def _identity(row: Mapping[str, Any]) -> tuple[str, str]:
    task, repeat = row.get("_ng_task_index"), row.get("_ng_rollout_index")
    names = (row.get(name) for name in ("task_id", "problem_id", "instance_id"))
    task_id = next((str(name) for name in names if name is not None and str(name).strip()), str(task))
    rollout_id = str(row.get("_ng_rollout_id") or f"{task}-{repeat}")
    attempt = row.get("_ng_attempt_index")
    return task_id, f"{rollout_id}-a{attempt}" if isinstance(attempt, int) and attempt > 0 else rollout_id


def _prompt(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the prompt's messages. Gym's exporter accepts only the roles system and user, so developer messages become
    system messages, and all other items user messages."""
    instructions = part(row, "responses_create_params", "instructions")
    if isinstance(instructions, str):
        yield {"type": "message", "role": "system", "content": instructions}
    given = part(row, "responses_create_params", "input")
    for item in items([{"role": "user", "content": given}] if isinstance(given, str) else given):
        kind = item.get("role", item.get("type"))
        role = "system" if kind in ("system", "developer") else "user"
        text = text_of(item.get("content") or item.get("output") or item.get("arguments") or item.get("summary"))
        yield {"type": "message", "role": role, "content": text if kind in ("system", "user") else f"[{kind}]\n{text}"}
