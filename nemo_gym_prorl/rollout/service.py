# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Service that accepts jobs: base class of a node's pipeline and of a fleet's gateway.

- A service accepts a job or refuses it with a reason, ends the job once, and notifies all waiters.
- With a journal, acceptance and outcome are on disk before any caller is notified. Accepted jobs survive a restart,
  and no caller sees an outcome that a restart loses.
- The caller of an attached job receives the answer over its connection. So the journal keeps no answer of such a job,
  and the answer does not wait for the disk.
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

from nemo_gym_prorl.async_tasks import BackgroundLoops
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

_RECOVERY_BATCH = 100
"""Jobs of an earlier process that are recovered without yielding to the event loop."""
_RETRY_S = 1.0
"""Seconds after a failed read of the journal before the next one, so that a broken disk causes no busy loop."""
_DISK_WAIT_S = 1.0
"""Seconds that the cancellation of an attached job waits for the disk; its caller must not wait for a full disk."""


class RolloutService(ABC):
    """Service that accepts jobs, ends each once, and remembers them.

    Args:
        clock: returns monotonic seconds.
        journal: keeps jobs across a restart; closed with the service.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
        loops: BackgroundLoops | None = None,
    ) -> None:
        self.loops = loops or BackgroundLoops(clock)
        self.store = JobStore(settings.retain_bytes, settings.retain_s, clock, journal)
        self.draining = False
        self.on_finish: list[Callable[[Job], None]] = []
        """Called with each job that reached its outcome, for example by metrics; exceptions are logged."""
        self._defaults = settings
        self._done: dict[Job, asyncio.Future[None]] = {}
        """Futures of jobs without an outcome, and of jobs whose outcome is being written to disk."""
        self._answers: dict[Job, asyncio.Future[None]] = {}
        """Futures of attached jobs without an outcome; a write to disk does not delay them."""
        self._arriving: dict[str, asyncio.Task[Job]] = {}
        """New jobs that are being written to disk."""
        self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @abstractmethod
    def _environments_now(self) -> Environments:
        """Return the environments of the service; raise a ``CallerError`` while the environments are unknown."""

    @abstractmethod
    def _may_queue(self, client: str, most: int) -> bool:
        """Return whether a client may queue one more job, if all clients together may queue ``most``."""

    @abstractmethod
    def _run(self, job: Job) -> None:
        """Start a job that is in the store."""

    @abstractmethod
    def _resume_job(self, earlier: Unfinished) -> None:
        """Recover a job that an earlier process accepted."""

    @abstractmethod
    def request_cancel(self, job: Job, error: RolloutError) -> None:
        """Request a job's cancellation with ``error`` as its failure; no-op for an ended or cancelled job."""

    @abstractmethod
    async def fork(self, parent: Job, turn: int | None, requests: Sequence[JobRequest]) -> list[Job]:
        """Accept jobs that share the first turns of another job and continue independently.

        Args:
            parent: a live or ended job.
            turn: turn of the fork; ``None`` for the latest with a checkpoint.
            requests: options of each fork.

        Raises:
            QueueFull, JobConflict, RolloutForgotten, Draining: a fork is refused; forks accepted before are cancelled.
            NoCheckpoint: the parent has no checkpoint after that turn.
            CallerError: the environment or this service takes no checkpoints.
        """

    @abstractmethod
    async def kept_turns(self, rollout: str) -> list[int]:
        """Return the turns after which a rollout can be forked, ascending; empty for an unknown rollout."""

    @abstractmethod
    def status(self) -> StatusView:
        """Return counts per stage, pool and state."""

    def share(self, clients: Mapping[str, float]) -> None:
        """Set the clients' relative shares of slots and limits. Every other client has one share of slots; all other
        clients together have one share of limits."""
        self.store.shares = clients

    async def accept(self, request: JobRequest, *, bounded: bool = True) -> Job:
        """Submit a job, and return once the job is on disk, if there is a journal; idempotent like :meth:`submit`.

        Raises:
            JournalUnavailable: the journal cannot be written.
            CallerError: as :meth:`submit`.
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
            arriving = asyncio.create_task(self._write_ahead(journal, job))
            self._arriving[job.id] = arriving
            arriving.add_done_callback(lambda _: self._arriving.pop(job.id))
        accepted = await asyncio.shield(arriving)  # a disconnect does not revoke the acceptance
        return same_job(accepted, request, digest)

    async def _write_ahead(self, journal: Journal, job: Job) -> Job:
        """Write a new job to the journal and start it; return the job, or an ended job that already has its id."""
        taken = False
        try:
            taken = await journal.accepted(job)
        finally:
            if not taken and job.checkpoint_store is not None:  # the refused job must not hold checkpoints
                job.checkpoint_store.ended(job, keep=False)
        if taken:
            self._start_job(job)
            return job
        known = await self.store.fetch(job.id)
        assert known is not None, "the journal knows the id, or fetch raises RolloutForgotten"
        return known

    def submit(self, request: JobRequest, *, bounded: bool = True) -> Job:
        """Accept a job in memory only; idempotent for the same id and row.

        Args:
            request: the job.
            bounded: refuse the job when the queue is full. Gym's ``/run`` passes ``False``: its client would retry
                without a pause, and its open connections bound the queue.

        Raises:
            QueueFull, JobConflict, RolloutForgotten, Draining: see the classes.
            CallerError: the row cannot be written as JSON, or no environment takes the row.
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
        """Create the job of a request after all checks; raise the errors of :meth:`submit`."""
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
        """Check that a client may queue ``jobs`` more jobs. Raise :class:`QueueFull` if the queue is full, and the
        client has its fair share."""
        most = self._defaults.max_queued
        if not self._may_queue(client, most - len(self._arriving) - jobs + 1):
            raise QueueFull(f"the queue is full (max_queued {most}, {jobs} more requested); try again later")

    async def _accept_forks(self, parent: Job, requests: Sequence[JobRequest], **resume_from: Any) -> list[Job]:
        """Accept all forks of a job, or none; ``resume_from`` is their ``fork=`` or ``resume_point=``. If a fork is
        refused, cancel those accepted before, and raise its ``CallerError``."""
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
                    self.request_cancel(job, JobCancelled("another fork of the request was refused"))
            raise
        return jobs

    def _recover_jobs(self) -> None:
        """Start to recover the accepted jobs of an earlier process, in the background since there may be 100,000. A
        request for a job that is not recovered yet waits for its recovery."""
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
                some = await asyncio.to_thread(journal.found, left[:_RECOVERY_BATCH])
            except Exception:  # database errors may be transient
                LOGGER.exception("the journal cannot be read; reading is retried in %g s", _RETRY_S)
                await asyncio.sleep(_RETRY_S)
                some = []
            else:
                left = left[_RECOVERY_BATCH:]
            if self._closing:
                return  # the next process recovers the remaining jobs
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

    async def wait(self, job: Job, timeout: float | None = None) -> bool:
        """Wait for a job's outcome, by default without limit; return ``False`` if ``timeout`` seconds passed first."""
        done = self.done(job)
        if not done.done():
            await asyncio.wait({done}, timeout=timeout)
        return done.done()

    def done(self, job: Job) -> asyncio.Future[None]:
        """Return a future that is done when the job has its outcome; shared, so the caller must not cancel it."""
        return self._done.get(job) or _completed_future()

    def answered(self, job: Job) -> asyncio.Future[None]:
        """Return a future that is done when an attached job has its answer; already done for any other job. Shared, so
        the caller must not cancel it."""
        return self._answers.get(job) or _completed_future()

    async def cancel(self, job: Job, reason: str = "cancelled by the caller") -> None:
        """Cancel a job in any state, and return once the job has its outcome and its session is released.

        If INIT ignores its cancellation, its session is released later, when INIT returns. For an attached job, the
        call waits at most 1 s for the disk.
        """
        self.request_cancel(job, JobCancelled(reason))
        if job.attached:
            await asyncio.wait({self.answered(job)})
        await self.wait(job, _DISK_WAIT_S if job.attached else None)

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new jobs, and wait until every job has its outcome; return ``False`` after ``timeout`` seconds."""
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
        """Accept jobs again after a drain."""
        self.draining = False

    def _finish(self, job: Job, outcome: Outcome) -> None:
        """End a job that no stage works on. Waiters are notified once the outcome is on disk."""
        job.pack()
        if self.store.journal is None:
            self._end(job, outcome, time.time())
        else:
            self._spawn(self._end_on_disk(job, outcome, time.time()))

    async def _end_on_disk(self, job: Job, outcome: Outcome, at: float) -> None:
        if job.attached:  # the journal keeps no answer of an attached job, so the caller need not wait
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
        if job.outcome is None:  # else the attached caller may have taken the answer already
            self._answer(job, outcome)
        job.finished_at = at
        self._move(job, outcome.state)
        self._done.pop(job).set_result(None)
        for callback in self.on_finish:
            try:
                callback(job)
            except Exception:  # an observer must not block the job or other observers
                LOGGER.exception("job %s: on_finish hook %r failed", job.id, callback)

    def _move(self, job: Job, state: JobState) -> None:
        was = job.state
        job.move(state)
        self.store.record(job, time.time(), was)

    def _spawn(self, work: Coroutine[Any, Any, Any] | Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOGGER.error("%s: background task failed", type(self).__name__, exc_info=error)

    async def _settle(self) -> None:
        while pending := {*self._tasks, *self._arriving.values()}:
            await asyncio.wait(pending)
        if self.store.journal is not None:
            await self.store.journal.close()


def _completed_future() -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future


def restarted(restarts: int) -> Failure:
    """Return the failed attempt of a job that ``restarts`` restarts of the service interrupted."""
    often = "was restarted" if restarts == 1 else f"was restarted {restarts} times"
    why = f"the service {often} before it had an outcome"
    return Failure(FailureKind.SHUTDOWN, Origin.INFRASTRUCTURE, None, why)


def shutting_down() -> JobCancelled:
    """Return the error of jobs that are cancelled because their service shuts down."""
    return JobCancelled("the service is shutting down", kind=FailureKind.SHUTDOWN)
