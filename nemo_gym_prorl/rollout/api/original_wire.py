# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Wire format of the original ProRL Agent server, for trainers that use it.

Routes and fields follow NVIDIA-NeMo/ProRL-Agent-Server (``scripts/start_server.py``, ``openhands/nvidia/utils.py``);
jobs run in the same pipeline as all others. Differences, where the original loses data:

- ``/process`` of a cancelled job answers with the partial messages.
- An unknown job gets 404 rather than 200, and errors keep their status.
- A second ``/process`` with the ``job_id`` of a running job joins that job; once answered, the ``job_id`` is free.
- ``/stop`` cancels only jobs of ``/process``.
- ``/status`` always has the same fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, HttpUrl

from nemo_gym_prorl.failures import CallerError, FailureKind, Stage
from nemo_gym_prorl.http.key_guard import caller_in
from nemo_gym_prorl.http.problems import ProblemError, problem_responses
from nemo_gym_prorl.rollout.api.access_control import require_own, scoped_key, submitted_by
from nemo_gym_prorl.rollout.api.attached_callers import AttachedCallers
from nemo_gym_prorl.rollout.api.routes import JsonRoute
from nemo_gym_prorl.rollout.api.schemas import Identifier
from nemo_gym_prorl.rollout.gym_rows import check_row
from nemo_gym_prorl.rollout.job import Job, JobState
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import JobConflict, JobRequest


class ProcessRequest(BaseModel):
    """Rollout to run. ``instance`` is the dataset row; ``sampling_params`` are added to the row's request."""

    model_config = ConfigDict(extra="forbid")

    instance: dict[str, Any]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    job_id: Identifier | None = None


class CancelBody(BaseModel):
    """Id of the job to cancel."""

    job_id: Identifier


class ServerBody(BaseModel):
    """URL of a backend, e.g. ``http://10.0.0.7:8000/v1``."""

    address: HttpUrl


_SAMPLING = ("temperature", "top_p", "max_output_tokens")
"""Sampling parameters of a Responses API request. Others are ignored: the model server's configuration sets them."""


def wire_router(
    pipeline: Pipeline,
    callers: AttachedCallers,
    add_backend: Callable[[str], Awaitable[None]],
    clear_backends: Callable[[], Awaitable[None]],
) -> APIRouter:
    """Return the original routes. Include this router before the job API's, since both have a ``/status``.

    Args:
        add_backend: adds the backend with this URL.
        clear_backends: removes every backend; running rollouts keep theirs.
    """
    router = APIRouter(route_class=JsonRoute, tags=["original ProRL wire format"])
    jobs: dict[str, Job] = {}  # jobs in flight by job_id
    names: dict[Job, str] = {}  # job_id of each job in flight
    running = False

    def started(name: str, job: Job) -> None:
        if not job.state.terminal:  # a joined job may have ended before, with an answer that was not delivered
            jobs[name], names[job] = job, name

    def finished(job: Job) -> None:
        name = names.pop(job, None)
        if name is not None and jobs.get(name) is job:
            del jobs[name]

    pipeline.on_finish.append(finished)

    def require_running() -> None:
        if not running:
            raise ProblemError(503, "not-running", "the server is not running; POST /start first")

    @router.post("/start", responses=problem_responses(400, 403))
    async def start() -> dict[str, str]:
        """Accept jobs."""
        nonlocal running
        if running:
            raise ProblemError(400, "already-running", "the server is running already")
        running = True
        return {"status": "started"}

    @router.post("/stop", responses=problem_responses(403))
    async def stop() -> dict[str, str]:
        """Refuse new jobs, and cancel the jobs of `/process`. Answers once the jobs' sandboxes are released."""
        nonlocal running
        running = False
        await asyncio.gather(*(pipeline.cancel(job, "the server was stopped") for job in list(jobs.values())))
        return {"status": "stopped"}

    @router.post("/process", responses=problem_responses(403, 409, 410, 422, 503))
    async def process(body: ProcessRequest, request: Request) -> Response:
        """Run one rollout and answer with its messages, tokens and verdict.

        With the `job_id` of a running rollout, the request joins that rollout; once its answer was delivered, the
        `job_id` is a new rollout.
        """
        require_running()
        who = caller_in(request.scope)
        key = scoped_key(who, b"process:" + body.job_id.encode() if body.job_id else None)

        def render(job: Job) -> bytes:
            return orjson.dumps(to_result(job, body.job_id or job.id))

        try:
            asked = JobRequest(to_row(body.instance, body.sampling_params), id=body.job_id)
            wanted = submitted_by(who, asked, pipeline.store)
            answer = await callers.run(wanted, key, request, render, lambda job: started(body.job_id or job.id, job))
        except JobConflict as error:
            raise JobConflict(error.complaint, field="job_id") from None
        except CallerError as error:
            if error.field is None or not error.field.startswith("row."):
                raise
            raise CallerError(error.complaint, field=f"instance.{error.field.removeprefix('row.')}") from None
        return Response(answer, media_type="application/json")

    @router.post("/cancel", responses=problem_responses(403, 404, 422))
    async def cancel(body: CancelBody, request: Request) -> dict[str, str]:
        """Cancel a job; the `/process` request of the job answers with the partial result."""
        job = jobs.get(body.job_id)
        if job is None:
            raise ProblemError(404, "unknown-rollout", f"no job {body.job_id!r} is in flight")
        require_own(caller_in(request.scope), job, "job_id")
        await pipeline.cancel(job)
        return {"status": f"job {body.job_id} is {job.state}"}

    @router.post("/add_llm_server", responses=problem_responses(403, 422, 501, 502))
    async def add_llm_server(body: ServerBody) -> dict[str, str]:
        """Add an inference backend."""
        address = str(body.address).rstrip("/")
        await add_backend(address)
        return {"status": f"added {address}"}

    @router.post("/clear_llm_server", responses=problem_responses(403, 501, 502))
    async def clear_llm_server() -> dict[str, str]:
        """Remove every inference backend."""
        await clear_backends()
        return {"status": "cleared"}

    @router.get("/status", include_in_schema=False)  # OpenAPI describes the job API's route
    async def status() -> dict[str, Any]:
        """Return the job API's status, and the original's counters."""
        view = pipeline.status().model_dump(mode="json")
        counters: dict[str, Any] = {"status": "running" if running else "stopped", "pending_jobs": len(jobs)}
        for stage in Stage:
            counters[f"{stage.value}_queue"] = pipeline.scheduler.waiting(stage)
            counters[f"active_{stage.value}"] = pipeline.scheduler.working(stage)
        return {**view, **counters, "total": len(jobs)}

    return router


def to_row(instance: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    """Return the Gym row of an instance, with sampling parameters added to the row's request.

    Raises:
        CallerError: the instance has no prompt, or is not a valid row.
    """
    params = instance.get("responses_create_params")
    if params is None:
        prompt = instance.get("prompt") or instance.get("problem_statement")
        if not prompt:
            raise CallerError(
                "needs `responses_create_params`, `prompt` (text or messages) or `problem_statement`", field="instance"
            )
        params = {"input": prompt}
    try:
        check_row({**instance, "responses_create_params": params})
    except CallerError as error:
        raise CallerError(error.complaint, field=f"instance.{error.field}") from None
    chosen = {name: sampling[name] for name in _SAMPLING if sampling.get(name) is not None}
    return {**instance, "responses_create_params": {**params, **chosen}}


def to_result(job: Job, job_id: str) -> dict[str, Any]:
    """Return an ended job as a result of the original wire format, under its ``job_id``."""
    outcome = job.outcome
    assert outcome is not None, "only a job with its outcome has a result"
    failure = outcome.failure
    result = job.gym_result()
    response = result.get("response") or {}
    critical = None
    if failure is not None:
        if outcome.state is JobState.TIMED_OUT:
            critical = "timeout"
        elif failure.kind is FailureKind.CANCELLED or failure.stage is None:
            critical = "cancelled"
        else:
            critical = failure.stage.value
    row = job.row
    params = row["responses_create_params"]
    worked = {stage: time.worked_s for stage, time in job.times.items()}
    waited = sum(time.waited_s for time in job.times.values())
    return {
        "job_id": job_id,
        "instance_id": row.get("instance_id"),
        "trajectory_id": row.get("trajectory_id"),
        "git_patch": result.get("git_patch"),
        "success": failure is None,
        "resolved": outcome.reward is not None and outcome.reward > 0,
        "reward": outcome.reward,
        "finish": job.progress.finish_reason == "stop",
        "end_properly": job.progress.finish_reason == "stop",
        "error": failure.reason if failure else None,
        "critical_error": critical,
        "filter": failure is not None,
        "messages": to_messages(params["input"], response.get("output") or []),
        "tools": params.get("tools") or [],
        "timing": {
            "init_time": worked[Stage.INIT],
            "run_time": worked[Stage.RUN],
            "eval_time": worked[Stage.EVAL],
            "others_time": waited,
            "counted_elapsed": sum(worked.values()),
            "timeout_triggered": outcome.state is JobState.TIMED_OUT,
        },
    }


def to_messages(prompt: str | list[dict[str, Any]], output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return Responses API items as chat messages; the policy's items of one turn become one assistant message.

    The message of a turn has the token fields of the turn's last item: ``token_ids`` (sampled ids), ``input_ids`` (ids
    of the whole prompt) and ``logprobs`` (one per sampled id).
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []
    turn: dict[str, Any] | None = None
    for item in [*(prompt if isinstance(prompt, list) else []), *output]:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
            turn = None
            continue
        if kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": _text(item.get("content"))})
            turn = None
            continue
        if turn is None:
            turn = {"role": "assistant", "content": "", "tool_calls": []}
            messages.append(turn)
        if kind == "function_call":
            call = {"id": item.get("call_id"), "name": item.get("name"), "arguments": item.get("arguments")}
            turn["tool_calls"].append(call)
        elif kind == "message":
            turn["content"] += _text(item.get("content"))
        if item.get("generation_token_ids") is not None:
            turn["token_ids"] = item["generation_token_ids"]
            turn["input_ids"] = item.get("prompt_token_ids")
            turn["logprobs"] = item.get("generation_log_probs")
            turn = None
    return messages


def _text(content: Any) -> str:
    """Return the text of a message's content, which may have any type, since callers write the prompt's items."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)
