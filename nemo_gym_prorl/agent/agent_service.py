# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rollout service as a Gym agent: Gym's routes ``/run`` and ``/v1/responses`` over one pipeline.

The HTTP status of a failed ``/run`` depends on the caller: :func:`~nemo_gym_prorl.agent.run_rows.run_status`.

``/run`` is idempotent while its rollout is in flight. Gym's client repeats a call whose connection dropped; the
repeated row attaches to the running job (:class:`~nemo_gym_prorl.rollout.api.attached_callers.AttachedCallers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import orjson
from fastapi import APIRouter, Request, Response
from omegaconf import DictConfig, OmegaConf
from starlette.types import ASGIApp

from nemo_gym_prorl.agent.gym_environment import GymContext
from nemo_gym_prorl.agent.gym_environments import (
    GymServers,
    SeededSessionHandler,
    ServiceConfig,
    gym_environments,
    responses_answer,
    responses_request,
)
from nemo_gym_prorl.agent.gym_http import (
    BackgroundCleanup,
    CookieJar,
    GymServer,
    require_ok,
)
from nemo_gym_prorl.agent.run_rows import (
    NOTHING_SAMPLED,
    empty_response,
    environment_of,
    failure_problem,
    failure_row,
    from_collector,
    has_tokens,
    merge_metrics,
    run_request,
    run_status,
)
from nemo_gym_prorl.failures import CallerError, Failure, FailureKind, Origin
from nemo_gym_prorl.http.applications import check_certificate, serve_tls
from nemo_gym_prorl.http.client import HttpAnswer, HttpClient
from nemo_gym_prorl.http.key_guard import KeyGuard, RouteScopes, caller_in
from nemo_gym_prorl.http.problems import ProblemError
from nemo_gym_prorl.rollout.api.access_control import ROUTES, KeysFile, scoped_key, submitted_by
from nemo_gym_prorl.rollout.api.attached_callers import AttachedCallers
from nemo_gym_prorl.rollout.api.original_wire import wire_router
from nemo_gym_prorl.rollout.api.routes import PipelineMetrics, rollout_router
from nemo_gym_prorl.rollout.gym_rows import read_json
from nemo_gym_prorl.rollout.job import Job
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import Draining, JobConflict, NotOwner
from nemo_gym_prorl.rollout.storage.checkpoints import CHECKPOINT_FOLDER, SharedCheckpoints
from nemo_gym_prorl.rollout.storage.journal import Journal
from nemo_gym_prorl.rollout.turn_records import ROLLOUT_OPTIONS_KEY, TRAJECTORY, gym_reads_trajectories, ng_trajectory


SCOPES = RouteScopes(ROUTES)

_CLEANUP_TIMEOUT_S = 5.0  # for cleanup requests at shutdown: reachable servers answer sooner, and Gym kills later


class AgentService:
    """Rollout service of an agent server: the pipeline, its HTTP client and its routes.

    Args:
        gym_config: Gym's merged configuration.
        model: instance name of the policy's first model server.

    Raises:
        CallerError: a setting is invalid, for example a server without an address, several workers, or incomplete
            TLS settings. The error names the setting.
    """

    def __init__(self, config: ServiceConfig, gym_config: DictConfig, *, model: str) -> None:
        if (getattr(config, "num_workers", None) or 1) > 1:
            raise CallerError(
                "must be 1: the pools bound one process; start more agents for more throughput", field="num_workers"
            )
        given = [name for name in ("tls_port", "tls_cert", "tls_key") if getattr(config, name) is not None]
        if len(given) in (1, 2):
            raise CallerError("set all of tls_port, tls_cert and tls_key, or none", field=given[0])
        if config.tls_cert is not None and config.tls_key is not None:
            check_certificate(config.tls_cert, config.tls_key)
        self._config = config
        self._http = HttpClient()
        self._servers = GymServers(
            cast("dict[str, Any]", OmegaConf.to_container(gym_config, resolve=True)), self._http
        )
        names = {"model_server": model} | {
            f"further_model_servers.{index}": name for index, name in enumerate(config.further_model_servers)
        }
        self._models = [self._servers.get("responses_api_models", name, field) for field, name in names.items()]
        self._cleanup = BackgroundCleanup()
        base = GymContext(None, self._models[0], cleanup=self._cleanup, further_models=tuple(self._models[1:]))
        environments = gym_environments(config, self._servers, base)
        keep = config.journal_keep_s, config.journal_keep_bytes
        journal = None if config.journal is None else Journal(config.journal, *keep)
        folder = gym_config.get(CHECKPOINT_FOLDER)
        shared = None if folder is None else SharedCheckpoints(Path(str(folder)))
        self.pipeline = Pipeline(environments, config, journal=journal, shared=shared)
        self.metrics = PipelineMetrics(self.pipeline)
        self._callers = AttachedCallers(self.pipeline, config.caller_grace_s)
        self._clients = KeysFile(config.keys_file, self.pipeline.share) if config.keys_file is not None else None

    def tls(self, app: ASGIApp) -> AbstractAsyncContextManager[None]:
        """Return a context that also serves the application over TLS at ``tls_port``; a no-op without that setting.

        Raises:
            CallerError: on entering the context: the port is taken.
        """
        config = self._config
        if config.tls_port is None or config.tls_cert is None or config.tls_key is None:
            return nullcontext()
        return serve_tls(app, config.tls_cert, config.tls_key, config.tls_port)

    def guarded(self, app: ASGIApp) -> KeyGuard:
        """Return the application behind a check of each request's bearer token and its scopes."""
        clients = self._clients.caller if self._clients is not None else None
        return KeyGuard(app, self._config.control_token, clients, SCOPES)

    def router(self) -> APIRouter:
        """Return the routes of the job API and, if configured, of the original ProRL wire format."""
        router = APIRouter()
        if self._config.prorl_wire:
            backends = ModelBackends(self._models)
            router.include_router(wire_router(self.pipeline, self._callers, backends.add, backends.clear))
        router.include_router(rollout_router(self.pipeline, self.metrics))
        return router

    def start(self) -> None:
        """Start the background loops and the pipeline, which resumes the unfinished rollouts of its journal."""
        self.pipeline.loops.start("session-leases", self._cleanup.renew)
        self.pipeline.start()

    async def close(self) -> None:
        """Cancel every rollout, release the sandboxes, wait up to 5 s for cleanup requests, and close the client."""
        await self.pipeline.close()
        await self._cleanup.close(_CLEANUP_TIMEOUT_S)
        await self._http.close()

    async def run(self, request: Request) -> Response:
        """Handle Gym's ``/run``: 200 with a verified row or a masked failure row.

        Raises:
            ProblemError: a trainer's rollout failed, and :func:`run_status` returns an error status.
            CallerError: the body is not JSON, or the service refuses a trainer's row; names the field. Gym's
                collector gets a masked failure row for a refused row.
            CallerGone: the client disconnected.
        """
        body = await request.body()
        row = read_json(body)
        collector = isinstance(row, dict) and from_collector(row)
        try:
            (job_request, key), caller = run_request(row, body), caller_in(request.scope)
            job_request = submitted_by(caller, job_request, self.pipeline.store)
            key = scoped_key(caller, key)
            answer = await self._callers.run(job_request, key, request, lambda job: _answer(job, collector=collector))
            return _json(answer)
        except CallerError as error:
            error = _in_row(error)
            if not collector:
                raise error from None
            kind = FailureKind.SHUTDOWN if isinstance(error, Draining) else error.kind
            return _json(_refused_row(row, Failure(kind, Origin.CALLER, None, error.reason)))

    async def responses(self, request: Request) -> Response:
        """Handle Gym's ``/v1/responses`` of an agent: run the tool loop in a session that the caller has seeded.

        Raises:
            ProblemError: the job failed; see :func:`responses_answer` for the status.
            CallerError: the service has no default environment, or the body is not a request; names the field.
            CallerGone: the client disconnected.
        """
        if SeededSessionHandler.name not in self.pipeline.environments.names:
            raise CallerError("/v1/responses needs a default environment: set resources_server, or post to /run")
        job_request = responses_request(read_json(await request.body()), dict(request.cookies))
        job_request = submitted_by(caller_in(request.scope), job_request, self.pipeline.store)
        answer = await self._callers.run(job_request, None, request, responses_answer)
        cookies, content = answer.split(b"\n", 1)
        response = _json(content)
        for name, value in orjson.loads(cookies).items():
            response.set_cookie(name, value)
        return response

    async def aggregate_metrics(self, body: dict[str, Any]) -> Any:
        """Handle Gym's ``/aggregate_metrics``: each resources server aggregates the rows of its environment.

        Masked rows that belong to no known environment are skipped: ``/run`` refused these rows.

        Raises:
            CallerError: an unmasked row belongs to no known environment, an environment has no resources server, or a
                server refuses its rows.
            InfrastructureError: a server fails or cannot be reached.
        """
        rollouts: dict[str, list[Any]] = {}
        for number, rollout in enumerate(body["verify_responses"]):
            try:
                environment = self.pipeline.environments.choose(rollout, environment_of(rollout))
            except CallerError as error:
                if rollout.get("mask_sample"):
                    continue
                field = ".".join(filter(None, (f"verify_responses.{number}", error.field)))
                raise CallerError(error.complaint, field=field) from error
            rollouts.setdefault(environment.name, []).append(rollout)
        return merge_metrics({name: await self._metrics_of(name, given) for name, given in rollouts.items()})

    async def _metrics_of(self, environment: str, rollouts: list[Any]) -> Any:
        own = environment in self._config.environments
        settings = self._config.of_environment(environment) if own else self._config
        if settings.resources_server is None:
            raise CallerError(f"environment {environment!r} has no resources server", field="verify_responses")
        server = self._servers.get("resources_servers", settings.resources_server.name, "resources_server")
        answer = await server.post("/aggregate_metrics", {"verify_responses": rollouts}, CookieJar())
        require_ok(answer, f"{server.name} /aggregate_metrics", FailureKind.VERIFIER_ERROR)
        return answer.json()


class ModelBackends:
    """Control of the backend pools of the policy's model servers; Gym's own model servers have no pool.

    Both methods raise ``ProblemError`` (501 for a server without a pool, 502 for a failed one) or ``CallerError``.

    Args:
        models: the model servers; each change is sent to all of them.
    """

    def __init__(self, models: Sequence[GymServer]) -> None:
        self._models = models

    async def add(self, address: str) -> None:
        """Add the backend with this base URL to every model server."""
        await self._send("POST", {"url": address})

    async def clear(self) -> None:
        await self._send("DELETE", None)

    async def _send(self, method: str, body: Any) -> None:
        for model in self._models:
            self._check(model.name, await model.call(method, "/v1/backends", body, CookieJar()))

    def _check(self, model: str, answer: HttpAnswer) -> None:
        if answer.status in (404, 405):
            raise ProblemError(
                501,
                "no-backend-pool",
                f"model server {model!r} has a fixed list of backends; use prorl_model to change them",
            )
        if answer.status in (403, 422):  # 403: the address is not allowed; a wrong key of this service gets 401
            raise CallerError(
                f"model server {model!r} refuses the backend: {answer.error_text(2000)}", field="address"
            )
        if not answer.ok:
            raise ProblemError(502, "model-server-refused", f"{model}: {answer.error_text(2000)}")


def gym_row(job: Job, *, collector: bool) -> bytes:
    """Return the body of a 200 answer of ``/run``: the verifier's row or the failure row, with a report in the field
    ``rollout``; for Gym's collector also with the trajectory that Gym from 0.7 on reads."""
    assert job.outcome is not None, "the job has no outcome yet"
    about = {
        "id": job.id,
        "group": job.group,
        "run": job.run,
        "state": job.outcome.state.value,
        "environment": job.environment,
        "turns": job.progress.turns,
        "tool_calls": job.progress.tool_calls,
        "finish_reason": job.progress.finish_reason,
        "weight_versions": job.progress.weight_versions,
        "log_probs": job.progress.log_probs,
        "token_in_rate": job.progress.token_in_rate,
        "seconds": {
            stage.value: {"waited": time.waited_s, "worked": time.worked_s} for stage, time in job.times.items()
        },
        "failed_attempts": [failure.kind.value for failure in job.failures],
        "steps": orjson.loads(job.steps),
    }
    if job.resumed:
        about |= {"resumed": job.resumed, "resumed_at_turn": job.resumed[-1]["turn"]}
    if job.forked_from:
        about["forked_from"] = job.forked_from
    if job.progress.harness:
        about["harness"] = job.progress.harness
    failure, result = job.outcome.failure, job.gym_result()
    if failure is not None and "response" not in result:  # the result of a plug-in's handler may not be a Gym row
        row = job.row
        result = failure_row(row, empty_response(row["responses_create_params"]), failure)
    answer = {**result, ROLLOUT_OPTIONS_KEY: about}
    if collector and gym_reads_trajectories():
        answer[TRAJECTORY] = ng_trajectory({**job.row, **answer})
    return orjson.dumps(answer)


def _answer(job: Job, *, collector: bool) -> bytes:
    """Return the body of a 200 answer of ``/run``; raise a ``ProblemError`` if :func:`run_status` returns another
    status."""
    assert job.outcome is not None, "the job has no outcome yet"
    failure = job.outcome.failure
    if failure is None and job.progress.finish_reason == "context_overflow":
        failure = NOTHING_SAMPLED if not has_tokens(job.gym_result().get("response")) else None
    if failure is not None and not collector:
        status = run_status(job.row, failure, job.gym_result().get("response"))
        if status != 200:
            raise failure_problem(status, failure, job.id)
    return gym_row(job, collector=collector)


def _refused_row(row: dict[str, Any], failure: Failure) -> bytes:
    params = row.get("responses_create_params")
    refused = failure_row(row, empty_response(params if isinstance(params, dict) else {}), failure)
    if gym_reads_trajectories():
        refused[TRAJECTORY] = ng_trajectory(refused)
    return orjson.dumps(refused)


def _in_row(error: CallerError) -> CallerError:
    """Return the error with its field as a path in the body of ``/run``: for jobs, fields of the row begin with
    ``row.``, but the body of ``/run`` is the row itself."""
    if isinstance(error, JobConflict):
        return JobConflict(error.complaint, field=f"{ROLLOUT_OPTIONS_KEY}.id")
    if isinstance(error, NotOwner):
        return NotOwner(error.complaint, field=f"{ROLLOUT_OPTIONS_KEY}.{error.field}")
    if error.field == "environment":
        return CallerError(error.complaint, field=f"{ROLLOUT_OPTIONS_KEY}.environment")
    if error.field is not None and error.field.startswith("row."):
        return CallerError(error.complaint, field=error.field.removeprefix("row."))
    return error


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
