# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""One stage's work on one job, bounded: by its budget, by an interruption, and by a grace if it heeds neither."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from nemo_gym_prorl.failures import BudgetExceeded, RolloutError, Stage
from nemo_gym_prorl.rollout.calls import HandlerCalls
from nemo_gym_prorl.rollout.job import Job
from nemo_gym_prorl.rollout.tasks import begin


LOGGER = logging.getLogger(__name__)

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
        if not await self._calls.call_off(task):
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
