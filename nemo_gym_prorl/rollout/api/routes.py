# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Routes of the job API (docs/job-api.md): rollouts as resources over HTTP, and Prometheus metrics of the service.

Routes only translate between HTTP and a :class:`~..service.RolloutService`. The router mounts on any FastAPI
application; ``prorl_agent`` has Gym's own routes besides. Gauges are read from the scheduler at each scrape, so they
cannot drift.
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
from nemo_gym_prorl.http.applications import LoopMetrics, require_running
from nemo_gym_prorl.http.key_guard import caller_of, log_as_admin
from nemo_gym_prorl.http.keys import Caller
from nemo_gym_prorl.http.problems import (
    ProblemError,
    ProblemRoute,
    no_other_parameters,
    problem_of,
    problem_responses,
)
from nemo_gym_prorl.rollout.api.access_control import ended_of, is_own, require_own, require_own_id, submitted_by
from nemo_gym_prorl.rollout.api.schemas import (
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
    SubmitRequest,
    TokenForm,
    job_json,
)
from nemo_gym_prorl.rollout.gym_rows import read_json
from nemo_gym_prorl.rollout.job import Job, JobState
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import Cursor, CursorExpired
from nemo_gym_prorl.rollout.service import RolloutService
from nemo_gym_prorl.rollout.status import StatusView


CallerParam = Annotated[Caller, Depends(caller_of)]
WaitParam = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for news (long-poll).")]


def rollout_router(service: RolloutService, metrics: ServiceMetrics) -> APIRouter:
    """Return the routes of one service. The application checks keys (``nemo_gym_prorl.http.key_guard``);
    :mod:`.access_control` checks who owns a rollout.

    Args:
        metrics: metrics of the service, served at ``/metrics``.
    """
    router = APIRouter(route_class=JsonRoute, dependencies=[Depends(no_other_parameters)])

    async def find(rollout_id: str, who: Caller) -> Job:
        job = await service.store.fetch(rollout_id)
        if job is None:
            raise ProblemError(404, "unknown-rollout", f"no rollout {rollout_id!r}")
        require_own(who, job)
        return job

    def log_admin_cancel(request: Request, who: Caller, cancelled: list[Job]) -> None:
        if who.is_admin and any(job.client in service.store.shares for job in cancelled):
            log_as_admin(request.scope)

    def answer(job: Job, tokens: TokenForm = TokenForm.ITEMS) -> Response:
        content = orjson.dumps(job_json(job, with_result=True, tokens=tokens))
        return Response(content, media_type="application/json")

    def listing(jobs: list[Job], cursor: Cursor, results: bool, more: Cursor | None = None) -> Response:
        rollouts = [job_json(job, with_result=results) for job in jobs]
        page = {"rollouts": rollouts, "cursor": str(cursor), "next": None if more is None else str(more)}
        return Response(orjson.dumps(page), media_type="application/json")

    @router.post(
        "/v1/rollouts",
        status_code=202,
        tags=["rollouts"],
        responses=problem_responses(403, 409, 410, 422, 429, 503),
    )
    async def submit(body: SubmitRequest, who: CallerParam) -> JobView:
        """Submit a rollout. A second submission of the same `id` and row returns the existing rollout."""
        job = await service.accept(submitted_by(who, body.to_request(), service.store))
        require_own_id(who, job)  # the journal may know the id from another client
        return JobView.of(job)

    @router.post(
        "/v1/rollouts/{rollout_id}/fork",
        status_code=202,
        tags=["rollouts"],
        responses=problem_responses(403, 404, 409, 410, 422, 429, 503),
    )
    async def fork(
        rollout_id: str,
        who: CallerParam,
        body: ForkRequest | None = None,
        turn: Annotated[
            int | None, Query(ge=1, description="Turn of the fork; by default the latest with a checkpoint.")
        ] = None,
        n: Annotated[int, Query(ge=1, le=1000, description="Number of forks.")] = 1,
    ) -> ForkAnswer:
        """Submit rollouts that continue this rollout from one of its checkpoints, with the sandbox's files and the
        tokens."""
        parent = await find(rollout_id, who)
        wanted = (body or ForkRequest()).to_requests(parent, n)
        jobs = await service.fork(parent, turn, [submitted_by(who, one, service.store) for one in wanted])
        return ForkAnswer(rollouts=[JobView.of(job) for job in jobs])

    @router.get("/v1/rollouts/{rollout_id}/checkpoints", tags=["rollouts"], responses=problem_responses(403, 404, 422))
    async def checkpoints(rollout_id: str, who: CallerParam) -> CheckpointsView:
        """Return the turns after which a rollout can be forked. Administrators may name rollouts of other services
        that share the checkpoint folder."""
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
        who: CallerParam,
        wait: WaitParam = 0.0,
        tokens: Annotated[TokenForm, Query(description="Form of the result's tokens.")] = TokenForm.ITEMS,
    ) -> Response:
        """Return the rollout; with `wait`, once the rollout has its outcome or the time is over."""
        job = await find(rollout_id, who)
        if wait and not job.state.terminal:
            await service.wait(job, wait)
        return answer(job, tokens)

    @router.get("/v1/rollouts", response_model=Listing, tags=["rollouts"], responses=problem_responses(403, 410, 422))
    async def list_rollouts(
        who: CallerParam,
        state: JobState | None = None,
        group: str | None = None,
        after: Annotated[str | None, Query(description="A cursor: follow the log of terminal outcomes.")] = None,
        page: Annotated[str | None, Query(alias="from", description="`next` of the page before.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        wait: WaitParam = 0.0,
        results: Annotated[bool, Query(description="Include each rollout's result.")] = False,
    ) -> Response:
        """List rollouts, oldest first; with `after`, ended rollouts behind that cursor, in order of their end."""
        store = service.store
        if after is not None and page is not None:
            raise CallerError("cannot be combined with `after`; send one of them", field="from")
        if after is None:
            first = 0 if page is None else Cursor.parse(page, "from").within(store.event_epoch, 0, store.submitted)
            found: list[Job] = []
            while len(found) <= limit:  # other clients' rollouts are skipped
                some = await store.page(state=state, group=group, after=first, limit=limit + 1, content=results)
                found += [job for job in some if is_own(who, job)]
                if len(some) <= limit:
                    break
                first = some[-1].number
            more = Cursor(store.event_epoch, found[limit - 1].number) if len(found) > limit else None
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
    async def cancel(rollout_id: str, who: CallerParam, request: Request) -> Response:
        """Cancel the rollout. Answers once the rollout has its outcome and its sandbox is released. A terminal rollout
        stays unchanged."""
        job = await find(rollout_id, who)
        log_admin_cancel(request, who, [job])
        await service.cancel(job)
        return answer(job)

    @router.post("/v1/rollouts/cancel", tags=["rollouts"], responses=problem_responses(403, 422))
    async def cancel_many(body: CancelRequest, who: CallerParam, request: Request) -> CancelAnswer:
        """Cancel several rollouts. Answers once all of them have their outcome."""
        if body.group is not None:
            jobs, unknown = [job for job in await service.store.in_group(body.group) if is_own(who, job)], []
        else:
            ids = list(dict.fromkeys(body.ids or ()))
            known = await service.store.fetch_all(ids)
            jobs, unknown = [*known.values()], [rollout_id for rollout_id in ids if rollout_id not in known]
            for number, rollout_id in enumerate(ids):
                if rollout_id in known:
                    require_own(who, known[rollout_id], f"ids.{number}")
        log_admin_cancel(request, who, jobs)
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
        who: CallerParam,
        after: Annotated[str | None, Query(description="`cursor` of the last event seen.")] = None,
    ) -> EventSourceResponse:
        """Stream state transitions of the caller's rollouts as server-sent events. `Last-Event-ID` or `after` resumes
        within the history of the last 10,000 transitions. A reader that falls behind the history gets an event
        `problem` with a problem document, and the stream ends."""
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
                problem = problem_of(error).problem
                yield ServerSentEvent(problem.model_dump_json(exclude_none=True), event="problem")

        return EventSourceResponse(stream())

    def drained() -> DrainAnswer:
        return DrainAnswer(draining=service.draining, live=len(service.store.live()))

    @router.post("/v1/drain", tags=["service"], responses=problem_responses(403, 422))
    async def drain(body: DrainRequest | None = None) -> DrainAnswer:
        """Refuse new rollouts. Answers when every rollout has its outcome, or after `timeout_s` seconds."""
        await service.drain(body.timeout_s if body else 0.0)
        return drained()

    @router.post("/v1/resume", tags=["service"], responses=problem_responses(403))
    async def resume() -> DrainAnswer:
        """Accept rollouts again."""
        service.resume()
        return drained()

    @router.get("/status", tags=["service"], responses=problem_responses(403))
    async def status() -> StatusView:
        """Return counts per stage, pool and state."""
        return service.status()

    @router.get("/healthz", tags=["service"], responses=problem_responses(503))
    async def healthz() -> dict[str, str]:
        """Return 200 while no background loop fails, else 503; the status is `draining` while rollouts are refused."""
        require_running(service.loops)
        return {"status": "draining" if service.draining else "ok"}

    @router.get("/metrics", tags=["service"], response_class=PlainTextResponse, responses=problem_responses(403))
    async def prometheus() -> Response:
        """Return the service's metrics in Prometheus's text format."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


class JsonRoute(ProblemRoute):
    """Route that parses its body as strict JSON (:func:`read_json`)."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the route's handler, which reads the body by :func:`read_json`."""
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await inner(_JsonRequest(request.scope, request.receive))

        return handle


class _JsonRequest(Request):
    async def json(self) -> Any:
        try:
            return read_json(await self.body())
        except CallerError as error:
            raise problem_of(error) from None  # FastAPI turns any exception but an HTTPException into its own 400


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
        yield GaugeMetricFamily("prorl_sessions", "Sandboxes in use by INIT, READY and RUN.", value=scheduler.sessions)
        yield GaugeMetricFamily(
            "prorl_retained_bytes", "Memory of finished rollouts.", value=self._pipeline.store.retained_bytes
        )
        yield CounterMetricFamily(
            "prorl_results_lost", "Results forgotten because of retain_bytes.", value=self._pipeline.store.lost
        )
        out = GaugeMetricFamily(
            "prorl_server_unreachable",
            "1 while this server is down, so that no rollout of the environment starts.",
            labels=["server", "environment"],
        )
        for outage in self._pipeline.outages:
            out.add_metric([outage.server, outage.environment], 1)
        yield out
        yield GaugeMetricFamily("prorl_abandoned", "Calls that ignored cancellation.", value=self._pipeline.abandoned)


class ServiceMetrics:
    """Prometheus metrics of a service, in a registry of their own.

    Args:
        service: the service, whose ``on_finish`` hook feeds the counters.
        state: collector of gauges, read at each scrape.
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
        """Return the metrics in Prometheus's text format."""
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
    """Prometheus metrics of a pipeline, with its pools, sessions and outages."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline, _Pools(pipeline))
