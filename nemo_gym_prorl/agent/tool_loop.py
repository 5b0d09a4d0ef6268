# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The multi-turn loop: the policy's turn, its tool calls, their answers, and again.

Tools are routes of the environment, as with Gym's ``simple_agent``, whose replies it treats in the same way, but for
errors. To Gym's own agent an error is always an observation. Then a gateway that is overrun, or a tool that is broken
for everybody, makes the policy fail its task, and that is trained on as a reward of 0. So here

- a refusal (429, 503) was made before any work, and the call is made again a few times;
- what a gateway says of a server behind it (502, 504, 520 to 530) may come after the work. A tool call cannot be
  repeated, so the attempt has failed, and with it what it did to its sandbox is gone;
- a 500 is the tool's own. One may be due to the arguments and is an observation. A tool that answers nothing else any
  more, be it one rollout that is told so or several, is broken.
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
from nemo_gym_prorl.agent.gym_http import CookieJar, GymServer, HttpAnswer
from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.http.tracing import SpanGroup, note, span
from nemo_gym_prorl.rollout.job import Progress
from nemo_gym_prorl.rollout.turns import TurnTiming


RESERVED_ROUTES = frozenset(
    {"seed_session", "release_session", "close_session", "checkpoint_session", "renew_leases", "verify"}
    | {"aggregate_metrics", "mcp", "openapi.json", "docs"}
)
"""Routes of a resources server that are no tools: a policy that calls them learns that there is no such tool."""

AfterTurn = Callable[[dict[str, Any], int], Awaitable[None]]

_TOOL_NAME = re.compile(r"(?!\.+$)[\w.-]{1,200}")
"""A longer one is no tool, and a path at which servers drop the connection."""


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """When the tool loop ends though the policy would go on.

    Attributes:
        max_steps: policy turns; ``None`` for no bound.
        max_total_sequence_length: prompt plus generated tokens of the latest turn, i.e. the length of the sequence so
            far; ``None`` for no bound.
        tool_concurrency: calls of one turn that may be in flight at once. 1 keeps the order in which the policy wrote
            them, which tools that share state (a shell, files) need.
    """

    max_steps: int | None = None
    max_total_sequence_length: int | None = None
    tool_concurrency: int = 1


class ToolLoop:
    """Policy turn, tool calls, observations, until the policy is done or a limit is reached.

    Args:
        server: the environment, whose routes are the tools.
        cookies: what it knows the rollout's session by.
        conversation: with the policy.
        limits: when the loop ends though the policy would go on.
        progress: counted up as the loop goes.
        hidden: further routes of the environment that are no tools.
        tools: the environment's tools, which several rollouts call.
        trouble: what the rollout has had with them.
    """

    def __init__(
        self,
        server: GymServer,
        cookies: CookieJar,
        conversation: Conversation,
        limits: LoopLimits,
        progress: Progress,
        hidden: Collection[str],
        tools: ToolAnswers,
        trouble: ToolErrorState,
    ) -> None:
        self._server = server
        self._cookies = cookies
        self._conversation = conversation
        self._limits = limits
        self._progress = progress
        self._no_tools = {*(f"/{name}" for name in RESERVED_ROUTES), *hidden}
        self._gate = asyncio.Semaphore(limits.tool_concurrency)
        self._tools = tools
        self._trouble = trouble

    async def run(
        self,
        params: dict[str, Any],
        response: dict[str, Any],
        pending: list[dict[str, Any]] | None = None,
        after_turn: AfterTurn | None = None,
    ) -> None:
        """Fill ``response`` in place; its ``output`` ends up with every item of every turn, token fields unchanged.

        Args:
            params: the row's request.
            response: empty, or as it was after a turn.
            pending: what was observed after that turn.
            after_turn: called with the response, and how many items at its end the policy has not been shown, when
                the tools of a turn have answered and the rollout goes on.
        """
        new = params["input"] if pending is None else pending
        if isinstance(new, str):
            new = [{"role": "user", "content": new}]
        without_input = {key: value for key, value in params.items() if key != "input"}
        output: list[dict[str, Any]] = response["output"]
        reason = None
        while reason is None:
            asked, begun = time.time(), time.monotonic()
            with span(SpanGroup.AGENT, "prorl.turn", turn=self._progress.turns) as this:
                turn = await self._conversation.turn(without_input, new)
                told, written = _tokens(turn or {})
                note(this, input_tokens=told, output_tokens=written)
            if turn is None:
                reason = "context_overflow"
                break
            self._progress.turns += 1
            self._progress.steps.append(_step(turn, asked, time.monotonic() - begun))
            output.extend(turn["output"])
            usage = _add_usage(response.get("usage"), turn.get("usage"))
            response.update({**turn, "output": output, "usage": usage, "previous_response_id": None})
            calls = [item for item in turn["output"] if item.get("type") == "function_call"]
            for place, call in enumerate(calls):
                _complete(call, f"call-{self._progress.turns}-{place}")
            reason = self._ended(turn, calls)
            if reason is None:
                new = await self._call_tools(calls, output)
                reason = self._limit_reached(turn)
                if after_turn is not None and reason is None:
                    await after_turn(response, len(new))
        self._progress.finish_reason = reason

    def _ended(self, turn: dict[str, Any], calls: list[dict[str, Any]]) -> str | None:
        if turn.get("incomplete_details"):
            nothing = (turn.get("usage") or {}).get("output_tokens") == 0
            return "context_overflow" if nothing else "length"
        if not turn["output"]:
            return "stop"  # asking again would get the same nothing, for ever
        said = any(item.get("type") == "message" and item.get("role") == "assistant" for item in turn["output"])
        return "stop" if said and not calls else None

    def _limit_reached(self, turn: dict[str, Any]) -> str | None:
        limits = self._limits
        if limits.max_steps is not None and self._progress.turns >= limits.max_steps:
            return "max_steps"
        longest = limits.max_total_sequence_length
        if longest is not None and _sequence_length(turn) >= longest:
            return "max_total_sequence_length"
        return None

    async def _call_tools(self, calls: list[dict[str, Any]], output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The observations, in the order of the calls; in ``output``, too, those that came before it is cancelled."""
        seen: list[dict[str, Any]] = []
        tasks: list[asyncio.Task[dict[str, Any]]] = []
        try:
            if self._limits.tool_concurrency == 1:
                for call in calls:
                    seen.append(await self._call_tool(call))
            else:
                async with asyncio.TaskGroup() as group:
                    tasks += (group.create_task(self._call_tool(call)) for call in calls)
        finally:
            seen += (task.result() for task in tasks if task.done() and not task.cancelled() and not task.exception())
            output.extend(seen)
        return seen

    async def _call_tool(self, call: dict[str, Any]) -> dict[str, Any]:
        """One observation. A tool's error is one too, unless it is a machine's: :class:`ToolAnswers`."""
        try:
            json.loads(call["arguments"])
            # Sent as written: not every writer of JSON takes what the reader made of it.
            arguments = call["arguments"].encode()
        except (ValueError, RecursionError) as error:
            return _observation(call, json.dumps({"error": f"Invalid tool call arguments: {error!r}"}))
        route = f"/{call['name']}"
        if not _TOOL_NAME.fullmatch(call["name"]) or route in self._no_tools:
            return _observation(call, json.dumps({"detail": "Not Found"}))
        async with self._gate:
            asked, begun = time.time(), time.monotonic()
            with span(SpanGroup.AGENT, "prorl.tool", tool=call["name"], call=str(call["call_id"])):
                answer = await self._tools.call(self._server, call["name"], arguments, self._cookies, self._trouble)
        self._progress.tool_calls += 1
        seconds = round(time.monotonic() - begun, 6)
        self._progress.steps[-1]["tools"].append(
            {"call_id": str(call["call_id"]), "started_at": asked, "seconds": seconds}
        )
        return _observation(call, answer.text())


def _complete(call: dict[str, Any], call_id: str) -> None:
    """Give a call the fields that a request must have. A call without one is the policy's act."""
    for name, instead in (("call_id", call_id), ("name", ""), ("arguments", "")):
        if not isinstance(value := call.get(name), str):
            call[name] = instead if value is None else json.dumps(value)


def _step(turn: dict[str, Any], asked: float, seconds: float) -> TurnTiming:
    told, written = _tokens(turn)
    return {
        "started_at": asked,
        "seconds": round(seconds, 6),
        "items": len(turn["output"]),
        "input_tokens": told,
        "output_tokens": written,
        "tools": [],
    }


def _tokens(turn: dict[str, Any]) -> tuple[int | None, int | None]:
    """What the policy says that it read and wrote."""
    told, written = (
        count if isinstance(count := (turn.get("usage") or {}).get(name), int) and count >= 0 else None
        for name in ("input_tokens", "output_tokens")
    )
    return told, written


def _observation(call: dict[str, Any], output: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": output}


def _sequence_length(turn: dict[str, Any]) -> int:
    """Tokens of prompt and generation of one turn; 0 if the model server tells neither usage nor token ids."""
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
    """Sums over turns, as ``simple_agent`` reports them."""
    if not total or not turn:
        return total or turn
    sums = {key: total.get(key, 0) + turn.get(key, 0) for key in ("input_tokens", "output_tokens", "total_tokens")}
    return {**total, **sums}


BROKEN_AFTER = 3
"""Answers of 500 to one rollout, one after the other, after which a tool counts as broken: two may be the arguments'
fault."""
BROKEN_FOR_ALL_AFTER = 16
"""The same over all rollouts: each of several policies may make a mistake, but not so many in a row."""

_REFUSALS = frozenset({429, 503})
_GATEWAYS = frozenset({502, 504, *range(520, 531)})
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
_LONGEST_S = 15.0
"""A pause that a refusal may ask for (``Retry-After``)."""


@dataclass(slots=True)
class ToolErrorState:
    """What one rollout has had with tools so far.

    Attributes:
        in_row: answers of 500 since any other one, by tool.
        refused_s: seconds of pauses after refusals, which are not the agent's time.
    """

    in_row: Counter[str] = field(default_factory=Counter)
    refused_s: float = 0.0
    _until: float = 0.0

    async def pause(self, seconds: float) -> None:
        """Wait after a refusal. Calls of one turn may wait at the same time, which is one time."""
        now = time.monotonic()
        self.refused_s += max(0.0, now + seconds - max(now, self._until))
        self._until = max(self._until, now + seconds)
        await asyncio.sleep(seconds)


class ToolAnswers:
    """The tools of one environment, as all of its rollouts call them.

    Attributes:
        errors: answers with a status of 429, or of 500 and above, by status.
    """

    def __init__(self) -> None:
        self.errors: Counter[int] = Counter()
        self._in_row: Counter[str] = Counter()
        """Answers of 500 since any other one, by tool."""

    async def call(
        self, server: GymServer, tool: str, arguments: bytes, cookies: CookieJar, trouble: ToolErrorState
    ) -> HttpAnswer:
        """Call a tool; again after a pause if it refuses, a few times. What comes back is an observation.

        Args:
            server: the environment.
            tool: its name.
            arguments: as JSON.
            cookies: of the rollout's session.
            trouble: the rollout's, which is kept up to date.

        Raises:
            InfrastructureError: the answer says nothing about the policy, or there is none.
        """
        for pause in (*_PAUSES_S, None):
            answer = await server.post(f"/{tool}", arguments, cookies)
            if answer.status == 429 or answer.status >= 500:
                self.errors[answer.status] += 1
            if answer.status not in _REFUSALS or pause is None:
                break
            asked = answer.headers.get("Retry-After", "")
            pause = min(max(pause, float(asked) if asked.isdecimal() else 0.0), _LONGEST_S)
            await trouble.pause(pause)
        if answer.status in _REFUSALS | _GATEWAYS:
            raise InfrastructureError(f"tool {tool!r}: HTTP {answer.status}: {answer.said(500)}")
        for count in (self._in_row, trouble.in_row):
            count[tool] = count[tool] + 1 if answer.status == 500 else 0
            if not count[tool]:
                del count[tool]
        failed = max(self._in_row[tool], trouble.in_row[tool])
        if trouble.in_row[tool] >= BROKEN_AFTER or self._in_row[tool] >= BROKEN_FOR_ALL_AFTER:
            raise InfrastructureError(
                f"tool {tool!r} is broken: it has answered with HTTP 500 {failed} times in a row, and now: "
                f"{answer.said(500)}"
            )
        return answer
