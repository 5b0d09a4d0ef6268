# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A fleet as one rollout service: the job API's jobs, run by many nodes.

A front decides where a job goes, and keeps what came of it; turns, tools and tokens never cross it, since each node
has its own model server. So it costs the same whether a rollout has one turn or a hundred.

A job's node knows it under another id, which says whose front it is and which try: what a node that was lost still
says of an earlier try concerns nobody. A lost node is nobody's attempt, as a dead server is none; but a job that met
several is suspected of them and fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from nemo_gym_prorl.failures import (
    CallerError,
    Failure,
    FailureKind,
    JobCancelled,
    Origin,
    RolloutError,
    Stage,
    classify,
)
from nemo_gym_prorl.rollout.environments import Environment, Environments
from nemo_gym_prorl.rollout.fleet.carrier import Loss
from nemo_gym_prorl.rollout.fleet.dispatcher import Dispatcher
from nemo_gym_prorl.rollout.fleet.nodes import Nodes
from nemo_gym_prorl.rollout.handler import AgentHandler
from nemo_gym_prorl.rollout.job import Job, JobState, Outcome, Progress, failure_state
from nemo_gym_prorl.rollout.request import Draining, JobRequest, QueueFull, row_digest
from nemo_gym_prorl.rollout.schemas import MAX_ID, FailureView, JobView, StatusView, TokenForm
from nemo_gym_prorl.rollout.store import JobStore


LOGGER = logging.getLogger(__name__)

MAX_LOSSES = 5
"""A job fails with the loss of so many nodes that it was on."""
_CLOSE_S = 30.0

_WAY = [JobState.QUEUED, JobState.INITIALIZING, JobState.READY, JobState.RUNNING, JobState.EVALUATING]


class NoNodes(Draining):
    """No node has told yet what it runs; the fleet is starting."""

    problem = "no-nodes"
    retry_after_s = 5


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Bounds of a front.

    Attributes:
        max_queued: jobs that may wait for a node before :class:`QueueFull`.
        retain_bytes, keep_unread_s: as of a pipeline.
    """

    max_queued: int = 100_000
    retain_bytes: int = 4 * 2**30
    keep_unread_s: float = 3600.0


@dataclass(slots=True)
class _Control:
    """A live job's bookkeeping."""

    request: JobRequest
    done: asyncio.Future[None]
    tries: int = 0
    rollout: str = ""
    """Its id at the node, of this try."""
    cancelled: RolloutError | None = None


class Front:
    """See the module. A :class:`~nemo_gym_prorl.rollout.service.RolloutService`.

    Args:
        nodes: where they come from.
        settings: bounds.
        say: told when a node is lost, away or back.
    """

    def __init__(
        self, nodes: Nodes, settings: FrontSettings | None = None, say: Callable[[str], None] = LOGGER.warning
    ) -> None:
        self.settings = settings or FrontSettings()
        self.store = JobStore(self.settings.retain_bytes, self.settings.keep_unread_s)
        self.draining = False
        self.on_finish: list[Callable[[Job], None]] = []
        self.lost_nodes = 0
        """Tries that ended with their node."""
        self.dispatcher = Dispatcher(
            nodes,
            tokens=TokenForm.PACKED,
            ended=self._ended,
            lost=self._lost,
            broke=lambda node, error: LOGGER.error("node %s: %s", node, error),
            say=say,
            moved=self._moved,
            surveyed=self._surveyed,
            patient=True,
        )
        self._environments: Environments | None = None
        self._controls: dict[str, _Control] = {}
        self._jobs: dict[str, Job] = {}
        """Live jobs by their ids at nodes."""
        self._life = uuid.uuid4().hex[:8]

    async def start(self) -> None:
        """Begin with the nodes that are there."""
        await self.dispatcher.start()

    async def close(self) -> None:
        """Cancel every job, and return when all have their outcome, or nodes don't answer."""
        self.draining = True
        for job in self.store.live():
            self.request_cancel(job, JobCancelled("the service is shutting down", kind=FailureKind.SHUTDOWN))
        pending = [control.done for control in self._controls.values()]
        if pending:
            await asyncio.wait(pending, timeout=_CLOSE_S)
        await self.dispatcher.close()

    # -- callers -------------------------------------------------------------------------------------------------

    def submit(self, request: JobRequest, *, bounded: bool = True) -> Job:
        """Take a job on; the same id and row again is the same job.

        Raises:
            QueueFull, JobConflict, RolloutForgotten, Draining, NoNodes.
            CallerError: the row cannot be written as JSON, or belongs to no environment that there is.
        """
        digest = row_digest(request.row)
        if (known := self.store.known(request, digest)) is not None:
            return known
        if self._environments is None:
            raise NoNodes("no node is up yet; try again later")
        environment = self._environments.of_job(request)
        if self.draining:
            raise Draining("the service is draining and takes no new rollouts")
        if bounded:
            if self.dispatcher.waiting >= self.settings.max_queued:
                raise QueueFull(f"{self.settings.max_queued} rollouts are waiting already; try again later")
            self.store.refuse_if_full(request.client)
        job = Job(
            id=request.id or uuid.uuid4().hex,
            stored_row=request.row,
            digest=digest,
            environment=environment.name,
            handler=environment.handler,
            submitted_at=time.time(),
            group=request.group,
            client=request.client,
            run=request.run,
            priority=request.priority,
            held=request.held,
        )
        self.store.add(job, job.submitted_at)
        self._controls[job.id] = _Control(request, asyncio.get_running_loop().create_future())
        self._begin(job)
        return job

    def fork(self, parent: Job, turn: int | None, requests: Sequence[JobRequest]) -> list[Job]:
        """Nothing: checkpoints are at their node.

        Raises:
            CallerError: always.
        """
        raise CallerError("a front forks no rollouts: their checkpoints are at the nodes that ran them")

    async def wait(self, job: Job, timeout: float | None = None) -> bool:
        """Wait for a job's outcome; ``False`` if it has none after ``timeout`` seconds."""
        done = self.done(job)
        if not done.done():
            await asyncio.wait({done}, timeout=timeout)
        return done.done()

    def done(self, job: Job) -> asyncio.Future[None]:
        """Done when the job has its outcome. Others wait for it too: it is not to be cancelled."""
        if (control := self._controls.get(job.id)) is not None:
            return control.done
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        over.set_result(None)
        return over

    async def cancel(self, job: Job, reason: str = "cancelled by the caller") -> None:
        """Cancel a job, in whatever state, and return when it has its outcome and its sandbox is gone."""
        self.request_cancel(job, JobCancelled(reason))
        await self.wait(job)

    def request_cancel(self, job: Job, error: RolloutError) -> None:
        """Cancel a job without waiting for it; a no-op on one that has its outcome or was cancelled before."""
        control = self._controls.get(job.id)
        if control is not None and control.cancelled is None:
            control.cancelled = error
            self.dispatcher.cancel(control.rollout)

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new jobs and wait until every job has its outcome; ``False`` if some have none in time."""
        self.draining = True
        pending = [control.done for control in self._controls.values()]
        if not pending:
            return True
        _, left = await asyncio.wait(pending, timeout=timeout)
        return not left

    def resume(self) -> None:
        """Take jobs again after a drain."""
        self.draining = False

    def status(self) -> StatusView:
        """The nodes' counts, summed, and the states of the jobs that the front remembers."""
        view = StatusView.sum(self.dispatcher.statuses.values())
        view.draining = self.draining
        view.stages[Stage.INIT].waiting += self.dispatcher.waiting
        view.states = {state: self.store.states[state] for state in JobState}
        view.retained_bytes, view.unread_bytes = self.store.retained_bytes, self.store.unread_bytes
        return view

    # -- what nodes tell -----------------------------------------------------------------------------------------

    def _surveyed(self, node: str) -> None:
        """Nodes of a fleet run the same environments: the newest word counts."""
        views = self.dispatcher.statuses[node].environments
        default = next((name for name, view in views.items() if view.default), None)
        self._environments = Environments(
            [
                Environment(
                    name,
                    view.handler,
                    _elsewhere,
                    frozenset(view.data_sources),
                    scores_groups_of=view.scores_groups_of,
                )
                for name, view in views.items()
            ],
            default,
        )

    def _begin(self, job: Job) -> None:
        control = self._controls[job.id]
        control.tries += 1
        which = f"~{self._life}-{job.number}-{control.tries}"
        control.rollout = job.id[: MAX_ID - len(which)] + which
        self._jobs[control.rollout] = job
        request = control.request
        wishes: dict[str, Any] = {
            "environment": job.environment,
            "client": job.client,
            "group": job.group,
            "run": job.run,
            "priority": job.priority,
            "budgets": {stage.value: seconds for stage, seconds in request.budgets.items()} or None,
            "max_attempts": request.max_attempts,
        }
        body = {"row": request.row, **{name: value for name, value in wishes.items() if value is not None}}
        self.dispatcher.submit(control.rollout, body)

    def _moved(self, rollout: str, state: JobState) -> None:
        if (job := self._jobs.get(rollout)) is not None:
            self._advance(job, state)

    def _ended(self, view: JobView) -> None:
        job = self._jobs.pop(view.id)
        control = self._controls[job.id]
        failures = [_failure(failure) for failure in view.failed_attempts]
        if view.failure is not None and view.failure.kind is FailureKind.SHUTDOWN and control.cancelled is None:
            # The node ended, not the rollout.
            self._again(job, failures, view.failure.reason)
            return
        job.failures += failures
        job.resumed = [place.model_dump() for place in view.resumed]
        job.times = view.timings
        labels = [{"first": label, "last": label} for label in view.weight_versions]
        job.progress = Progress(view.turns, view.tool_calls, view.finish_reason, labels, view.steps or [])  # type: ignore[arg-type]
        job.tokens = orjson.dumps([turn.model_dump(exclude_none=True) for turn in view.tokens or ()])
        failure = _failure(view.failure, timed_out=view.state is JobState.TIMED_OUT) if view.failure else None
        if failure is not None and control.cancelled is not None:
            failure = classify(control.cancelled, failure.stage)
        self._finish(job, Outcome(view.state, view.result or {}, view.reward, failure, view.masked))

    def _lost(self, rollout: str, loss: Loss, why: str) -> None:
        job = self._jobs.pop(rollout)
        control = self._controls[job.id]
        if control.cancelled is not None:
            self._fail(job, classify(control.cancelled, None))
        elif loss is Loss.REFUSED:
            self._fail(job, Failure(FailureKind.AGENT_REQUEST_FAILED, Origin.CALLER, None, why))
        else:
            self._again(job, [], why)

    def _again(self, job: Job, failures: list[Failure], why: str) -> None:
        """Its node is lost, or has lost it."""
        self.lost_nodes += 1
        failure = Failure(FailureKind.SESSION_LOST, Origin.INFRASTRUCTURE, None, why)
        job.failures += [*failures, failure]
        if self._controls[job.id].tries >= MAX_LOSSES:
            self._fail(job, failure)
            return
        if job.state is not JobState.QUEUED:
            self._advance(job, JobState.QUEUED)
        self._begin(job)

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
        job.outcome = outcome
        job.finished_at = time.time()
        job.pack()
        self._move(job, outcome.state)
        self._controls.pop(job.id).done.set_result(None)
        for callback in self.on_finish:
            try:
                callback(job)
            except Exception:  # whoever looks on must not hold up the job, nor those who look on besides
                LOGGER.exception("job %s: on_finish hook %r failed", job.id, callback)

    def _move(self, job: Job, state: JobState) -> None:
        was = job.state
        job.move(state)
        self.store.record(job, time.time(), was)


def _elsewhere() -> AgentHandler:
    raise AssertionError("handlers are at the nodes")


def _failure(view: FailureView, *, timed_out: bool = False) -> Failure:
    return Failure(view.kind, view.origin, view.stage, view.reason, timed_out, None, view.traceback)
