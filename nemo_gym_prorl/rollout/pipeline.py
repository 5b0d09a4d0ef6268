# SPDX-License-Identifier: Apache-2.0
"""INIT → READY → RUN → EVAL: carries the scheduler's decisions out, with budgets, retries and cancellation.

There are no worker loops that an exception could end: a slot is a number in :class:`~.stages.StageScheduler`, and each
`Start` becomes one task that always gives its slot back. What a handler may do wrong is bounded here, once:

- it raises → the error is classified, the attempt ends, infrastructure trouble is retried;
- it takes too long → it is cancelled when the stage's budget is used up;
- it ignores cancellation → after a grace it is abandoned: its slot comes back, it is counted, and a session that it
  returns later is still released;
- its release hangs → release is bounded too, and the attempt ends as ``session_release_failed``, because scoring while
  the agent may still act would be wrong.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_prorl.failures import (
    BudgetExceeded,
    FailureKind,
    InfrastructureError,
    JobCancelled,
    Stage,
    classify,
)
from nemo_gym_prorl.rollout.handler import HandlerRegistry
from nemo_gym_prorl.rollout.job import Job, JobState, Outcome, Progress, failure_state
from nemo_gym_prorl.rollout.request import Draining, JobConflict, JobRequest, PipelineSettings, QueueFull
from nemo_gym_prorl.rollout.stages import StageScheduler, Start
from nemo_gym_prorl.rollout.store import JobStore


LOGGER = logging.getLogger(__name__)

_WORKING_STATE = {
    Stage.INIT: JobState.INITIALIZING,
    Stage.RUN: JobState.RUNNING,
    Stage.EVAL: JobState.EVALUATING,
}


@dataclass(slots=True)
class _Control:
    """The pipeline's own notes on a live job."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    since: float = 0.0
    """When the job entered the queue that it waits in, on the monotonic clock."""
    interrupt: asyncio.Future[None] | None = None
    """While a stage works: set it to make the stage stop."""
    cancelled: JobCancelled | None = None
    tries: Counter[Stage] = field(default_factory=Counter)
    retry: asyncio.TimerHandle | None = None


class Pipeline:
    """One staged pipeline and its jobs.

    Args:
        handlers: the installed handlers.
        settings: bounds and defaults.
        clock: monotonic seconds; what stages are charged by.
    """

    def __init__(
        self,
        handlers: HandlerRegistry,
        settings: PipelineSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.handlers = handlers
        self.settings = settings or PipelineSettings()
        self.store = JobStore(self.settings.retain)
        self.scheduler = StageScheduler(self.settings.stages)
        self._clock = clock
        self.draining = False
        self.abandoned = 0
        """Stage works that ignored their cancellation."""
        self.on_finish: list[Callable[[Job], None]] = []
        """Called with each job that reached its outcome, e.g. by metrics."""
        self._controls: dict[str, _Control] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- callers -------------------------------------------------------------------------------------------------

    def submit(self, request: JobRequest, *, bounded: bool = True) -> Job:
        """Take a job on; the same id and row again is the same job.

        Args:
            request: the job.
            bounded: refuse when the queue is full. Gym's own route passes ``False``: its client would spin on a
                refusal, and its open connections are bound enough.

        Raises:
            QueueFull, JobConflict, Draining, CallerError: the request names a handler that is not installed.
        """
        if request.id is not None and (known := self.store.get(request.id)) is not None:
            if known.held or request.held:
                raise JobConflict(f"job {request.id!r} belongs to another caller; choose another id", field="id")
            if known.row != request.row:
                raise JobConflict(f"job {request.id!r} exists with another row; choose another id", field="id")
            return known
        if self.draining:
            raise Draining("the service is draining and takes no new rollouts")
        if bounded and self.scheduler.waiting(Stage.INIT) >= self.settings.max_queued:
            raise QueueFull(f"{self.settings.max_queued} rollouts are waiting already; try again later")
        job = Job(
            id=request.id or uuid.uuid4().hex,
            row=request.row,
            handler=self.handlers.choose(request.row, request.handler),
            submitted_at=time.time(),
            group=request.group,
            client=request.client,
            priority=request.priority,
            budgets=request.budgets or self.settings.budgets,
            max_attempts=request.max_attempts or self.settings.max_attempts,
            held=request.held,
        )
        self.store.add(job, job.submitted_at)
        self._controls[job.id] = _Control(since=self._clock())
        self._carry_out(self.scheduler.submit(job.id, job.client, job.priority))
        return job

    async def wait(self, job: Job, timeout: float | None = None) -> bool:
        """Wait for a job's outcome; ``False`` if it has none after ``timeout`` seconds."""
        control = self._controls.get(job.id)
        if control is None:
            return True
        try:
            async with asyncio.timeout(timeout):
                await control.done.wait()
        except TimeoutError:
            return False
        return True

    async def cancel(self, job: Job, reason: str = "cancelled by the caller") -> None:
        """Cancel a job, in whatever state, and return when it has its outcome and its session is gone."""
        self.request_cancel(job, JobCancelled(reason))
        await self.wait(job)

    def request_cancel(self, job: Job, error: JobCancelled) -> None:
        """Cancel a job without waiting for it; a no-op on one that has its outcome or was cancelled before."""
        control = self._controls.get(job.id)
        if control is None or control.cancelled is not None:
            return
        control.cancelled = error
        if control.retry is not None:
            control.retry.cancel()
            self._finish_failed(job, error, None)
            self._carry_out(self.scheduler.remove(job.id))
        elif self.scheduler.is_waiting(job.id):
            self.scheduler.pause(job.id)
            self._spawn(self._leave_queue(job, error))
        elif control.interrupt is not None and not control.interrupt.done():
            control.interrupt.set_result(None)
        # Else the stage is between two awaits of its own, e.g. releasing, and looks at `cancelled` next.

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new jobs and wait until every job has its outcome; ``False`` if some have none after ``timeout``."""
        self.draining = True
        pending = [asyncio.ensure_future(control.done.wait()) for control in self._controls.values()]
        if not pending:
            return True
        _, left = await asyncio.wait(pending, timeout=timeout)
        for waiter in left:
            waiter.cancel()
        return not left

    def resume(self) -> None:
        """Take jobs again after a drain."""
        self.draining = False

    async def close(self) -> None:
        """Cancel every job and return when all have their outcome. Bounded by grace and release times."""
        self.draining = True
        for job in self.store.live():
            self.request_cancel(job, JobCancelled("the service is shutting down", kind=FailureKind.SHUTDOWN))
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    # -- stages --------------------------------------------------------------------------------------------------

    def _carry_out(self, starts: list[Start]) -> None:
        for start in starts:
            job = self.store.get(start.job_id)
            assert job is not None, "a live job is never forgotten"
            self._spawn(self._work(job, start.stage))

    async def _work(self, job: Job, stage: Stage) -> None:
        """One stage's work on one job: take the slot, do it, give the slot back."""
        control = self._controls[job.id]
        control.tries[stage] += 1
        spent = job.times[stage]
        spent.attempts += 1
        spent.waited_s += self._clock() - control.since
        if job.state is not _WORKING_STATE[stage]:
            self._move(job, _WORKING_STATE[stage])
        started = self._clock()
        error: BaseException | None = None
        value: Any = None
        try:
            value = await self._bounded(job, stage, control)
        except Exception as caught:  # the border at which every failure of a handler is classified
            error = caught
        spent.worked_s += self._clock() - started
        if error is None and stage is Stage.INIT:
            job.session = value
        elif error is None and stage is Stage.RUN:
            job.trajectory = value
        if job.session is not None and (stage is Stage.RUN or error is not None or control.cancelled is not None):
            release_error = await self._release(job)
            error = error or release_error
        if control.cancelled is not None:
            error = control.cancelled
        control.since = self._clock()
        if error is None:
            self._go_on(job, stage, value)
        else:
            self._give_up_or_retry(job, stage, error)

    async def _bounded(self, job: Job, stage: Stage, control: _Control) -> Any:
        """Run the handler's coroutine: at most its budget, or until the job is cancelled, plus the grace."""
        if control.cancelled is not None:
            raise control.cancelled
        budget = job.budgets.of(stage)
        task = asyncio.ensure_future(self._call(job, stage))
        control.interrupt = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({task, control.interrupt}, timeout=budget, return_when=asyncio.FIRST_COMPLETED)
        finally:
            control.interrupt = None
        if task.done():
            if task.cancelled():
                raise InfrastructureError(f"the handler cancelled itself in {stage}", kind=FailureKind.AGENT_RUN_ERROR)
            return task.result()
        task.cancel()
        await asyncio.wait({task}, timeout=self.settings.cancel_grace_s)
        if not task.done():
            self._abandon(job, stage, task)
        elif not task.cancelled() and task.exception() is None and stage is Stage.INIT:
            job.session = task.result()  # it came up after all, so it has to be released
        raise control.cancelled or BudgetExceeded(stage, budget)

    async def _call(self, job: Job, stage: Stage) -> Any:
        handler = self.handlers.get(job.handler)
        if stage is Stage.INIT:
            return await _survive_exit(handler.init(job))
        if stage is Stage.RUN:
            return await _survive_exit(handler.run(job, job.session))
        assert job.trajectory is not None, "EVAL follows RUN"
        return await _survive_exit(handler.eval(job, job.trajectory))

    def _abandon(self, job: Job, stage: Stage, task: asyncio.Task[Any]) -> None:
        self.abandoned += 1
        LOGGER.error("%s of job %s ignores its cancellation and was abandoned", stage, job.id)
        task.add_done_callback(lambda late: self._late(job, stage, late))

    def _late(self, job: Job, stage: Stage, task: asyncio.Task[Any]) -> None:
        """An abandoned work came back. A session from it belongs to nobody: release it."""
        if task.cancelled():
            return
        if task.exception() is not None:
            LOGGER.warning("abandoned %s of job %s ended with %r", stage, job.id, task.exception())
        elif stage is Stage.INIT:
            self._spawn(self._release_session(job, task.result()))

    async def _release(self, job: Job) -> BaseException | None:
        session, job.session = job.session, None
        return await self._release_session(job, session)

    async def _release_session(self, job: Job, session: Any) -> BaseException | None:
        """Release within its bound; the error if it did not work."""
        task = asyncio.ensure_future(_survive_exit(self.handlers.get(job.handler).release(job, session)))
        bound = self.settings.release_s
        await asyncio.wait({task}, timeout=bound)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=self.settings.cancel_grace_s)
            if not task.done():
                self.abandoned += 1
            reason = f"the session was not released within {bound:g} s"
        elif task.cancelled():
            reason = "the release was cancelled"
        elif (error := task.exception()) is not None:
            reason = f"the session could not be released: {type(error).__name__}: {error}"
        else:
            return None
        LOGGER.warning("job %s: %s", job.id, reason)
        return InfrastructureError(reason, kind=FailureKind.SESSION_RELEASE_FAILED)

    def _go_on(self, job: Job, stage: Stage, value: Any) -> None:
        if stage is Stage.INIT:
            self._move(job, JobState.READY)
            self._carry_out(self.scheduler.worked(job.id, Stage.RUN))
        elif stage is Stage.RUN:
            self._move(job, JobState.EVALUATING)
            self._carry_out(self.scheduler.worked(job.id, Stage.EVAL))
        else:
            self._finish(job, Outcome(JobState.SUCCEEDED, value.result, reward=value.reward))
            self._carry_out(self.scheduler.worked(job.id, None))

    def _give_up_or_retry(self, job: Job, stage: Stage, error: BaseException) -> None:
        control = self._controls[job.id]
        failure = classify(error, stage)
        job.failures.append(failure)
        tries = control.tries[Stage.EVAL] if stage is Stage.EVAL else control.tries[Stage.INIT]
        if not failure.retryable or tries >= job.max_attempts:
            self._finish_failed(job, error, stage)
            self._carry_out(self.scheduler.worked(job.id, None))
            return
        back_to = Stage.EVAL if stage is Stage.EVAL else Stage.INIT
        if back_to is Stage.INIT:
            job.trajectory, job.progress = None, Progress()
            self._move(job, JobState.QUEUED)
        delay = min(self.settings.retry_delay_s * 2 ** (tries - 1), 30.0)
        LOGGER.info(
            "job %s: %s in %s (%s), try %d in %.1f s", job.id, failure.kind, stage, failure.reason, tries + 1, delay
        )
        control.retry = asyncio.get_running_loop().call_later(delay, self._requeue, job, back_to)
        self._carry_out(self.scheduler.set_aside(job.id))

    def _requeue(self, job: Job, stage: Stage) -> None:
        control = self._controls[job.id]
        control.retry = None
        control.since = self._clock()
        self._carry_out(self.scheduler.requeue(job.id, stage))

    async def _leave_queue(self, job: Job, error: JobCancelled) -> None:
        """A waiting job is cancelled: release its session if it holds one, then it is over."""
        if job.session is not None:
            await self._release(job)
        self._finish_failed(job, error, None)
        self._carry_out(self.scheduler.remove(job.id))

    # -- outcomes ------------------------------------------------------------------------------------------------

    def _finish_failed(self, job: Job, error: BaseException, stage: Stage | None) -> None:
        failure = classify(error, stage)
        try:
            outcome = self.handlers.get(job.handler).on_failure(job, stage, failure)
        except Exception as caught:  # a defect of the handler must not take the outcome away
            LOGGER.exception("on_failure of handler %s failed", job.handler)
            failure = classify(caught, stage)
            outcome = Outcome(failure_state(failure), {}, failure=failure)
        self._finish(job, outcome)

    def _finish(self, job: Job, outcome: Outcome) -> None:
        job.outcome = outcome
        job.finished_at = time.time()
        job.trajectory = None
        self._move(job, outcome.state)
        self._controls.pop(job.id).done.set()
        for callback in self.on_finish:
            callback(job)

    def _move(self, job: Job, state: JobState) -> None:
        job.move(state)
        self.store.record(job, time.time())

    def _spawn(self, work: Coroutine[Any, Any, Any] | Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOGGER.error("defect in the pipeline", exc_info=error)


async def _survive_exit(work: Awaitable[Any]) -> Any:
    """A handler that calls ``exit()`` would end the event loop, and with it everybody's rollouts."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"the handler called exit({error.code})") from error
