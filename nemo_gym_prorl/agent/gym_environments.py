# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Settings of the agent server, and construction of the environments that the settings describe.

Gym's command line can override every setting. Defaults of pipeline settings are those of
:class:`~nemo_gym_prorl.rollout.settings.PipelineSettings`.

A service has a default environment, described by the top-level settings, and the further environments in
``environments``. Each installed plug-in that the configuration does not mention adds an environment of its name.

Gym checks server references only at the top level of an agent's configuration. This module checks the references in
``environments`` when the server starts.

:class:`SeededSessionHandler` serves the agent's ``/v1/responses``: the tool loop in a session that the caller seeds
and scores. Such a call is a job with a RUN slot, a budget and an entry in the job API. The job ends when its caller
disconnects, and is never retried, because the effects of its tools are final.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import orjson
from nemo_gym.config_types import ResourcesServerRef
from pydantic import BaseModel, ConfigDict, Field

from nemo_gym_prorl.agent.gym_environment import GymContext, GymEnvironmentHandler, GymSession, OnTimeout
from nemo_gym_prorl.agent.gym_http import Address, CookieJar, GymServer, addresses
from nemo_gym_prorl.agent.harness_handler import HarnessHandler
from nemo_gym_prorl.agent.run_rows import empty_response, failure_problem, failure_status
from nemo_gym_prorl.agent.tool_loop import EnvironmentTools, LoopLimits
from nemo_gym_prorl.failures import CallerError, Failure, InfrastructureError, Origin, Stage, suggest
from nemo_gym_prorl.http.client import HttpClient
from nemo_gym_prorl.rollout.api.schemas import BudgetsModel, Identifier
from nemo_gym_prorl.rollout.gym_rows import check_row
from nemo_gym_prorl.rollout.handler import AgentHandler, Environment, Environments, HandlerRegistry, HandlesTimeouts
from nemo_gym_prorl.rollout.job import Job, Outcome, Trajectory, Verdict, failure_state
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.settings import (
    JOURNAL_KEEP_BYTES,
    JOURNAL_KEEP_S,
    Budgets,
    PipelineSettings,
    Positive,
    Seconds,
)


Share = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]

_LIMITS = LoopLimits()


class EnvironmentSettings(BaseModel):
    """Settings of an environment's rollouts; at the top of the agent's settings, those of the default environment."""

    model_config = ConfigDict(extra="forbid")

    resources_server: ResourcesServerRef | None = None
    """Gym's reference to the default environment's server."""
    handler: str = GymEnvironmentHandler.name
    """``gym_environment``, ``harness`` or a handler of yours."""
    handler_config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the handler."""
    max_steps: Positive | None = _LIMITS.max_steps
    """Policy turns of one rollout."""
    max_total_sequence_length: Positive | None = _LIMITS.max_total_sequence_length
    """Prompt and sampled tokens of one rollout."""
    tool_concurrency: Positive = _LIMITS.tool_concurrency
    """Tool calls of one turn in flight at once."""
    on_timeout: OnTimeout = OnTimeout.MASK
    """Policy for rollouts beyond RUN's budget: ``mask``, ``score`` or ``zero`` reward."""
    scores_groups_of: Positive | None = None
    """Group size that the server's ``/verify`` scores together. Default: the server's ``num_rollouts_per_prompt``,
    else 1."""

    checkpoint_turns: Positive | None = None
    """Turns between two checkpoints, from which a rollout can resume or fork."""

    @property
    def limits(self) -> LoopLimits:
        return LoopLimits(self.max_steps, self.max_total_sequence_length, self.tool_concurrency)


class EnvironmentConfig(EnvironmentSettings):
    """Settings of a further environment; an unset setting has the service's value.

    An environment that sets ``handler`` does not inherit the service's ``handler_config``.
    """

    data_sources: list[str] = Field(default_factory=list)
    """Values of a row's ``data_source`` that select the environment, besides its name."""
    budgets: BudgetsModel = BudgetsModel()
    share: Share = 1.0
    """Share of sandboxes and slots, relative to other environments."""


class ServiceConfig(PipelineSettings, EnvironmentSettings):
    """All settings of the agent server."""

    environments: dict[Identifier, EnvironmentConfig] = Field(default_factory=dict)
    """Further environments that the same pools serve, by name."""

    further_model_servers: list[str] = Field(default_factory=list)
    """Model servers besides ``model_server``."""
    journal: str | None = None
    """Folder on a local disk, by which accepted rollouts and outcomes survive a restart."""
    journal_keep_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = JOURNAL_KEEP_S
    """Lifetime of an outcome in the journal."""
    journal_keep_bytes: Positive = JOURNAL_KEEP_BYTES
    """Limit on the journal's compressed outcomes, beyond which the oldest are deleted."""
    caller_grace_s: Seconds = 10.0
    """Seconds for which a ``/run`` continues after its caller disconnected."""
    prorl_wire: bool = False
    """Serve the original ProRL wire format, such as ``/process``."""
    control_token: str | None = None
    """Administrator's key, a bearer token. Without a key the server listens on loopback only."""
    keys_file: Path | None = None
    """File of clients with keys, which ``prorl key`` writes."""
    tls_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Further port for TLS on all interfaces."""
    tls_cert: Path | None = None
    """Certificate file for ``tls_port``."""
    tls_key: Path | None = None
    """Private key file for ``tls_port``."""

    def of_environment(self, name: str) -> EnvironmentSettings:
        """Return the settings of a further environment, with the service's values for unset settings, except
        ``handler_config`` if the environment sets ``handler``."""
        own = self.environments[name]
        explicit = {key: getattr(own, key) for key in EnvironmentSettings.model_fields if key in own.model_fields_set}
        inherited = {key: getattr(self, key) for key in EnvironmentSettings.model_fields}
        if "handler" in explicit:
            del inherited["handler_config"]
        return EnvironmentSettings.model_validate({**inherited, **explicit})

    def budgets_of(self, name: str) -> Budgets:
        """Return the budgets of a further environment, with the service's budgets for stages without their own."""
        return _override(self.budgets, self.environments[name].budgets)


def _override(defaults: Budgets, budgets: BudgetsModel) -> Budgets:
    return defaults.model_copy(update={stage.value: seconds for stage, seconds in budgets.given().items()})


_SETTLE_SHARE = 0.6
"""Fraction of ``cancel_grace_s`` for fetching tokens or closing a session; a margin, so that the stage then ends in
time and does not count as abandoned."""


class GymServers:
    """Clients of the deployment's servers; one :class:`GymServer` per instance, created at first use.

    Args:
        config: Gym's merged configuration.
    """

    def __init__(self, config: Mapping[str, Any], http: HttpClient) -> None:
        self._config = config
        self._addresses: dict[str, Address] = addresses(config)
        self._http = http
        self._servers: dict[str, GymServer] = {}

    def scores_groups_of(self, name: str) -> int:
        """Return the setting ``num_rollouts_per_prompt`` of a resources server, the group size that it scores
        together; 1 if unset."""
        [server] = self._config[name]["resources_servers"].values()
        size = server.get("num_rollouts_per_prompt")
        return size if isinstance(size, int) else 1

    def get(self, kind: str, name: str, field: str) -> GymServer:
        """Return the server of an instance.

        Args:
            kind: Gym's kind of server, such as ``resources_servers``.
            name: name of the instance.
            field: the setting that names the instance, for the error.

        Raises:
            CallerError: the deployment has no such instance; suggests the closest name.
        """
        names = [other for other in self._addresses if kind in self._config[other]]
        if name not in names:
            raise CallerError(f"no server {name!r} with host and port in {kind}{suggest(name, names)}", field=field)
        if name not in self._servers:
            self._servers[name] = GymServer(name, self._addresses[name], self._http)
        return self._servers[name]


def gym_environments(config: ServiceConfig, servers: GymServers, base: GymContext) -> Environments:
    """Return the environments of a configuration.

    Handlers of configured environments are built at once; those of other plug-ins and of ``/v1/responses`` at first
    use.

    Args:
        base: context with the model servers and the background cleanup, which all handlers share.

    Raises:
        CallerError: a setting is invalid; names the setting.
    """
    registry = HandlerRegistry({handler.name: handler for handler in (GymEnvironmentHandler, HarnessHandler)})
    base = replace(base, settle_s=config.cancel_grace_s * _SETTLE_SHARE)
    top = EnvironmentSettings.model_validate({key: getattr(config, key) for key in EnvironmentSettings.model_fields})

    def environment(name: str, settings: EnvironmentSettings, field: str = "", **more: Any) -> Environment:
        context = _context(settings, name, field, servers, base)
        build = _builder(registry, settings, context, field)
        return Environment(
            name,
            settings.handler,
            build,
            scores_groups_of=context.scores_groups_of,
            checkpoint_turns=context.checkpoint_turns,
            tool_errors=context.tools.errors,
            **{"data_sources": frozenset({name}), **more},
        )

    described: list[Environment] = []
    default = None
    if top.resources_server is not None or top.handler != GymEnvironmentHandler.name:
        default = top.handler if top.resources_server is None else top.resources_server.name
        described.append(environment(default, top))
    elif not config.environments:
        raise CallerError("set a resources server here, or for each of `environments`", field="resources_server")
    for name, own in config.environments.items():
        sources = frozenset({name, *own.data_sources})
        described.append(
            environment(
                name,
                config.of_environment(name),
                f"environments.{name}.",
                data_sources=sources,
                budgets=config.budgets_of(name),
                share=own.share,
            )
        )
    # Plug-ins and seeded sessions do not inherit the handler settings of the default environment.
    plain = top.model_copy(update={"handler_config": {}, "on_timeout": OnTimeout.MASK, "scores_groups_of": 1})
    taken = {name for one in described for name in (one.handler, one.name)}
    further = [
        environment(name, plain.model_copy(update={"handler": name}))
        for name in sorted(registry.plugins.keys() - taken)
    ]
    if top.resources_server is not None:
        seeded = SeededSessionHandler.name
        context = _context(plain, seeded, "", servers, base)
        further.append(
            Environment(seeded, seeded, lambda: SeededSessionHandler(context), tool_errors=context.tools.errors)
        )
    environments = Environments([*described, *further], default)
    for one in described:
        environments.get(one.name)
    return environments


def _context(
    settings: EnvironmentSettings, name: str, field: str, servers: GymServers, base: GymContext
) -> GymContext:
    server, together = settings.resources_server, settings.scores_groups_of
    resources = server and servers.get(server.type, server.name, f"{field}resources_server")
    if together is None:
        together = servers.scores_groups_of(server.name) if server else 1
    return replace(
        base,
        resources=resources,
        scores_groups_of=together,
        environment=name,
        limits=settings.limits,
        on_timeout=settings.on_timeout,
        tools=EnvironmentTools(),
        checkpoint_turns=settings.checkpoint_turns,
    )


def _builder(
    registry: HandlerRegistry, settings: EnvironmentSettings, context: GymContext, field: str
) -> Callable[[], AgentHandler]:
    """Return the factory of an environment's handler; ``field`` prefixes the names of settings in errors."""
    name = settings.handler
    registry.require(name, f"{field}handler")

    def build() -> AgentHandler:
        config = registry.config(name, settings.handler_config, f"{field}handler_config")
        try:
            handler = registry.factory(name)(replace(context, config=config))
        except CallerError as error:
            raise CallerError(error.complaint, field=f"{field}{error.field or 'handler'}") from error
        if settings.on_timeout is not OnTimeout.MASK and not isinstance(handler, HandlesTimeouts):
            reason = f"must be mask for handler {name!r}, which has no method `timed_out`"
            raise CallerError(reason, field=f"{field}on_timeout")
        return handler

    return build


_COOKIES = "session_cookies"
_PARAMS = "responses_create_params"


class SeededSessionHandler(GymEnvironmentHandler):
    """Handler of ``/v1/responses``: the tool loop in a session that the caller seeds, scores and closes."""

    name = "seeded_session"

    async def init(self, job: Job) -> GymSession:
        """Return the session of the caller's cookies; refuse a job that did not come by ``/v1/responses``."""
        cookies = job.row.get(_COOKIES)
        if not isinstance(cookies, dict):
            raise CallerError("seeded_session is only available through POST /v1/responses", field="environment")
        return GymSession(CookieJar(dict(cookies)), closed=True)

    async def run(self, job: Job, session: GymSession) -> Trajectory:
        """Run the tool loop.

        A lost connection fails the job at once. The error names no server, because the pipeline holds jobs of an
        unreachable server and then restarts them, which would repeat the effects of tools in the caller's session.
        """
        try:
            return await super().run(job, session)
        except InfrastructureError as error:
            raise InfrastructureError(error.reason, kind=error.kind) from error

    async def release(self, job: Job, session: GymSession) -> None:
        """Do nothing: the caller closes its session."""

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        """Return the response and the session's cookies without a reward; the caller scores."""
        return Verdict(None, {"response": trajectory.response, _COOKIES: trajectory.evidence.cookies.values})

    def on_failure(self, job: Job, stage: Stage | None, failure: Failure) -> Outcome:
        """Return the failure with the response so far, for the job API."""
        response = job.trajectory.response if job.trajectory else empty_response(job.row[_PARAMS])
        return Outcome(failure_state(failure), {"response": response}, failure=failure)


def responses_request(params: Any, cookies: dict[str, str]) -> JobRequest:
    """Return the job of a ``/v1/responses`` call; raise a ``CallerError`` with the field of an invalid request."""
    try:
        check_row({_PARAMS: params})
    except CallerError as error:
        field = (error.field or "").removeprefix(_PARAMS).removeprefix(".")
        raise CallerError(error.complaint, field=field or "body") from None
    row = {_PARAMS: params, _COOKIES: cookies}
    return JobRequest(row, id=f"responses-{uuid.uuid4().hex}", environment=SeededSessionHandler.name, max_attempts=1)


def responses_answer(job: Job) -> bytes:
    """Return two JSON lines: the session's cookies, and the response.

    Raises:
        ProblemError: the job failed: 422 for a bad request, 504 if the agent exceeded its time budget, else 503.
    """
    assert job.outcome is not None, "the job has no outcome yet"
    failure, result = job.outcome.failure, job.gym_result()
    if failure is None:
        return orjson.dumps(result[_COOKIES]) + b"\n" + orjson.dumps(result["response"])
    slow = failure.timed_out and failure.origin is Origin.AGENT
    raise failure_problem(504 if slow else failure_status(failure), failure, job.id)
