# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Bounded calls into handlers. Handlers are plug-ins and may misbehave, so each call has a time limit and a checked
result.

- A stage returns what its protocol declares, or raises an error for :func:`~nemo_gym_prorl.failures.classify`.
- A release or a query returns within its time limit, with or without an answer.
- A failed job always gets an outcome that reports the failure, regardless of ``on_failure``.

So each job ends exactly once and frees its slot. An :class:`Attempt` is the work of one stage on one job. The attempt
ends with its budget or an interruption, or after a grace period if the handler ignores the cancellation.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from nemo_gym_prorl.async_tasks import start_eager_task
from nemo_gym_prorl.failures import (
    BudgetExceeded,
    Failure,
    FailureKind,
    InfrastructureError,
    RolloutError,
    Stage,
    classify,
    unexpected_kind,
)
from nemo_gym_prorl.rollout.gym_rows import TRAINING_TRACES, is_masked, masked, take_tokens
from nemo_gym_prorl.rollout.handler import (
    AgentHandler,
    CancelsScoring,
    Environments,
    HandlesTimeouts,
    ReportsUnreachable,
    ReportsWaiting,
    StoresCheckpoints,
)
from nemo_gym_prorl.rollout.job import (
    FAILED_STATES,
    Checkpoint,
    Job,
    JobState,
    Outcome,
    Trajectory,
    Verdict,
    failure_state,
)
from nemo_gym_prorl.rollout.storage.checkpoints import SharedCheckpoints, restart_without_checkpoint


LOGGER = logging.getLogger(__name__)

QUERY_TIMEOUT_S = 5.0
"""Seconds that a handler may take to answer a query; bounds how late a budget ends or an outage is noticed."""


class HandlerCalls:
    """Bounded calls into the handlers of one pipeline.

    Args:
        release_s: seconds that the release of a session may take.
        cancel_grace_s: seconds until a cancelled call counts as abandoned.
    """

    def __init__(
        self,
        handlers: Environments,
        release_s: float,
        cancel_grace_s: float,
        shared: SharedCheckpoints | None = None,
    ) -> None:
        self._handlers = handlers
        self._shared = shared
        self._release_s = release_s
        self._cancel_grace_s = cancel_grace_s
        self.abandoned = 0
        """Number of calls that ignored their cancellation."""

    async def work(self, job: Job, stage: Stage) -> Any:
        """Run a stage, and return the session, the trajectory, or the outcome of a scored job.

        Raises:
            Exception: any exception of the handler; ``SystemExit`` and ``KeyboardInterrupt`` as ``RuntimeError``.
        """
        try:
            handler = self._handlers.get(job.environment)
            if stage is Stage.INIT:
                if job.resume_point is not None:
                    await self._restore(job, handler)
                return await handler.init(job)
            if stage is Stage.RUN:
                return self._trajectory(job, await handler.run(job, job.session))
            assert job.trajectory is not None, "EVAL follows RUN"
            return self._scored(job, await handler.eval(job, job.trajectory))
        except (SystemExit, KeyboardInterrupt) as error:  # would end the event loop, and with it all rollouts
            raise _no_exception(error, job, stage) from error

    async def _restore(self, job: Job, handler: AgentHandler) -> None:
        if self._shared is None:
            if job.forked_from is not None:
                restart_without_checkpoint(job, "this service has no checkpoint_folder")
        elif not isinstance(handler, StoresCheckpoints):
            restart_without_checkpoint(job, f"handler {job.handler!r} cannot read checkpoints of other services")
        else:
            await self._shared.restore(job, handler.unpack)

    def result_of(self, task: asyncio.Task[Any], job: Job, stage: Stage) -> Any:
        """Return the result of a finished :meth:`work` task.

        Raises:
            InfrastructureError: the task was cancelled by the handler itself.
            Exception: any exception of the task; a ``RuntimeError`` in place of, for example, a ``SystemExit``.
        """
        if task.cancelled():
            raise InfrastructureError(
                f"handler {job.handler!r} cancelled itself in {stage}", kind=FailureKind.AGENT_RUN_ERROR
            )
        error = task.exception()
        if error is not None and not isinstance(error, Exception):
            raise _no_exception(error, job, stage) from error
        return task.result()

    async def cancel_and_wait(self, task: asyncio.Task[Any]) -> bool:
        """Cancel a call, and return whether the call ended within the grace period; else count it as abandoned."""
        task.cancel()
        await asyncio.wait({task}, timeout=self._cancel_grace_s)
        self.abandoned += not task.done()
        return task.done()

    async def release(self, job: Job, session: Any) -> RolloutError | None:
        """Release a session within the time limit; return the error, or ``None`` after a successful release."""
        return await self._cleanup(job, lambda handler: handler.release(job, session), "the session", "released")

    async def end_scoring(self, job: Job) -> None:
        """Cancel scoring that continues after the call of ``eval`` ended, within the time limit of a release; log
        failures. No-op for a handler without ``end_scoring``."""
        if isinstance(handler := self._handlers.get(job.environment), CancelsScoring):
            ending = handler.end_scoring
            await self._cleanup(job, lambda _: ending(job), "scoring", "ended")

    async def _cleanup(
        self, job: Job, cleanup: Callable[[AgentHandler], Awaitable[None]], what: str, done: str
    ) -> RolloutError | None:
        async def work() -> None:
            try:
                await cleanup(self._handlers.get(job.environment))
            except (SystemExit, KeyboardInterrupt) as error:
                raise RuntimeError(f"it raised {type(error).__name__}") from error

        task = start_eager_task(work())
        bound, server = self._release_s, None
        if not task.done():
            await asyncio.wait({task}, timeout=bound)
        if not task.done():
            await self.cancel_and_wait(task)
            reason = f"{what} was not {done} within {bound:g} s"
        elif task.cancelled():
            reason = f"{what} could not be {done}: that was cancelled"
        elif (error := task.exception()) is not None:
            failed = classify(error, None)
            reason, server = f"{what} could not be {done}: {failed.reason}", failed.server
        else:
            return None
        LOGGER.warning("job %s: %s", job.id, reason)
        return InfrastructureError(reason, kind=FailureKind.SESSION_RELEASE_FAILED, server=server)

    def failed(self, job: Job, stage: Stage | None, failure: Failure) -> Outcome:
        """Return the handler's outcome of a failed job. If ``on_failure`` misbehaves, return an outcome without a
        result, with the same failure kind and the handler's fault in the reason."""
        trace = None
        try:
            if job.trajectory is not None:
                job.trajectory.take_tokens()
            outcome = self._handlers.get(job.environment).on_failure(job, stage, failure)
            fault = _outcome_defect(outcome)
        except BaseException as error:  # also SystemExit: the call runs in the event loop itself
            LOGGER.exception("on_failure of handler %s failed", job.handler)
            raised = classify(error, stage)
            fault, trace = f"raised {raised.reason}", raised.traceback
        if fault is None:
            return outcome
        reason = f"{failure.reason}; besides, on_failure of handler {job.handler!r} {fault}"
        blamed = replace(failure, reason=reason, traceback=failure.traceback or trace)
        return Outcome(failure_state(failure), {}, failure=blamed)

    async def waited(self, job: Job) -> float | None:
        """Return the seconds of this RUN attempt in which the agent waited for a backend; 0 if the handler does not
        report them, ``None`` if the handler's server did not answer."""
        try:
            handler = self._handlers.get(job.environment)
            if not isinstance(handler, ReportsWaiting):
                return 0.0
            seconds = await _with_timeout(QUERY_TIMEOUT_S, handler.waited(job))
        except Exception as error:
            LOGGER.warning(
                "job %s: waited of handler %s failed: %s", job.id, job.handler, classify(error, None).reason
            )
            return None if isinstance(error, InfrastructureError | TimeoutError) else 0.0
        return seconds if _is_number(seconds) and seconds > 0 else 0.0

    def timed_out(self, job: Job) -> Trajectory | Outcome | None:
        """Return the result of a job whose RUN budget is used up: a trajectory to score, or an outcome. ``None`` fails
        the job: the handler has no ``timed_out``, decides so, or raised."""
        try:
            handler = self._handlers.get(job.environment)
            if job.trajectory is not None:
                job.trajectory.take_tokens()
            value = handler.timed_out(job, job.session) if isinstance(handler, HandlesTimeouts) else None
            if value is None:
                return None
            return self._scored(job, value) if isinstance(value, Verdict) else self._trajectory(job, value)
        except BaseException as error:  # also SystemExit: the call runs in the event loop itself
            LOGGER.warning(
                "job %s: timed_out of handler %s failed: %s", job.id, job.handler, classify(error, None).reason
            )
            return None

    async def unreachable(self, environment: str) -> dict[str, frozenset[Stage]] | None:
        """Return the servers of an environment that do not answer, with the stages that need each; ``None`` if the
        handler cannot probe its servers, or its probe failed."""
        try:
            handler = self._handlers.get(environment)
            if not isinstance(handler, ReportsUnreachable):
                return None
            down = await _with_timeout(QUERY_TIMEOUT_S, handler.unreachable())
            return {server: frozenset(map(Stage, stages)) for server, stages in down.items()}
        except Exception as error:
            LOGGER.warning("unreachable of environment %s failed: %s", environment, classify(error, None).reason)
            return None

    async def maintain_checkpoints(self, environment: str, checkpoints: Sequence[Checkpoint], *, erase: bool) -> None:
        """Erase or renew checkpoints at the resources server; failures are logged, since that server erases orphans
        by age."""
        try:
            if isinstance(handler := self._handlers.get(environment), StoresCheckpoints):
                await _with_timeout(self._release_s, (handler.forget if erase else handler.renew)(checkpoints))
        except Exception as error:
            what = "forget" if erase else "renew"
            LOGGER.warning("%s of environment %s failed: %s", what, environment, classify(error, None).reason)

    def _trajectory(self, job: Job, value: Any) -> Trajectory:
        if not isinstance(value, Trajectory) or not isinstance(value.response, dict):
            raise _defect(job, Stage.RUN, f"returned {_short(value)}, not a Trajectory with a response")
        value.take_tokens()
        return value

    def _scored(self, job: Job, value: Any) -> Outcome:
        if not isinstance(value, Verdict):
            raise _defect(job, Stage.EVAL, f"returned {_short(value)}, not a Verdict")
        reward = value.reward
        if reward is not None and not _is_number(reward):
            raise _defect(job, Stage.EVAL, f"returned a Verdict with reward {_short(reward)}, no finite number")
        if not isinstance(value.result, dict):
            raise _defect(job, Stage.EVAL, f"returned a Verdict with result {_short(value.result)}, not a dict")
        if job.trajectory is not None:
            job.trajectory.tokens = job.trajectory.tokens or take_tokens(value.result.get("response"))
        try:
            traces = value.result.get(TRAINING_TRACES)
            if traces is not None and traces == job.row.get(TRAINING_TRACES):  # copied from the row, not sampled now
                value = replace(value, result={**value.result})
                del value.result[TRAINING_TRACES]
            mask = is_masked(value.result)
            result = masked(value.result) if mask else value.result
            return Outcome(JobState.SUCCEEDED, result, reward=None if reward is None else float(reward), masked=mask)
        except (TypeError, ValueError, RecursionError) as error:
            raise _defect(job, Stage.EVAL, f"returned a result that cannot be written as JSON: {error}") from error


def _outcome_defect(outcome: Any) -> str | None:
    if not isinstance(outcome, Outcome):
        return f"returned {_short(outcome)}, not an Outcome"
    if not isinstance(outcome.state, JobState) or outcome.state not in FAILED_STATES:
        return f"returned an Outcome with state {_short(outcome.state)}, which is none of a failed job"
    if outcome.reward is not None:
        return "returned an Outcome with a reward, which a failed job has not"
    if not isinstance(outcome.failure, Failure):
        return f"returned an Outcome with failure {_short(outcome.failure)}, not a Failure"
    return None


def _defect(job: Job, stage: Stage, what: str) -> InfrastructureError:
    return InfrastructureError(f"{stage} of handler {job.handler!r} {what}", kind=unexpected_kind(stage))


def _no_exception(error: BaseException, job: Job, stage: Stage) -> RuntimeError:
    return RuntimeError(f"{stage} of handler {job.handler!r} raised {type(error).__name__}({error})")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _short(value: Any) -> str:
    try:
        return repr(value)[:200]
    except Exception:
        return f"a {type(value).__name__}"


async def _with_timeout(seconds: float, work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of ``work``; after ``seconds``, cancel ``work`` and raise a ``TimeoutError`` without waiting
    for its end."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
    if not task.done():
        raise TimeoutError(f"no answer within {seconds:g} s")
    return task.result()


_MIN_EXTENSION_S = 1.0
"""Least extension of a budget in seconds, which bounds how often the handler of a waiting rollout is queried."""

_TIMER_TOLERANCE_S = 0.001
"""Seconds by which a timer may fire early."""

_UNKNOWN_WAIT_S = 180.0
"""Seconds for which the waiting time of a rollout may be unknown before its budget ends anyway. A model server
under load may be slow to answer."""


class Attempt:
    """Work of one stage on one job.

    Args:
        spawn: starts a background task, for the release after an abandoned INIT.
        outage_s: returns the total seconds of outages of the job's environment.
    """

    def __init__(
        self,
        job: Job,
        stage: Stage,
        calls: HandlerCalls,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
        outage_s: Callable[[], float],
    ) -> None:
        self._job = job
        self._stage = stage
        self._calls = calls
        self._clock = clock
        self._spawn = spawn
        self._outage_s = outage_s
        self._interrupt: asyncio.Future[RolloutError] = asyncio.get_running_loop().create_future()
        self.abandoned = False
        """Whether the work ignored its cancellation and may still run."""
        self.idle_s = 0.0
        """Seconds without a backend or with a server down; computed when the budget runs out."""

    def interrupt(self, error: RolloutError) -> None:
        """Cancel the work; :meth:`run` then raises ``error``. Only the first call counts."""
        if not self._interrupt.done():
            self._interrupt.set_result(error)

    async def run(self) -> Any:
        """Run the stage within its budget, and return the result. A session that INIT returns despite its cancellation
        is stored in ``job.session``.

        Raises:
            RolloutError: the work was interrupted.
            BudgetExceeded: the budget is used up.
            Exception: any exception of the handler.
        """
        if self._interrupt.done():
            raise self._interrupt.result()
        job, stage = self._job, self._stage
        task = start_eager_task(self._calls.work(job, stage))
        if not task.done():
            await self._wait_until_due(task)
        if task.done():
            return self._calls.result_of(task, job, stage)
        if not await self._calls.cancel_and_wait(task):
            self.abandoned = True
            LOGGER.error("%s of job %s ignores its cancellation and was abandoned", stage, job.id)
            task.add_done_callback(self._release_late_session)
        elif not task.cancelled() and task.exception() is None and stage is Stage.INIT:
            job.session = task.result()  # so that the pipeline releases the session
        raise self._interrupt.result() if self._interrupt.done() else BudgetExceeded(stage, job.budgets.of(stage))

    async def _wait_until_due(self, task: asyncio.Task[Any]) -> None:
        """Wait until the work is done or interrupted, or has used up its budget. Waiting for a backend and outages of
        the environment's servers are not charged."""
        ends: set[asyncio.Future[Any]] = {task, self._interrupt}
        budget = self._job.budgets.of(self._stage)
        if self._stage is Stage.RUN:
            budget -= self._job.spent_s
        started, left, out_before, known_s = self._clock(), budget, self._outage_s(), budget
        while left > 0:
            done, _ = await asyncio.wait(ends, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            waited: float | None = 0.0
            if self._stage is Stage.RUN:
                asked = asyncio.ensure_future(self._calls.waited(self._job))
                done, _ = await asyncio.wait({*ends, asked}, return_when=asyncio.FIRST_COMPLETED)
                if asked not in done:
                    asked.cancel()
                    return
                waited = asked.result()
            elapsed = self._clock() - started
            self.idle_s = min(max((waited or 0.0) + self._outage_s() - out_before, self.idle_s), elapsed)
            left = budget + self.idle_s - elapsed
            if 0 < left < _TIMER_TOLERANCE_S:  # the timer fired early by less than its resolution
                left = 0.0
            known_s = elapsed if waited is not None else known_s
            if 0 < left < _MIN_EXTENSION_S or (left <= 0 and waited is None and elapsed - known_s <= _UNKNOWN_WAIT_S):
                left = _MIN_EXTENSION_S

    def _release_late_session(self, task: asyncio.Task[Any]) -> None:
        """Release the session that an abandoned INIT returned late; log the exception of an abandoned stage."""
        if task.cancelled():
            return
        if task.exception() is not None:
            LOGGER.warning("abandoned %s of job %s ended with %r", self._stage, self._job.id, task.exception())
        elif self._stage is Stage.INIT:
            self._spawn(self._calls.release(self._job, task.result()))
