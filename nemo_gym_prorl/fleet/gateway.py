# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A fleet as one rollout service: the job API's jobs, run by many nodes, and its HTTP application.

A front decides where a job goes, and keeps what came of it; turns, tools and tokens never cross it, since each node
has its own model server. So it costs the same whether a rollout has one turn or a hundred.

A job's node knows it under another id, which says whose front it is and which try: what a node that was lost still
says of an earlier try concerns nobody. A lost node is nobody's attempt, as a dead server is none; but a job that met
several is suspected of them and fails. Where nodes share a folder for checkpoints, the next try, which is told the ids
of those before it, goes on where they were.

With a journal the fleet's jobs outlive the front: what was at a node that is there still goes on, and its outcome is
fetched; the rest begins again. The application also answers as Gym's head server would, so that ``prorl`` finds it.
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

from nemo_gym_prorl.background import BackgroundLoops
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
from nemo_gym_prorl.fleet.nodes import NodeSource
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

_WAY = [JobState.QUEUED, JobState.INITIALIZING, JobState.READY, JobState.RUNNING, JobState.EVALUATING]


class NoNodes(Draining):
    """No node has told yet what it runs; the fleet is starting."""

    problem = "no-nodes"
    retry_after_s = 5


SETTINGS = ServiceSettings(max_queued=100_000, retain_bytes=4 * 2**30)


@dataclass(slots=True)
class _Control:
    """A live job's bookkeeping."""

    tries: int = 0
    rollout: str = ""
    """Its id at the node, of this try."""
    cancelled: RolloutError | None = None


class FleetGateway(RolloutService):
    """See the module.

    Args:
        nodes: where they come from.
        settings: bounds.
        say: told when a node is lost, away or back.
        journal: what keeps its jobs over a restart, if anything; closed with it.
        loops: supervises the loops of the front, and those of the source of its nodes.
    """

    def __init__(
        self,
        nodes: NodeSource,
        settings: ServiceSettings = SETTINGS,
        say: Callable[[str], None] = LOGGER.warning,
        journal: Journal | None = None,
        loops: BackgroundLoops | None = None,
    ) -> None:
        super().__init__(settings, journal=journal, loops=loops)
        self.lost_nodes = 0
        """Tries that ended with their node."""
        self.dispatcher = FleetDispatcher(
            nodes,
            tokens=TokenForm.PACKED,
            ended=self._ended,
            lost=self._lost,
            broke=lambda node, error: LOGGER.error("node %s: %s", node, error),
            say=say,
            moved=self._moved,
            placed=self._placed,
            surveyed=self._surveyed,
            patient=True,
            loops=self.loops,
        )
        self._environments: Environments | None = None
        self._controls: dict[str, _Control] = {}
        self._jobs: dict[str, Job] = {}
        """Live jobs by their ids at nodes."""
        self._gateway_id = uuid.uuid4().hex[:8]
        self._shares = False
        """NodeSource have a folder for checkpoints."""

    async def start(self) -> None:
        """ResumePoint with the nodes that are there, and with what an earlier life had accepted."""
        await self.dispatcher.start()
        self._recover_jobs()

    async def close(self) -> None:
        """Cancel every job, and return when all have their outcome, or nodes don't answer; with a journal, leave them
        at their nodes for the front's next life."""
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
            done.set_result(None)  # whoever waits has waited for long enough

    # -- callers -------------------------------------------------------------------------------------------------

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
        self._carry(job, job.id[: MAX_ID - len(which)] + which)

    def _resume_job(self, earlier: Unfinished) -> None:
        job, restarts, node, rollout = earlier  # which may be at its node still
        self._remember(job)
        if rollout is not None and node in self.dispatcher.nodes:
            self._carry(job, rollout, node)
        else:
            job.failures.append(restarted(restarts))
            job.tries += [rollout] if rollout is not None else []
            self._run(job)

    def _carry(self, job: Job, rollout: str, node: str | None = None) -> None:
        """Have it run under this id, at this node if it is there already."""
        self._controls[job.id].rollout = rollout
        self._jobs[rollout] = job
        group = job.group
        if group is not None and job.scope is not None:
            # Another's group of that name are no siblings, and nodes know of no clients.
            group = hashlib.blake2b(repr((job.scope, group)).encode(), digest_size=16).hexdigest()
        resume_point = job.resume_point or ResumePoint()
        resume_point = replace(resume_point, tries=(*job.tries[::-1], *resume_point.tries))
        job.tries.append(rollout)
        wishes: dict[str, Any] = {
            "environment": job.environment,
            "client": job.client,
            "group": group,
            "run": job.run,
            "priority": job.priority,
            "budgets": job.budgets.model_dump(),
            "max_attempts": job.max_attempts,
            "begin": {name: told for name, told in asdict(resume_point).items() if told} or None,
        }
        body = {"row": job.row, **{name: value for name, value in wishes.items() if value is not None}}
        self.dispatcher.submit(rollout, body, node=node)

    async def fork(self, parent: Job, turn: int | None, requests: Sequence[JobRequest]) -> list[Job]:
        if not self._shares:
            reason = "no node of this fleet has one, so checkpoints are at the nodes that took them; set it at each"
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
        # The nodes' counts, summed, and the states of the jobs that the front remembers.
        view = StatusView.sum(self.dispatcher.statuses.values())
        view.draining = self.draining
        view.stages[Stage.INIT].waiting += self.dispatcher.waiting
        view.states = {state: self.store.states[state] for state in JobState}
        view.retained_bytes = self.store.retained_bytes
        view.checkpoint_folder = next((node.checkpoint_folder for node in self.dispatcher.statuses.values()), None)
        view.journal = self.store.trouble
        return view

    # -- what nodes tell -----------------------------------------------------------------------------------------

    def _surveyed(self, node: str) -> None:
        """NodeSource of a fleet run the same environments: the newest word counts."""
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
            # Its node ended, or cancelled a try that an earlier life of ours had given up.
            self._again(job, failures, view.failure.reason if view.failure else "its node has cancelled it")
            return
        try:
            outcome = self._outcome(job, view)
        except (TypeError, ValueError, LookupError, RecursionError) as error:
            self._again(job, failures, f"its node tells an outcome that makes no sense: {error!r}")
            return
        job.failures += failures
        self._finish(job, outcome)

    def _outcome(self, job: Job, view: JobView) -> Outcome:
        """What a node tells, after which the job has all that belongs to it.

        Raises:
            TypeError, ValueError, LookupError, RecursionError: that is none.
        """
        if (view.state is JobState.SUCCEEDED) is not (view.failure is None):
            raise ValueError(f"{view.state} with failure {view.failure}")
        if view.state is not JobState.SUCCEEDED and view.reward is not None:
            raise ValueError(f"{view.state} with reward {view.reward}")
        if view.timings.keys() < set(Stage):
            raise ValueError(f"times of {[*view.timings]} alone")
        control = self._controls[job.id]
        job.resumed = [place.model_dump() for place in view.resumed]
        job.kept_turns = view.checkpoints if self._shares else []
        job.forked_from = view.forked_from.model_dump() if view.forked_from else None
        job.times = view.timings
        labels = [{"first": label, "last": label} for label in view.weight_versions]
        job.progress = Progress(view.turns, view.tool_calls, view.finish_reason, labels, view.steps or [])  # type: ignore[arg-type]
        tokens = [turn.model_dump(exclude_none=True) for turn in view.tokens or ()]
        for told in tokens:
            TurnTokens.unpack(told)
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
        """Its node is lost, or has lost it."""
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
        """Make the transitions up to a state; some of them may not have been told."""
        if state is JobState.QUEUED and job.state is not JobState.QUEUED:
            self._move(job, JobState.QUEUED)
            return
        for step in _WAY[_WAY.index(job.state) + 1 : _WAY.index(state) + 1]:
            self._move(job, step)

    def _fail(self, job: Job, failure: Failure) -> None:
        self._finish(job, Outcome(failure_state(failure), {}, None, failure))

    def _finish(self, job: Job, outcome: Outcome) -> None:
        if outcome.state is JobState.SUCCEEDED:
            scored = job.times[Stage.EVAL].attempts
            self._advance(job, JobState.EVALUATING if scored else JobState.RUNNING)
        del self._controls[job.id]
        if not self._shares:
            job.tries = []  # of use to nobody, and a journal keeps them
        super()._finish(job, outcome)


def _elsewhere() -> AgentHandler:
    raise AssertionError("handlers are at the nodes")


def _failure(view: FailureView, *, timed_out: bool = False) -> Failure:
    return Failure(view.kind, view.origin, view.stage, view.reason, timed_out, None, view.traceback)


class DrainNode(BaseModel):
    """Which node is to get nothing new."""

    model_config = ConfigDict(extra="forbid")

    node: str
    drain: bool = Field(default=True, description="False: give it rollouts again.")


class _Nodes(Collector):
    def __init__(self, front: FleetGateway) -> None:
        self._front = front

    def collect(self) -> Iterable[Metric]:
        nodes = self._front.dispatcher.views()
        family = GaugeMetricFamily("prorl_fleet_nodes", "Nodes of the fleet.", labels=["usable"])
        for usable in (True, False):
            count = sum(node.usable is usable for node in nodes)
            family.add_metric([str(usable).lower()], count)
        yield family
        waiting = self._front.dispatcher.waiting
        yield GaugeMetricFamily("prorl_fleet_waiting", "Rollouts that are at no node yet.", value=waiting)
        lost = self._front.lost_nodes
        yield GaugeMetricFamily("prorl_fleet_lost_tries", "Tries that ended with their node.", value=lost)


SCOPES = RouteScopes({**ROUTES, ("GET", "/server_instances"): Scope.READ})


def gateway_app(front: FleetGateway, *, key: str | None, clients: Path | None = None) -> FastAPI:
    """The application of a front.

    Args:
        front: started and closed by the caller.
        key: its own, which every route but ``/healthz`` wants; ``None`` for none.
        clients: a file of those with keys of their own besides.

    Raises:
        CallerError: that cannot be read, or is wrong.
    """
    keys = None if clients is None else KeysFile(clients, front.share)
    app = FastAPI(title="nemo-gym-prorl fleet")
    add_problem_handlers(app)
    app.add_middleware(KeyGuard, key=key, clients=keys.caller if keys else None, scopes=SCOPES)
    app.include_router(rollout_router(front, ServiceMetrics(front, _Nodes(front))))
    router = APIRouter(route_class=JsonRoute, dependencies=[Depends(no_other_parameters)])

    @router.get("/v1/nodes", tags=["service"], responses=problem_responses())
    async def nodes() -> list[NodeView]:
        """The fleet's nodes."""
        return front.dispatcher.views()

    @router.post("/v1/nodes/drain", tags=["service"], responses=problem_responses(422))
    async def drain(body: DrainNode) -> list[NodeView]:
        """Give a node nothing new; what it has goes on."""
        front.dispatcher.drain(body.node, body.drain)
        return front.dispatcher.views()

    @router.get("/server_instances", tags=["service"], responses=problem_responses())
    async def server_instances(request: Request) -> list[dict[str, str]]:
        """As Gym's head server lists its servers: here, by the address that the caller has."""
        url = str(request.base_url).rstrip("/")
        return [{"process_name": "fleet", "name": "prorl_agent", "server_type": "responses_api_agents", "url": url}]

    app.include_router(router)
    return app
