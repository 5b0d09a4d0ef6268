# SPDX-License-Identifier: Apache-2.0
"""What the service remembers: live jobs, the ordered log of terminal outcomes, and the stream of transitions.

All three are bounded. A trainer submits millions of rollouts through one service; what has ended is kept for
``retain`` jobs so that a follower that was away can catch up, and then forgotten. A cursor that points at something
forgotten is an error that says so (:class:`CursorExpired`), never a silent gap.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.job import Job, JobState


EVENT_HISTORY = 10_000
"""Transitions kept for subscribers that reconnect with the id of the last one they saw."""


class CursorExpired(CallerError):
    """The cursor is older than what is kept; the follower has missed outcomes and must list afresh."""

    http_status = 410
    problem = "cursor-expired"


@dataclass(frozen=True, slots=True)
class Transition:
    """One entry of the event stream. ``seq`` counts up without gaps; ``at`` is seconds since the epoch."""

    seq: int
    at: float
    job_id: str
    group: str | None
    client: str
    state: JobState
    reward: float | None
    failure_kind: str | None


class JobStore:
    """In-memory store of one pipeline.

    Args:
        retain: terminal jobs to keep.
    """

    def __init__(self, retain: int = 2_000) -> None:
        self._retain = retain
        self._jobs: dict[str, Job] = {}
        self._groups: dict[str, set[str]] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()  # job id -> position in the log of terminal outcomes
        self._log_length = 0
        self._expired_before = 0
        self._events: deque[Transition] = deque(maxlen=EVENT_HISTORY)
        self._seq = 0
        self._submitted = 0
        self._wake: asyncio.Event = asyncio.Event()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job, at: float) -> None:
        """Remember a new job."""
        self._submitted += 1
        job.number = self._submitted
        self._jobs[job.id] = job
        if job.group is not None:
            self._groups.setdefault(job.group, set()).add(job.id)
        self.record(job, at)

    def get(self, job_id: str) -> Job | None:
        """The job, unless it never was or is forgotten."""
        return self._jobs.get(job_id)

    def in_group(self, group: str) -> list[Job]:
        """Remembered jobs of a group, in no particular order."""
        return [self._jobs[job_id] for job_id in self._groups.get(group, ())]

    def live(self) -> list[Job]:
        """Jobs without an outcome."""
        return [job for job in self._jobs.values() if not job.state.terminal]

    def find(self, *, state: JobState | None, group: str | None, after: int = 0) -> Iterator[Job]:
        """Remembered jobs that fit and whose ``number`` lies behind ``after``, oldest first."""
        for job in self._jobs.values():
            if job.number > after and (state is None or job.state is state) and (group is None or job.group == group):
                yield job

    def record(self, job: Job, at: float) -> None:
        """Publish the job's current state; a terminal one also enters the log of outcomes."""
        self._seq += 1
        outcome = job.outcome
        failure = outcome.failure if outcome else None
        self._events.append(
            Transition(
                seq=self._seq,
                at=at,
                job_id=job.id,
                group=job.group,
                client=job.client,
                state=job.state,
                reward=outcome.reward if outcome else None,
                failure_kind=failure.kind.value if failure else None,
            )
        )
        if job.state.terminal:
            self._ended[job.id] = self._log_length
            self._log_length += 1
            while len(self._ended) > self._retain:
                oldest, position = next(iter(self._ended.items()))
                self._expired_before = position + 1
                self._forget(oldest)
        self._wake.set()
        self._wake = asyncio.Event()

    # -- the ordered log of terminal outcomes --------------------------------------------------------------------

    @property
    def cursor(self) -> int:
        """Position behind the last terminal outcome."""
        return self._log_length

    def ended_after(self, cursor: int, limit: int) -> tuple[list[Job], int]:
        """Terminal jobs from position ``cursor`` on, in the order in which they ended, and the cursor to go on with.

        Raises:
            CursorExpired: outcomes at that position were forgotten.
            CallerError: the cursor lies in the future, e.g. because the service was restarted.
        """
        if cursor > self._log_length:
            raise CallerError(f"{cursor} lies behind the end of the log ({self._log_length})", field="after")
        if cursor < self._expired_before:
            raise CursorExpired(
                f"outcomes before {self._expired_before} are forgotten; list again and follow from there",
                field="after",
            )
        newer: list[Job] = []
        for job_id in reversed(self._ended):
            if self._ended[job_id] < cursor:
                break
            newer.append(self._jobs[job_id])
        newer.reverse()
        page = newer[:limit]
        return page, (self._ended[page[-1].id] + 1 if page else self._log_length)

    async def wait_for_end(self, cursor: int, timeout: float) -> None:
        """Return when there is a terminal outcome at or behind ``cursor``, or after ``timeout`` seconds."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self._log_length <= cursor:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or not await self._news_within(left):
                return

    # -- the stream of transitions -------------------------------------------------------------------------------

    async def events(self, after: int | None = None) -> AsyncIterator[Transition]:
        """Transitions from now on, or from behind ``after`` as far as history reaches. A reader too slow for the
        history sees a gap in ``seq`` and can list afresh; it never holds up the service."""
        seen = self._seq if after is None else after
        while True:
            wake = self._wake
            for event in self._newer_than(seen):
                seen = event.seq
                yield event
            if self._wake is wake:
                await wake.wait()

    def _newer_than(self, seen: int) -> list[Transition]:
        newer: list[Transition] = []
        for event in reversed(self._events):
            if event.seq <= seen:
                break
            newer.append(event)
        newer.reverse()
        return newer

    async def _news_within(self, seconds: float) -> bool:
        wake = self._wake
        try:
            async with asyncio.timeout(seconds):
                await wake.wait()
        except TimeoutError:
            return False
        return True

    def _forget(self, job_id: str) -> None:
        del self._ended[job_id]
        job = self._jobs.pop(job_id)
        if job.group is not None:
            members = self._groups[job.group]
            members.discard(job_id)
            if not members:
                del self._groups[job.group]
