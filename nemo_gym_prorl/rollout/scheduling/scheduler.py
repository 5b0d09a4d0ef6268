# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Stage scheduler: three bounded pools, their queues, and the READY buffer between INIT and RUN. Pure.

The scheduler owns no task, clock or socket. Its inputs are events (`submit`, `worked`, `requeue`, `hold`, …), and its
outputs are decisions to start a job in a stage (:class:`Start`). The pipeline executes the decisions and reports back.
So a test can check thousands of schedules without a sandbox.

Invariants:

- A stage never works on more jobs than its pool has slots.
- INIT starts a job only while session capacity is free: jobs with a session (in INIT, READY or RUN) never exceed
  ``run + ready``. So INIT never blocks on a full READY buffer.
- Jobs in a stage on hold, waiting or working, do not count against slots and session capacity, because their server
  does not answer. So while n environments are down, up to n + 1 times the slots and sessions may be in use.
- No environment takes a whole stage while another could use the stage. A slot of each stage stays free for each
  environment that has no slot there and has jobs in earlier stages. A session stays free for each environment that has
  no session and waits for INIT. Environments below their share of sessions get INIT's last slots.
- A :class:`Start` takes a slot, and exactly one later event of that job frees the slot.
- Siblings that are scored together (:mod:`.fair_queue`) start EVAL at once, in one slot; siblings that wait for the
  others hold no slot.
- A stage on hold for an environment (:meth:`StageScheduler.hold`) starts no job of the environment. Other environments
  are not affected.
- Waiting jobs are ordered by :mod:`.fair_queue`. The load of a client or environment is counted in slots of the stage.
  For INIT, sessions are counted, because rows with a short INIT would otherwise fill READY and RUN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import Enum, auto

from nemo_gym_prorl.failures import Stage
from nemo_gym_prorl.rollout.scheduling.fair_queue import FairQueue, GroupBarrier, Member, is_under_fair_share
from nemo_gym_prorl.rollout.settings import PoolSizes


@dataclass(frozen=True, slots=True)
class Start:
    """Decision to start a job in a stage. The job then holds a slot; the jobs of a cohort (``member``) share one."""

    job_id: str
    stage: Stage
    member: Member | None = None


class _Position(Enum):
    WAITING = auto()
    WORKING = auto()
    GATHERED = auto()
    """Before EVAL, outside the queue: siblings are missing, or a sibling represents the cohort in the queue."""
    SHARING = auto()
    """In EVAL, in the slot of a sibling."""
    PAUSED = auto()
    """Removed from its queue, but counted until its session is released."""
    OUTSIDE = auto()
    """New, or between two attempts; holds no slot and no session."""


_WAITS = frozenset({_Position.WAITING, _Position.GATHERED})
_WORKS = frozenset({_Position.WORKING, _Position.SHARING})


@dataclass(slots=True)
class _JobEntry:
    client: str
    priority: int
    stage: Stage
    position: _Position
    environment: str


class StageScheduler:
    """Stage pools of one pipeline.

    Args:
        sizes: slots per stage and the size of the READY buffer.
        shares: shares by environment, relative to each other; 1 by default.
        cohorts: number of siblings that are scored together, by environment; 1 by default.
    """

    def __init__(
        self,
        sizes: PoolSizes,
        shares: Mapping[str, float] | None = None,
        cohorts: Mapping[str, int] | None = None,
    ) -> None:
        self.sizes = sizes
        self._cohorts = GroupBarrier(cohorts or {})
        self._shares = dict(shares or {})
        self.client_shares: Mapping[str, float] = {}
        """Shares of clients with keys of their own; set by :meth:`share`."""
        self._queued: Counter[str] = Counter()
        """Jobs in INIT's queue by client."""
        self._jobs: dict[str, _JobEntry] = {}
        self._load: Counter[tuple[Stage, str, str]] = Counter()
        """Load by stage, client and environment: slots in use, and for INIT sessions."""
        self._queues = {stage: self._queue(stage) for stage in Stage}
        self._live: Counter[str] = Counter()
        """Jobs by environment."""
        self._working: Counter[tuple[Stage, str]] = Counter()
        """Used slots by stage and environment."""
        self._sessions: Counter[tuple[Stage, str]] = Counter()
        """Sessions by the stage and environment of their jobs."""
        self._on_hold: dict[tuple[str, Stage], FairQueue] = {}
        """Queues of the stages on hold, by environment."""

    def waiting(self, stage: Stage) -> int:
        """Return the number of jobs that wait for a stage; for RUN these are the jobs in the READY buffer."""
        gathered = self._cohorts.waiting if stage is Stage.EVAL else 0
        return len(self._queues[stage]) + self._waiting_on_hold(stage) + gathered

    def working(self, stage: Stage) -> int:
        """Return the number of used slots of a stage."""
        return sum(count for (at, _), count in self._working.items() if at is stage)

    @property
    def sessions(self) -> int:
        """Number of jobs with a session, in INIT, READY or RUN."""
        return self._sessions.total()

    def works_on(self, environment: str) -> bool:
        return any(self._working[stage, environment] for stage in Stage)

    def is_waiting(self, job_id: str) -> bool:
        """Return whether the job is in a queue or waits for siblings."""
        return self._jobs[job_id].position in _WAITS

    def is_held(self, job_id: str) -> bool:
        """Return whether the job waits for or is in a stage that is on hold for its environment."""
        entry = self._jobs[job_id]
        return entry.position in _WAITS | _WORKS and (entry.environment, entry.stage) in self._on_hold

    def held(self, environment: str) -> frozenset[Stage]:
        return frozenset(stage for name, stage in self._on_hold if name == environment)

    def by_environment(self) -> Counter[tuple[str, Stage, bool]]:
        """Return the number of jobs by environment, stage, and whether they are in the stage (else they wait)."""
        return Counter(
            (entry.environment, entry.stage, entry.position in _WORKS)
            for entry in self._jobs.values()
            if entry.position in _WORKS | _WAITS
        )

    def may_queue(self, client: str, bound: int) -> bool:
        """Return whether a client may queue one more job for INIT: fewer than ``bound`` jobs wait, or the client is
        under its fair share. So a client that floods the queue blocks no other client."""
        return self.waiting(Stage.INIT) < bound or is_under_fair_share(client, bound, self._queued, self.client_shares)

    def missing_siblings(self, job_id: str) -> tuple[int, frozenset[str]] | None:
        """Return missing and live siblings of a waiting job; see :meth:`.GroupBarrier.missing`."""
        return self._cohorts.missing(job_id)

    def share(self, clients: Mapping[str, float]) -> None:
        """Set the clients' shares, relative to each other; 1 by default."""
        self.client_shares = dict(clients)
        for queue in (*self._queues.values(), *self._on_hold.values()):
            queue.share(self.client_shares)

    def submit(
        self, job_id: str, client: str, priority: int, environment: str = "", group: str | None = None
    ) -> list[Start]:
        """Add a new job to the queue of INIT."""
        self._jobs[job_id] = _JobEntry(client, priority, Stage.INIT, _Position.OUTSIDE, environment)
        self._cohorts.join(job_id, environment, group)
        _add(self._live, environment, 1)
        return self._enqueue(job_id, Stage.INIT)

    def worked(self, job_id: str, then: Stage | None) -> list[Start]:
        """Free the slot of a job whose stage is done; queue the job for stage ``then``, or remove it (``None``)."""
        self._leave_slot(job_id)
        if then is None:
            self._cohorts.leave(job_id)
            _add(self._live, self._jobs.pop(job_id).environment, -1)
            return self._fill()
        return self._enqueue(job_id, then)

    def set_aside(self, job_id: str) -> list[Start]:
        """Free the slot of a job that will be retried; the job holds no slot and no session until :meth:`requeue`."""
        self._leave_slot(job_id)
        return self._fill()

    def requeue(self, job_id: str, stage: Stage) -> list[Start]:
        """Queue a job that was set aside."""
        return self._enqueue(job_id, stage)

    def pause(self, job_id: str) -> list[Start]:
        """Remove a waiting job from its queue, but count its session until :meth:`remove`: the session of a READY job
        exists until its release is done."""
        entry = self._jobs[job_id]
        self._take_off(job_id, entry)
        self._moves(entry, entry.stage, _Position.PAUSED)
        return self._fill()

    def remove(self, job_id: str) -> list[Start]:
        entry = self._jobs[job_id]
        _add(self._live, entry.environment, -1)
        if entry.position in _WAITS:
            self._take_off(job_id, entry)
        self._moves(entry, entry.stage, _Position.OUTSIDE)
        self._cohorts.leave(job_id)
        del self._jobs[job_id]
        return self._fill()

    def hold(self, environment: str, stages: frozenset[Stage]) -> list[Start]:
        """Set the stages that are on hold for an environment to ``stages``. Waiting jobs keep their order."""
        held = self.held(environment)
        for stage in held ^ stages:
            waiting = self._jobs_that_wait(environment, stage)
            if stage in stages:
                aside = self._on_hold[environment, stage] = self._queue(stage)
                self._transfer(waiting, self._queues[stage], aside)
            else:
                self._transfer(waiting, self._on_hold.pop((environment, stage)), self._queues[stage])
        return self._fill()

    def _enqueue(self, job_id: str, stage: Stage) -> list[Start]:
        if stage is Stage.EVAL and job_id in self._cohorts:
            self._moves(self._jobs[job_id], stage, _Position.GATHERED)
            self._push(self._cohorts.gather(job_id), stage)
        else:
            self._push(job_id, stage)
        return self._fill()

    def _push(self, job_id: str | None, stage: Stage) -> None:
        if job_id is not None:
            entry = self._jobs[job_id]
            self._moves(entry, stage, _Position.WAITING)
            self._queue_of(entry).push(job_id, entry.client, entry.priority, entry.environment)

    def _take_off(self, job_id: str, entry: _JobEntry) -> None:
        """Remove a waiting job from its queue. The job's cohort, then incomplete, leaves the queue too."""
        stood: str | None = job_id if entry.position is _Position.WAITING else None
        following = None
        if entry.stage is Stage.EVAL and job_id in self._cohorts:
            stood, following = self._cohorts.withdraw(job_id)
        if stood is not None:
            standing = self._jobs[stood]
            self._queue_of(standing).remove(stood, standing.client, standing.priority, standing.environment)
            if stood != job_id:
                self._moves(standing, standing.stage, _Position.GATHERED)
        self._push(following, Stage.EVAL)

    def _queue(self, stage: Stage) -> FairQueue:
        def load(client: str, environment: str) -> float:
            return self._load[stage, client, environment] / self._share(environment)

        return FairQueue(load, self.client_shares)

    def _queue_of(self, entry: _JobEntry) -> FairQueue:
        return self._on_hold.get((entry.environment, entry.stage), self._queues[entry.stage])

    def _jobs_that_wait(self, environment: str, stage: Stage) -> list[str]:
        return [
            job_id
            for job_id, entry in self._jobs.items()
            if entry.position is _Position.WAITING and entry.stage is stage and entry.environment == environment
        ]

    def _transfer(self, job_ids: list[str], source: FairQueue, target: FairQueue) -> None:
        for job_id in job_ids:
            entry = self._jobs[job_id]
            source.remove(job_id, entry.client, entry.priority, entry.environment)
            target.push(job_id, entry.client, entry.priority, entry.environment)

    def _waiting_on_hold(self, stage: Stage) -> int:
        return sum(len(queue) for (_, held), queue in self._on_hold.items() if held is stage)

    def _leave_slot(self, job_id: str) -> None:
        entry = self._jobs[job_id]
        heir, following = None, None
        if entry.stage is Stage.EVAL and job_id in self._cohorts:
            heir, following = self._cohorts.scored(job_id)
        if entry.position is _Position.WORKING and heir is not None:
            self._moves(self._jobs[heir], entry.stage, _Position.WORKING)
        self._moves(entry, entry.stage, _Position.OUTSIDE)
        self._push(following, Stage.EVAL)

    def _moves(self, entry: _JobEntry, stage: Stage, position: _Position) -> None:
        self._count(entry, -1)
        entry.stage, entry.position = stage, position
        self._count(entry, 1)

    def _count(self, entry: _JobEntry, one: int) -> None:
        works = entry.position is _Position.WORKING
        at = entry.stage, entry.environment
        if entry.position is _Position.WAITING and entry.stage is Stage.INIT:
            _add(self._queued, entry.client, one)
        if works:
            _add(self._working, at, one)
        if works and entry.stage is not Stage.INIT:
            self._add_load(entry.stage, entry, one)
        has_session = works if entry.stage is Stage.INIT else entry.position is not _Position.OUTSIDE
        if has_session and entry.stage is not Stage.EVAL:
            _add(self._sessions, at, one)
            self._add_load(Stage.INIT, entry, one)

    def _add_load(self, stage: Stage, entry: _JobEntry, one: int) -> None:
        _add(self._load, (stage, entry.client, entry.environment), one)
        self._queues[stage].add_load(entry.client, one)

    def _counted(self, what: Counter[tuple[Stage, str]], *stages: Stage) -> int:
        """Return the number of slots or sessions in these stages, without those of stages on hold."""
        return sum(count for (at, name), count in what.items() if at in stages and (name, at) not in self._on_hold)

    def _free(self, stage: Stage) -> int:
        """Return the number of free slots of a stage; for INIT, at most the free session capacity."""
        slots = self.sizes.of(stage) - self._counted(self._working, stage)
        return min(slots, self._free_sessions) if stage is Stage.INIT else slots

    @property
    def _max_sessions(self) -> int:
        return self.sizes.run + self.sizes.ready

    @property
    def _free_sessions(self) -> int:
        return self._max_sessions - self._counted(self._sessions, Stage.INIT, Stage.RUN)

    def _may_start(self, stage: Stage) -> Set[str]:
        """Return the environments of which a queued job may start in a stage next."""
        may: Set[str] = self._queues[stage].environments
        free = self._free(stage)
        if free <= 0:
            return frozenset()
        if free > len(self._live) or len(self._live) == 1:
            return may
        coming = self._coming(stage)
        without_slot = {name for name in coming if not self._working[stage, name]}
        if self.sizes.of(stage) - self._counted(self._working, stage) <= len(without_slot):
            may &= without_slot
            if stage is Stage.INIT:
                may = {name for name in may if self._is_below_share(name)}
        if stage is Stage.INIT:
            without_session = {name for name in coming if not self._sessions_of(name)}
            if self._free_sessions <= len(without_session):
                may &= without_session
        return may

    def _coming(self, stage: Stage) -> Set[str]:
        """Return the environments with jobs that wait for a stage or are in an earlier one, except those on hold."""
        waiting = self._queues[Stage.INIT].environments
        if stage is Stage.INIT:
            return waiting
        upstream = waiting | {name for at, name in self._sessions if (name, at) not in self._on_hold}
        return self._queues[stage].environments | {name for name in upstream if (name, stage) not in self._on_hold}

    def _is_below_share(self, environment: str) -> bool:
        """Return whether the environment has fewer sessions than its share among the environments with sessions or
        waiting rows."""
        names = {name for _, name in self._sessions} | self._queues[Stage.INIT].environments
        share = self._share(environment) / sum(map(self._share, names))
        return self._sessions_of(environment) < share * self._max_sessions

    def _sessions_of(self, environment: str) -> int:
        return self._sessions[Stage.INIT, environment] + self._sessions[Stage.RUN, environment]

    def _share(self, environment: str) -> float:
        return self._shares.get(environment, 1.0)

    def _fill(self) -> list[Start]:
        """Start all jobs that may start; later stages first, since a start in RUN frees a slot of the READY buffer."""
        return [start for stage in (Stage.EVAL, Stage.RUN, Stage.INIT) for start in self._fill_stage(stage)]

    def _fill_stage(self, stage: Stage) -> list[Start]:
        queue, starts = self._queues[stage], []
        while len(queue) and (may := self._may_start(stage)):
            starts += self._start(queue.pop(may if may < queue.environments else None), stage)
        return starts

    def _start(self, job_id: str, stage: Stage) -> list[Start]:
        self._moves(self._jobs[job_id], stage, _Position.WORKING)
        if stage is not Stage.EVAL or job_id not in self._cohorts:
            return [Start(job_id, stage)]
        members = self._cohorts.start(job_id)
        for sibling in members.keys() - {job_id}:
            self._moves(self._jobs[sibling], stage, _Position.SHARING)
        return [Start(one, stage, member) for one, member in members.items()]


def _add[K](counter: Counter[K], key: K, more: int) -> None:
    """Add to a counter, and delete zero entries: callers invent client names, so the counter would grow for ever."""
    counter[key] += more
    if not counter[key]:
        del counter[key]
