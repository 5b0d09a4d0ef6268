# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a rollout service does with a job, whether one node's pipeline or the front of a fleet runs the job.

A service accepts a job or says why not, ends it once, and tells all waiters. With a journal both steps are on disk
before any caller is told: accepted jobs outlive the service, and no caller has seen an outcome that is not kept. A
caller that holds a connection takes its answer away; of such a job the journal keeps only that it was, so its answer
waits for no disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from nemo_gym_prorl.background import BackgroundLoops
from nemo_gym_prorl.failures import CallerError, Failure, FailureKind, JobCancelled, Origin, RolloutError
from nemo_gym_prorl.rollout.handler import Environments
from nemo_gym_prorl.rollout.job import Job, JobState, Outcome
from nemo_gym_prorl.rollout.request import Draining, JobConflict, JobRequest, QueueFull
from nemo_gym_prorl.rollout.settings import ServiceSettings
from nemo_gym_prorl.rollout.status import StatusView
from nemo_gym_prorl.rollout.storage.store import JobStore, same_job


if TYPE_CHECKING:
    from nemo_gym_prorl.rollout.storage.journal import Journal
    from nemo_gym_prorl.rollout.storage.journal_records import Unfinished


LOGGER = logging.getLogger(__name__)

_AT_ONCE = 100
"""Jobs of an earlier life that are taken on between two looks at whatever else there is to do."""
_RETRY_S = 1.0
_DISK_S = 1.0
"""How long who cancels a job that is held by a connection waits for it to be in the log."""


class RolloutService(ABC):
    """Takes jobs on, ends each once, and remembers them.

    Args:
        settings: bounds and defaults.
        clock: monotonic seconds.
        journal: what keeps its jobs over a restart, if anything; closed with it.
        loops: supervises the background loops of the service.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
        loops: BackgroundLoops | None = None,
    ) -> None:
        self.loops = loops or BackgroundLoops(clock)
        self.store = JobStore(settings.retain_bytes, settings.keep_unread_s, clock, journal)
        self.draining = False
        self.on_finish: list[Callable[[Job], None]] = []
        """Called with each job that reached its outcome, e.g. by metrics; what one raises is logged."""
        self._defaults = settings
        self._done: dict[Job, asyncio.Future[None]] = {}
        """Of jobs without an outcome, also of those whose outcome is on its way to the disk."""
        self._answers: dict[Job, asyncio.Future[None]] = {}
        """The same of those that are held by a connection, but for what is on its way to the disk."""
        self._arriving: dict[str, asyncio.Task[Job]] = {}
        """New jobs that are on their way to the disk."""
        self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @abstractmethod
    def _environments_now(self) -> Environments:
        """Whose rollouts it runs. Raises a CallerError as long as that is not known."""

    @abstractmethod
    def _may_queue(self, client: str, most: int) -> bool:
        """Whether a client may have one more job wait, where all together may have ``most``."""

    @abstractmethod
    def _run(self, job: Job) -> None:
        """ResumePoint with a job that is remembered."""

    @abstractmethod
    def _resume_job(self, earlier: Unfinished) -> None:
        """Take on again what an earlier life of the service had accepted."""

    @abstractmethod
    def request_cancel(self, job: Job, error: RolloutError) -> None:
        """Cancel a job without waiting for it; a no-op on one that has its outcome or was cancelled before. The error
        is how it ends."""

    @abstractmethod
    async def fork(self, parent: Job, turn: int | None, requests: Sequence[JobRequest]) -> list[Job]:
        """Take jobs on that share the first turns of another one, and go on from there each for itself.

        Args:
            parent: live or ended.
            turn: after which; the latest that there is a checkpoint of by default.
            requests: what else is wished for each.

        Raises:
            QueueFull, JobConflict, RolloutForgotten, Draining: nothing was begun.
            NoCheckpoint: of that turn.
            CallerError: its environment, or this service, takes none.
        """

    @abstractmethod
    async def kept_turns(self, rollout: str) -> list[int]:
        """The turns after which a rollout can be forked, in order; none of one that is unknown."""

    @abstractmethod
    def status(self) -> StatusView:
        """Counts per stage, pool and state."""

    def share(self, clients: Mapping[str, float]) -> None:
        """From now on clients have these shares of slots and bounds; 1 where none is said."""
        self.store.shares = clients

    # -- jobs come -----------------------------------------------------------------------------------------------

    async def accept(self, request: JobRequest, *, bounded: bool = True) -> Job:
        """As :meth:`submit`, and return when the job is on disk, where there is a journal.

        Raises:
            JournalUnavailable: it cannot be written.
        """
        journal = self.store.journal
        if journal is None:
            return self.submit(request, bounded=bounded)
        if request.id is not None and self.store.get(request.id) is None:
            await self.store.wait_for_recovery(request.id)
        digest = request.digest()
        if (known := self.store.known(request, digest)) is not None:
            return known
        arriving = self._arriving.get(request.id or "")
        if arriving is None:
            job = self._new(request, digest, bounded=bounded)
            arriving = asyncio.create_task(self._write_ahead(journal, job, named=request.id is not None))
            self._arriving[job.id] = arriving
            arriving.add_done_callback(lambda _: self._arriving.pop(job.id))
        accepted = await asyncio.shield(arriving)  # whose caller hangs up is accepted all the same
        return same_job(accepted, request, digest)

    async def _write_ahead(self, journal: Journal, job: Job, *, named: bool) -> Job:
        """The job, or that which had its id before."""
        taken = False
        try:
            taken = await journal.accepted(job, named=named)
        finally:
            if not taken and job.checkpoint_store is not None:  # what it was to begin from is not its own any more
                job.checkpoint_store.ended(job, keep=False)
        if taken:
            self._start_job(job)
            return job
        known = await self.store.fetch(job.id)
        assert known is not None, "it is there or forgotten"
        return known

    def submit(self, request: JobRequest, *, bounded: bool = True) -> Job:
        """Take a job on, in memory only; the same id and row again is the same job.

        Args:
            request: the job.
            bounded: refuse when the queue is full. Gym's own route passes ``False``: its client would spin on a
                refusal, and its open connections are bound enough.

        Raises:
            QueueFull, JobConflict, RolloutForgotten, Draining.
            CallerError: the row cannot be written as JSON, or belongs to no environment that there is.
        """
        digest = request.digest()
        if (known := self.store.known(request, digest)) is not None:
            return known
        if request.id in self._arriving:
            raise JobConflict.with_anothers(request.id)
        job = self._new(request, digest, bounded=bounded)
        self._start_job(job)
        return job

    def _new(self, request: JobRequest, digest: bytes, *, bounded: bool) -> Job:
        """The job of a request that nothing stands against.

        Raises:
            QueueFull, Draining, CallerError: as :meth:`submit`.
        """
        environment = self._environments_now().of_job(request)
        if self.draining:
            raise Draining("the service is draining and takes no new rollouts")
        if self.store.journal is not None and not request.attached:
            self.store.journal.check()
        if bounded:
            self._check_room(request.client, 1)
        budgets = environment.budgets or self._defaults.budgets
        return Job(
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
            budgets=budgets.model_copy(update={stage.value: given for stage, given in request.budgets.items()}),
            max_attempts=request.max_attempts or environment.max_attempts or self._defaults.max_attempts,
            attached=request.attached,
            scope=request.client if request.client in self.store.shares else None,
            forked_from=request.forked_from,
            resume_point=request.resume_point,
        )

    def _check_room(self, client: str, jobs: int) -> None:
        """Raises:
        QueueFull: so many more of a client are too many."""
        most = self._defaults.max_queued
        if not self._may_queue(client, most - len(self._arriving) - jobs + 1):
            raise QueueFull(f"{most} rollouts are waiting already, or were with {jobs} more; try again later")
        self.store.refuse_if_full(client)

    async def _accept_forks(self, parent: Job, requests: Sequence[JobRequest], **resume_from: Any) -> list[Job]:
        """Take jobs on that begin where another one was, all or none; ``begin`` says where.

        Raises:
            CallerError: one of them is refused, before any is begun, unless the service cannot write any more.
        """
        row = orjson.dumps(parent.row)
        every = [
            replace(request, row=orjson.loads(row), run=parent.run, environment=parent.environment, **resume_from)
            for request in requests
        ]
        known = await self.store.fetch_all(request.id for request in every if request.id is not None)
        new = 0
        for request in every:
            if request.id in known and not known[request.id].delivered:
                same_job(known[request.id], request, request.digest())
            else:
                new += 1
        if new:
            self._check_room(every[0].client, new)
        jobs: list[Job] = []
        try:
            for request in every:
                jobs.append(await self.accept(request, bounded=False))
        except CallerError:
            for job in jobs:
                if job.id not in known:
                    self.request_cancel(job, JobCancelled("its siblings could not be taken on"))
            raise
        return jobs

    def _recover_jobs(self) -> None:
        """ResumePoint to take on what an earlier life had accepted, beside all else: it may be a hundred thousand jobs. Who
        asks for one that is not here yet waits."""
        if self.store.journal is not None:
            self.store.expected = asyncio.get_running_loop().create_future()
            self.store.arriving = asyncio.ensure_future(self._recover_all(self.store.journal))
            self._spawn(self.store.arriving)

    async def _recover_all(self, journal: Journal) -> None:
        left: list[str] | None = None
        while left is None or left:
            try:
                if left is None:
                    left = await asyncio.to_thread(journal.unfinished)
                    self.store.expect(left)
                some = await asyncio.to_thread(journal.found, left[:_AT_ONCE])
            except Exception:  # of a database: it may be back in a moment, and they are all there
                LOGGER.exception("the journal cannot be read, which is tried again")
                await asyncio.sleep(_RETRY_S)
                some = []
            else:
                left = left[_AT_ONCE:]
            if self._closing:
                return  # they are the next life's
            for earlier in some:
                self._resume_job(earlier)

    def _start_job(self, job: Job) -> None:
        self._remember(job)
        self._run(job)
        if self._closing:
            self.request_cancel(job, shutting_down())

    def _remember(self, job: Job) -> None:
        self.store.add(job, time.time())
        self._done[job] = asyncio.get_running_loop().create_future()
        if job.attached:
            self._answers[job] = asyncio.get_running_loop().create_future()

    # -- whoever waits for them ----------------------------------------------------------------------------------

    async def wait(self, job: Job, timeout: float | None = None) -> bool:
        """Wait for a job's outcome; ``False`` if it has none after ``timeout`` seconds."""
        done = self.done(job)
        if not done.done():
            await asyncio.wait({done}, timeout=timeout)
        return done.done()

    def done(self, job: Job) -> asyncio.Future[None]:
        """Done when the job has its outcome. Others wait for it too: it is not to be cancelled."""
        return self._done.get(job) or _over()

    def answered(self, job: Job) -> asyncio.Future[None]:
        """Done when a job that is held by a connection has its answer, or will have none; also not to be cancelled."""
        return self._answers.get(job) or _over()

    async def cancel(self, job: Job, reason: str = "cancelled by the caller") -> None:
        """Cancel a job, in whatever state, and return when it has its outcome. Its session is gone by then; one that
        takes longer than the grace to come up goes when it is there. A disk that is full holds up none that is held by
        a connection."""
        self.request_cancel(job, JobCancelled(reason))
        if job.attached:
            await asyncio.wait({self.answered(job)})
        await self.wait(job, _DISK_S if job.attached else None)

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new jobs and wait until every job has its outcome; ``False`` if some have none after ``timeout``."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.store.wait_for_recovery()
                for underway in (self._arriving, self._done):
                    if underway:
                        await asyncio.wait([*underway.values()])
                return True
        return False

    def resume(self) -> None:
        """Take jobs again after a drain."""
        self.draining = False

    # -- jobs end ------------------------------------------------------------------------------------------------

    def _finish(self, job: Job, outcome: Outcome) -> None:
        """End a job that nobody works on. Nobody is told of its outcome before it is on disk."""
        job.pack()
        if self.store.journal is None:
            self._end(job, outcome, time.time())
        else:
            self._spawn(self._end_on_disk(job, outcome, time.time()))

    async def _end_on_disk(self, job: Job, outcome: Outcome, at: float) -> None:
        if job.attached:  # of it nothing is kept but that it was
            self._answer(job, outcome)
        if await self.store.persist_outcome(job, outcome, at):
            self._end(job, outcome, at)
        else:
            self._done.pop(job).set_result(None)

    def _answer(self, job: Job, outcome: Outcome) -> None:
        job.outcome = outcome
        if (answer := self._answers.pop(job, None)) is not None:
            answer.set_result(None)

    def _end(self, job: Job, outcome: Outcome, at: float) -> None:
        if job.outcome is None:  # else its caller may have taken that away already
            self._answer(job, outcome)
        job.finished_at = at
        self._move(job, outcome.state)
        self._done.pop(job).set_result(None)
        for callback in self.on_finish:
            try:
                callback(job)
            except Exception:  # whoever looks on must not hold up the job, nor those who look on besides
                LOGGER.exception("job %s: on_finish hook %r failed", job.id, callback)

    def _move(self, job: Job, state: JobState) -> None:
        was = job.state
        job.move(state)
        self.store.record(job, time.time(), was)

    # -- its own tasks -------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, Any] | Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOGGER.error("defect in %s", type(self).__name__, exc_info=error)

    async def _settle(self) -> None:
        """Return when nothing is under way any more, and the journal is another's to have."""
        while pending := {*self._tasks, *self._arriving.values()}:
            await asyncio.wait(pending)
        if self.store.journal is not None:
            await self.store.journal.close()


def _over() -> asyncio.Future[None]:
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    over.set_result(None)
    return over


def restarted(lives: int) -> Failure:
    """What became of a job's attempt, for so many lives of the service."""
    often = "was restarted" if lives == 1 else f"was restarted {lives} times"
    why = f"the service {often} before it had an outcome"
    return Failure(FailureKind.SHUTDOWN, Origin.INFRASTRUCTURE, None, why)


def shutting_down() -> JobCancelled:
    """How jobs end that a service ends with."""
    return JobCancelled("the service is shutting down", kind=FailureKind.SHUTDOWN)
