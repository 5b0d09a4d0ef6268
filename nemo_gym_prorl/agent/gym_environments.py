# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of an agent's YAML, and the environments that they describe, over the servers of a Gym deployment.

Every setting can be overridden on Gym's command line. A setting that bounds a pipeline has its default in
:class:`~nemo_gym_prorl.rollout.settings.PipelineSettings`, and nowhere else.

There are three kinds of environments: the default one, which the top of the configuration describes; those in
``environments``; and one for each installed plug-in that the configuration does not mention, under the plug-in's name.
Gym checks the references at the top of an agent's configuration and none below, so these are checked here, at the
start.

:class:`SeededSessionHandler` runs Gym's ``/v1/responses`` of an agent: the tool loop alone, in a session that the
caller has seeded and will score. Such a call is a job like any other, with a place in the RUN pool, a budget, an end
when its caller hangs up, and an entry in the job API. It is tried once only, since the effects of its tools are final.
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
from nemo_gym_prorl.agent.gym_http import Address, CookieJar, GymServer, HttpClient, addresses
from nemo_gym_prorl.agent.run_rows import empty_response, failure_problem, failure_status
from nemo_gym_prorl.agent.tool_loop import LoopLimits, ToolAnswers
from nemo_gym_prorl.failures import CallerError, Failure, InfrastructureError, Origin, Stage, suggest
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
    """Gym's reference to its server. The default environment is called after it."""
    handler: str = GymEnvironmentHandler.name
    """Agent handler of its rows."""
    handler_config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the handler, whose keys the handler defines."""
    max_steps: Positive | None = _LIMITS.max_steps
    """Policy turns of one rollout."""
    max_total_sequence_length: Positive | None = _LIMITS.max_total_sequence_length
    """Prompt plus generated tokens of one rollout."""
    tool_concurrency: Positive = _LIMITS.tool_concurrency
    """Tool calls of one turn in flight at once; 1 keeps their order."""
    on_timeout: OnTimeout = OnTimeout.MASK
    """Policy for rollouts that exceed the RUN time budget: ``mask``, ``score`` as it is, or ``zero`` reward."""
    scores_groups_of: Positive | None = None
    """How many rollouts of a group the server's ``/verify`` scores together, answering none before all have come. By
    default what the server says of itself: ``num_rollouts_per_prompt``, else 1."""

    checkpoint_turns: Positive | None = None
    """After so many turns each a rollout can be resumed or forked, where its server can keep sessions; ``null``: never
    but from the start."""

    @property
    def limits(self) -> LoopLimits:
        """Return the limits of the tool loop."""
        return LoopLimits(self.max_steps, self.max_total_sequence_length, self.tool_concurrency)


class EnvironmentConfig(EnvironmentSettings):
    """One of several environments; what it leaves out is the service's. A ``handler`` of its own comes with a
    ``handler_config`` of its own, or none."""

    data_sources: list[str] = Field(default_factory=list)
    """Rows with one of these in ``data_source`` are its own, besides those with its name."""
    budgets: BudgetsModel = BudgetsModel()
    share: Share = 1.0
    """Share of sandboxes and slots, relative to other environments, while rows of several wait."""


class ServiceConfig(PipelineSettings, EnvironmentSettings):
    """All settings of the agent server."""

    environments: dict[Identifier, EnvironmentConfig] = Field(default_factory=dict)
    """Further environments that the same pools serve, by name."""

    further_model_servers: list[str] = Field(default_factory=list)
    """Instances that share the rollouts with the one in ``model_server``, each rollout staying at one of them."""
    journal: str | None = None
    """A folder on this machine's own disk in which accepted rollouts and outcomes outlive a restart; without it a
    restart forgets them."""
    journal_keep_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = JOURNAL_KEEP_S
    """How long an outcome is kept there."""
    journal_keep_bytes: Positive = JOURNAL_KEEP_BYTES
    """How much all of them may take there, compressed; the oldest are forgotten first."""
    caller_grace_s: Seconds = 10.0
    """How long a ``/run`` whose caller vanished goes on, in case the caller posts it again."""
    prorl_wire: bool = False
    """Also serve the original ProRL wire format: /process, /cancel, /start, /stop, /add_llm_server, …"""
    control_token: str | None = None
    """The deployment's own key, good for everything: every route requires one as a bearer token. Without any the
    server listens on loopback only."""
    keys_file: Path | None = None
    """Clients with keys of their own, each with scopes and a share; `prorl key` writes it. Looked at again when it
    changes."""
    tls_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Also answer here, on all interfaces, by TLS; Gym's own servers go on using the plain address."""
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def of_environment(self, name: str) -> EnvironmentSettings:
        """The settings of one of the further environments, with the service's for those that it leaves out."""
        own = self.environments[name]
        said = {key: getattr(own, key) for key in EnvironmentSettings.model_fields if key in own.model_fields_set}
        above = {key: getattr(self, key) for key in EnvironmentSettings.model_fields}
        if "handler" in said:
            del above["handler_config"]
        return EnvironmentSettings.model_validate({**above, **said})

    def budgets_of(self, name: str) -> Budgets:
        """The budgets of one of the further environments."""
        return _within(self.environments[name].budgets, self.budgets)


def _within(said: BudgetsModel, above: Budgets) -> Budgets:
    """Those that are said, and for those that are not, what holds above them."""
    return above.model_copy(update={stage.value: seconds for stage, seconds in said.given().items()})


_SETTLE_SHARE = 0.6
"""Of the grace for a cancelled stage: the time for its tokens or its session. The rest is for everything else."""


class GymServers:
    """The servers of a deployment that rollouts use, each with one client.

    Args:
        config: Gym's merged configuration.
        http: the client behind them.
    """

    def __init__(self, config: Mapping[str, Any], http: HttpClient) -> None:
        self._config = config
        self._known: dict[str, Address] = addresses(config)
        self._http = http
        self._servers: dict[str, GymServer] = {}

    def scores_groups_of(self, name: str) -> int:
        """How many rollouts of a prompt a resources server says that it compares with each other, in Gym's words."""
        [server] = self._config[name]["resources_servers"].values()
        told = server.get("num_rollouts_per_prompt")
        return told if isinstance(told, int) else 1

    def get(self, kind: str, name: str, field: str) -> GymServer:
        """A server.

        Args:
            kind: Gym's name for what it is, ``resources_servers`` say.
            name: of its instance.
            field: where it is named.

        Raises:
            CallerError: there is none of that kind and name, with the nearest.
        """
        there = [other for other in self._known if kind in self._config[other]]
        if name not in there:
            raise CallerError(f"no server {name!r} with host and port in {kind}{suggest(name, there)}", field=field)
        if name not in self._servers:
            self._servers[name] = GymServer(name, self._known[name], self._http)
        return self._servers[name]


def gym_environments(config: ServiceConfig, servers: GymServers, base: GymContext) -> Environments:
    """The environments of a configuration. Those that it describes have their handlers built.

    Args:
        config: of the service.
        servers: of the deployment.
        base: what their handlers have in common: the policy, the cleanup.

    Raises:
        CallerError: names the setting that cannot work.
    """
    registry = HandlerRegistry({GymEnvironmentHandler.name: GymEnvironmentHandler})
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
        raise CallerError("name one, here or for each of `environments`", field="resources_server")
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
    # What the default environment says of its handler and verdicts is none of a plug-in's, nor of a session that a
    # caller brings along.
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
        tools=ToolAnswers(),
        checkpoint_turns=settings.checkpoint_turns,
    )


def _builder(
    registry: HandlerRegistry, settings: EnvironmentSettings, context: GymContext, field: str
) -> Callable[[], AgentHandler]:
    """What builds an environment's handler; ``field`` is where its settings stand."""
    name = settings.handler
    registry.require(name, f"{field}handler")

    def build() -> AgentHandler:
        config = registry.config(name, settings.handler_config, f"{field}handler_config")
        try:
            handler = registry.factory(name)(replace(context, config=config))
        except CallerError as error:
            raise CallerError(error.complaint, field=f"{field}{error.field or 'handler'}") from error
        if settings.on_timeout is not OnTimeout.MASK and not isinstance(handler, HandlesTimeouts):
            reason = f"with handler {name!r} it can only be mask: that has no `timed_out`"
            raise CallerError(reason, field=f"{field}on_timeout")
        return handler

    return build


_COOKIES = "session_cookies"
_PARAMS = "responses_create_params"


class SeededSessionHandler(GymEnvironmentHandler):
    """Runs the tool loop in a session that it neither made nor ends."""

    name = "seeded_session"

    async def init(self, job: Job) -> GymSession:
        """The caller's session."""
        cookies = job.row.get(_COOKIES)
        if not isinstance(cookies, dict):
            raise CallerError("is for POST /v1/responses, which brings a session along", field="environment")
        return GymSession(CookieJar(dict(cookies)), closed=True)

    async def run(self, job: Job, session: GymSession) -> Trajectory:
        """The tool loop. A connection that is lost ends it, whichever server it was to: the job must not be held until
        that server is back and then begun again, in a session in which things have happened."""
        try:
            return await super().run(job, session)
        except InfrastructureError as error:
            raise InfrastructureError(error.reason, kind=error.kind) from error

    async def release(self, job: Job, session: GymSession) -> None:
        """Nothing: the caller goes on with its session."""

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        """Nothing to score: the answer is the response, and the cookies that the session has by now."""
        return Verdict(None, {"response": trajectory.response, _COOKIES: trajectory.evidence.cookies.values})

    def on_failure(self, job: Job, stage: Stage | None, failure: Failure) -> Outcome:
        """No answer but the failure; the response so far, for whoever looks into the job."""
        response = job.trajectory.response if job.trajectory else empty_response(job.row[_PARAMS])
        return Outcome(failure_state(failure), {"response": response}, failure=failure)


def responses_request(params: Any, cookies: dict[str, str]) -> JobRequest:
    """The job of a call.

    Raises:
        CallerError: the body is no Responses API request; names the field.
    """
    try:
        check_row({_PARAMS: params})
    except CallerError as error:
        field = (error.field or "").removeprefix(_PARAMS).removeprefix(".")
        raise CallerError(error.complaint, field=field or "body") from None
    row = {_PARAMS: params, _COOKIES: cookies}
    return JobRequest(row, id=f"responses-{uuid.uuid4().hex}", environment=SeededSessionHandler.name, max_attempts=1)


def responses_answer(job: Job) -> bytes:
    """What the session's cookies are by now, and on a line of its own the response.

    Raises:
        ProblemError: the job failed: 422 if the request is to blame, 504 if the agent used up its time, else 503.
    """
    assert job.outcome is not None, "only a job with its outcome has an answer"
    failure, result = job.outcome.failure, job.gym_result()
    if failure is None:
        return orjson.dumps(result[_COOKIES]) + b"\n" + orjson.dumps(result["response"])
    slow = failure.timed_out and failure.origin is Origin.AGENT
    raise failure_problem(504 if slow else failure_status(failure), failure, job.id)
