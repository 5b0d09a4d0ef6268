# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The job API (docs/api.md): rollouts as resources over HTTP.

Thin on purpose: a route translates between the wire and :class:`~.pipeline.Pipeline` and decides nothing. The router
mounts on any FastAPI application; on ``prorl_agent`` it stands beside Gym's own routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import PlainTextResponse
from sse_starlette import EventSourceResponse, ServerSentEvent

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.cursors import Cursor, CursorExpired
from nemo_gym_prorl.rollout.job import Job, JobState
from nemo_gym_prorl.rollout.json_route import JsonRoute
from nemo_gym_prorl.rollout.metrics import PipelineMetrics
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.schemas import (
    MAX_WAIT_S,
    CancelAnswer,
    CancelRequest,
    DrainAnswer,
    DrainRequest,
    JobView,
    Listing,
    StatusView,
    SubmitRequest,
    TokenForm,
    job_json,
)
from nemo_gym_prorl.serving.problems import ProblemError, no_other_parameters, problem_of, problem_responses


Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for news (long-poll).")]


def rollout_router(pipeline: Pipeline, metrics: PipelineMetrics) -> APIRouter:
    """The routes of one pipeline. Who may call them is the application's to say (``nemo_gym_prorl.serving.access``).

    Args:
        pipeline: whose jobs.
        metrics: served at ``/metrics``.
    """
    router = APIRouter(route_class=JsonRoute, dependencies=[Depends(no_other_parameters)])

    async def find(rollout_id: str) -> Job:
        job = await pipeline.store.fetch(rollout_id)
        if job is None:
            raise ProblemError(404, "unknown-rollout", f"no rollout {rollout_id!r}")
        return job

    def answer(job: Job, tokens: TokenForm = TokenForm.ITEMS) -> Response:
        content = orjson.dumps(job_json(job, with_result=True, tokens=tokens))
        pipeline.store.mark_read(job)
        return Response(content, media_type="application/json")

    def listing(jobs: list[Job], cursor: Cursor, results: bool, more: Cursor | None = None) -> Response:
        rollouts = [job_json(job, with_result=results) for job in jobs]
        if results:
            for job in jobs:
                pipeline.store.mark_read(job)
        page = {"rollouts": rollouts, "cursor": str(cursor), "next": None if more is None else str(more)}
        return Response(orjson.dumps(page), media_type="application/json")

    @router.post(
        "/v1/rollouts",
        status_code=202,
        tags=["rollouts"],
        responses=problem_responses(409, 410, 422, 429, 503),
    )
    async def submit(body: SubmitRequest) -> JobView:
        """Submit a rollout. The same `id` and row again answer with the job that exists."""
        job = await pipeline.accept(body.to_request())
        return JobView.of(job)

    @router.get(
        "/v1/rollouts/{rollout_id}",
        response_model=JobView,
        tags=["rollouts"],
        responses=problem_responses(404, 410, 422),
    )
    async def get(
        rollout_id: str,
        wait: Wait = 0.0,
        tokens: Annotated[TokenForm, Query(description="Where the result's tokens are to be.")] = TokenForm.ITEMS,
    ) -> Response:
        """The rollout; with `wait`, as soon as it has its outcome or the time is over."""
        job = await find(rollout_id)
        if wait and not job.state.terminal:
            await pipeline.wait(job, wait)
        return answer(job, tokens)

    @router.get("/v1/rollouts", response_model=Listing, tags=["rollouts"], responses=problem_responses(410, 422))
    async def list_rollouts(
        state: JobState | None = None,
        group: str | None = None,
        after: Annotated[str | None, Query(description="A cursor: follow the log of terminal outcomes.")] = None,
        page: Annotated[str | None, Query(alias="from", description="`next` of the page before.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        wait: Wait = 0.0,
        results: Annotated[bool, Query(description="Include each rollout's result.")] = False,
    ) -> Response:
        """Without `after`: rollouts, oldest first. With it: terminal outcomes in the order in which they ended."""
        store = pipeline.store
        if after is not None and page is not None:
            raise CallerError("is a page of the rollouts, `after` a place in the log; give one of them", field="from")
        if after is None:
            first = 0 if page is None else Cursor.parse(page, "from").within(store.life, 0, store.submitted)
            found = await store.page(state=state, group=group, after=first, limit=limit + 1, content=results)
            more = Cursor(store.life, found[limit - 1].number) if len(found) > limit else None
            return listing(found[:limit], store.cursor, results, more)
        start = Cursor.parse(after)
        if wait:
            await store.wait_for_end(start, wait)
        ended, cursor = await store.ended_after(start, limit, content=results)
        fitting = [job for job in ended if (state is None or job.state is state) and group in (None, job.group)]
        return listing(fitting, cursor, results)

    @router.delete(
        "/v1/rollouts/{rollout_id}",
        response_model=JobView,
        tags=["rollouts"],
        responses=problem_responses(404, 410, 422),
    )
    async def cancel(rollout_id: str) -> Response:
        """Cancel; answers when the rollout has its outcome and its sandbox is gone. A terminal one stays as it is."""
        job = await find(rollout_id)
        await pipeline.cancel(job)
        return answer(job)

    @router.post("/v1/rollouts/cancel", tags=["rollouts"], responses=problem_responses(422))
    async def cancel_many(body: CancelRequest) -> CancelAnswer:
        """Cancel several at once; answers when all of them have their outcome."""
        if body.group is not None:
            jobs, unknown = await pipeline.store.in_group(body.group), []
        else:
            ids = dict.fromkeys(body.ids or ())
            found = await pipeline.store.fetch_all(ids)
            jobs, unknown = [*found.values()], [rollout_id for rollout_id in ids if rollout_id not in found]
        await asyncio.gather(*(pipeline.cancel(job) for job in jobs))
        return CancelAnswer(rollouts=[JobView.of(job) for job in jobs], unknown=unknown)

    @router.get(
        "/v1/events",
        tags=["service"],
        response_class=EventSourceResponse,
        responses=problem_responses(410, 422),
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
                    yield ServerSentEvent(orjson.dumps(transition).decode(), event="transition", id=transition.cursor)
            except CursorExpired as error:
                yield ServerSentEvent(problem_of(error).problem.model_dump_json(exclude_none=True), event="problem")

        return EventSourceResponse(stream())

    @router.post("/v1/drain", tags=["service"], responses=problem_responses(422))
    async def drain(body: DrainRequest | None = None) -> DrainAnswer:
        """Take no new rollouts. Answers when every rollout has its outcome, or after `timeout_s` seconds."""
        await pipeline.drain(body.timeout_s if body else 0.0)
        return DrainAnswer.of(pipeline)

    @router.post("/v1/resume", tags=["service"], responses=problem_responses())
    async def resume() -> DrainAnswer:
        """Take rollouts again."""
        pipeline.resume()
        return DrainAnswer.of(pipeline)

    @router.get("/status", tags=["service"], responses=problem_responses())
    async def status() -> StatusView:
        """Counts per stage, pool and state."""
        return StatusView.of(pipeline)

    @router.get("/healthz", tags=["service"])
    async def healthz() -> dict[str, str]:
        """Answers while the event loop turns; says `draining` when no new work is taken."""
        return {"status": "draining" if pipeline.draining else "ok"}

    @router.get("/metrics", tags=["service"], response_class=PlainTextResponse, responses=problem_responses())
    async def prometheus() -> Response:
        """Prometheus metrics."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
