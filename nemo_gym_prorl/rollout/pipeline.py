# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Pipeline INIT → READY → RUN → EVAL: executes the scheduler's decisions, with budgets, retries and cancellation.

Slots are counters in :class:`~.scheduler.StageScheduler`, not worker tasks, so an exception cannot take a slot out of
service. Each :class:`~.scheduler.Start` becomes one task that always frees its slot. Faults of handlers are contained:

- A handler raises or returns an invalid value: the attempt fails, and infrastructure failures are retried.
- A server of the environment is down: its rollouts wait for up to ``unreachable_s``, and the attempt does not count.
- A stage exceeds its budget: the stage is cancelled. Waiting for a backend is not charged to RUN.
- A stage ignores cancellation: after a grace period the call is abandoned and counted, and its slot is freed. A
  session that the abandoned call returns later is released.
- Siblings are scored together and some are never submitted: the waiting siblings fail as ``cohort_incomplete``.
- A release exceeds its time limit: the attempt fails as ``session_release_failed``, because otherwise the agent could
  act while its rollout is scored.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_gym_prorl.failures import (
    BudgetExceeded,
    CallerError,
    Failure,
    FailureKind,
    InfrastructureError,
    RolloutError,
    Stage,
    classify,
    drop_tracebacks,
)
from nemo_gym_prorl.http.tracing import SpanGroup, failed, note, span
from nemo_gym_prorl.rollout.handler import Environments
from nemo_gym_prorl.rollout.handler_calls import Attempt, HandlerCalls
from nemo_gym_prorl.rollout.job import Checkpoint, Job, JobState, Outcome, Progress, ResumePoint, Trajectory
from nemo_gym_prorl.rollout.request import Fork, JobRequest, resolve_fork_turn
from nemo_gym_prorl.rollout.scheduling.circuit_breaker import CircuitBreaker, Outage
from nemo_gym_prorl.rollout.scheduling.scheduler import StageScheduler, Start
from nemo_gym_prorl.rollout.service import RolloutService, restarted, shutting_down
from nemo_gym_prorl.rollout.settings import PipelineSettings
from nemo_gym_prorl.rollout.status import VERSION, EnvironmentView, HeldView, StatusView, stage_pools
from nemo_gym_prorl.rollout.storage.checkpoints import RENEW_S, CheckpointStore, SharedCheckpoints


if TYPE_CHECKING:  # so that clients of the job API import no database
    from nemo_gym_prorl.rollout.storage.journal import Journal
    from nemo_gym_prorl.rollout.storage.journal_records import Unfinished

LOGGER = logging.getLogger(__name__)

_WORKING_STATE = {
    Stage.INIT: JobState.INITIALIZING,
    Stage.RUN: JobState.RUNNING,
    Stage.EVAL: JobState.EVALUATING,
}

_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
"""Bounds, in seconds, of the retry delay of a job whose server cannot be probed."""
_SESSION_GONE = frozenset({FailureKind.SESSION_LOST, FailureKind.SESSION_EXPIRED})


@dataclass(slots=True)
class _Control:
    """State of a job without an outcome, private to the pipeline."""

    since: float = 0.0
    """Monotonic time at which the job entered its current queue or stage."""
    attempt: Attempt | None = None
    cancelled: RolloutError | None = None
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Context of the submitter: spans of the job belong to the submitter's trace, not to that of the job that freed
    the slot."""
    tries: Counter[Stage] = field(default_factory=Counter)
    retry: asyncio.TimerHandle | None = None
    timed_out: Failure | None = None
    """Time-out of a RUN whose result counts nevertheless. If EVAL cannot score the result, the job ends with this
    failure, and RUN is not repeated."""
    held_up: dict[Stage, float] = field(default_factory=dict)
    """Monotonic time at which an outage first stopped the job, by stage; cleared by a success of the stage."""


class Pipeline(RolloutService):
    """Staged pipeline of one service, and its jobs.

    Args:
        clock: returns monotonic seconds, which are charged to budgets.
        journal: keeps jobs across a restart; closed with the pipeline. Requires a call of :meth:`start`.
        shared: folder in which services share checkpoints; ``None`` without one.
    """

    def __init__(
        self,
        environments: Environments,
        settings: PipelineSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
        shared: SharedCheckpoints | None = None,
    ) -> None:
        self.shared = shared
        self.environments = environments
        self.settings = settings or PipelineSettings()
        super().__init__(self.settings, clock, journal)
        every = [environments.environment(name) for name in environments.names]
        cohorts = {environment.name: environment.scores_groups_of for environment in every}
        self.scheduler = StageScheduler(self.settings.stages, environments.shares, cohorts)
        self._calls = HandlerCalls(environments, self.settings.release_timeout_s, self.settings.cancel_grace_s, shared)
        self._outages = CircuitBreaker(
            self._calls,
            self.scheduler,
            self._execute,
            self._give_up_waiting,
            clock,
            self.settings.probe_s,
            self.loops,
        )
        self._clock = clock
        self.checkpoints = CheckpointStore(
            self.settings.checkpoint_bytes, self.settings.checkpoint_s, self._erase_checkpoints, clock, shared
        )
        self._controls: dict[str, _Control] = {}
        self._renewing: asyncio.Task[None] | None = None

    @property
    def abandoned(self) -> int:
        """Number of handler calls that ignored their cancellation."""
        return self._calls.abandoned

    @property
    def outages(self) -> list[Outage]:
        """Unreachable servers, once per environment that needs them."""
        return self._outages.all

    def start(self) -> None:
        """Start to recover the accepted jobs of an earlier process in the background; no-op without a journal."""
        self._recover_jobs()

    def _resume_job(self, earlier: Unfinished) -> None:
        job = earlier.job
        job.failures.append(restarted(earlier.restarts))
        if job.environment in self.environments.names and (job.forked_from is None or self.shared is not None):
            job.handler = self.environments.environment(job.environment).handler
            job.checkpoint_store, job.resume_point = self.checkpoints, self._resume_point_of(job)
            self._start_job(job)
            return
        self._remember(job)
        what = f"its environment {job.environment!r}" if job.forked_from is None else "the checkpoint of the fork"
        gone = InfrastructureError(f"the service was restarted without {what}")
        self._finish(job, Outcome(JobState.FAILED, {}, failure=classify(gone, None)))

    def _resume_point_of(self, job: Job) -> ResumePoint | None:
        """Return the checkpoints from which a recovered job may start: its own, else those named at its submission;
        ``None`` without a shared folder."""
        if self.shared is None:
            return None
        was = job.resume_point or ResumePoint(client=job.client)
        if job.forked_from is not None and not was.parents:
            # client=None: access to the parent was checked when the job was submitted.
            was = replace(was, parents=(job.forked_from["id"],), turn=job.forked_from["turn"], client=None)
        return replace(was, tries=(job.id, *was.tries))

    def _environments_now(self) -> Environments:
        return self.environments

    def _may_queue(self, client: str, most: int) -> bool:
        return self.scheduler.may_queue(client, most)

    def _new(self, request: JobRequest, digest: bytes, *, bounded: bool) -> Job:
        job = super()._new(request, digest, bounded=bounded)
        job.checkpoint_store = self.checkpoints
        if request.fork is not None:
            if not self.checkpoints.has(request.fork.checkpoint):  # erased since fork() found the checkpoint
                resolve_fork_turn(request.fork.parent, None, (), ended=True)
            self.checkpoints.add(job, request.fork.checkpoint)
        return job

    def _remember(self, job: Job) -> None:
        super()._remember(job)
        self._controls[job.id] = _Control(since=self._clock())

    def _run(self, job: Job) -> None:
        if self._renewing is None:
            self._renewing = self.loops.start("checkpoint-renewal", self._renew_checkpoints, delay_s=RENEW_S)
        group = job.group
        if group is not None and job.scope is not None:
            group = f"{job.scope}/{group}"  # clients with keys choose group names independently
        self._execute(self.scheduler.submit(job.id, job.client, job.priority, job.environment, group))

    async def fork(self, parent: Job, turn: int | None, requests: Sequence[JobRequest]) -> list[Job]:
        kept = await self.kept_turns(parent.id)
        if not kept and self.environments.environment(parent.environment).checkpoint_turns is None:
            reason = f"environment {parent.environment!r} takes no checkpoints; set its checkpoint_turns"
            raise CallerError(reason, field="environment")
        turn = resolve_fork_turn(parent.id, turn, kept, ended=parent.state.terminal)
        if (checkpoint := parent.checkpoints.get(turn)) is not None:
            return await self._accept_forks(parent, requests, fork=Fork(parent.id, checkpoint))
        return await self._accept_forks(
            parent, requests, resume_point=ResumePoint(parents=(parent.id,), turn=turn, client=parent.client)
        )

    async def kept_turns(self, rollout: str) -> list[int]:
        job = await self.store.fetch(rollout)
        shared = await self.shared.turns(rollout) if self.shared is not None else ()
        return sorted({*shared, *(job.checkpoints if job is not None else ())})

    def share(self, clients: Mapping[str, float]) -> None:
        super().share(clients)
        self.scheduler.share(clients)

    def request_cancel(self, job: Job, error: RolloutError) -> None:
        control = self._controls.get(job.id)
        if control is None or control.cancelled is not None:
            return
        control.cancelled = error
        if control.retry is not None:
            control.retry.cancel()
            self._spawn_in_context(job, self._leave_queue(job, classify(error, None)))
        elif self.scheduler.is_waiting(job.id):
            self._execute(self.scheduler.pause(job.id))
            self._spawn_in_context(job, self._leave_queue(job, classify(error, None)))
        elif control.attempt is not None:
            control.attempt.interrupt(error)
        # Else the job is between stages, for example in a release, after which `cancelled` is checked.

    def status(self) -> StatusView:
        return StatusView(
            version=VERSION,
            draining=self.draining,
            stages=stage_pools(self.scheduler),
            ready_slots=self.scheduler.sizes.ready,
            sessions=self.scheduler.sessions,
            states={state: self.store.states[state] for state in JobState},
            held=HeldView.all_of(self.outages),
            retained_bytes=self.store.retained_bytes,
            abandoned=self.abandoned,
            checkpoint_folder=self.shared.identity if self.shared is not None else None,
            journal=self.store.journal_error,
            environments=EnvironmentView.all_of(self.environments, self.scheduler, self.settings),
        )

    async def close(self) -> None:
        """Cancel every job, and return once all have ended. With a journal, jobs without an attached caller get no
        outcome, and the next process recovers these jobs. Bounded by the grace period and the limit of a release."""
        self.draining = self._closing = True
        if self.store.journal is not None:
            self.store.journal.stop_trying()
        for job in self.store.live():
            self.request_cancel(job, shutting_down())
        await self._outages.close()
        await self._settle()

    def _execute(self, starts: list[Start]) -> None:
        for start in starts:
            job = self.store.get(start.job_id)
            assert job is not None, "a live job is never forgotten"
            job.member = start.member
            self._spawn_in_context(job, self._work_traced(job, start.stage))

    async def _work_traced(self, job: Job, stage: Stage) -> None:
        attributes = {"rollout": job.id, "group": job.group, "run": job.run, "environment": job.environment}
        with span(SpanGroup.ROLLOUT, f"prorl.{stage.value}", **attributes) as this:
            failures = len(job.failures)
            await self._work(job, stage)
            note(this, waited_s=job.times[stage].waited_s, attempt=job.times[stage].attempts, state=job.state.value)
            if len(job.failures) > failures:
                failed(this, f"{job.failures[-1].kind.value}: {job.failures[-1].reason}")

    async def _work(self, job: Job, stage: Stage) -> None:
        """Run one stage of a job that holds the stage's slot, then free the slot. The job is queued for the next
        stage, set aside for a retry, or gets its outcome."""
        control = self._controls[job.id]
        control.tries[stage] += 1
        spent = job.times[stage]
        spent.attempts += 1
        spent.waited_s += self._clock() - control.since
        if job.state is not _WORKING_STATE[stage]:
            self._move(job, _WORKING_STATE[stage])
        control.since = started = self._clock()
        outage_s = partial(self._outages.outage_s, job.environment)
        control.attempt = attempt = Attempt(job, stage, self._calls, self._clock, self._spawn, outage_s)
        self._outages.watch(job.environment)
        job.working = lambda: (stage, self._clock() - started - attempt.idle_s)
        if control.cancelled is not None:
            attempt.interrupt(control.cancelled)
        raised: BaseException | None = None
        value: Any = None
        try:
            value = await attempt.run()
        except Exception as caught:
            raised = caught
        error = raised
        control.attempt = None
        if stage is Stage.RUN and isinstance(error, BudgetExceeded) and not attempt.abandoned:
            value = self._calls.timed_out(job)
            if value is not None:
                control.timed_out, error = classify(error, stage), None
        job.working = None
        spent.worked_s += self._clock() - started - attempt.idle_s
        spent.waited_s += attempt.idle_s
        if error is None and stage is Stage.INIT:
            job.session = value
        elif error is None and isinstance(value, Trajectory):
            job.trajectory = value
        if job.session is not None and (stage is Stage.RUN or error is not None or control.cancelled is not None):
            release_error = await self._release(job)
            error = error or release_error
        failure = classify(error, stage) if error is not None else None
        if failure is not None and stage is Stage.RUN:
            failure = control.timed_out or failure
        counts = True
        if failure is not None and failure.connection_lost and control.cancelled is None:
            counts = not await self._outages.record_lost_connection(job, stage, failure)
        if control.cancelled is not None:
            failure = classify(control.cancelled, stage)
        control.since = self._clock()
        if failure is None:
            if control.held_up and self._outages.first(job.environment) is None:
                for passed in [*Stage][: [*Stage].index(stage) + 1]:
                    control.held_up.pop(passed, None)
            self._go_on(job, stage, value)
        elif counts or control.cancelled is not None:
            await self._give_up_or_retry(job, stage, failure, error)
        else:
            await self._hold_up(job, stage, failure, started)
        for one in (raised, error, control.cancelled):
            drop_tracebacks(one)

    async def _release(self, job: Job) -> BaseException | None:
        session, job.session = job.session, None
        return await self._calls.release(job, session)

    def _go_on(self, job: Job, stage: Stage, value: Any) -> None:
        if stage is Stage.INIT:
            self._move(job, JobState.READY)
            self._execute(self.scheduler.worked(job.id, Stage.RUN))
        elif isinstance(value, Trajectory):
            self._move(job, JobState.EVALUATING)
            self._execute(self.scheduler.worked(job.id, Stage.EVAL))
            self._await_siblings(job.id, job.budgets.eval)
        else:
            self._finish(job, value)
            self._execute(self.scheduler.worked(job.id, None))

    async def _give_up_or_retry(self, job: Job, stage: Stage, failure: Failure, error: BaseException | None) -> None:
        control = self._controls[job.id]
        job.failures.append(failure)
        if failure.traceback is not None:
            LOGGER.warning("job %s: %s of handler %s failed", job.id, stage, job.handler, exc_info=error)
        # A lost session needs a whole new attempt; scoring again cannot restore the session.
        again = Stage.EVAL if stage is Stage.EVAL and failure.kind not in _SESSION_GONE else Stage.INIT
        tries = control.tries[again]
        if control.timed_out is not None and failure.retryable and (again is Stage.INIT or tries >= job.max_attempts):
            failure = control.timed_out
        if not failure.retryable or tries >= job.max_attempts or control.cancelled is not None:
            await self._finish_failed(job, failure, stage)
            self._execute(self.scheduler.worked(job.id, None))
            return
        self._start_over(job, control, again)
        delay = min(self.settings.retry_delay_s * 5 ** (tries - 1), 30.0) * random.uniform(0.8, 1.2)
        LOGGER.info("job %s: %s in %s (%s), retry in %.1f s", job.id, failure.kind, stage, failure.reason, delay)
        self._set_aside(job, again, delay)

    def _set_aside(self, job: Job, again: Stage, delay: float) -> None:
        self._controls[job.id].retry = asyncio.get_running_loop().call_later(delay, self._requeue, job, again)
        self._execute(self.scheduler.set_aside(job.id))

    async def _hold_up(self, job: Job, stage: Stage, failure: Failure, started: float) -> None:
        """Requeue a job whose server is down, without counting the attempt. If the handler cannot probe the server,
        requeue with a delay, and fail the job after ``unreachable_s``."""
        control = self._controls[job.id]
        job.failures.append(failure)
        again = Stage.EVAL if stage is Stage.EVAL else Stage.INIT
        control.tries[again] -= 1
        now = self._clock()
        if now - started > self.settings.unreachable_s:
            control.held_up.clear()  # the stage worked for longer than any outage may last: a new outage
        control.held_up.setdefault(stage, now)
        self._start_over(job, control, again)
        waited = now - min(control.held_up.values())
        if self._outages.first(job.environment) is not None:
            self._execute(self.scheduler.worked(job.id, again))
            self._await_siblings(job.id, job.budgets.eval)
        elif waited < self.settings.unreachable_s:
            self._set_aside(job, again, min(max(waited, _MIN_RETRY_S), _MAX_RETRY_S))
        else:
            assert failure.server is not None, "only a lost connection to a named server gets here"
            given_up = classify(self._unreachable(failure.server, failure.reason), stage)
            await self._finish_failed(job, given_up, stage)
            self._execute(self.scheduler.worked(job.id, None))

    def _unreachable(self, server: str, met: str) -> InfrastructureError:
        reason = f"server {server} was unreachable for {self.settings.unreachable_s:g} s (unreachable_s): {met}"
        return InfrastructureError(reason, kind=FailureKind.TRANSPORT_UNREACHABLE, server=server)

    def _start_over(self, job: Job, control: _Control, again: Stage) -> None:
        if again is Stage.INIT:
            job.trajectory, job.progress, job.spent_s = None, Progress(), 0.0
            control.tries[Stage.EVAL] = 0
            self._move(job, JobState.QUEUED)

    def _give_up_waiting(self, environment: str) -> None:
        """Fail the jobs that an unreachable server of an environment has held up for ``unreachable_s``."""
        now, outage = self._clock(), self._outages.first(environment)
        if outage is None:
            return
        error = self._unreachable(outage.server, outage.reason)
        for job_id, control in [*self._controls.items()]:
            job = self.store.get(job_id)
            assert job is not None, "a live job is never forgotten"
            if job.environment != environment or not self.scheduler.is_held(job_id):
                continue
            begun = max(outage.since, control.since)
            if self.scheduler.is_waiting(job_id):
                begun = min(control.held_up.values(), default=begun)
            if now - begun >= self.settings.unreachable_s:
                self.request_cancel(job, error)

    def _requeue(self, job: Job, stage: Stage) -> None:
        control = self._controls[job.id]
        control.retry = None
        self._execute(self.scheduler.requeue(job.id, stage))
        self._await_siblings(job.id, job.budgets.eval)

    def _await_siblings(
        self, job_id: str, patience_s: float, before: frozenset[str] | None = None, of: _Control | None = None
    ) -> None:
        """Check every ``patience_s`` (the EVAL budget) whether a waiting job's group can still become complete; stop
        when the job no longer waits. The group's waiting jobs fail if siblings were never submitted and the group has
        not changed since the last check. ``before``: live jobs of the group at the last check. ``of``: state of the
        job at the first check, so that a later job with the same id is left alone."""
        control = self._controls.get(job_id)
        if control is None or of not in (None, control):
            return
        found = self.scheduler.missing_siblings(job_id)
        if found is None:
            return
        missing, siblings = found
        if missing and siblings == before:
            reason = f"the group is scored together, and {missing} of its rollouts were never submitted"
            error = InfrastructureError(reason, kind=FailureKind.COHORT_INCOMPLETE)
            for job in map(self.store.get, siblings):
                if job is not None and self.scheduler.missing_siblings(job.id) is not None:
                    self.request_cancel(job, error)
            return
        again = partial(self._await_siblings, job_id, patience_s, siblings, control)
        asyncio.get_running_loop().call_later(patience_s, again)

    async def _leave_queue(self, job: Job, failure: Failure) -> None:
        if job.session is not None:
            await self._release(job)
        await self._finish_failed(job, failure, None)
        self._execute(self.scheduler.remove(job.id))

    async def _finish_failed(self, job: Job, failure: Failure, stage: Stage | None) -> None:
        """Cancel scoring that an earlier attempt may have left running, then record the failure."""
        if job.times[Stage.EVAL].attempts:
            await self._calls.end_scoring(job)
        self._finish(job, self._calls.failed(job, stage, failure))

    def _finish(self, job: Job, outcome: Outcome) -> None:
        if job.checkpoints:
            # A gateway that lost the connection cancels the rollout here and resumes it at another node.
            wanted = outcome.state is not JobState.CANCELLED or self.shared is not None
            self.checkpoints.ended(job, keep=not job.attached and wanted)
        del self._controls[job.id]
        super()._finish(job, outcome)

    def _erase_checkpoints(self, environment: str, checkpoints: list[Checkpoint]) -> None:
        if own := [one for one in checkpoints if not one.borrowed]:
            self._spawn(self._calls.maintain_checkpoints(environment, own, erase=True))
            if self.shared is not None:
                self._spawn(self.shared.erase(own))

    async def _renew_checkpoints(self) -> float:
        for environment, checkpoints in self.checkpoints.held().items():
            await self._calls.maintain_checkpoints(environment, checkpoints, erase=False)
            if self.shared is not None:
                await self.shared.renew(checkpoints)
        return RENEW_S

    def _spawn_in_context(self, job: Job, work: Coroutine[Any, Any, None]) -> None:
        self._spawn(asyncio.create_task(work, context=self._controls[job.id].context.copy()))
