# SPDX-License-Identifier: Apache-2.0
"""The job API (docs/api.md): rollouts as resources over HTTP.

Thin on purpose: a route translates between the wire and :class:`~.pipeline.Pipeline` and decides nothing. The router
mounts on any FastAPI application; on ``prorl_agent`` it stands beside Gym's own routes.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from nemo_gym_prorl.problems import Problem, ProblemError, ProblemRoute, problem_of
from nemo_gym_prorl.rollout.cursors import Cursor, CursorExpired
from nemo_gym_prorl.rollout.job import Job, JobState
from nemo_gym_prorl.rollout.metrics import PipelineMetrics
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import RolloutForgotten
from nemo_gym_prorl.rollout.schemas import (
    CancelAnswer,
    CancelRequest,
    EventView,
    JobView,
    Listing,
    StatusView,
    SubmitRequest,
    job_json,
)


MAX_WAIT_S = 60.0
"""Longest long-poll; a caller that waits longer polls again, so that dead connections are noticed."""

Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for news (long-poll).")]

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": description}
    for status, description in {
        401: "The control token is missing or wrong.",
        404: "No such rollout.",
        409: "The id belongs to a rollout with another row.",
        410: "The cursor is older than what is kept, or the rollout is forgotten.",
        422: "A field is wrong; `errors` names it.",
        429: "The queue is full.",
        503: "The service is draining.",
    }.items()
}


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: _PROBLEMS[status] for status in (401, *statuses)}


def rollout_router(pipeline: Pipeline, metrics: PipelineMetrics, control_token: str | None = None) -> APIRouter:
    """The routes of one pipeline.

    Args:
        pipeline: whose jobs.
        metrics: served at ``/metrics``.
        control_token: if set, routes that submit, show or cancel jobs require it as a bearer token.
    """
    router = APIRouter(route_class=ProblemRoute)
    guard = [Depends(token_guard(control_token))]

    def find(rollout_id: str) -> Job:
        job = pipeline.store.get(rollout_id)
        if job is None and pipeline.store.is_forgotten(rollout_id):
            raise RolloutForgotten(f"rollout {rollout_id!r} has ended and is forgotten")
        if job is None:
            raise ProblemError(404, "unknown-rollout", f"no rollout {rollout_id!r}")
        return job

    def answer(job: Job) -> Response:
        content = orjson.dumps(job_json(job, with_result=True))
        pipeline.store.mark_read(job)
        return Response(content, media_type="application/json")

    def listing(jobs: list[Job], cursor: Cursor, results: bool) -> Response:
        rollouts = [job_json(job, with_result=results) for job in jobs]
        if results:
            for job in jobs:
                pipeline.store.mark_read(job)
        return Response(orjson.dumps({"rollouts": rollouts, "cursor": str(cursor)}), media_type="application/json")

    @router.post(
        "/v1/rollouts",
        status_code=202,
        tags=["rollouts"],
        dependencies=guard,
        responses=_problems(409, 410, 422, 429, 503),
    )
    async def submit(body: SubmitRequest) -> JobView:
        """Submit a rollout. The same `id` and row again answer with the job that exists."""
        job = pipeline.submit(body.to_request(pipeline.settings.budgets))
        return JobView.of(job)

    @router.get(
        "/v1/rollouts/{rollout_id}",
        response_model=JobView,
        tags=["rollouts"],
        dependencies=guard,
        responses=_problems(404, 410, 422),
    )
    async def get(rollout_id: str, wait: Wait = 0.0) -> Response:
        """The rollout; with `wait`, as soon as it has its outcome or the time is over."""
        job = find(rollout_id)
        if wait and not job.state.terminal:
            await pipeline.wait(job, wait)
        return answer(job)

    @router.get(
        "/v1/rollouts", response_model=Listing, tags=["rollouts"], dependencies=guard, responses=_problems(410, 422)
    )
    async def list_rollouts(
        state: JobState | None = None,
        group: str | None = None,
        after: Annotated[str | None, Query(description="A cursor: follow the log of terminal outcomes.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        wait: Wait = 0.0,
        results: Annotated[bool, Query(description="Include each rollout's result.")] = False,
    ) -> Response:
        """Without `after`: rollouts, oldest first. With it: terminal outcomes in the order in which they ended."""
        store = pipeline.store
        if after is None:
            cursor = store.cursor
            found: list[Job] = []
            for job in store.find(state=state, group=group):
                if len(found) == limit:
                    break
                found.append(job)
            return listing(found, cursor, results)
        start = Cursor.parse(after)
        if wait:
            await store.wait_for_end(start, wait)
        ended, cursor = store.ended_after(start, limit)
        fitting = [job for job in ended if (state is None or job.state is state) and group in (None, job.group)]
        return listing(fitting, cursor, results)

    @router.delete(
        "/v1/rollouts/{rollout_id}",
        response_model=JobView,
        tags=["rollouts"],
        dependencies=guard,
        responses=_problems(404, 410),
    )
    async def cancel(rollout_id: str) -> Response:
        """Cancel; answers when the rollout has its outcome and its sandbox is gone. A terminal one stays as it is."""
        job = find(rollout_id)
        await pipeline.cancel(job)
        return answer(job)

    @router.post("/v1/rollouts/cancel", tags=["rollouts"], dependencies=guard, responses=_problems(422))
    async def cancel_many(body: CancelRequest) -> CancelAnswer:
        """Cancel several at once; answers when all of them have their outcome."""
        if body.group is not None:
            jobs, unknown = pipeline.store.in_group(body.group), []
        else:
            found = {rollout_id: pipeline.store.get(rollout_id) for rollout_id in body.ids or ()}
            jobs = [job for job in found.values() if job is not None]
            unknown = [rollout_id for rollout_id, job in found.items() if job is None]
        await asyncio.gather(*(pipeline.cancel(job) for job in jobs))
        return CancelAnswer(rollouts=[JobView.of(job) for job in jobs], unknown=unknown)

    @router.get(
        "/v1/events",
        tags=["service"],
        dependencies=guard,
        response_class=EventSourceResponse,
        responses=_problems(410, 422),
    )
    async def events(
        request: Request, after: Annotated[str | None, Query(description="`cursor` of the last one seen.")] = None
    ) -> EventSourceResponse:
        """Every transition as a server-sent event. `Last-Event-ID` or `after` resumes as far as history reaches. A
        reader that falls behind further than that gets an event `problem` with a problem document, and the end."""
        seen = request.headers.get("last-event-id")
        field, text = ("after", after) if seen is None else ("Last-Event-ID", seen)
        transitions = pipeline.store.events(None if text is None else Cursor.parse(text, field))

        async def stream() -> AsyncIterator[ServerSentEvent]:
            try:
                async for transition in transitions:
                    view = EventView.of(transition, pipeline.store.event_cursor(transition))
                    yield ServerSentEvent(view.model_dump_json(), event="transition", id=view.cursor)
            except CursorExpired as error:
                yield ServerSentEvent(problem_of(error).problem.model_dump_json(exclude_none=True), event="problem")

        return EventSourceResponse(stream())

    @router.get("/status", tags=["service"])
    async def status() -> StatusView:
        """Counts per stage, pool and state."""
        return StatusView.of(pipeline)

    @router.get("/healthz", tags=["service"])
    async def healthz() -> dict[str, str]:
        """Answers while the event loop turns; says `draining` when no new work is taken."""
        return {"status": "draining" if pipeline.draining else "ok"}

    @router.get("/metrics", tags=["service"], response_class=Response)
    async def prometheus() -> Response:
        """Prometheus metrics."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def token_guard(control_token: str | None) -> Any:
    """A dependency that lets a request pass if it carries the token, or if none is set."""

    async def guard(request: Request) -> None:
        if control_token is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {control_token}".encode()):
            raise ProblemError(
                401,
                "unauthorized",
                "send `Authorization: Bearer <control token>`",
                headers={"WWW-Authenticate": "Bearer"},
            )

    return guard
