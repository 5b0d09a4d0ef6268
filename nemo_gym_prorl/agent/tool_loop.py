# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Multi-turn tool loop: the policy's turn, its tool calls, their observations, and the next turn.

Tools are routes of the environment's server. Replies are treated as in Gym's ``simple_agent``, except for errors.
Gym's agent turns every error into an observation, so an overloaded gateway or a broken tool causes reward 0. Here:

- *429, 503*: the server refused the call before any work, so the loop retries the call a few times.
- *502, 504, 520 to 530*: a gateway failed, possibly after the tool's work. Tool calls are not idempotent, so the
  attempt fails, and its sandbox is discarded.
- *500*: a single answer may be due to the arguments and is an observation. A tool that answers several calls in a row
  with 500, from one rollout or from several, is broken, and the attempt fails.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_prorl.agent.conversation import Conversation
from nemo_gym_prorl.agent.gym_http import CookieJar, GymServer
from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.http.client import HttpAnswer
from nemo_gym_prorl.http.tracing import SpanGroup, note, span
from nemo_gym_prorl.rollout.job import Progress
from nemo_gym_prorl.rollout.turn_records import TurnTiming


RESERVED_ROUTES = frozenset(
    {"seed_session", "release_session", "close_session", "checkpoint_session", "renew_leases", "run_program", "verify"}
    | {"aggregate_metrics", "mcp", "openapi.json", "docs"}
)
"""Routes of a resources server that are not tools: a call of the policy to such a route gets "Not Found"."""

AfterTurn = Callable[[dict[str, Any], int], Awaitable[None]]

_TOOL_NAME = re.compile(r"(?!\.+$)[\w.-]{1,200}")
"""Valid tool names. Servers drop the connection on overlong paths, so names have at most 200 characters."""


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """Limits of the tool loop.

    Attributes:
        max_steps: policy turns; ``None`` for no limit.
        max_total_sequence_length: prompt plus generated tokens of the latest turn, i.e. the length of the sequence so
            far; ``None`` for no limit.
        tool_concurrency: tool calls of one turn in flight at once. With 1 the calls run in the policy's order, which
            tools that share state (a shell, files) need.
    """

    max_steps: int | None = None
    max_total_sequence_length: int | None = None
    tool_concurrency: int = 1


class ToolLoop:
    """Tool loop of one rollout.

    Args:
        server: resources server whose routes are the tools.
        progress: progress of the rollout, updated by the loop.
        hidden: additional routes of the server that are not tools.
    """

    def __init__(
        self,
        server: GymServer,
        cookies: CookieJar,
        conversation: Conversation,
        limits: LoopLimits,
        progress: Progress,
        hidden: Collection[str],
        tools: EnvironmentTools,
        errors: ToolErrorState,
    ) -> None:
        self._server = server
        self._cookies = cookies
        self._conversation = conversation
        self._limits = limits
        self._progress = progress
        self._no_tools = {*(f"/{name}" for name in RESERVED_ROUTES), *hidden}
        self._semaphore = asyncio.Semaphore(limits.tool_concurrency)
        self._tools = tools
        self._errors = errors

    async def run(
        self,
        params: dict[str, Any],
        response: dict[str, Any],
        pending: list[dict[str, Any]] | None = None,
        after_turn: AfterTurn | None = None,
    ) -> None:
        """Run until the policy is done or a limit is reached, and set the finish reason.

        ``response`` is filled in place: the items of all turns are added to its ``output``, with their token fields.

        Args:
            params: the row's request.
            response: an empty response, or the response of a checkpoint.
            pending: items of a checkpoint that the policy has not received; ``None`` for a new rollout.
            after_turn: called after the tools of a turn have answered, unless the turn was the last. The arguments are
                the response and the number of items at the end of ``output`` that the policy has not received.
        """
        new = params["input"] if pending is None else pending
        if isinstance(new, str):
            new = [{"role": "user", "content": new}]
        without_input = {key: value for key, value in params.items() if key != "input"}
        output: list[dict[str, Any]] = response["output"]
        reason = None
        while reason is None:
            started_at, start = time.time(), time.monotonic()
            with span(SpanGroup.AGENT, "prorl.turn", turn=self._progress.turns) as this:
                turn = await self._conversation.turn(without_input, new)
                input_tokens, output_tokens = _token_counts(turn or {})
                note(this, input_tokens=input_tokens, output_tokens=output_tokens)
            if turn is None:
                reason = "context_overflow"
                break
            self._progress.turns += 1
            self._progress.steps.append(_step(turn, started_at, time.monotonic() - start))
            output.extend(turn["output"])
            usage = _add_usage(response.get("usage"), turn.get("usage"))
            response.update({**turn, "output": output, "usage": usage, "previous_response_id": None})
            calls = [item for item in turn["output"] if item.get("type") == "function_call"]
            for index, call in enumerate(calls):
                _fill_missing_fields(call, f"call-{self._progress.turns}-{index}")
            reason = self._finish_reason(turn, calls)
            if reason is None:
                new = await self._call_tools(calls, output)
                reason = self._limit_reached(turn)
                if after_turn is not None and reason is None:
                    await after_turn(response, len(new))
        self._progress.finish_reason = reason

    def _finish_reason(self, turn: dict[str, Any], calls: list[dict[str, Any]]) -> str | None:
        if turn.get("incomplete_details"):
            nothing = (turn.get("usage") or {}).get("output_tokens") == 0
            return "context_overflow" if nothing else "length"
        if not turn["output"]:
            return "stop"  # another request would get the same empty answer
        has_message = any(item.get("type") == "message" and item.get("role") == "assistant" for item in turn["output"])
        return "stop" if has_message and not calls else None

    def _limit_reached(self, turn: dict[str, Any]) -> str | None:
        limits = self._limits
        if limits.max_steps is not None and self._progress.turns >= limits.max_steps:
            return "max_steps"
        longest = limits.max_total_sequence_length
        if longest is not None and _sequence_length(turn) >= longest:
            return "max_total_sequence_length"
        return None

    async def _call_tools(self, calls: list[dict[str, Any]], output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Execute the calls, and return the observations in the order of the calls. The observations are also appended
        to ``output``; after an error or a cancellation, only those of finished calls."""
        observations: list[dict[str, Any]] = []
        tasks: list[asyncio.Task[dict[str, Any]]] = []
        try:
            if self._limits.tool_concurrency == 1:
                for call in calls:
                    observations.append(await self._call_tool(call))
            else:
                async with asyncio.TaskGroup() as group:
                    tasks += (group.create_task(self._call_tool(call)) for call in calls)
        finally:
            done = [task for task in tasks if task.done() and not task.cancelled() and not task.exception()]
            observations += (task.result() for task in done)
            output.extend(observations)
        return observations

    async def _call_tool(self, call: dict[str, Any]) -> dict[str, Any]:
        """Execute one call and return its observation, which may be an error of the tool or of the call itself."""
        try:
            json.loads(call["arguments"])
            # Arguments are sent unchanged: `json` accepts values (NaN, lone surrogates) that `orjson` cannot write.
            arguments = call["arguments"].encode()
        except (ValueError, RecursionError) as error:
            return _observation(call, json.dumps({"error": f"Invalid tool call arguments: {error!r}"}))
        route = f"/{call['name']}"
        if not _TOOL_NAME.fullmatch(call["name"]) or route in self._no_tools:
            return _observation(call, json.dumps({"detail": "Not Found"}))
        async with self._semaphore:
            started_at, start = time.time(), time.monotonic()
            with span(SpanGroup.AGENT, "prorl.tool", tool=call["name"], call=str(call["call_id"])):
                answer = await self._tools.call(self._server, call["name"], arguments, self._cookies, self._errors)
        self._progress.tool_calls += 1
        seconds = round(time.monotonic() - start, 6)
        self._progress.steps[-1]["tools"].append(
            {"call_id": str(call["call_id"]), "started_at": started_at, "seconds": seconds}
        )
        return _observation(call, answer.text())


def _fill_missing_fields(call: dict[str, Any], call_id: str) -> None:
    """Fill the required fields of a malformed call, so that the call gets an observation like any other."""
    for name, default in (("call_id", call_id), ("name", ""), ("arguments", "")):
        if not isinstance(value := call.get(name), str):
            call[name] = default if value is None else json.dumps(value)


def _step(turn: dict[str, Any], started_at: float, seconds: float) -> TurnTiming:
    input_tokens, output_tokens = _token_counts(turn)
    return {
        "started_at": started_at,
        "seconds": round(seconds, 6),
        "items": len(turn["output"]),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "tools": [],
    }


def _token_counts(turn: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the numbers of input and output tokens; ``None`` for a number that ``usage`` lacks or that is invalid."""
    input_tokens, output_tokens = (
        count if isinstance(count := (turn.get("usage") or {}).get(name), int) and count >= 0 else None
        for name in ("input_tokens", "output_tokens")
    )
    return input_tokens, output_tokens


def _observation(call: dict[str, Any], output: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": output}


def _sequence_length(turn: dict[str, Any]) -> int:
    """Return the prompt plus generated tokens of one turn; 0 if the turn has neither usage nor token ids."""
    usage = turn.get("usage") or {}
    if usage.get("total_tokens"):
        return int(usage["total_tokens"])
    return max(
        (
            len(item.get("prompt_token_ids") or ()) + len(item.get("generation_token_ids") or ())
            for item in turn["output"]
        ),
        default=0,
    )


def _add_usage(total: dict[str, Any] | None, turn: dict[str, Any] | None) -> dict[str, Any] | None:
    if not total or not turn:
        return total or turn
    sums = {key: total.get(key, 0) + turn.get(key, 0) for key in ("input_tokens", "output_tokens", "total_tokens")}
    return {**total, **sums}


BROKEN_AFTER = 3
"""Consecutive 500 answers to one rollout after which a tool counts as broken; two may be due to bad arguments."""
BROKEN_FOR_ALL_AFTER = 16
"""Consecutive 500 answers to all rollouts after which a tool counts as broken; several policies may each err once."""

_REFUSALS = frozenset({429, 503})
_GATEWAYS = frozenset({502, 504, *range(520, 531)})
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)  # between retries of a refused call
_MAX_RETRY_AFTER_S = 15.0  # cap on `Retry-After`, so that a server cannot hold up a rollout


@dataclass(slots=True)
class ToolErrorState:
    """Tool errors of one rollout.

    Attributes:
        consecutive: consecutive 500 answers by tool.
        refused_s: seconds of pauses after tools refused a call; not charged to the RUN budget.
    """

    consecutive: Counter[str] = field(default_factory=Counter)
    refused_s: float = 0.0
    _until: float = 0.0

    async def pause(self, seconds: float) -> None:
        """Wait after a refused call, and add the wait to ``refused_s``. Overlapping waits count once."""
        now = time.monotonic()
        self.refused_s += max(0.0, now + seconds - max(now, self._until))
        self._until = max(self._until, now + seconds)
        await asyncio.sleep(seconds)


class EnvironmentTools:
    """Tools of one environment, shared by its rollouts: retries, and detection of broken tools.

    Attributes:
        errors: number of answers with status 429 or ≥ 500, by status.
    """

    def __init__(self) -> None:
        self.errors: Counter[int] = Counter()
        self._consecutive: Counter[str] = Counter()  # 500 answers by tool, over all rollouts

    async def call(
        self, server: GymServer, tool: str, arguments: bytes, cookies: CookieJar, rollout_errors: ToolErrorState
    ) -> HttpAnswer:
        """Call a tool, with retries after a refusal, and return the answer that becomes the observation.

        Args:
            arguments: arguments as JSON.
            rollout_errors: tool errors of the rollout, updated by the call.

        Raises:
            InfrastructureError: the server is overloaded or unreachable, its gateway failed, or the tool is broken
                (:data:`BROKEN_AFTER`, :data:`BROKEN_FOR_ALL_AFTER`).
        """
        for pause in (*_PAUSES_S, None):
            answer = await server.post(f"/{tool}", arguments, cookies)
            if answer.status == 429 or answer.status >= 500:
                self.errors[answer.status] += 1
            if answer.status not in _REFUSALS or pause is None:
                break
            retry_after = answer.headers.get("Retry-After", "")
            pause = min(max(pause, float(retry_after) if retry_after.isdecimal() else 0.0), _MAX_RETRY_AFTER_S)
            await rollout_errors.pause(pause)
        if answer.status in _REFUSALS | _GATEWAYS:
            raise InfrastructureError(f"tool {tool!r}: HTTP {answer.status}: {answer.error_text(500)}")
        for count in (self._consecutive, rollout_errors.consecutive):
            count[tool] = count[tool] + 1 if answer.status == 500 else 0
            if not count[tool]:
                del count[tool]
        failed = max(self._consecutive[tool], rollout_errors.consecutive[tool])
        if rollout_errors.consecutive[tool] >= BROKEN_AFTER or self._consecutive[tool] >= BROKEN_FOR_ALL_AFTER:
            raise InfrastructureError(
                f"tool {tool!r} is broken: {failed} consecutive HTTP 500 answers, the latest: {answer.error_text(500)}"
            )
        return answer
