# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Job store of a service, in memory: jobs, the ordered log of terminal outcomes, and the stream of transitions.

- Results have a time to live and a limit of bytes. Beyond either the store forgets the oldest results, read or not.
- Nothing is forgotten silently: a cursor behind which outcomes are missing and the id of a forgotten job are errors.

With a journal an outcome is on disk before it enters the log. Results that memory forgot are then read from the
journal, the log continues across restarts, and ids stay known.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from nemo_gym_prorl.failures import FailureKind
from nemo_gym_prorl.rollout.job import Job, JobState, Outcome
from nemo_gym_prorl.rollout.request import Cursor, CursorExpired, JobConflict, JobRequest, RolloutForgotten
from nemo_gym_prorl.rollout.settings import RETAIN_BYTES, RETAIN_S


if TYPE_CHECKING:  # so that clients of the job API import no database
    from nemo_gym_prorl.rollout.storage.journal import Journal


LOGGER = logging.getLogger(__name__)

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
        retain_s: time to live of a terminal job in seconds.
        clock: returns monotonic seconds.
        journal: keeps jobs and outcomes across a restart; ``None`` without one.
    """

    def __init__(
        self,
        retain_bytes: int = RETAIN_BYTES,
        retain_s: float = RETAIN_S,
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
    ) -> None:
        self.journal = journal
        self.event_epoch = uuid.uuid4().hex[:12]
        """Epoch of transitions and of pages of a listing, whose counts restart with each start."""
        self.epoch = self.event_epoch if journal is None else journal.epoch
        """Epoch of the log of outcomes."""
        self._retain_bytes = retain_bytes
        self._retain_s = retain_s
        self._clock = clock
        self.shares: Mapping[str, float] = {}
        """Shares of clients with keys of their own."""
        self._jobs: dict[str, Job] = {}
        self._groups: dict[str, dict[str, Job]] = {}
        """Jobs by id, by group."""
        self.states: Counter[JobState] = Counter()
        """Number of remembered jobs by state."""
        self._log: dict[int, Job] = {}
        self._log_length = self._expired_before = 0 if journal is None else journal.end
        self._ended: OrderedDict[Job, _Entry] = OrderedDict()  # in the order in which the jobs ended
        self.retained_bytes = 0
        """Bytes of the terminal jobs."""
        self.lost = 0
        """Number of results that were forgotten before their time, for want of room, and are in no journal."""
        self._forgotten_ids: OrderedDict[bytes, None] = OrderedDict()
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

    def add(self, job: Job, at: float) -> None:
        """Add a new job. A delivered job with the same id then stays only in the log of outcomes."""
        self._submitted += 1
        job.number = self._submitted
        if (delivered := self._jobs.get(job.id)) is not None:
            self._remove(delivered)  # so that jobs stay in the order of their numbers
        self._jobs[job.id] = job
        if job.group is not None:
            self._groups.setdefault(job.group, {})[job.id] = job
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
            raise self._forgotten(request.id)
        return None

    def _forgotten(self, job_id: str) -> RolloutForgotten:
        longer = "set a journal, or raise retain_bytes"
        if self.journal is not None:
            longer = "raise journal_keep_s or journal_keep_bytes"
        return RolloutForgotten(
            f"rollout {job_id!r} has ended and its result is forgotten; to keep results longer, {longer}; a new "
            "rollout needs another id"
        )

    async def fetch(self, job_id: str) -> Job | None:
        """Return a job from memory or journal; ``None`` for an unknown id.

        Raises:
            RolloutForgotten: the job is forgotten.
        """
        found = (await self.fetch_all([job_id])).get(job_id)
        if found is None and self.is_forgotten(job_id):
            raise self._forgotten(job_id)
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
        return [*self.find(state=None, group=group), *kept.values()]

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
        """Return jobs in memory that match and have a number above ``after``, oldest first; ``None`` matches all."""
        jobs = self._jobs if group is None else self._groups.get(group, {})
        return (job for job in jobs.values() if job.fits(state, group, after))

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
        """Return, by number, the jobs that are only in the journal."""
        if self.journal is None or not (state is None or state.terminal):
            return {}
        kept = await self.journal.listed(state=state, after=after, **which)
        return {job.number: job for job in kept if job.id not in self._jobs}

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
            self._ended[job] = _Entry(self._log_length, job.size, self._clock())
            self.retained_bytes += job.size
            self._log[self._log_length] = job
            self._log_length += 1
            self._forget_oldest()
        self._wake.set()
        self._wake = asyncio.Event()

    def deliver(self, job: Job) -> None:
        """Drop a job's row and result, and free its id, because the attached caller has the answer."""
        job.deliver()
        if (entry := self._ended.get(job)) is not None:
            self.retained_bytes += job.size - entry.size
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

    def _forget_oldest(self) -> None:
        """Forget the results beyond the limits of age and bytes. Without a journal they are lost; the first loss for
        want of room is logged."""
        while self._ended:
            job, entry = next(iter(self._ended.items()))
            age_s = self._clock() - entry.ended
            is_early = age_s < self._retain_s
            if is_early and self.retained_bytes <= self._retain_bytes:
                return
            del self._ended[job]
            self.retained_bytes -= entry.size
            self._forget(job, entry)
            if is_early and self.journal is None and not job.delivered:
                if not self.lost:
                    LOGGER.warning(
                        "results fill retain_bytes (%d MiB): the oldest, of rollout %s, is forgotten after %.0f s; "
                        "raise retain_bytes, or set a journal",
                        self._retain_bytes >> 20,
                        job.id,
                        age_s,
                    )
                self.lost += 1

    def _forget(self, job: Job, entry: _Entry) -> None:
        del self._log[entry.position]
        self._expired_before = max(self._expired_before, entry.position + 1)
        self.states[job.state] -= 1
        if not job.delivered and self.journal is None:
            self._remember_forgotten(job.id)
        if self._jobs.get(job.id) is job:  # else delivered, and another job has its id by now
            self._remove(job)

    def _remove(self, job: Job) -> None:
        del self._jobs[job.id]
        if job.group is not None:
            del self._groups[job.group][job.id]
            if not self._groups[job.group]:
                del self._groups[job.group]

    def _remember_forgotten(self, job_id: str) -> None:
        self._forgotten_ids[_mark(job_id)] = None
        if len(self._forgotten_ids) > REMEMBERED_IDS:
            self._forgotten_ids.popitem(last=False)


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
