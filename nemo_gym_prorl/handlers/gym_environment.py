# SPDX-License-Identifier: Apache-2.0
"""The default handler: drives *any* Gym resources server through the three stages.

    INIT   POST /seed_session                      on the resources server
    RUN    POST /v1/responses on the model server, then POST /<tool> on the resources server, until done
           POST <release path>                     where the server named one when it was seeded
    EVAL   POST /verify

It does what Gym's ``simple_agent`` does with the same replies, so rewards are the same, and adds what a service needs:
limits on turns and tokens, a clean end at context overflow, partial trajectories, and failures that are failures.

Server-side release is an extension that unmodified servers never see: a server whose ``/seed_session`` answers with a
``release_path`` is told, before EVAL, that the agent is done, and answers when the agent's sandbox is gone.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_prorl.failures import Failure, FailureKind, Origin, Stage, TaskError
from nemo_gym_prorl.handlers.conversation import Conversation
from nemo_gym_prorl.handlers.gym_http import CookieJar, GymServer, require_ok
from nemo_gym_prorl.rollout.job import Job, Outcome, Progress, Trajectory, Verdict, failure_state


RESERVED_ROUTES = frozenset(
    {"seed_session", "release_session", "close_session", "verify", "aggregate_metrics", "mcp", "openapi.json", "docs"}
)
"""Routes of a resources server that are no tools: a policy that calls them learns that there is no such tool."""

_NEVER_HAPPENED = frozenset({FailureKind.CANCELLED, FailureKind.KILL_SHAPED, FailureKind.SHUTDOWN})
_TOOL_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """When the tool loop ends though the policy would go on.

    Attributes:
        max_turns: policy turns; ``None`` for no bound.
        max_tokens: prompt plus generated tokens of the latest turn, i.e. the length of the sequence so far.
        tool_concurrency: calls of one turn that may be in flight at once. 1 keeps the order in which the policy wrote
            them, which tools that share state (a shell, files) need.
    """

    max_turns: int | None = None
    max_tokens: int | None = None
    tool_concurrency: int = 1


@dataclass(frozen=True, slots=True)
class GymContext:
    """What the service tells a handler about its deployment."""

    resources: GymServer
    model: GymServer
    limits: LoopLimits = field(default_factory=LoopLimits)


@dataclass(slots=True)
class GymSession:
    """One rollout's session at its resources server."""

    cookies: CookieJar
    release_path: str | None = None


class GymEnvironmentHandler:
    """See the module's description.

    Args:
        context: the servers and limits.
    """

    name = "gym_environment"

    def __init__(self, context: GymContext) -> None:
        self._context = context

    async def init(self, job: Job) -> GymSession:
        """Seed a session.

        Raises:
            CallerError: the server refuses the row (4xx); its message is passed on.
            InfrastructureError: the server fails (5xx) or cannot be reached.
        """
        session = GymSession(CookieJar())
        answer = await self._context.resources.post("/seed_session", job.row, session.cookies)
        require_ok(answer, f"{self._context.resources.name} /seed_session", FailureKind.PROVIDER_UNAVAILABLE)
        body = answer.json()
        if isinstance(body, dict) and isinstance(body.get("release_path"), str):
            session.release_path = body["release_path"]
        return session

    async def run(self, job: Job, session: GymSession) -> Trajectory:
        """Run the tool loop; ``job.trajectory`` grows with each turn."""
        params = job.row["responses_create_params"]
        job.trajectory = Trajectory(empty_response(params), evidence=session.cookies)
        attempt = f"{job.id}.{job.times[Stage.RUN].attempts}"
        conversation = Conversation(self._context.model, attempt, job.group)
        loop = ToolLoop(self._context, conversation, session.cookies, job.progress)
        await loop.run(params, job.trajectory.response)
        return job.trajectory

    async def release(self, job: Job, session: GymSession) -> None:
        """Tell a server that asked for it that the agent is done."""
        if session.release_path is None:
            return
        answer = await self._context.resources.post(session.release_path, {}, session.cookies)
        require_ok(answer, f"release at {self._context.resources.name}", FailureKind.SESSION_RELEASE_FAILED)

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        """Verify.

        Raises:
            TaskError: the verifier refuses the rollout (4xx) or answers without a reward.
            InfrastructureError: it fails (5xx) or cannot be reached.
        """
        server = self._context.resources
        answer = await server.post("/verify", {**job.row, "response": trajectory.response}, trajectory.evidence)
        if 400 <= answer.status < 500:
            raise TaskError(f"{server.name} /verify refused the rollout: HTTP {answer.status}: {answer.text(2000)}")
        require_ok(answer, f"{server.name} /verify", FailureKind.VERIFIER_ERROR)
        result = answer.json()
        reward = result.get("reward") if isinstance(result, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise TaskError(f"{server.name} /verify answered without a number in `reward`: {answer.text(500)}")
        return Verdict(float(reward), result)

    async def unreachable(self) -> list[str]:
        """Which of the servers do not answer now."""
        servers = (self._context.resources, self._context.model)
        answering = await asyncio.gather(*(server.answers() for server in servers))
        return [server.name for server, answers in zip(servers, answering, strict=True) if not answers]

    def on_failure(self, job: Job, stage: Stage | None, failure: Failure) -> Outcome:
        """A masked row that carries whatever was sampled, and no reward that anybody could train on."""
        if job.trajectory is not None:
            response = job.trajectory.response
        else:
            response = empty_response(job.row["responses_create_params"])
        return Outcome(failure_state(failure), failure_row(job.row, response, failure), failure=failure)


class ToolLoop:
    """Policy turn, tool calls, observations, until the policy is done or a limit is reached.

    Args:
        context: servers and limits.
        conversation: with the policy.
        cookies: the resources session.
        progress: counted up as the loop goes.
    """

    def __init__(
        self, context: GymContext, conversation: Conversation, cookies: CookieJar, progress: Progress
    ) -> None:
        self._context = context
        self._conversation = conversation
        self._cookies = cookies
        self._progress = progress
        self._gate = asyncio.Semaphore(context.limits.tool_concurrency)

    async def run(self, params: dict[str, Any], response: dict[str, Any]) -> None:
        """Fill ``response`` in place; its ``output`` ends up with every item of every turn, token fields unchanged."""
        new = params["input"]
        if isinstance(new, str):
            new = [{"role": "user", "content": new}]
        without_input = {key: value for key, value in params.items() if key != "input"}
        output: list[dict[str, Any]] = response["output"]
        reason = None
        while reason is None:
            turn = await self._conversation.turn(without_input, new)
            if turn is None:
                reason = "context_overflow"
                break
            self._progress.turns += 1
            output.extend(turn["output"])
            usage = _add_usage(response.get("usage"), turn.get("usage"))
            response.update({**turn, "output": output, "usage": usage, "previous_response_id": None})
            calls = [item for item in turn["output"] if item.get("type") == "function_call"]
            reason = self._ended(turn, calls)
            if reason is None:
                new = await self._call_tools(calls)
                output.extend(new)
                reason = self._limit_reached(turn)
        await self._conversation.settle()
        self._progress.finish_reason = reason

    def _ended(self, turn: dict[str, Any], calls: list[dict[str, Any]]) -> str | None:
        if turn.get("incomplete_details"):
            return "length"
        if not turn["output"]:
            return "stop"  # asking again would get the same nothing, for ever
        said = any(item.get("type") == "message" and item.get("role") == "assistant" for item in turn["output"])
        return "stop" if said and not calls else None

    def _limit_reached(self, turn: dict[str, Any]) -> str | None:
        limits = self._context.limits
        if limits.max_turns is not None and self._progress.turns >= limits.max_turns:
            return "max_turns"
        if limits.max_tokens is not None and _sequence_length(turn) >= limits.max_tokens:
            return "max_tokens"
        return None

    async def _call_tools(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The observations, in the order of the calls."""
        if self._context.limits.tool_concurrency == 1:
            return [await self._call_tool(call) for call in calls]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._call_tool(call)) for call in calls]
        return [task.result() for task in tasks]

    async def _call_tool(self, call: dict[str, Any]) -> dict[str, Any]:
        """One observation. A tool's error is an observation too: the policy gets the body of any answer."""
        try:
            json.loads(call["arguments"])
            # Sent as written: not every writer of JSON takes what the reader made of it.
            arguments = call["arguments"].encode()
        except (ValueError, TypeError, RecursionError) as error:
            return _observation(call, json.dumps({"error": f"Invalid tool call arguments: {error!r}"}))
        if not _TOOL_NAME.fullmatch(call["name"]) or call["name"] in RESERVED_ROUTES:
            return _observation(call, json.dumps({"detail": "Not Found"}))
        async with self._gate:
            answer = await self._context.resources.post(f"/{call['name']}", arguments, self._cookies)
        self._progress.tool_calls += 1
        return _observation(call, answer.text())


def failure_row(row: dict[str, Any], response: dict[str, Any], failure: Failure) -> dict[str, Any]:
    """A rollout without a reward, as Gym's collectors and trainers understand it.

    Gym writes it to the failures file next to the results and tries it again, unless it says otherwise: a bad row
    stays bad (``_ng_failure_terminal``), and a rollout that was taken back never happened (``_ng_no_persist``).
    """
    marks: dict[str, Any] = {}
    if failure.kind in _NEVER_HAPPENED:
        marks["_ng_no_persist"] = True
    elif failure.origin in (Origin.CALLER, Origin.TASK):
        marks["_ng_failure_terminal"] = True
    return {
        **row,
        "response": response,
        "reward": 0.0,  # the row's schema needs a number; mask_sample says that it is none
        "mask_sample": True,
        "failure_kind": failure.kind.value,
        "failure_reason": failure.reason,
        "_ng_failure_class": failure.kind.value,
        **marks,
    }


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


def empty_response(params: dict[str, Any], *, clock: Callable[[], float] = time.time) -> dict[str, Any]:
    """A Responses API response without output: what a rollout has before its first turn."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "created_at": int(clock()),
        "model": params.get("model") or "none",
        "object": "response",
        "output": [],
        "tool_choice": params.get("tool_choice") or "auto",
        "parallel_tool_calls": params.get("parallel_tool_calls", True),
        "tools": params.get("tools") or [],
    }
