# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Carries rollouts to a service, and tells the outcome of each, once.

A service may be away for a while, break connections, or begin a new life that remembers nothing. So each rollout has a
task of its own that goes on until it knows an outcome: it submits (the same id again is the same rollout), waits for
news, asks, and submits again what the service does not know. News come from following the service's log of outcomes;
whenever that begins anew, all are told to ask, since something may have been missed.

Between, the service's transitions tell how far each has come; that is for who deals rollouts out, and may miss some.

What is cancelled is settled only when the service says so, or says that it does not know it and nothing is on its way
there: a submission that was sent is never given up half-way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nemo_gym_prorl.background import BackgroundLoops
from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.http.problem_document import TYPE_PREFIX
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView, TokenForm
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.request import Draining


RETRY_S = 1.0
"""Pause before something that failed is tried again."""
GIVE_UP_S = 120.0
"""How long a service may be away before its rollouts are begun elsewhere, where that is possible."""
RESULT_S = 30.0
"""How long to try to have the result of a rollout that ended under an earlier process."""
_FOLLOW_S = 30.0
ASK_S = 300.0
"""How long a rollout waits for news before it is asked for: a log that cannot be read brings none."""
_AT_ONCE = 64
"""Calls of one kind at a time."""
_DRAINING = TYPE_PREFIX + Draining.problem
_LATER = (408, 425, 429)
"""Besides 5xx: whoever asks again may be answered."""


MAX_LOST_NODES = 5
"""A rollout fails with the loss of so many services that it was on: it is suspected of them."""


class LossReason(StrEnum):
    """Why a rollout has no outcome."""

    REFUSED = "refused"
    """Its row is to blame."""
    TAKEN = "taken"
    """Its id is another rollout's."""
    FORGOTTEN = "forgotten"
    """It has ended, and its result is gone."""
    CANCELLED = "cancelled"
    """Before it began."""
    AWAY = "away"
    """The service was away for too long, and another one is there."""
    UNTAKEN = "untaken"
    """The service takes nothing new, and another one does."""
    UNFORKABLE = "unforkable"
    """It was to go on from another one, of which that service keeps nothing."""


FORK = "fork"
"""Where a rollout's body says that it goes on from a turn of another one: ``rollout_id`` and ``turn``."""

# The row's fault are the same statuses as of an environment, see ``handlers/gym_http.py``.
_LOSS_BY_STATUS = dict.fromkeys((400, 413, 415, 422), LossReason.REFUSED) | {
    409: LossReason.TAKEN,
    410: LossReason.FORGOTTEN,
}
_FORK_LOSS_BY_STATUS = dict.fromkeys((404, 409, 410, 422), LossReason.UNFORKABLE)


@dataclass(eq=False, slots=True)
class _ForwardedJob:
    """A rollout under way.

    Attributes:
        sent: the service may know it.
        cancelling: its outcome is of no use.
        failing_since: when the first of the calls for it failed between which none succeeded.
        news: it may have changed.
    """

    id: str
    body: Mapping[str, Any]
    sent: bool = False
    cancelling: bool = False
    failing_since: float | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def is_unwanted(self) -> bool:
        """Whether it is to be cancelled; that can change at any time."""
        return self.cancelling


class JobForwarder:
    """See the module.

    Args:
        client: a client; open before :meth:`start`.
        tokens: the form in which results have their tokens.
        ended: told of every rollout that has an outcome.
        lost: told of every rollout that has none, and why.
        broke: told of an error that ends it: a defect of ours, or a service that refuses us altogether.
        say: told when the service is away, and when it is back.
        follows: asked of each rollout that the service has taken on, or has had: whether its outcome is wanted. If
            not, it is dropped here.
        replaceable: whether its rollouts could be begun elsewhere now.
        moved: told of every state that a rollout without an outcome is seen in.
        turned: told when it goes away and when it is back.
        patient: go on asking a service that refuses us altogether, or is none: others do its work meanwhile.
    """

    def __init__(
        self,
        client: RolloutClient,
        *,
        tokens: TokenForm,
        ended: Callable[[JobView], None],
        lost: Callable[[str, LossReason, str], None],
        broke: Callable[[BaseException], None],
        say: Callable[[str], None],
        follows: Callable[[JobView], bool] = lambda _: True,
        replaceable: Callable[[], bool] = lambda: False,
        moved: Callable[[str, JobState], None] = lambda rollout, state: None,
        turned: Callable[[bool], None] = lambda away: None,
        patient: bool = False,
        loops: BackgroundLoops | None = None,
    ) -> None:
        self.client, self._patient = client, patient
        self._loops = loops or BackgroundLoops(restart=False)
        self._moved, self._turned = moved, turned
        self._tokens = tokens
        self._ended, self._lost, self._broke, self._say = ended, lost, broke, say
        self._follows, self._replaceable = follows, replaceable
        self._jobs: dict[str, _ForwardedJob] = {}
        self._orphaned_ids: set[str] = set()
        """Given up here, and to be cancelled when the service is back."""
        self.trouble = ""
        """Why it is away; empty if it is not."""
        self._silent = False
        """It did not answer when it was asked last."""
        self._refuses = False
        """It took no new rollout when it was asked last, since it drains, say."""
        self._posts, self._gets = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_AT_ONCE)
        self._to_cancel: dict[str, asyncio.Future[JobView | None]] = {}
        self._canceller: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def away(self) -> bool:
        """It did not answer when it was asked last, or does not take what is new."""
        return self._silent or self._refuses

    @property
    def load(self) -> int:
        """Rollouts under way."""
        return len(self._jobs)

    def start(self) -> None:
        """ResumePoint to follow it."""
        self._track(self._loops.start("node-outcomes", self._follow))
        self._track(self._loops.start("node-events", self._watch))

    async def close(self) -> None:
        """Stop whatever is under way here; the service is told nothing."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def give_up(self, why: str) -> None:
        """It is gone for good: none of its rollouts has an outcome."""
        for it in [*self._jobs.values()]:
            self._settle(it, LossReason.AWAY, why)

    def heard(self, error: BaseException | None) -> None:
        """Somebody else asked it. What hangs, or is cut off, breaks no connection by which our calls would end."""
        if error is None:
            self._is_back()
            return
        self._is_away(error)
        for it in [*self._jobs.values()]:
            if self._is_hopeless(it):
                self._give_up(it)
                self._cancel(it)  # should its call still end

    def submit(self, rollout: str, body: Mapping[str, Any]) -> None:
        """Carry a rollout there."""
        self._jobs[rollout] = forwarded = _ForwardedJob(rollout, body)
        self._spawn(self._forward(forwarded))

    def cancel(self, rollout: str) -> None:
        """The outcome of a rollout is of no use. It is told all the same, when its sandbox is gone."""
        if forwarded := self._jobs.get(rollout):
            self._cancel(forwarded)

    def _cancel(self, it: _ForwardedJob) -> None:
        it.cancelling = True
        it.news.set()

    def cancel_unknown(self, rollout: str) -> None:
        """Cancel what an earlier process submitted."""
        self._jobs[rollout] = forwarded = _ForwardedJob(rollout, {}, sent=True, cancelling=True)
        self._spawn(self._forward(forwarded))

    async def result(self, rollout: str) -> JobView:
        """A rollout that had its outcome under an earlier process.

        Raises:
            InfrastructureError: the service has no result of it.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + RESULT_S
        while True:
            try:
                async with self._gets:
                    # Others had their turn before this one: that is no fault of a service that answers.
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
                raise InfrastructureError("it has no result", kind=FailureKind.SESSION_LOST)
            return job

    # One rollout

    async def _forward(self, it: _ForwardedJob) -> None:
        while await self._accepted(it) and not await self._settled(it):
            pass

    async def _accepted(self, it: _ForwardedJob) -> bool:
        """Whether the service has it now; else it is settled."""
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
                if not self._follows(job):
                    self._jobs.pop(it.id, None)
                    return False
                if job.state.terminal:  # under an earlier process; the log may have told of it long ago
                    it.news.set()
                return True
            except ApiError as error:
                it.sent = before or error.problem.status >= 500
                if (loss := losses.get(error.problem.status)) is not None:
                    return self._settle(it, loss, error.problem.detail)
                if not (_is_passing(error) or self._patient):
                    raise
                later, hopeless = error.problem.status in _LATER, self._is_hopeless(it)
                if hopeless or not later:  # a queue that is full has its time before others are asked
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
                return self._settle(it, LossReason.REFUSED, f"its row is no JSON: {error}")
            except InfrastructureError as error:
                self._is_away(error)
                if self._is_hopeless(it):
                    return self._give_up(it)
            await self._pause(it, pause)
        return it.sent or self._settle(it, LossReason.CANCELLED, "cancelled before it was submitted")

    async def _settled(self, it: _ForwardedJob) -> bool:
        """Whether its outcome is known; else the service does not know it."""
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
                if job is None or job.state is JobState.SUCCEEDED:  # that answer tells no result
                    async with self._gets:
                        job = await self.client.get(it.id, tokens=self._tokens)
                self._is_back(it)
                if job.id != it.id:
                    raise InfrastructureError(f"asked for {it.id!r} it tells of {job.id!r}")
                if job.state.terminal:
                    if self._jobs.pop(it.id, None) is not None:
                        self._ended(job)
                    return True
            except ApiError as error:
                if error.problem.status == 404:
                    it.sent = False
                    if self._patient and not it.is_unwanted():
                        return not self._settle(
                            it, LossReason.AWAY, f"{self.client.url} was restarted, and has lost it"
                        )
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
        """Wait, unless it is cancelled meanwhile."""
        it.news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await it.news.wait()
        it.news.set()

    def _settle(self, it: _ForwardedJob, loss: LossReason, why: str) -> bool:
        """It has no outcome. Always false."""
        if self._jobs.pop(it.id, None) is not None:
            self._lost(it.id, loss, why)
        return False

    def _give_up(self, it: _ForwardedJob) -> bool:
        if it.sent:
            self._orphaned_ids.add(it.id)
        return self._settle(it, LossReason.AWAY, f"{self.client.url} does not answer")

    # All of them

    async def _cancelled(self, rollout: str) -> JobView | None:
        """Cancel it, together with others that are to be; ``None`` if the service does not know it."""
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
                if error.problem.status not in (410, *_LATER):  # perhaps of a proxy's, before a service that is gone
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
                        self._moved(event.id, event.state)
            except (ApiError, InfrastructureError):
                seen = None
            await asyncio.sleep(RETRY_S)

    def _ask_all(self) -> None:
        for it in [*self._jobs.values()]:
            it.news.set()

    async def _cancel_orphans(self) -> None:
        if ghosts := [*self._orphaned_ids]:
            await self.client.cancel(ghosts)
            self._orphaned_ids.difference_update(ghosts)

    def _is_away(self, error: BaseException, *, refuses: bool = False) -> None:
        """Note that it does not answer, or that it takes nothing new on."""
        if not self.away:
            self._say(f"waiting for the service at {self.client.url}: {error}")
        was_away = self.away
        self.trouble = str(error)
        self._refuses = self._refuses or refuses
        self._silent = self._silent or not refuses
        if not was_away:
            self._turned(True)

    def _is_hopeless(self, it: _ForwardedJob) -> bool:
        """Note that a call for it failed. Whether they have for too long: others, for others, may succeed."""
        now = asyncio.get_running_loop().time()
        if it.failing_since is None:
            it.failing_since = now
        return now - it.failing_since > GIVE_UP_S and self._replaceable()

    def _is_back(self, it: _ForwardedJob | None = None, *, takes: bool = False) -> None:
        """Note that it answers, or even that it takes on what is new."""
        if it is not None:
            it.failing_since = None
        was_away = self.away
        self._silent = False
        self._refuses = self._refuses and not takes
        if was_away and not self.away:
            self.trouble = ""
            self._say(f"the service at {self.client.url} is back")
            self._turned(False)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._track(asyncio.create_task(work))

    def _track(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broke(error)


def _is_passing(error: ApiError) -> bool:
    return error.problem.status >= 500 or error.problem.status in _LATER
