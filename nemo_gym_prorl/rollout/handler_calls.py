# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Calls into handlers, which are plug-ins and may do anything: every call is bounded and its result checked.

A stage's work gives what its protocol says or an error that :func:`~nemo_gym_prorl.failures.classify` understands. A
release or a question gives its answer or none, within a bound. A job that failed has an outcome that says so, whatever
``on_failure`` made of it. So the pipeline above can hold that each job ends exactly once and gives its slot back.

An :class:`Attempt` is one stage's work on one job, bounded by its budget, by an interruption, and by a grace if the
handler ignores both.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from nemo_gym_prorl.failures import (
    BudgetExceeded,
    Failure,
    FailureKind,
    InfrastructureError,
    Origin,
    RolloutError,
    Stage,
    classify,
    is_text,
    unexpected_kind,
)
from nemo_gym_prorl.rollout.gym_rows import is_masked, masked, take_tokens
from nemo_gym_prorl.rollout.handler import (
    AgentHandler,
    CancelsScoring,
    Environments,
    HandlesTimeouts,
    ReportsUnreachable,
    ReportsWaiting,
    RestoresCheckpoints,
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

ASK_S = 5.0
"""How long a handler may think about a question."""


class HandlerCalls:
    """The handlers of one pipeline, as it calls them.

    Args:
        handlers: them, by environment.
        release_s: how long a session may take to be released.
        cancel_grace_s: how long a call that was cancelled may take to come back before it is abandoned.
        shared: where checkpoints of other services are.
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
        """Calls that ignored their cancellation."""

    async def work(self, job: Job, stage: Stage) -> Any:
        """A stage's work: the session, the trajectory, or the outcome of a job that was scored.

        Raises:
            Exception: whatever the handler raised; what is no :class:`Exception` as one.
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
        except (SystemExit, KeyboardInterrupt) as error:  # would end the event loop, and with it everybody's rollouts
            raise _no_exception(error, job, stage) from error

    async def _restore(self, job: Job, handler: AgentHandler) -> None:
        if self._shared is None:
            if job.forked_from is not None:
                restart_without_checkpoint(job, "this service has no checkpoint_folder")
        elif not isinstance(handler, RestoresCheckpoints):
            restart_without_checkpoint(job, f"handler {job.handler!r} takes no checkpoints of other services")
        else:
            await self._shared.give(job, handler.unpack)

    def result_of(self, task: asyncio.Task[Any], job: Job, stage: Stage) -> Any:
        """What the task of a finished :meth:`work` gave.

        Raises:
            Exception: what it raised.
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
        """Cancel a call; whether it has come back then. One that ignores that is counted, and not waited for."""
        task.cancel()
        await asyncio.wait({task}, timeout=self._cancel_grace_s)
        self.abandoned += not task.done()
        return task.done()

    async def release(self, job: Job, session: Any) -> RolloutError | None:
        """Release a session within its bound; the error if that did not work."""
        return await self._let_go(job, lambda handler: handler.release(job, session), "the session", "released")

    async def end_scoring(self, job: Job) -> None:
        """Have scoring end within the same bound, where it may go on by itself; what goes wrong is logged."""
        if isinstance(handler := self._handlers.get(job.environment), CancelsScoring):
            ending = handler.end_scoring
            await self._let_go(job, lambda _: ending(job), "scoring", "ended")

    async def _let_go(
        self, job: Job, let_go: Callable[[AgentHandler], Awaitable[None]], what: str, done: str
    ) -> RolloutError | None:
        async def work() -> None:
            try:
                await let_go(self._handlers.get(job.environment))
            except (SystemExit, KeyboardInterrupt) as error:
                raise RuntimeError(f"it raised {type(error).__name__}") from error

        task = begin(work())
        bound, server = self._release_s, None
        if not task.done():
            await asyncio.wait({task}, timeout=bound)
        if not task.done():
            await self.cancel_and_wait(task)
            reason = f"{what} was not {done} within {bound:g} s"
        elif task.cancelled():
            reason = f"{what} could not be {done}: that was cancelled"
        elif (error := task.exception()) is not None:
            told = classify(error, None)
            reason, server = f"{what} could not be {done}: {told.reason}", told.server
        else:
            return None
        LOGGER.warning("job %s: %s", job.id, reason)
        return InfrastructureError(reason, kind=FailureKind.SESSION_RELEASE_FAILED, server=server)

    def failed(self, job: Job, stage: Stage | None, failure: Failure) -> Outcome:
        """The outcome of a job that failed: the handler's, or where that is none, one without a result. What happened
        to the rollout stays what it was; what the handler did besides is told with it."""
        trace = None
        try:
            if job.trajectory is not None:
                job.trajectory.take_tokens()
            outcome = self._handlers.get(job.environment).on_failure(job, stage, failure)
            fault = _fault(outcome)
        except BaseException as error:  # also exit(): the call runs in the event loop itself
            LOGGER.exception("on_failure of handler %s failed", job.handler)
            told = classify(error, stage)
            fault, trace = f"raised {told.reason}", told.traceback
        if fault is None:
            return outcome
        reason = f"{failure.reason}; besides, on_failure of handler {job.handler!r} {fault}"
        blamed = replace(failure, reason=reason, traceback=failure.traceback or trace)
        return Outcome(failure_state(failure), {}, failure=blamed)

    async def waited(self, job: Job) -> float | None:
        """Seconds of this RUN attempt in which the agent could not act; 0 if the handler cannot tell, ``None`` if it
        cannot tell now."""
        try:
            handler = self._handlers.get(job.environment)
            if not isinstance(handler, ReportsWaiting):
                return 0.0
            seconds = await _within(ASK_S, handler.waited(job))
        except Exception as error:
            LOGGER.warning(
                "job %s: waited of handler %s failed: %s", job.id, job.handler, classify(error, None).reason
            )
            return None if isinstance(error, InfrastructureError | TimeoutError) else 0.0
        return seconds if _is_number(seconds) and seconds > 0 else 0.0

    def timed_out(self, job: Job) -> Trajectory | Outcome | None:
        """What counts of a job whose RUN budget is used up: a trajectory to be scored, or how it ended; ``None`` if
        nothing does, which is also what becomes of a handler's error."""
        try:
            handler = self._handlers.get(job.environment)
            if job.trajectory is not None:
                job.trajectory.take_tokens()
            value = handler.timed_out(job, job.session) if isinstance(handler, HandlesTimeouts) else None
            if value is None:
                return None
            return self._scored(job, value) if isinstance(value, Verdict) else self._trajectory(job, value)
        except BaseException as error:  # also exit(): the call runs in the event loop itself
            LOGGER.warning(
                "job %s: timed_out of handler %s failed: %s", job.id, job.handler, classify(error, None).reason
            )
            return None

    async def unreachable(self, environment: str) -> dict[str, frozenset[Stage]] | None:
        """The servers of an environment that do not answer now, with the stages that need each; ``None`` if its
        handler cannot tell."""
        try:
            handler = self._handlers.get(environment)
            if not isinstance(handler, ReportsUnreachable):
                return None
            told = await _within(ASK_S, handler.unreachable())
            needed = told if isinstance(told, Mapping) else dict.fromkeys(told, Stage)
            return {server: frozenset(map(Stage, stages)) for server, stages in needed.items()}
        except Exception as error:
            LOGGER.warning("unreachable of environment %s failed: %s", environment, classify(error, None).reason)
            return None

    async def care(self, environment: str, checkpoints: Sequence[Checkpoint], *, erase: bool) -> None:
        """Have checkpoints erased, or renewed; what goes wrong is logged: who keeps them erases what is old."""
        try:
            if isinstance(handler := self._handlers.get(environment), StoresCheckpoints):
                await _within(self._release_s, (handler.forget if erase else handler.renew)(checkpoints))
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
            mask = is_masked(value.result)
            result = masked(value.result) if mask else value.result
            return Outcome(JobState.SUCCEEDED, result, reward=None if reward is None else float(reward), masked=mask)
        except (TypeError, ValueError, RecursionError) as error:
            raise _defect(job, Stage.EVAL, f"returned a result that cannot be written as JSON: {error}") from error


def _fault(outcome: Any) -> str | None:
    """What is wrong with what ``on_failure`` returned."""
    if not isinstance(outcome, Outcome):
        return f"returned {_short(outcome)}, not an Outcome"
    if not isinstance(outcome.state, JobState) or outcome.state not in FAILED_STATES:
        return f"returned an Outcome with state {_short(outcome.state)}, which is none of a failed job"
    if outcome.reward is not None:
        return "returned an Outcome with a reward, which a failed job has not"
    if not isinstance(outcome.failure, Failure) or not _well_formed(outcome.failure):
        return f"returned an Outcome with failure {_short(outcome.failure)}, not a Failure"
    try:
        told = orjson.loads(outcome.body)
    except (TypeError, ValueError):
        told = None
    if not isinstance(told, dict):
        return f"returned an Outcome with result {_short(outcome.body)}, not an object in JSON"
    return None


def _well_formed(failure: Failure) -> bool:
    """Whether it is what its type says: whoever lists or follows jobs is sent it."""
    trace, server = failure.traceback, failure.server
    return (
        isinstance(failure.kind, FailureKind)
        and isinstance(failure.origin, Origin)
        and (failure.stage is None or isinstance(failure.stage, Stage))
        and isinstance(failure.timed_out, bool)
        and all(isinstance(text, str) and is_text(text) for text in (failure.reason, trace or "", server or ""))
    )


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


async def _within(seconds: float, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of ``work``; not waited for if it ignores that its time is over.

    Raises:
        TimeoutError: it takes too long.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
    if not task.done():
        raise TimeoutError(f"no answer within {seconds:g} s")
    return task.result()


def begin[T](work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task of the running loop that has come to its first wait, or to its end. What it raises is in the task."""
    return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)


_RECHECK_S = 1.0
"""Least extension of a budget, so that a rollout that waits at its very end is not asked about all the time."""

_TICK_S = 0.001
"""So early a timer may come."""

_UNKNOWN_S = 180.0
"""For how long nobody may know for how long a rollout has waited before its budget is over all the same. They who know
may be busy, most of all where thousands wait."""


class Attempt:
    """The handler's coroutine of one stage.

    Args:
        job: worked on.
        stage: which.
        calls: the handlers.
        clock: monotonic seconds.
        spawn: runs what an abandoned work leaves to do.
        out_s: for how many seconds so far the job's servers have not answered.
    """

    def __init__(
        self,
        job: Job,
        stage: Stage,
        calls: HandlerCalls,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
        out_s: Callable[[], float],
    ) -> None:
        self._job = job
        self._stage = stage
        self._calls = calls
        self._clock = clock
        self._spawn = spawn
        self._out_s = out_s
        self._interrupt: asyncio.Future[RolloutError] = asyncio.get_running_loop().create_future()
        self.abandoned = False
        """The work ignored its cancellation and may still go on."""
        self.idle_s = 0.0
        """Seconds in which nothing could be done, for lack of a backend or of a server that answers; known where the
        budget ran out."""

    def interrupt(self, error: RolloutError) -> None:
        """Make the work stop; :meth:`run` raises ``error``."""
        if not self._interrupt.done():
            self._interrupt.set_result(error)

    async def run(self) -> Any:
        """What the work gives. A session that comes up after all, when it was told to stop, is in ``job.session``.

        Raises:
            RolloutError: it was interrupted.
            BudgetExceeded: it used up its budget.
            Exception: whatever the handler raised.
        """
        if self._interrupt.done():
            raise self._interrupt.result()
        job, stage = self._job, self._stage
        task = begin(self._calls.work(job, stage))
        if not task.done():
            await self._until_due(task)
        if task.done():
            return self._calls.result_of(task, job, stage)
        if not await self._calls.cancel_and_wait(task):
            self.abandoned = True
            LOGGER.error("%s of job %s ignores its cancellation and was abandoned", stage, job.id)
            task.add_done_callback(self._came_late)
        elif not task.cancelled() and task.exception() is None and stage is Stage.INIT:
            job.session = task.result()  # it has to be released
        raise self._interrupt.result() if self._interrupt.done() else BudgetExceeded(stage, job.budgets.of(stage))

    async def _until_due(self, task: asyncio.Task[Any]) -> None:
        """Return when the work is done or interrupted, or has used up its budget. Nothing of that is used up while the
        agent cannot act, or the job's servers do not answer."""
        ends: set[asyncio.Future[Any]] = {task, self._interrupt}
        budget = self._job.budgets.of(self._stage)
        if self._stage is Stage.RUN:
            budget -= self._job.spent_s
        started, left, out_before, known_s = self._clock(), budget, self._out_s(), budget
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
            self.idle_s = min(max((waited or 0.0) + self._out_s() - out_before, self.idle_s), elapsed)
            left = budget + self.idle_s - elapsed
            if 0 < left < _TICK_S:  # clocks and timers round differently
                left = 0.0
            known_s = elapsed if waited is not None else known_s
            if 0 < left < _RECHECK_S or (left <= 0 and waited is None and elapsed - known_s <= _UNKNOWN_S):
                left = _RECHECK_S

    def _came_late(self, task: asyncio.Task[Any]) -> None:
        """An abandoned work came back. A session from it belongs to nobody: release it."""
        if task.cancelled():
            return
        if task.exception() is not None:
            LOGGER.warning("abandoned %s of job %s ended with %r", self._stage, self._job.id, task.exception())
        elif self._stage is Stage.INIT:
            self._spawn(self._calls.release(self._job, task.result()))
