# SPDX-License-Identifier: Apache-2.0
"""The rollout service as a Gym agent: ``/run`` and ``/v1/responses`` as Gym defines them, over one pipeline.

What ``/run`` answers where a rollout failed depends on who asks: :func:`~.failure_rows.run_status`. And since Gym's
client posts a call again when its connection drops, an identical row that arrives while the first still runs joins it
(:class:`~nemo_gym_prorl.rollout.callers.CallerWatch`) instead of doing the work twice.
"""

from __future__ import annotations

from typing import Annotated, Any, Self, cast

import orjson
from fastapi import APIRouter, Request, Response
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect

from nemo_gym_prorl.failures import CallerError, Failure, FailureKind, Origin
from nemo_gym_prorl.handlers.failure_rows import (
    NOTHING_SAMPLED,
    empty_response,
    failure_problem,
    failure_row,
    from_collector,
    has_tokens,
    run_status,
)
from nemo_gym_prorl.handlers.gym_environment import GymContext, GymEnvironmentHandler
from nemo_gym_prorl.handlers.gym_http import CookieJar, GymServer, HttpAnswer, HttpClient, addresses, require_ok
from nemo_gym_prorl.handlers.run_request import WISHES, run_request
from nemo_gym_prorl.handlers.seeded_session import SeededSessionHandler, responses_answer, responses_request
from nemo_gym_prorl.handlers.tool_loop import LoopLimits
from nemo_gym_prorl.known_keys import KnownKeys
from nemo_gym_prorl.problems import ProblemError, problem_of
from nemo_gym_prorl.rollout.api import rollout_router
from nemo_gym_prorl.rollout.callers import CallerGone, CallerWatch
from nemo_gym_prorl.rollout.handler import HandlerRegistry
from nemo_gym_prorl.rollout.job import Budgets, Job
from nemo_gym_prorl.rollout.metrics import PipelineMetrics
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import Draining, JobConflict
from nemo_gym_prorl.rollout.rows import read_json
from nemo_gym_prorl.rollout.schemas import Seconds
from nemo_gym_prorl.rollout.settings import PipelineSettings
from nemo_gym_prorl.rollout.stages import PoolSizes
from nemo_gym_prorl.rollout.wire import wire_router


Positive = Annotated[int, Field(ge=1)]

_SETTLE_SHARE = 0.6
"""Of the grace for a cancelled stage: the time for fetching its tokens. The rest is for everything else."""
_FAREWELL_S = 5.0


class StagesConfig(KnownKeys):
    """Slots per stage. ``ready`` bounds the buffer between INIT and RUN: each job in it holds a sandbox."""

    init: Positive = 8
    ready: Annotated[int, Field(ge=0)] = 8
    run: Positive = 32
    eval: Positive = 8


class BudgetsConfig(KnownKeys):
    """Seconds that each stage may work on a rollout, per attempt. Time in a queue is free."""

    init: Seconds = 600.0
    run: Seconds = 3600.0
    eval: Seconds = 900.0


class ServiceConfig(BaseModel):
    """Settings of the service in an agent's YAML; every one can be overridden on Gym's command line."""

    handler: str = "gym_environment"
    """Agent handler of rows whose ``data_source`` names none."""
    stages: StagesConfig = StagesConfig()
    budgets: BudgetsConfig = BudgetsConfig()
    release_timeout_s: Seconds = 60.0
    """How long a resources server may take to give a sandbox back."""
    cancel_grace_s: Seconds = 5.0
    """How long a cancelled stage may take to come back before it is abandoned."""
    max_attempts: Positive = 3
    """Tries of a rollout whose infrastructure failed."""
    max_queued: Positive = 10_000
    """Rollouts that may wait before the job API answers 429."""
    retain_bytes: Positive = 2**30
    """What finished rollouts may keep. Those that were read are forgotten first; when others fill it, the job API
    answers 429."""
    keep_unread_s: Seconds = 3600.0
    """How long a result that nobody has read is kept, whatever the bound."""
    unreachable_s: Seconds = 900.0
    """How long a server that cannot be reached may hold a rollout up before it fails."""
    max_turns: Positive | None = None
    """Policy turns of one rollout."""
    max_tokens: Positive | None = None
    """Length of one rollout's sequence, in tokens."""
    tool_concurrency: Positive = 1
    """Tool calls of one turn in flight at once; 1 keeps their order."""
    caller_grace_s: Seconds = 10.0
    """How long a ``/run`` whose caller vanished goes on, in case the caller posts it again."""
    prorl_wire: bool = False
    """Also serve the original ProRL wire format: /process, /cancel, /start, /stop, /add_llm_server, …"""
    control_token: str | None = None
    """The key: every route requires it as a bearer token. Without one the server listens on loopback only."""

    def pipeline_settings(self) -> PipelineSettings:
        """As the pipeline takes them."""
        return PipelineSettings(
            stages=PoolSizes(**self.stages.model_dump()),
            budgets=Budgets(**self.budgets.model_dump()),
            release_s=self.release_timeout_s,
            cancel_grace_s=self.cancel_grace_s,
            max_attempts=self.max_attempts,
            max_queued=self.max_queued,
            retain_bytes=self.retain_bytes,
            keep_unread_s=self.keep_unread_s,
            unreachable_s=self.unreachable_s,
        )


class AgentService:
    """One pipeline, its HTTP client and its routes.

    Args:
        config: settings.
        context: the servers that rollouts use.
        http: the client behind them; closed with the service.
    """

    def __init__(self, config: ServiceConfig, context: GymContext, http: HttpClient) -> None:
        self._config = config
        self._context = context
        self._http = http
        builtin = {handler.name: handler for handler in (GymEnvironmentHandler, SeededSessionHandler)}
        handlers = HandlerRegistry(context, config.handler, builtin)
        self.pipeline = Pipeline(handlers, config.pipeline_settings())
        self.metrics = PipelineMetrics(self.pipeline)
        self._callers = CallerWatch(self.pipeline, config.caller_grace_s)

    @classmethod
    def from_gym(cls, config: ServiceConfig, gym_config: DictConfig, *, resources: str, model: str) -> Self:
        """Build from Gym's merged configuration.

        Raises:
            CallerError: it has no address for one of the servers, or asks for several workers.
        """
        if (getattr(config, "num_workers", None) or 1) > 1:
            raise CallerError(
                "must be 1: the pools bound what one process runs; start further agents instead", field="num_workers"
            )
        http = HttpClient()
        known = addresses(cast("dict[str, Any]", OmegaConf.to_container(gym_config, resolve=True)))
        servers = {}
        for field_name, name in (("resources_server", resources), ("model_server", model)):
            if name not in known:
                raise CallerError(f"no server {name!r} with host and port in the configuration", field=field_name)
            servers[field_name] = GymServer(name, known[name], http)
        limits = LoopLimits(config.max_turns, config.max_tokens, config.tool_concurrency)
        context = GymContext(
            servers["resources_server"],
            servers["model_server"],
            limits,
            settle_s=config.cancel_grace_s * _SETTLE_SHARE,
        )
        return cls(config, context, http)

    def router(self) -> APIRouter:
        """The job API and, if configured, the original ProRL wire format."""
        router = APIRouter()
        if self._config.prorl_wire:
            router.include_router(wire_router(self.pipeline, self._callers, ModelBackends(self._context.model)))
        router.include_router(rollout_router(self.pipeline, self.metrics))
        return router

    async def close(self) -> None:
        """Cancel every rollout, wait until its sandboxes are released, and close the client."""
        await self.pipeline.close()
        await self._context.farewells.close(_FAREWELL_S)
        await self._http.close()

    async def run(self, request: Request) -> Response:
        """Gym's ``/run``: 200 with a verified row or a masked failure row; for a trainer, an error where
        :func:`run_status` says so. What is no row at all is refused with 422 and the field that is wrong."""
        body = await request.body()
        try:
            row = read_json(body)
        except CallerError as error:
            return problem_of(error).response()
        collector = isinstance(row, dict) and from_collector(row)
        try:
            asked = run_request(row, body, self.pipeline.settings.budgets)
            answer = await self._callers.run(
                asked.job, asked.key, request, lambda job: _answer(job, collector=collector)
            )
            return _json(answer)
        except CallerGone:
            return Response(status_code=499)  # nobody reads it
        except ProblemError as error:
            return error.response()
        except CallerError as error:
            if not collector:
                return problem_of(_in_row(error)).response()
            kind = FailureKind.SHUTDOWN if isinstance(error, Draining) else error.kind
            return _json(_refused_row(row, Failure(kind, Origin.CALLER, None, error.reason)))

    async def refused(self, request: Request, error: ProblemError) -> Response:
        """The answer to a rollout for which this process has no room: that error, or Gym's collector its row, since
        an error would end its whole collection. It does the row again when it resumes."""
        try:
            row = read_json(await request.body()) if request.url.path == "/run" else None
        except (CallerError, ClientDisconnect):
            row = None
        if not isinstance(row, dict) or not from_collector(row):
            return error.response()
        failure = Failure(FailureKind.PROVIDER_QUOTA_EXHAUSTED, Origin.INFRASTRUCTURE, None, str(error))
        return _json(_refused_row(row, failure))

    async def responses(self, request: Request) -> Response:
        """Gym's ``/v1/responses`` of an agent: the tool loop in a session that the caller has seeded."""
        try:
            wanted = responses_request(read_json(await request.body()), dict(request.cookies))
            answer = await self._callers.run(wanted, None, request, responses_answer)
        except CallerGone:
            return Response(status_code=499)  # nobody reads it
        except ProblemError as error:
            return error.response()
        except CallerError as error:
            return problem_of(error).response()
        cookies, response = answer.split(b"\n", 1)
        good = _json(response)
        for name, value in orjson.loads(cookies).items():
            good.set_cookie(name, value)
        return good

    async def aggregate_metrics(self, body: dict[str, Any]) -> Any:
        """Gym's ``/aggregate_metrics``: the resources server knows what its rewards mean.

        Raises:
            CallerError: the server refuses the rollouts.
            InfrastructureError: it fails or cannot be reached.
        """
        server = self._context.resources
        answer = await server.post("/aggregate_metrics", body, CookieJar())
        require_ok(answer, f"{server.name} /aggregate_metrics", FailureKind.VERIFIER_ERROR)
        return answer.json()


class ModelBackends:
    """Backends of the policy's model server, where that has a pool (``prorl_model`` has, Gym's own has not).

    Args:
        model: the model server.
    """

    def __init__(self, model: GymServer) -> None:
        self._model = model

    async def add(self, address: str) -> None:
        """Add a backend by its base URL."""
        self._check(await self._model.call("POST", "/v1/backends", {"url": address}, CookieJar()))

    async def clear(self) -> None:
        """Remove all of them."""
        self._check(await self._model.call("DELETE", "/v1/backends", None, CookieJar()))

    def _check(self, answer: HttpAnswer) -> None:
        if answer.status in (404, 405):
            raise ProblemError(
                501,
                "no-backend-pool",
                f"model server {self._model.name!r} has a fixed list of backends; use prorl_model to change them",
            )
        if answer.status in (403, 422):  # its own key would be 401
            raise CallerError(f"{self._model.name} refuses it: {answer.text(2000)}", field="address")
        if not answer.ok:
            raise ProblemError(502, "model-server-refused", f"{self._model.name}: {answer.text(2000)}")


def gym_row(job: Job) -> bytes:
    """What ``/run`` answers: the verifier's row or the failure row, and how it came about."""
    assert job.outcome is not None, "only a job with its outcome has an answer"
    about = {
        "id": job.id,
        "group": job.group,
        "state": job.state.value,
        "turns": job.progress.turns,
        "tool_calls": job.progress.tool_calls,
        "finish_reason": job.progress.finish_reason,
        "weight_versions": job.progress.weight_versions,
        "seconds": {
            stage.value: {"waited": time.waited_s, "worked": time.worked_s} for stage, time in job.times.items()
        },
        "failed_attempts": [failure.kind.value for failure in job.failures],
    }
    failure = job.outcome.failure
    if failure is not None and "response" not in job.outcome.result:  # its handler has no idea of Gym's rows
        row = job.row
        result = failure_row(row, empty_response(row["responses_create_params"]), failure)
        return orjson.dumps({**result, WISHES: about})
    return job.outcome.body_with(WISHES, about)


def _answer(job: Job, *, collector: bool) -> bytes:
    """The body of a good answer.

    Raises:
        ProblemError: the caller is a trainer, and the rollout failed in a way that it must see as an HTTP error.
    """
    assert job.outcome is not None, "only a job with its outcome has an answer"
    failure = job.outcome.failure
    if failure is None and job.progress.finish_reason == "context_overflow":
        failure = NOTHING_SAMPLED if not has_tokens(job.outcome.result.get("response")) else None
    if failure is not None and not collector:
        status = run_status(job.row, failure, job.outcome.result.get("response"))
        if status != 200:
            raise failure_problem(status, failure, job.id)
    return gym_row(job)


def _refused_row(row: dict[str, Any], failure: Failure) -> bytes:
    """What Gym's collector gets for a row that became no job."""
    params = row.get("responses_create_params")
    return orjson.dumps(failure_row(row, empty_response(params if isinstance(params, dict) else {}), failure))


def _in_row(error: CallerError) -> CallerError:
    """An id that is taken was named in the row."""
    if isinstance(error, JobConflict):
        return JobConflict(error.complaint, field=f"{WISHES}.id")
    return error


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
