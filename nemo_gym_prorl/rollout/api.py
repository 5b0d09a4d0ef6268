# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The job API (docs/job-api.md): rollouts as resources over HTTP, and Prometheus metrics of the service.

A route translates between the wire and a :class:`~.service.RolloutService` and decides nothing. The router mounts on
any FastAPI application; on ``prorl_agent`` it stands beside Gym's own routes. Gauges are read from the scheduler when
they are scraped, so they cannot drift from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sse_starlette import EventSourceResponse, ServerSentEvent

from nemo_gym_prorl.failures import CallerError, Stage
from nemo_gym_prorl.http.access import caller_of, tell
from nemo_gym_prorl.http.applications import LoopMetrics, require_running
from nemo_gym_prorl.http.keys import Caller
from nemo_gym_prorl.http.problems import (
    ProblemError,
    ProblemRoute,
    no_other_parameters,
    problem_of,
    problem_responses,
)
from nemo_gym_prorl.rollout.access_control import ended_of, is_own, require_own, require_own_id, submitted_by
from nemo_gym_prorl.rollout.job import Job, JobState
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import Cursor, CursorExpired
from nemo_gym_prorl.rollout.rows import read_json
from nemo_gym_prorl.rollout.schemas import (
    MAX_WAIT_S,
    CancelAnswer,
    CancelRequest,
    CheckpointsView,
    DrainAnswer,
    DrainRequest,
    ForkAnswer,
    ForkRequest,
    JobView,
    Listing,
    StatusView,
    SubmitRequest,
    TokenForm,
    job_json,
)
from nemo_gym_prorl.rollout.service import RolloutService


Who = Annotated[Caller, Depends(caller_of)]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for news (long-poll).")]


def rollout_router(service: RolloutService, metrics: ServiceMetrics) -> APIRouter:
    """The routes of one service. Who may call them is the application's to say (``nemo_gym_prorl.http.access``),
    and whose a rollout is that of :mod:`.access_control`.

    Args:
        service: whose jobs.
        metrics: served at ``/metrics``.
    """
    router = APIRouter(route_class=JsonRoute, dependencies=[Depends(no_other_parameters)])

    async def find(rollout_id: str, who: Caller) -> Job:
        job = await service.store.fetch(rollout_id)
        if job is None:
            raise ProblemError(404, "unknown-rollout", f"no rollout {rollout_id!r}")
        require_own(who, job)
        return job

    def tell_of(request: Request, who: Caller, cancelled: list[Job]) -> None:
        if who.is_admin and any(job.client in service.store.shares for job in cancelled):
            tell(request.scope)

    def answer(job: Job, tokens: TokenForm = TokenForm.ITEMS) -> Response:
        content = orjson.dumps(job_json(job, with_result=True, tokens=tokens))
        service.store.mark_read(job)
        return Response(content, media_type="application/json")

    def listing(jobs: list[Job], cursor: Cursor, results: bool, more: Cursor | None = None) -> Response:
        rollouts = [job_json(job, with_result=results) for job in jobs]
        if results:
            for job in jobs:
                service.store.mark_read(job)
        page = {
            "rollouts": rollouts,
            "cursor": str(cursor),
            "next": None if more is None else str(more),
        }
        return Response(orjson.dumps(page), media_type="application/json")

    @router.post(
        "/v1/rollouts",
        status_code=202,
        tags=["rollouts"],
        responses=problem_responses(403, 409, 410, 422, 429, 503),
    )
    async def submit(body: SubmitRequest, who: Who) -> JobView:
        """Submit a rollout. The same `id` and row again answer with the job that exists."""
        job = await service.accept(submitted_by(who, body.to_request(), service.store))
        require_own_id(who, job)  # it may have been another's, long ago
        return JobView.of(job)

    @router.post(
        "/v1/rollouts/{rollout_id}/fork",
        status_code=202,
        tags=["rollouts"],
        responses=problem_responses(403, 404, 409, 410, 422, 429, 503),
    )
    async def fork(
        rollout_id: str,
        who: Who,
        body: ForkRequest | None = None,
        turn: Annotated[
            int | None, Query(ge=1, description="After which; by default the latest that is kept.")
        ] = None,
        n: Annotated[int, Query(ge=1, le=1000, description="How many.")] = 1,
    ) -> ForkAnswer:
        """Submit rollouts that begin where this one was after a turn: with its sandbox's files, and its tokens."""
        parent = await find(rollout_id, who)
        wanted = (body or ForkRequest()).to_requests(parent, n)
        jobs = await service.fork(parent, turn, [submitted_by(who, one, service.store) for one in wanted])
        return ForkAnswer(rollouts=[JobView.of(job) for job in jobs])

    @router.get("/v1/rollouts/{rollout_id}/checkpoints", tags=["rollouts"], responses=problem_responses(403, 404, 422))
    async def checkpoints(rollout_id: str, who: Who) -> CheckpointsView:
        """Where it can be forked. Administrators may ask of other services' rollouts by which this one can go on."""
        if (job := await service.store.fetch(rollout_id)) is not None:
            require_own(who, job)
        turns = await service.kept_turns(rollout_id) if job is not None or who.is_admin else []
        if job is None and not turns:
            raise ProblemError(404, "unknown-rollout", f"no rollout {rollout_id!r}")
        return CheckpointsView(turns=turns)

    @router.get(
        "/v1/rollouts/{rollout_id}",
        response_model=JobView,
        tags=["rollouts"],
        responses=problem_responses(403, 404, 410, 422),
    )
    async def get(
        rollout_id: str,
        who: Who,
        wait: Wait = 0.0,
        tokens: Annotated[TokenForm, Query(description="Where the result's tokens are to be.")] = TokenForm.ITEMS,
    ) -> Response:
        """The rollout; with `wait`, as soon as it has its outcome or the time is over."""
        job = await find(rollout_id, who)
        if wait and not job.state.terminal:
            await service.wait(job, wait)
        return answer(job, tokens)

    @router.get("/v1/rollouts", response_model=Listing, tags=["rollouts"], responses=problem_responses(403, 410, 422))
    async def list_rollouts(
        who: Who,
        state: JobState | None = None,
        group: str | None = None,
        after: Annotated[str | None, Query(description="A cursor: follow the log of terminal outcomes.")] = None,
        page: Annotated[str | None, Query(alias="from", description="`next` of the page before.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        wait: Wait = 0.0,
        results: Annotated[bool, Query(description="Include each rollout's result.")] = False,
    ) -> Response:
        """Without `after`: rollouts, oldest first. With it: terminal outcomes in the order in which they ended."""
        store = service.store
        if after is not None and page is not None:
            raise CallerError("is a page of the rollouts, `after` a place in the log; give one of them", field="from")
        if after is None:
            first = 0 if page is None else Cursor.parse(page, "from").within(store.life, 0, store.submitted)
            found: list[Job] = []
            while len(found) <= limit:  # others' are gone past
                some = await store.page(state=state, group=group, after=first, limit=limit + 1, content=results)
                found += [job for job in some if is_own(who, job)]
                if len(some) <= limit:
                    break
                first = some[-1].number
            more = Cursor(store.life, found[limit - 1].number) if len(found) > limit else None
            return listing(found[:limit], store.cursor, results, more)
        ended, cursor = await ended_of(who, store, Cursor.parse(after), limit, wait, content=results)
        fitting = [job for job in ended if (state is None or job.state is state) and group in (None, job.group)]
        return listing(fitting, cursor, results)

    @router.delete(
        "/v1/rollouts/{rollout_id}",
        response_model=JobView,
        tags=["rollouts"],
        responses=problem_responses(403, 404, 410, 422),
    )
    async def cancel(rollout_id: str, who: Who, request: Request) -> Response:
        """Cancel; answers when the rollout has its outcome and its sandbox is gone. A terminal one stays as it is."""
        job = await find(rollout_id, who)
        tell_of(request, who, [job])
        await service.cancel(job)
        return answer(job)

    @router.post("/v1/rollouts/cancel", tags=["rollouts"], responses=problem_responses(403, 422))
    async def cancel_many(body: CancelRequest, who: Who, request: Request) -> CancelAnswer:
        """Cancel several at once; answers when all of them have their outcome."""
        if body.group is not None:
            jobs, unknown = [job for job in await service.store.in_group(body.group) if is_own(who, job)], []
        else:
            ids = list(dict.fromkeys(body.ids or ()))
            known = await service.store.fetch_all(ids)
            jobs, unknown = [*known.values()], [rollout_id for rollout_id in ids if rollout_id not in known]
            for number, rollout_id in enumerate(ids):
                if rollout_id in known:
                    require_own(who, known[rollout_id], f"ids.{number}")
        tell_of(request, who, jobs)
        await asyncio.gather(*(service.cancel(job) for job in jobs))
        return CancelAnswer(rollouts=[JobView.of(job) for job in jobs], unknown=unknown)

    @router.get(
        "/v1/events",
        tags=["service"],
        response_class=EventSourceResponse,
        responses=problem_responses(403, 410, 422),
    )
    async def events(
        request: Request,
        who: Who,
        after: Annotated[str | None, Query(description="`cursor` of the last one seen.")] = None,
    ) -> EventSourceResponse:
        """Every transition as a server-sent event. `Last-Event-ID` or `after` resumes as far as history reaches. A
        reader that falls behind further than that gets an event `problem` with a problem document, and the end."""
        seen = request.headers.get("last-event-id")
        field, text = ("after", after) if seen is None else ("Last-Event-ID", seen)
        transitions = service.store.events(None if text is None else Cursor.parse(text, field))

        async def stream() -> AsyncIterator[ServerSentEvent]:
            try:
                async for transition in transitions:
                    if is_own(who, transition):
                        data = orjson.dumps(transition).decode()
                        yield ServerSentEvent(data, event="transition", id=transition.cursor)
            except CursorExpired as error:
                told = problem_of(error).problem
                yield ServerSentEvent(told.model_dump_json(exclude_none=True), event="problem")

        return EventSourceResponse(stream())

    @router.post("/v1/drain", tags=["service"], responses=problem_responses(403, 422))
    async def drain(body: DrainRequest | None = None) -> DrainAnswer:
        """Take no new rollouts. Answers when every rollout has its outcome, or after `timeout_s` seconds."""
        await service.drain(body.timeout_s if body else 0.0)
        return DrainAnswer.of(service)

    @router.post("/v1/resume", tags=["service"], responses=problem_responses(403))
    async def resume() -> DrainAnswer:
        """Take rollouts again."""
        service.resume()
        return DrainAnswer.of(service)

    @router.get("/status", tags=["service"], responses=problem_responses(403))
    async def status() -> StatusView:
        """Counts per stage, pool and state."""
        return service.status()

    @router.get("/healthz", tags=["service"], responses=problem_responses(503))
    async def healthz() -> dict[str, str]:
        """Answers while the event loop turns and no background loop fails; says `draining` when no new work is
        taken."""
        require_running(service.loops)
        return {"status": "draining" if service.draining else "ok"}

    @router.get("/metrics", tags=["service"], response_class=PlainTextResponse, responses=problem_responses(403))
    async def prometheus() -> Response:
        """Prometheus metrics."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


class JsonRoute(ProblemRoute):
    """A route that reads its body by :func:`read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler, for a request that reads its JSON strictly."""
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await inner(_JsonRequest(request.scope, request.receive))

        return handle


class _JsonRequest(Request):
    async def json(self) -> Any:
        try:
            return read_json(await self.body())
        except CallerError as error:
            raise problem_of(error) from None  # FastAPI lets pass what is an HTTPException, all else is 400 to it


_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)


class _Pools(Collector):
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def collect(self) -> Iterable[Metric]:
        scheduler = self._pipeline.scheduler
        slots = GaugeMetricFamily("prorl_stage_slots", "Slots of a stage's pool.", labels=["stage"])
        working = GaugeMetricFamily("prorl_stage_working", "Slots in use.", labels=["stage", "environment"])
        waiting = GaugeMetricFamily("prorl_stage_waiting", "Jobs queued for a stage.", labels=["stage", "environment"])
        for stage in Stage:
            slots.add_metric([stage.value], scheduler.sizes.of(stage))
        counts = scheduler.by_environment()
        errors = CounterMetricFamily("prorl_tool_errors", "Error answers of tools.", labels=["status", "environment"])
        for name in self._pipeline.environments.names:
            for status, count in self._pipeline.environments.environment(name).tool_errors.items():
                errors.add_metric([str(status), name], count)
            for stage in Stage:
                working.add_metric([stage.value, name], counts[name, stage, True])
                waiting.add_metric([stage.value, name], counts[name, stage, False])
        yield from (slots, working, waiting, errors)
        yield GaugeMetricFamily("prorl_sessions", "Sandboxes held by INIT, READY and RUN.", value=scheduler.sessions)
        yield GaugeMetricFamily(
            "prorl_retained_bytes", "What finished rollouts keep.", value=self._pipeline.store.retained_bytes
        )
        yield GaugeMetricFamily(
            "prorl_results_full",
            "1 while unread results fill retain_bytes, so that submissions are refused.",
            value=self._pipeline.store.full,
        )
        out = GaugeMetricFamily(
            "prorl_server_unreachable",
            "1 while no rollout of the environment begins since this server is out.",
            labels=["server", "environment"],
        )
        for outage in self._pipeline.held:
            out.add_metric([outage.server, outage.environment], 1)
        yield out
        yield GaugeMetricFamily("prorl_abandoned", "Calls that ignored cancellation.", value=self._pipeline.abandoned)


class ServiceMetrics:
    """The metrics of a service, in a registry of their own.

    Args:
        service: whose; hooks itself to the service's outcomes.
        state: tells how it is now.
    """

    def __init__(self, service: RolloutService, state: Collector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(state)
        self._registry.register(LoopMetrics(service.loops))
        self._outcomes = Counter(
            "prorl_rollouts", "Rollouts that ended.", ["state", "failure_kind", "environment"], registry=self._registry
        )
        self._failures = Counter(
            "prorl_failed_attempts",
            "Attempts that failed.",
            ["stage", "failure_kind", "environment"],
            registry=self._registry,
        )
        labels = ["stage", "environment"]
        self._worked = Histogram(
            "prorl_stage_worked_seconds", "Work per rollout.", labels, buckets=_SECONDS, registry=self._registry
        )
        self._waited = Histogram(
            "prorl_stage_waited_seconds", "Queue time per rollout.", labels, buckets=_SECONDS, registry=self._registry
        )
        self._turns = Histogram(
            "prorl_turns",
            "Policy turns per rollout.",
            ["environment"],
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
            registry=self._registry,
        )
        service.on_finish.append(self._finished)

    def render(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)

    def _finished(self, job: Job) -> None:
        failure = job.outcome.failure if job.outcome else None
        where = job.environment
        self._outcomes.labels(job.state.value, failure.kind.value if failure else "", where).inc()
        for attempt in job.failures:
            self._failures.labels(attempt.stage.value if attempt.stage else "", attempt.kind.value, where).inc()
        for stage, spent in job.times.items():
            if spent.attempts:
                self._worked.labels(stage.value, where).observe(spent.worked_s)
                self._waited.labels(stage.value, where).observe(spent.waited_s)
        self._turns.labels(where).observe(job.progress.turns)


class PipelineMetrics(ServiceMetrics):
    """The metrics of a pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline, _Pools(pipeline))
