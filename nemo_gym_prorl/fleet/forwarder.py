# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Forwarder of rollouts to one service, with exactly one result for each: an outcome, or a :class:`LossReason`.

A service may be unreachable for a while, drop connections, or restart without its memory. So each rollout has a task
that runs until the result is known. The task submits the rollout (idempotent by id), waits for a notification from the
service's log of outcomes, and fetches the result. All tasks fetch when the log restarts or cannot be read. If the
service does not know the rollout, the task submits the rollout again, or with ``patient`` reports a loss.

The service's event stream reports the progress of rollouts, for placement; events may be missed.

A rollout counts as cancelled only when the service confirms, or does not know the rollout while no submission is in
flight. A rollout of an unreachable service may be given up before; its id is cancelled when the service is back. A
submission that was sent is never abandoned before its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nemo_gym_prorl.async_tasks import BackgroundLoops
from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.http.problem_document import TYPE_PREFIX
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView, TokenForm
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.request import Draining


RETRY_S = 1.0
"""Seconds before a failed call is retried, so that an outage causes no busy loop."""
GIVE_UP_S = 120.0
"""Seconds that a service may be unreachable before its rollouts move to another service, if there is one."""
RESULT_S = 30.0
"""Seconds to fetch the result of a rollout that ended under an earlier process; large results take long."""
_FOLLOW_S = 30.0
"""Long-poll of the log of outcomes, in seconds."""
ASK_S = 300.0
"""Seconds without a notification after which a rollout is fetched, in case the log cannot be read."""
_MAX_CONCURRENT_CALLS = 64
"""Concurrent submissions, and concurrent fetches, to bound the connections to one service."""
_DRAINING = TYPE_PREFIX + Draining.problem
_LATER = (408, 425, 429)
"""Statuses besides 5xx after which a repeated call can succeed."""


MAX_LOST_NODES = 5
"""Lost nodes after which a rollout fails, since it may have caused the losses."""


class LossReason(StrEnum):
    """Why a rollout has no outcome."""

    REFUSED = "refused"
    """The service refused the row, or the row cannot be written as JSON."""
    TAKEN = "taken"
    """The id belongs to another rollout."""
    FORGOTTEN = "forgotten"
    """The rollout ended and its result is forgotten."""
    CANCELLED = "cancelled"
    """The rollout was cancelled before it started."""
    AWAY = "away"
    """The service left, lost the rollout at a restart, or was unreachable for too long while another was available."""
    UNTAKEN = "untaken"
    """The service accepts no new rollouts, and another service does."""
    UNFORKABLE = "unforkable"
    """The service has no checkpoint for the fork."""


FORK = "fork"
"""Field of a rollout's body with the parent of a fork: ``rollout_id`` and ``turn``."""

# The statuses that blame the row are the same as those of an environment server (`BAD_ROW_STATUSES`).
_LOSS_BY_STATUS = dict.fromkeys((400, 413, 415, 422), LossReason.REFUSED) | {
    409: LossReason.TAKEN,
    410: LossReason.FORGOTTEN,
}
_FORK_LOSS_BY_STATUS = dict.fromkeys((404, 409, 410, 422), LossReason.UNFORKABLE)


@dataclass(eq=False, slots=True)
class _ForwardedJob:
    """Rollout in flight at the service.

    Attributes:
        sent: whether the service may know the rollout.
        cancelling: whether the rollout is to be cancelled.
        failing_since: monotonic time of the first failed call since the last successful one; ``None`` if none failed.
        news: set when the rollout may have ended or is to be cancelled.
    """

    id: str
    body: Mapping[str, Any]
    sent: bool = False
    cancelling: bool = False
    failing_since: float | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def is_unwanted(self) -> bool:
        """Return whether the rollout is to be cancelled; may change at any await."""
        return self.cancelling


class JobForwarder:
    """Forwarder of rollouts to one service; see the module.

    Args:
        client: client of the service; must be open before :meth:`start`.
        tokens: form of the results' tokens.
        on_ended: called with every rollout that has an outcome.
        on_lost: called with the id of every rollout that will have no outcome, the reason and a message.
        on_error: called with an error that stops a task: a bug, or a service that refuses all requests.
        report: called with a message when the service becomes unavailable, and when it is available again.
        is_wanted: called with each accepted rollout; returns whether its outcome is wanted. Unwanted rollouts are not
            followed.
        replaceable: returns whether another service could run the rollouts now.
        on_state: called with every observed state of a rollout without an outcome.
        on_availability: called with ``True`` when the service becomes unavailable, with ``False`` when it is available
            again.
        patient: for a fleet. Retry a service that refuses all requests instead of raising the error, and report
            rollouts that a restarted service does not know as lost instead of resubmitting them.
        loops: supervises the background loops; created by default.
    """

    def __init__(
        self,
        client: RolloutClient,
        *,
        tokens: TokenForm,
        on_ended: Callable[[JobView], None],
        on_lost: Callable[[str, LossReason, str], None],
        on_error: Callable[[BaseException], None],
        report: Callable[[str], None],
        is_wanted: Callable[[JobView], bool] = lambda _: True,
        replaceable: Callable[[], bool] = lambda: False,
        on_state: Callable[[str, JobState], None] = lambda rollout, state: None,
        on_availability: Callable[[bool], None] = lambda away: None,
        patient: bool = False,
        loops: BackgroundLoops | None = None,
    ) -> None:
        self.client, self._patient = client, patient
        self._loops = loops or BackgroundLoops(restart=False)
        self._on_state, self._on_availability = on_state, on_availability
        self._tokens = tokens
        self._on_ended, self._on_lost, self._on_error, self._report = on_ended, on_lost, on_error, report
        self._is_wanted, self._replaceable = is_wanted, replaceable
        self._jobs: dict[str, _ForwardedJob] = {}
        self._orphaned_ids: set[str] = set()
        """Rollouts that were given up while the service was away, to be cancelled when the service is back."""
        self.last_error = ""
        """Why the service is unavailable; empty if it is available."""
        self._silent = False
        """Whether the last call got no answer."""
        self._refuses = False
        """Whether the last submission was refused, for example by a draining service."""
        self._posts, self._gets = asyncio.Semaphore(_MAX_CONCURRENT_CALLS), asyncio.Semaphore(_MAX_CONCURRENT_CALLS)
        self._to_cancel: dict[str, asyncio.Future[JobView | None]] = {}
        self._canceller: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def away(self) -> bool:
        """Whether the service does not answer or accepts no new rollouts."""
        return self._silent or self._refuses

    @property
    def load(self) -> int:
        """Number of rollouts in flight."""
        return len(self._jobs)

    def start(self) -> None:
        """Start to follow the service's log of outcomes and its event stream."""
        self._track(self._loops.start("node-outcomes", self._follow))
        self._track(self._loops.start("node-events", self._watch))

    async def close(self) -> None:
        """Stop all tasks; rollouts at the service continue there."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def give_up(self, why: str) -> None:
        """Report all rollouts as lost, because the service has left for good."""
        for it in [*self._jobs.values()]:
            self._settle(it, LossReason.AWAY, why)

    def record_probe(self, error: BaseException | None) -> None:
        """Record the result of a health probe made by another component; ``None`` for a success. After a failed probe,
        rollouts whose calls have failed for more than :data:`GIVE_UP_S` are reported as lost, if another service can
        run them. Calls to a hung or partitioned machine would wait for ever, since TCP connections stay open."""
        if error is None:
            self._is_back()
            return
        self._is_away(error)
        for it in [*self._jobs.values()]:
            if self._is_hopeless(it):
                self._give_up(it)
                self._cancel(it)  # in case a pending submission succeeds later

    def submit(self, rollout: str, body: Mapping[str, Any]) -> None:
        """Start to forward a rollout. ``body``: its ``row``, options, and for a fork the field :data:`FORK`."""
        self._jobs[rollout] = forwarded = _ForwardedJob(rollout, body)
        self._spawn(self._forward(forwarded))

    def cancel(self, rollout: str) -> None:
        """Cancel a rollout. Its result is reported once its sandbox is released, or once the rollout is lost."""
        if forwarded := self._jobs.get(rollout):
            self._cancel(forwarded)

    def _cancel(self, it: _ForwardedJob) -> None:
        it.cancelling = True
        it.news.set()

    def cancel_unknown(self, rollout: str) -> None:
        """Cancel a rollout that an earlier process submitted, and report its result."""
        self._jobs[rollout] = forwarded = _ForwardedJob(rollout, {}, sent=True, cancelling=True)
        self._spawn(self._forward(forwarded))

    async def result(self, rollout: str) -> JobView:
        """Return the result of a rollout that ended under an earlier process.

        Raises:
            InfrastructureError: the service has no result of the rollout, or does not answer within 30 s.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + RESULT_S
        while True:
            try:
                async with self._gets:
                    # Waiting for the semaphore is not charged to a service that answers.
                    async with asyncio.timeout_at(deadline if self.away else now() + RESULT_S):
                        job = await self.client.get(rollout, tokens=self._tokens)
            except (ApiError, InfrastructureError, TimeoutError) as error:
                known = not isinstance(error, ApiError) or _is_passing(error)
                if known and now() < deadline:
                    await asyncio.sleep(RETRY_S)
                    continue
                why = str(error) or f"{self.client.url} gave no answer in {RESULT_S:g} s"
                raise InfrastructureError(why, kind=FailureKind.SESSION_LOST) from error
            if job.result is None:
                reason = f"{self.client.url} has no result of rollout {rollout!r}"
                raise InfrastructureError(reason, kind=FailureKind.SESSION_LOST)
            return job

    async def _forward(self, it: _ForwardedJob) -> None:
        while await self._accepted(it) and not await self._settled(it):
            pass

    async def _accepted(self, it: _ForwardedJob) -> bool:
        """Submit the rollout until the service accepts it. Return ``False`` if the rollout needs no further work: its
        result was reported, or its outcome is not wanted."""
        options = {name: value for name, value in it.body.items() if name not in ("row", FORK)}
        fork = it.body.get(FORK)
        losses = _LOSS_BY_STATUS | _FORK_LOSS_BY_STATUS if fork else _LOSS_BY_STATUS
        while not it.is_unwanted():
            pause, before = RETRY_S, it.sent
            try:
                async with self._posts:
                    if it.is_unwanted():
                        break
                    it.sent = True
                    if fork:
                        job = await self.client.fork_once(**fork, id=it.id, **options)
                    else:
                        job = await self.client.submit_once(dict(it.body["row"]), id=it.id, **options)
                self._is_back(it, takes=True)
                if not self._is_wanted(job):
                    self._jobs.pop(it.id, None)
                    return False
                if job.state.terminal:  # ended under an earlier process; the log may not contain the outcome again
                    it.news.set()
                return True
            except ApiError as error:
                it.sent = before or error.problem.status >= 500
                if (loss := losses.get(error.problem.status)) is not None:
                    return self._settle(it, loss, error.problem.detail)
                if not (_is_passing(error) or self._patient):
                    raise
                later, hopeless = error.problem.status in _LATER, self._is_hopeless(it)
                if hopeless or not later:  # a full queue (429) is retried before another service is tried
                    self._is_away(error, refuses=True)
                    untaken = later or error.problem.type == _DRAINING
                    if untaken and not before and self._replaceable():
                        if it.is_unwanted():
                            return self._settle(it, LossReason.CANCELLED, "cancelled before it was submitted")
                        return self._settle(it, LossReason.UNTAKEN, error.problem.detail)
                    if hopeless:
                        return self._give_up(it)
                pause = error.retry_after_s or RETRY_S
            except TypeError as error:
                return self._settle(it, LossReason.REFUSED, f"the row cannot be written as JSON: {error}")
            except InfrastructureError as error:
                self._is_away(error)
                if self._is_hopeless(it):
                    return self._give_up(it)
            await self._pause(it, pause)
        return it.sent or self._settle(it, LossReason.CANCELLED, "cancelled before it was submitted")

    async def _settled(self, it: _ForwardedJob) -> bool:
        """Wait until the result is reported; return ``False`` if the rollout must be submitted again, because the
        service does not know it."""
        while True:
            try:
                if it.is_unwanted():
                    job = await self._cancelled(it.id)
                    if job is None:
                        return not self._settle(it, LossReason.CANCELLED, "cancelled before it began")
                else:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(ASK_S):
                            await it.news.wait()
                    it.news.clear()
                    if it.is_unwanted():
                        continue
                    job = None
                if job is None or job.state is JobState.SUCCEEDED:  # the answer to a cancellation has no result
                    async with self._gets:
                        job = await self.client.get(it.id, tokens=self._tokens)
                self._is_back(it)
                if job.id != it.id:
                    raise InfrastructureError(f"{self.client.url} answered a request for {it.id!r} with {job.id!r}")
                if job.state.terminal:
                    if self._jobs.pop(it.id, None) is not None:
                        self._on_ended(job)
                    return True
            except ApiError as error:
                if error.problem.status == 404:
                    it.sent = False
                    if self._patient and not it.is_unwanted():
                        return not self._settle(it, LossReason.AWAY, f"{self.client.url} was restarted and lost it")
                    return False
                if error.problem.status == 410:
                    return not self._settle(it, LossReason.FORGOTTEN, error.problem.detail)
                if not (_is_passing(error) or self._patient):
                    raise
                it.news.set()
                if self._is_hopeless(it):
                    return not self._give_up(it)
                await asyncio.sleep(error.retry_after_s or RETRY_S)
            except InfrastructureError as error:
                it.news.set()
                self._is_away(error)
                if self._is_hopeless(it):
                    return not self._give_up(it)
                await asyncio.sleep(RETRY_S)

    async def _pause(self, it: _ForwardedJob, seconds: float) -> None:
        it.news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await it.news.wait()
        it.news.set()

    def _settle(self, it: _ForwardedJob, loss: LossReason, why: str) -> bool:
        """Report that the rollout will have no outcome, once. Always return ``False``."""
        if self._jobs.pop(it.id, None) is not None:
            self._on_lost(it.id, loss, why)
        return False

    def _give_up(self, it: _ForwardedJob) -> bool:
        if it.sent:
            self._orphaned_ids.add(it.id)
        return self._settle(it, LossReason.AWAY, f"{self.client.url} does not answer")

    async def _cancelled(self, rollout: str) -> JobView | None:
        """Cancel a rollout, in one request with others; return the rollout without its result, or ``None`` if the
        service does not know the rollout."""
        future: asyncio.Future[JobView | None] = asyncio.get_running_loop().create_future()
        self._to_cancel[rollout] = future
        if self._canceller is None or self._canceller.done():
            self._canceller = self._spawn(self._cancel_all())
        return await future

    async def _cancel_all(self) -> None:
        await asyncio.sleep(0)
        while batch := self._to_cancel:
            self._to_cancel = {}
            try:
                answer = await self.client.cancel(batch)
            except Exception as error:
                for future in batch.values():
                    if not future.done():
                        future.set_exception(error)
                continue
            jobs = {job.id: job for job in answer.rollouts}
            for rollout, future in batch.items():
                if not future.done():
                    future.set_result(jobs.get(rollout))

    async def _follow(self) -> None:
        cursor: str | None = None
        while True:
            try:
                if cursor is None:
                    cursor = (await self.client.list(limit=1)).cursor
                    self._is_back()
                    await self._cancel_orphans()
                    self._ask_all()
                page = await self.client.ended(cursor, wait=_FOLLOW_S, limit=1000)
                self._is_back()
                if self._refuses:
                    self._is_back(takes=not (await self.client.status()).draining)
                cursor = page.cursor
                for job in page.rollouts:
                    if job.id in self._jobs:
                        self._jobs[job.id].news.set()
            except ApiError as error:
                if error.problem.status != 410 and not (_is_passing(error) or self._patient):
                    raise
                cursor = None
                if error.problem.status not in (410, *_LATER):  # for example a proxy's answer for a dead service
                    self._is_away(error)
                    self._ask_all()
                await asyncio.sleep(0 if error.problem.status == 410 else error.retry_after_s or RETRY_S)
            except InfrastructureError as error:
                cursor = None
                self._is_away(error)
                self._ask_all()
                await asyncio.sleep(RETRY_S)

    async def _watch(self) -> None:
        seen: str | None = None
        while True:
            try:
                async for event in self.client.events(seen):
                    seen = event.cursor
                    if event.id in self._jobs and not event.state.terminal:
                        self._on_state(event.id, event.state)
            except (ApiError, InfrastructureError):
                seen = None
            await asyncio.sleep(RETRY_S)

    def _ask_all(self) -> None:
        for it in [*self._jobs.values()]:
            it.news.set()

    async def _cancel_orphans(self) -> None:
        if orphans := [*self._orphaned_ids]:
            await self.client.cancel(orphans)
            self._orphaned_ids.difference_update(orphans)

    def _is_away(self, error: BaseException, *, refuses: bool = False) -> None:
        """Record that the service does not answer, or, with ``refuses``, that it accepts no new rollouts."""
        if not self.away:
            self._report(f"waiting for the service at {self.client.url}: {error}")
        was_away = self.away
        self.last_error = str(error)
        self._refuses = self._refuses or refuses
        self._silent = self._silent or not refuses
        if not was_away:
            self._on_availability(True)

    def _is_hopeless(self, it: _ForwardedJob) -> bool:
        """Record a failed call for a rollout; return whether its calls have failed for more than :data:`GIVE_UP_S` and
        another service could run the rollout."""
        now = asyncio.get_running_loop().time()
        if it.failing_since is None:
            it.failing_since = now
        return now - it.failing_since > GIVE_UP_S and self._replaceable()

    def _is_back(self, it: _ForwardedJob | None = None, *, takes: bool = False) -> None:
        """Record that the service answers, and, with ``takes``, that it accepts new rollouts."""
        if it is not None:
            it.failing_since = None
        was_away = self.away
        self._silent = False
        self._refuses = self._refuses and not takes
        if was_away and not self.away:
            self.last_error = ""
            self._report(f"the service at {self.client.url} is back")
            self._on_availability(False)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._track(asyncio.create_task(work))

    def _track(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)


def _is_passing(error: ApiError) -> bool:
    return error.problem.status >= 500 or error.problem.status in _LATER
