# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gateway of a fleet: many nodes behind the job API of one rollout service, and the gateway's HTTP application.

The gateway chooses the node of a job and keeps the job's outcome. Turns and tool calls never pass through the gateway,
since each node has its own model server. So a turn costs the gateway nothing but its part of the rollout's result.

- Each try of a job has its own id at the node: job id, random id of the gateway process, job number and try. So late
  results of a lost node are ignored.
- Losing a node does not use up an attempt. A job that lost several nodes fails, since the job may have caused this.
- If nodes share a checkpoint folder, the next try gets the ids of earlier tries and resumes from their checkpoints.
- With a journal, jobs survive a restart of the gateway: jobs at nodes continue there, and all others start again.

The application also has the route of Gym's head server by which ``prorl`` finds servers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field

from nemo_gym_prorl.async_tasks import BackgroundLoops
from nemo_gym_prorl.failures import (
    CallerError,
    Failure,
    FailureKind,
    Origin,
    RolloutError,
    Stage,
    classify,
)
from nemo_gym_prorl.fleet.dispatcher import FleetDispatcher, NodeView
from nemo_gym_prorl.fleet.forwarder import MAX_LOST_NODES, LossReason
from nemo_gym_prorl.fleet.placement import NodeSource
from nemo_gym_prorl.http.key_guard import KeyGuard, RouteScopes
from nemo_gym_prorl.http.keys import Scope
from nemo_gym_prorl.http.problems import add_problem_handlers, no_other_parameters, problem_responses
from nemo_gym_prorl.rollout.api.access_control import ROUTES, KeysFile
from nemo_gym_prorl.rollout.api.routes import JsonRoute, ServiceMetrics, rollout_router
from nemo_gym_prorl.rollout.api.schemas import MAX_ID, FailureView, JobView, TokenForm
from nemo_gym_prorl.rollout.gym_rows import TurnTokens, compact_json_bytes
from nemo_gym_prorl.rollout.handler import AgentHandler, Environment, Environments
from nemo_gym_prorl.rollout.job import Job, JobState, Outcome, Progress, ResumePoint, failure_state
from nemo_gym_prorl.rollout.request import Draining, JobRequest, resolve_fork_turn
from nemo_gym_prorl.rollout.service import RolloutService, restarted, shutting_down
from nemo_gym_prorl.rollout.settings import Budgets, ServiceSettings
from nemo_gym_prorl.rollout.status import StatusView
from nemo_gym_prorl.rollout.storage.checkpoints import CHECKPOINT_FOLDER


if TYPE_CHECKING:
    from nemo_gym_prorl.rollout.storage.journal import Journal
    from nemo_gym_prorl.rollout.storage.journal_records import Unfinished


LOGGER = logging.getLogger(__name__)

_CLOSE_S = 30.0
"""Seconds that a closing gateway waits until its cancelled jobs have their outcome."""

_STATE_ORDER = [JobState.QUEUED, JobState.INITIALIZING, JobState.READY, JobState.RUNNING, JobState.EVALUATING]


class NoNodes(Draining):
    """No node has reported its environments yet, as while the fleet starts, or no node answers."""

    problem = "no-nodes"
    retry_after_s = 5


SETTINGS = ServiceSettings(max_queued=100_000, retain_bytes=4 * 2**30)


@dataclass(slots=True)
class _Control:
    """State of a job without an outcome, private to the gateway."""

    tries: int = 0
    rollout: str = ""
    """Id of the current try at its node."""
    cancelled: RolloutError | None = None


class FleetGateway(RolloutService):
    """Rollout service that forwards its jobs to the nodes of a fleet; see the module.

    Args:
        report: called with a message when a node is lost, unavailable or available again.
        journal: keeps jobs across a restart; closed with the gateway.
        loops: supervises the background loops of the gateway and of its node source; created by default.
    """

    def __init__(
        self,
        nodes: NodeSource,
        settings: ServiceSettings = SETTINGS,
        report: Callable[[str], None] = LOGGER.warning,
        journal: Journal | None = None,
        loops: BackgroundLoops | None = None,
    ) -> None:
        super().__init__(settings, journal=journal, loops=loops)
        self.lost_nodes = 0
        """Number of tries without a usable outcome, for example because their node was lost."""
        self.dispatcher = FleetDispatcher(
            nodes,
            tokens=TokenForm.PACKED,
            on_ended=self._ended,
            on_lost=self._lost,
            on_error=lambda node, error: LOGGER.error("node %s: %s", node, error),
            report=report,
            on_state=self._moved,
            on_placed=self._placed,
            on_survey=self._surveyed,
            patient=True,
            loops=self.loops,
        )
        self._environments: Environments | None = None
        self._controls: dict[str, _Control] = {}
        self._jobs: dict[str, Job] = {}
        """Live jobs by their ids at nodes."""
        self._gateway_id = uuid.uuid4().hex[:8]
        self._shares = False
        """Whether nodes share a checkpoint folder."""

    async def start(self) -> None:
        """Open the present nodes, and start to recover the accepted jobs of an earlier process."""
        await self.dispatcher.start()
        self._recover_jobs()

    async def close(self) -> None:
        """Cancel every job, and return once all have their outcome, or after 30 s. With a journal, cancel no job: jobs
        at nodes continue, and the next process recovers all jobs."""
        self.draining = self._closing = True
        if self.store.journal is not None:
            self.store.journal.stop_trying()
        else:
            for job in self.store.live():
                self.request_cancel(job, shutting_down())
            if self._done:
                await asyncio.wait([*self._done.values()], timeout=_CLOSE_S)
        await self.dispatcher.close()
        await self._settle()
        for done in self._done.values():
            done.set_result(None)  # wake waiters for jobs that have no outcome

    def _environments_now(self) -> Environments:
        if self._environments is None:
            raise NoNodes("no node is up yet; try again later")
        return self._environments

    def _may_queue(self, client: str, most: int) -> bool:
        return self.dispatcher.may_wait(client, most)

    def share(self, clients: Mapping[str, float]) -> None:
        super().share(clients)
        self.dispatcher.share(clients)

    def _remember(self, job: Job) -> None:
        super()._remember(job)
        self._controls[job.id] = _Control()

    def _run(self, job: Job) -> None:
        control = self._controls[job.id]
        control.tries += 1
        which = f"~{self._gateway_id}-{job.number}-{control.tries}"
        self._forward(job, job.id[: MAX_ID - len(which)] + which)

    def _resume_job(self, earlier: Unfinished) -> None:
        job, restarts, node, rollout = earlier
        self._remember(job)
        if rollout is not None and node in self.dispatcher.nodes:
            self._forward(job, rollout, node)
        else:
            job.failures.append(restarted(restarts))
            job.tries += [rollout] if rollout is not None else []
            self._run(job)

    def _forward(self, job: Job, rollout: str, node: str | None = None) -> None:
        """Forward a job under the id ``rollout``; to ``node`` if the job may be there already."""
        self._controls[job.id].rollout = rollout
        self._jobs[rollout] = job
        group = job.group
        if group is not None and job.scope is not None:
            # Clients with keys choose group names independently, and nodes know nothing of the gateway's clients.
            group = hashlib.blake2b(repr((job.scope, group)).encode(), digest_size=16).hexdigest()
        resume_point = job.resume_point or ResumePoint()
        resume_point = replace(resume_point, tries=(*job.tries[::-1], *resume_point.tries))
        job.tries.append(rollout)
        options: dict[str, Any] = {
            "environment": job.environment,
            "client": job.client,
            "group": group,
            "run": job.run,
            "priority": job.priority,
            "budgets": job.budgets.model_dump(),
            "max_attempts": job.max_attempts,
            "begin": {name: value for name, value in asdict(resume_point).items() if value} or None,
        }
        body = {"row": job.row, **{name: value for name, value in options.items() if value is not None}}
        self.dispatcher.submit(rollout, body, node=node)

    async def fork(self, parent: Job, turn: int | None, requests: Sequence[JobRequest]) -> list[Job]:
        if not self._shares:
            reason = "not set at any node, so rollouts of a fleet cannot be forked; set the same folder at each node"
            raise CallerError(reason, field=CHECKPOINT_FOLDER)
        turn = resolve_fork_turn(parent.id, turn, await self.kept_turns(parent.id), ended=parent.state.terminal)
        resume_point = ResumePoint(parents=tuple(parent.tries[::-1]), turn=turn, parent=parent.id)
        return await self._accept_forks(parent, requests, resume_point=resume_point)

    async def kept_turns(self, rollout: str) -> list[int]:
        job = await self.store.fetch(rollout)
        if job is None or not self._shares:
            return []
        turns = await self.dispatcher.kept_turns(job.tries[::-1])
        if turns is None:
            raise NoNodes("no node answers; try again later")
        return turns

    def request_cancel(self, job: Job, error: RolloutError) -> None:
        control = self._controls.get(job.id)
        if control is not None and control.cancelled is None:
            control.cancelled = error
            self.dispatcher.cancel(control.rollout)

    def status(self) -> StatusView:
        # Pools and sessions are sums over the nodes; states and memory are those of the gateway's jobs.
        view = StatusView.sum(self.dispatcher.statuses.values())
        view.draining = self.draining
        view.stages[Stage.INIT].waiting += self.dispatcher.waiting
        view.states = {state: self.store.states[state] for state in JobState}
        view.retained_bytes = self.store.retained_bytes
        view.checkpoint_folder = next((node.checkpoint_folder for node in self.dispatcher.statuses.values()), None)
        view.journal = self.store.journal_error
        return view

    def _surveyed(self, node: str) -> None:
        """Update the environments from a node's latest status: all nodes of a fleet run the same environments."""
        self._shares = self._shares or self.dispatcher.statuses[node].checkpoint_folder is not None
        views = self.dispatcher.statuses[node].environments
        default = next((name for name, view in views.items() if view.default), None)
        self._environments = Environments(
            [
                Environment(
                    name,
                    view.handler,
                    _elsewhere,
                    frozenset(view.data_sources),
                    Budgets(**{stage.value: seconds for stage, seconds in view.budgets.items()}),
                    view.max_attempts,
                    scores_groups_of=view.scores_groups_of,
                )
                for name, view in views.items()
            ],
            default,
        )

    def _placed(self, rollout: str, node: str) -> None:
        if self.store.journal is not None and (job := self._jobs.get(rollout)) is not None:
            self._spawn(self.store.journal.placed(job.id, node, rollout))

    def _moved(self, rollout: str, state: JobState) -> None:
        if (job := self._jobs.get(rollout)) is not None:
            self._advance(job, state)

    def _ended(self, view: JobView) -> None:
        job = self._jobs.pop(view.id)
        control = self._controls[job.id]
        failures = [_failure(failure) for failure in view.failed_attempts]
        if view.state is JobState.CANCELLED and control.cancelled is None:
            # The node shut down, or got a late cancellation from an earlier process of the gateway.
            self._again(job, failures, view.failure.reason if view.failure else "cancelled by its node")
            return
        try:
            outcome = self._outcome(job, view)
        except (TypeError, ValueError, LookupError, RecursionError) as error:
            self._again(job, failures, f"its node reported an invalid outcome: {error!r}")
            return
        job.failures += failures
        self._finish(job, outcome)

    def _outcome(self, job: Job, view: JobView) -> Outcome:
        """Return the outcome that a node reported, and copy the details of the report to the job. Raise a
        ``TypeError``, ``ValueError``, ``LookupError`` or ``RecursionError`` for an invalid report."""
        if (view.state is JobState.SUCCEEDED) is not (view.failure is None):
            raise ValueError(f"{view.state} with failure {view.failure}")
        if view.state is not JobState.SUCCEEDED and view.reward is not None:
            raise ValueError(f"{view.state} with reward {view.reward}")
        if view.timings.keys() < set(Stage):
            raise ValueError(f"times of {[*view.timings]} alone")
        control = self._controls[job.id]
        job.resumed = [point.model_dump() for point in view.resumed]
        job.kept_turns = view.checkpoints if self._shares else []
        job.forked_from = view.forked_from.model_dump() if view.forked_from else None
        job.times = view.timings
        labels = [{"first": label, "last": label} for label in view.weight_versions]
        job.progress = Progress(view.turns, view.tool_calls, view.finish_reason, labels, view.steps or [])  # type: ignore[arg-type]
        job.progress.harness = view.harness
        job.progress.token_in_rate = view.token_in_rate
        tokens = [turn.model_dump(exclude_none=True) for turn in view.tokens or ()]
        for turn in tokens:
            TurnTokens.unpack(turn)
        job.tokens = compact_json_bytes(tokens)
        failure = _failure(view.failure, timed_out=view.state is JobState.TIMED_OUT) if view.failure else None
        if failure is not None and control.cancelled is not None:
            failure = classify(control.cancelled, failure.stage)
        return Outcome(view.state, view.result or {}, view.reward, failure, view.masked)

    def _lost(self, rollout: str, loss: LossReason, why: str) -> None:
        job = self._jobs.pop(rollout)
        control = self._controls[job.id]
        if control.cancelled is not None:
            self._fail(job, classify(control.cancelled, None))
        elif loss is LossReason.REFUSED:
            self._fail(job, Failure(FailureKind.BAD_ROW, Origin.CALLER, None, why))
        else:
            self._again(job, [], why)

    def _again(self, job: Job, failures: list[Failure], why: str) -> None:
        """Start the next try of a job whose try gave no usable outcome; after the last allowed try, fail the job."""
        self.lost_nodes += 1
        failure = Failure(FailureKind.SESSION_LOST, Origin.INFRASTRUCTURE, None, why)
        job.failures += [*failures, failure]
        if self._controls[job.id].tries >= MAX_LOST_NODES:
            self._fail(job, failure)
            return
        if job.state is not JobState.QUEUED:
            self._advance(job, JobState.QUEUED)
        self._run(job)

    def _advance(self, job: Job, state: JobState) -> None:
        """Move the job to a state, through the states in between, which the node may not have reported."""
        if state is JobState.QUEUED and job.state is not JobState.QUEUED:
            self._move(job, JobState.QUEUED)
            return
        for step in _STATE_ORDER[_STATE_ORDER.index(job.state) + 1 : _STATE_ORDER.index(state) + 1]:
            self._move(job, step)

    def _fail(self, job: Job, failure: Failure) -> None:
        self._finish(job, Outcome(failure_state(failure), {}, None, failure))

    def _finish(self, job: Job, outcome: Outcome) -> None:
        if outcome.state is JobState.SUCCEEDED:
            scored = job.times[Stage.EVAL].attempts
            self._advance(job, JobState.EVALUATING if scored else JobState.RUNNING)
        del self._controls[job.id]
        if not self._shares:
            job.tries = []  # of no use without a checkpoint folder, but the journal would store them
        super()._finish(job, outcome)


def _elsewhere() -> AgentHandler:
    raise AssertionError("handlers are at the nodes")


def _failure(view: FailureView, *, timed_out: bool = False) -> Failure:
    return Failure(view.kind, view.origin, view.stage, view.reason, timed_out, None, view.traceback)


class DrainNode(BaseModel):
    """Node to exclude from new rollouts, or to include again."""

    model_config = ConfigDict(extra="forbid")

    node: str
    drain: bool = Field(default=True, description="False ends the drain.")


class _NodeMetrics(Collector):
    def __init__(self, gateway: FleetGateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterable[Metric]:
        nodes = self._gateway.dispatcher.views()
        family = GaugeMetricFamily("prorl_fleet_nodes", "Nodes of the fleet.", labels=["usable"])
        for usable in (True, False):
            count = sum(node.usable is usable for node in nodes)
            family.add_metric([str(usable).lower()], count)
        yield family
        waiting = self._gateway.dispatcher.waiting
        yield GaugeMetricFamily("prorl_fleet_waiting", "Rollouts that are at no node yet.", value=waiting)
        lost = self._gateway.lost_nodes
        yield GaugeMetricFamily("prorl_fleet_lost_tries", "Tries that ended with their node.", value=lost)


SCOPES = RouteScopes({**ROUTES, ("GET", "/server_instances"): Scope.READ})


def gateway_app(gateway: FleetGateway, *, key: str | None, clients: Path | None = None) -> FastAPI:
    """Return the HTTP application of a gateway.

    Args:
        gateway: started and closed by the caller.
        key: administrator's key, which every route but ``/healthz`` requires; ``None`` to require no key.
        clients: keys file, with clients that have keys of their own; ``None`` without such clients.

    Raises:
        CallerError: the keys file cannot be read, or is invalid.
    """
    keys = None if clients is None else KeysFile(clients, gateway.share)
    app = FastAPI(title="nemo-gym-prorl fleet")
    add_problem_handlers(app)
    app.add_middleware(KeyGuard, key=key, clients=keys.caller if keys else None, scopes=SCOPES)
    app.include_router(rollout_router(gateway, ServiceMetrics(gateway, _NodeMetrics(gateway))))
    router = APIRouter(route_class=JsonRoute, dependencies=[Depends(no_other_parameters)])

    @router.get("/v1/nodes", tags=["service"], responses=problem_responses())
    async def nodes() -> list[NodeView]:
        return gateway.dispatcher.views()

    @router.post("/v1/nodes/drain", tags=["service"], responses=problem_responses(422))
    async def drain(body: DrainNode) -> list[NodeView]:
        """Exclude a node from new rollouts, or include it again. The node's current rollouts continue."""
        gateway.dispatcher.drain(body.node, body.drain)
        return gateway.dispatcher.views()

    @router.get("/server_instances", tags=["service"], responses=problem_responses())
    async def server_instances(request: Request) -> list[dict[str, str]]:
        """Return only this gateway, in the form of Gym's head server, at the address that the request used."""
        url = str(request.base_url).rstrip("/")
        return [{"process_name": "fleet", "name": "prorl_agent", "server_type": "responses_api_agents", "url": url}]

    app.include_router(router)
    return app
