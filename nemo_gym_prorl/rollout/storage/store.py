# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Job store of a service, in memory: jobs, the ordered log of terminal outcomes, and the stream of transitions.

- Memory is bounded in bytes. Each result has a time to live, which ends when a client reads the result.
- Above the limit the store forgets results whose time to live is over. If younger results fill the limit, the service
  refuses new jobs.
- Nothing is forgotten silently: a cursor behind which outcomes are missing and the id of a forgotten job are errors.

With a journal an outcome is on disk before it enters the log. Results that memory forgot are then read from the
journal, the log continues across restarts, and ids stay known.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import uuid
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from nemo_gym_prorl.failures import FailureKind
from nemo_gym_prorl.rollout.job import Job, JobState, Outcome
from nemo_gym_prorl.rollout.request import Cursor, CursorExpired, JobConflict, JobRequest, QueueFull, RolloutForgotten
from nemo_gym_prorl.rollout.scheduling.fair_queue import is_under_fair_share


if TYPE_CHECKING:  # so that clients of the job API import no database
    from nemo_gym_prorl.rollout.storage.journal import Journal


EVENT_HISTORY = 10_000
"""Transitions kept for subscribers that reconnect with the id of the last transition seen; bounds memory."""

REMEMBERED_IDS = 100_000
"""Number of ids of forgotten jobs that stay known; they take some 15 MB at most."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One entry of the event stream, as ``/v1/events`` sends it. ``seq`` counts up without gaps; ``cursor`` is the
    position behind the entry; ``at`` is in seconds since the epoch; ``id`` is the job's."""

    seq: int
    cursor: str
    at: float
    id: str
    group: str | None
    client: str
    state: JobState
    reward: float | None
    failure_kind: str | None


@dataclass(slots=True)
class _Entry:
    """Terminal job: its position in the log of outcomes, its size in bytes, and the monotonic time of its end."""

    position: int
    size: int
    ended: float


class JobStore:
    """Jobs of one service.

    Args:
        retain_bytes: memory limit for terminal jobs.
        keep_unread_s: time to live, in seconds, of an unread result.
        clock: returns monotonic seconds.
        journal: keeps jobs and outcomes across a restart; ``None`` without one.
    """

    def __init__(
        self,
        retain_bytes: int = 2**30,
        keep_unread_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
    ) -> None:
        self.journal = journal
        self.event_epoch = uuid.uuid4().hex[:12]
        """Epoch of transitions and of pages of a listing, whose counts restart with each start."""
        self.epoch = self.event_epoch if journal is None else journal.epoch
        """Epoch of the log of outcomes."""
        self._retain_bytes = retain_bytes
        self._keep_unread_s = keep_unread_s
        self._clock = clock
        self.shares: Mapping[str, float] = {}
        """Shares of clients with keys of their own."""
        self._jobs: dict[str, Job] = {}
        self._numbers: list[tuple[int, str]] = []
        """Numbers and ids of jobs, ascending; ids of forgotten jobs are removed in batches."""
        self._groups: dict[str, set[str]] = {}
        self.states: Counter[JobState] = Counter()
        """Number of remembered jobs by state."""
        self._log: dict[int, Job] = {}
        self._log_length = self._expired_before = 0 if journal is None else journal.end
        self._unread: OrderedDict[Job, _Entry] = OrderedDict()  # in the order in which the jobs ended
        self._read: OrderedDict[Job, _Entry] = OrderedDict()  # in the order in which results were read
        self.retained_bytes = 0
        """Bytes of the terminal jobs."""
        self.retained_of: Counter[str] = Counter()
        """Bytes of the terminal jobs by client."""
        self._forgotten_ids: OrderedDict[bytes, None] = OrderedDict()
        self._leaving: list[list[Job]] = []
        """Per pending read of the journal, the jobs forgotten since it began: the read may have missed them."""
        self._events: deque[Transition] = deque(maxlen=EVENT_HISTORY)
        self._seq = 0
        self._submitted = 0 if journal is None else journal.numbered
        self._wake: asyncio.Event = asyncio.Event()
        self.arriving: asyncio.Future[None] | None = None
        """Done when all accepted jobs of an earlier process are recovered."""
        self.expected: asyncio.Future[frozenset[str]] | None = None
        """Ids of the jobs to recover."""

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def full(self) -> bool:
        """Whether results whose time to live is not over fill the memory limit; other results are forgotten first."""
        self._forget_over_bound()
        return self.retained_bytes >= self._retain_bytes and not self._read

    def add(self, job: Job, at: float) -> None:
        """Add a new job. A delivered job with the same id then stays only in the log of outcomes."""
        self._submitted += 1
        job.number = self._submitted
        if (delivered := self._jobs.pop(job.id, None)) is not None:
            self._leave_group(delivered)
        self._jobs[job.id] = job
        self._numbers.append((job.number, job.id))
        if len(self._numbers) > 2 * len(self._jobs) + 64:
            self._numbers = [(known.number, known.id) for known in self._jobs.values()]
        if job.group is not None:
            self._groups.setdefault(job.group, set()).add(job.id)
        self.record(job, at)

    def get(self, job_id: str) -> Job | None:
        """Return a job that is in memory, or ``None``."""
        return self._jobs.get(job_id)

    def is_forgotten(self, job_id: str) -> bool:
        """Return whether a job with this id ended and is forgotten; such an id is not used again."""
        return _mark(job_id) in self._forgotten_ids

    def known(self, request: JobRequest, digest: bytes) -> Job | None:
        """Return the job in memory that a request repeats; ``None`` for a new job.

        Args:
            request: the request.
            digest: digest of the request.

        Raises:
            JobConflict: the id belongs to another job, or one of the two is attached to a connection.
            RolloutForgotten: the id belongs to a forgotten job.
        """
        if request.id is None:
            return None
        job = self.get(request.id)
        if job is not None and not job.delivered:
            return same_job(job, request, digest)
        if self.is_forgotten(request.id):
            raise RolloutForgotten(f"rollout {request.id!r} has ended and is forgotten; a new one needs another id")
        return None

    def refuse_if_full(self, client: str) -> None:
        """Refuse a new job while unread results fill the limit.

        Raises:
            QueueFull: the limit is reached, and this client has its fair share.
        """
        if self.full and not is_under_fair_share(client, self._retain_bytes, self.retained_of, self.shares):
            raise QueueFull(
                f"unread results fill {self.retained_bytes / 2**20:.0f} of "
                f"{self._retain_bytes / 2**20:.0f} MiB; read them (GET /v1/rollouts/ID, or follow with "
                "results=true), then submit again"
            )

    async def fetch(self, job_id: str) -> Job | None:
        """Return a job from memory or journal; ``None`` for an unknown id.

        Raises:
            RolloutForgotten: the job is forgotten.
        """
        found = (await self.fetch_all([job_id])).get(job_id)
        if found is None and self.is_forgotten(job_id):
            raise RolloutForgotten(f"rollout {job_id!r} has ended and is forgotten")
        return found

    async def fetch_all(self, job_ids: Iterable[str]) -> dict[str, Job]:
        """Return the given jobs that are in memory or in the journal."""
        found = {job_id: self._jobs.get(job_id) for job_id in job_ids}
        missing = [job_id for job_id, job in found.items() if job is None]
        if missing and self.journal is not None:
            await self.wait_for_recovery(*missing)
            kept = await self.journal.find(missing)
            for job_id in missing:
                found[job_id] = self._jobs.get(job_id) or kept.get(job_id)
                if job_id in kept and kept[job_id] is None:
                    self._remember_forgotten(job_id)
        return {job_id: job for job_id, job in found.items() if job is not None}

    async def in_group(self, group: str) -> list[Job]:
        """Return all jobs of a group, in no particular order."""
        await self.wait_for_recovery()
        kept = await self._kept(state=None, group=group)
        return [*(self._jobs[job_id] for job_id in self._groups.get(group, ())), *kept.values()]

    async def wait_for_recovery(self, *ids: str) -> None:
        """Wait until the accepted jobs of an earlier process are recovered. With ``ids``, wait only if one of these
        jobs is still to be recovered."""
        if self.arriving is None or self.arriving.done():
            return
        if ids and self.expected is not None:
            either: set[asyncio.Future[Any]] = {self.expected, self.arriving}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self.expected.done() and not self.expected.result() & {*ids}:
                return
        await asyncio.wait({self.arriving})

    def expect(self, ids: Iterable[str]) -> None:
        """Set the ids of the jobs to recover."""
        assert self.expected is not None, "recovery has started"
        self.expected.set_result(frozenset(ids))

    def live(self) -> list[Job]:
        """Return the jobs without an outcome."""
        return [job for job in self._jobs.values() if not job.state.terminal]

    @property
    def journal_error(self) -> str | None:
        """Error of the journal's last commit, if it failed."""
        return None if self.journal is None else self.journal.failing

    @property
    def submitted(self) -> int:
        """Number of submitted jobs, forgotten ones included."""
        return self._submitted

    def find(self, *, state: JobState | None, group: str | None, after: int = 0) -> Iterator[Job]:
        """Yield jobs in memory that match and have a number above ``after``, oldest first; ``None`` matches all."""
        numbers = self._numbers
        if group is not None:
            numbers = sorted((self._jobs[job_id].number, job_id) for job_id in self._groups.get(group, ()))
        for index in range(bisect_right(numbers, after, key=itemgetter(0)), len(numbers)):
            number, job_id = numbers[index]
            job = self._jobs.get(job_id)
            if job is not None and job.number == number and job.fits(state, group, after):
                yield job

    async def page(
        self, *, state: JobState | None, group: str | None, after: int, limit: int, content: bool
    ) -> list[Job]:
        """Return the first ``limit`` jobs that match, as for :meth:`find`, from memory and journal. Jobs from the
        journal have a result only with ``content``."""
        await self.wait_for_recovery()
        kept = await self._kept(state=state, group=group, after=after, limit=limit, content=content)
        here = islice(self.find(state=state, group=group, after=after), limit)
        numbered = kept | {job.number: job for job in here}
        return [numbered[number] for number in sorted(numbered)][:limit]

    async def _kept(self, *, state: JobState | None, after: int = 0, **which: Any) -> dict[int, Job]:
        """Return, by number, the jobs that are only in the journal, and those that memory forgot during the read."""
        if self.journal is None or not (state is None or state.terminal):
            return {}
        leaving: list[Job] = []
        self._leaving.append(leaving)
        try:
            kept = await self.journal.listed(state=state, after=after, **which)
        finally:
            self._leaving = [one for one in self._leaving if one is not leaving]
        found = [*kept, *(job for job in leaving if job.fits(state, which["group"], after))]
        return {job.number: job for job in found if job.id not in self._jobs}

    async def persist_outcome(self, job: Job, outcome: Outcome, at: float) -> bool:
        """Write the outcome of a packed job to the journal, if any. Return ``False`` if the service shuts down
        and the job stays without an outcome, to be resumed by the next process."""
        if self.journal is None:
            return True
        if not job.attached and outcome.failure is not None and outcome.failure.kind is FailureKind.SHUTDOWN:
            return False
        return await self.journal.ended(job, outcome, at) is not None

    def record(self, job: Job, at: float, was: JobState | None = None) -> None:
        """Publish the job's current state; a terminal state also enters the log of outcomes.

        Args:
            job: the job.
            at: seconds since the epoch.
            was: previous state; ``None`` for a new job.
        """
        if was is not None:
            self.states[was] -= 1
        self.states[job.state] += 1
        self._seq += 1
        outcome = job.outcome
        retried = job.failures[-1] if job.state is JobState.QUEUED and job.failures else None
        failure = outcome.failure if outcome else retried
        self._events.append(
            Transition(
                seq=self._seq,
                cursor=str(Cursor(self.event_epoch, self._seq)),
                at=at,
                id=job.id,
                group=job.group,
                client=job.client,
                state=job.state,
                reward=outcome.reward if outcome else None,
                failure_kind=failure.kind.value if failure else None,
            )
        )
        if job.state.terminal:
            self._unread[job] = _Entry(self._log_length, job.size, self._clock())
            self._retain(job, job.size)
            self._log[self._log_length] = job
            self._log_length += 1
            if job.delivered or job.state is JobState.CANCELLED:
                self.mark_read(job)  # the caller has the answer, or does not want one
            self._forget_over_bound()
        self._wake.set()
        self._wake = asyncio.Event()

    # -- reading -------------------------------------------------------------------------------------------------

    def mark_read(self, job: Job) -> None:
        """End the time to live of a job's result; no-op for a job without an outcome."""
        if (entry := self._unread.pop(job, None)) is not None:
            self._read[job] = entry

    def _retain(self, job: Job, more: int) -> None:
        self.retained_bytes += more
        self.retained_of[job.client] += more
        if not self.retained_of[job.client]:
            del self.retained_of[job.client]  # callers choose client names, so the counter must not grow

    def deliver(self, job: Job) -> None:
        """Drop a job's row and result, and free its id, because the attached caller has the answer."""
        self.mark_read(job)
        job.deliver()
        if (entry := self._read.get(job)) is not None:
            self._retain(job, job.size - entry.size)
            entry.size = job.size

    # -- the ordered log of terminal outcomes --------------------------------------------------------------------

    @property
    def cursor(self) -> Cursor:
        """Cursor behind the last terminal outcome."""
        return Cursor(self.epoch, self._log_length)

    async def ended_after(self, cursor: Cursor, limit: int, *, content: bool = False) -> tuple[list[Job], Cursor]:
        """Return terminal jobs behind ``cursor`` in order of their end, and the next cursor. Jobs from the journal
        have a result only with ``content``.

        Raises:
            CursorExpired: an outcome behind the cursor is forgotten, or the cursor has another epoch.
            CallerError: the cursor lies beyond the log's end.
        """
        start = cursor.within(self.epoch, self._first, self._log_length)
        end = min(start + limit, self._log_length)
        found = {position: self._log[position] for position in range(start, end) if position in self._log}
        if len(found) < end - start and self.journal is not None:
            found = await self.journal.between(start, end, content=content) | found
        if len(found) < end - start:
            raise CursorExpired(f"outcomes behind {cursor} are forgotten; list again and follow from the new cursor")
        return [found[position] for position in range(start, end)], Cursor(self.epoch, end)

    @property
    def _first(self) -> int:
        """Position from which on all outcomes are in memory or in the journal."""
        return self._expired_before if self.journal is None else min(self._expired_before, self.journal.first)

    async def wait_for_end(self, cursor: Cursor, timeout: float) -> None:
        """Return once there is a terminal outcome behind ``cursor``, or after ``timeout`` seconds.

        Raises:
            CursorExpired, CallerError: as :meth:`ended_after`.
        """
        start = cursor.within(self.epoch, self._first, self._log_length)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._log_length <= start:
                    await self._wake.wait()

    # -- the stream of transitions -------------------------------------------------------------------------------

    def events(self, after: Cursor | None = None) -> AsyncIterator[Transition]:
        """Follow transitions from now on, or from behind the cursor ``after``.

        A slow reader never blocks the service: the iterator raises :class:`CursorExpired` once transitions that the
        reader has not seen are forgotten.

        Raises:
            CursorExpired: transitions behind the cursor are forgotten, or the cursor has another epoch.
            CallerError: the cursor lies beyond the last transition.
        """
        return self._follow(
            self._seq if after is None else after.within(self.event_epoch, self._first_event, self._seq)
        )

    async def _follow(self, seen: int) -> AsyncIterator[Transition]:
        while True:
            wake = self._wake
            if seen < self._first_event:
                raise CursorExpired(
                    f"this reader was too slow: transitions {seen + 1} to {self._first_event} are forgotten; list "
                    "again and follow from there"
                )
            for event in self._newer_than(seen):
                seen = event.seq
                yield event
            if self._wake is wake:
                await wake.wait()

    @property
    def _first_event(self) -> int:
        """Number of forgotten transitions."""
        return self._seq - len(self._events)

    def _newer_than(self, seen: int) -> list[Transition]:
        newer: list[Transition] = []
        for event in reversed(self._events):
            if event.seq <= seen:
                break
            newer.append(event)
        newer.reverse()
        return newer

    # -- forgetting ----------------------------------------------------------------------------------------------

    def _forget_over_bound(self) -> None:
        while self.retained_bytes > self._retain_bytes:
            if self._read:
                job, entry = self._read.popitem(last=False)
            else:
                job, entry = next(iter(self._unread.items()))
                if self._clock() - entry.ended < self._keep_unread_s:
                    return
                del self._unread[job]
            self._retain(job, -entry.size)
            self._forget(job, entry)

    def _forget(self, job: Job, entry: _Entry) -> None:
        del self._log[entry.position]
        for leaving in self._leaving:
            leaving.append(job)
        self._expired_before = max(self._expired_before, entry.position + 1)
        self.states[job.state] -= 1
        if not job.delivered and self.journal is None:
            self._remember_forgotten(job.id)
        if self._jobs.get(job.id) is not job:
            return  # delivered, and another job has its id by now
        del self._jobs[job.id]
        self._leave_group(job)

    def _remember_forgotten(self, job_id: str) -> None:
        self._forgotten_ids[_mark(job_id)] = None
        if len(self._forgotten_ids) > REMEMBERED_IDS:
            self._forgotten_ids.popitem(last=False)

    def _leave_group(self, job: Job) -> None:
        if job.group is not None:
            members = self._groups[job.group]
            members.discard(job.id)
            if not members:
                del self._groups[job.group]


def same_job(known: Job, request: JobRequest, digest: bytes) -> Job:
    """Return the known job if the request repeats it.

    Raises:
        JobConflict: digest or training run differ, or one of the two is attached to a connection.
    """
    if known.attached or request.attached:
        raise JobConflict.with_anothers(request.id)
    if known.digest != digest or known.run != request.run:
        other = "of another training" if known.digest == digest else "with another row"
        raise JobConflict(f"job {request.id!r} exists {other}; choose another id", field="id")
    return known


def _mark(job_id: str) -> bytes:
    return hashlib.blake2b(job_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
