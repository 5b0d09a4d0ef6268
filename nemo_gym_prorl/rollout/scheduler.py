# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which job goes where, and when: three bounded pools, their queues and the READY buffer between INIT and RUN.

Pure: it owns no task, clock or socket. Events go in (`submit`, `worked`, `retry`, `cancel`, …), decisions come out
(`Start` this job in that stage). The pipeline carries decisions out and reports back. A hundred thousand schedules of
it are checked in a second, which no test with real sandboxes could do.

Invariants:

- A stage never holds more jobs than its pool has slots.
- INIT starts only if the sandbox it makes has somewhere to go: jobs that hold a session (in INIT, READY or RUN) never
  exceed ``run + ready``. So READY is bounded by construction and nothing has to block when INIT is done.
- What stands in a stage on hold counts for neither, be it that it waits there or that it works: its server does not
  answer, and it must not take another environment's place. So an outage may add the slots and sessions of at most as
  many environments as are out.
- No environment takes a stage whole while another could use it: a slot of a stage stays free for each that has
  none there and rows on their way, and a session for each that has none and waits for INIT. So one whose work takes
  long, or never ends, can cost the others what is above one each, and not that one. (INIT's last slots are used by
  those that have less than their share of the sessions.)
- A slot is taken by `Start` and given back by exactly one later event of that job.
- Siblings that are scored together (:mod:`.queues`) start EVAL at once, in one slot: what a verifier does for all of
  them is one piece of work, and those that wait for the others hold nothing.
- A stage that is on hold for an environment (:meth:`StageScheduler.hold`) starts nothing of it. Rows of other
  environments go on as if those on hold were not there.
- Among waiting jobs the order is that of :mod:`.queues`. What a client or an environment has is counted in slots
  of the stage, but for INIT in sessions: else one whose rows start quickly would fill READY, and RUN with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import Enum, auto

from nemo_gym_prorl.failures import Stage
from nemo_gym_prorl.rollout.queues import FairQueue, GroupBarrier, Member, is_under_fair_share
from nemo_gym_prorl.rollout.settings import PoolSizes


@dataclass(frozen=True, slots=True)
class Start:
    """ResumePoint to work on a job in a stage; the job holds one of its slots from now on, with its cohort if it has one."""

    job_id: str
    stage: Stage
    member: Member | None = None


class _Where(Enum):
    WAITING = auto()
    WORKING = auto()
    GATHERED = auto()
    """Waiting for siblings, or with them behind the one that stands in the queue: holds nothing."""
    ALONG = auto()
    """Being scored in a sibling's slot."""
    PAUSED = auto()
    """Off every queue but still counted where it was: a READY job whose session is being released."""
    OUTSIDE = auto()
    """Between two attempts: holds nothing."""


_WAITS = frozenset({_Where.WAITING, _Where.GATHERED})
_WORKS = frozenset({_Where.WORKING, _Where.ALONG})


@dataclass(slots=True)
class _Place:
    client: str
    priority: int
    stage: Stage
    where: _Where
    environment: str


class StageScheduler:
    """The pools of one pipeline.

    Args:
        sizes: slots per stage and the READY bound.
        shares: of an environment, in proportion to each other's; 1 where none is said.
        cohorts: how many siblings an environment scores together; 1 where none is said.
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
        """Of the clients that have one; set by :meth:`share`."""
        self._queued: Counter[str] = Counter()
        """Jobs in INIT's queue, by client."""
        self._jobs: dict[str, _Place] = {}
        self._has: Counter[tuple[Stage, str, str]] = Counter()
        """What a client has of an environment: slots of a stage, and for INIT sessions."""
        self._queues = {stage: self._queue(stage) for stage in Stage}
        self._live: Counter[str] = Counter()
        """Jobs by environment."""
        self._working: Counter[tuple[Stage, str]] = Counter()
        """Slots in use, by stage and environment."""
        self._sessions: Counter[tuple[Stage, str]] = Counter()
        """Sessions, by the stage where their jobs are and by environment."""
        self._on_hold: dict[tuple[str, Stage], FairQueue] = {}
        """What waits for a stage that is on hold for its environment."""

    # -- what is where -------------------------------------------------------------------------------------------

    def waiting(self, stage: Stage) -> int:
        """Jobs queued for a stage; for RUN that is the READY buffer."""
        gathered = self._cohorts.waiting if stage is Stage.EVAL else 0
        return len(self._queues[stage]) + self._waiting_on_hold(stage) + gathered

    def working(self, stage: Stage) -> int:
        """Slots of a stage in use."""
        return sum(count for (at, _), count in self._working.items() if at is stage)

    @property
    def sessions(self) -> int:
        """Jobs that hold, or are about to hold, a session: in INIT, READY or RUN."""
        return self._sessions.total()

    def works_on(self, environment: str) -> bool:
        """Some stage works on a job of that environment."""
        return any(self._working[stage, environment] for stage in Stage)

    def is_waiting(self, job_id: str) -> bool:
        """The job stands in a queue, or waits for siblings, so nobody works on it."""
        return self._jobs[job_id].where in _WAITS

    def is_held(self, job_id: str) -> bool:
        """The job waits for a stage that is on hold, or that works on it."""
        place = self._jobs[job_id]
        return place.where in _WAITS | _WORKS and (place.environment, place.stage) in self._on_hold

    def held(self, environment: str) -> frozenset[Stage]:
        """The stages on hold for an environment."""
        return frozenset(stage for name, stage in self._on_hold if name == environment)

    def by_environment(self) -> Counter[tuple[str, Stage, bool]]:
        """How many jobs of each environment stand where: its name, the stage, and whether that works on them. Counted
        anew with each call."""
        return Counter(
            (place.environment, place.stage, place.where in _WORKS)
            for place in self._jobs.values()
            if place.where in _WORKS | _WAITS
        )

    def may_queue(self, client: str, bound: int) -> bool:
        """Whether a client may have one more job wait for INIT, where ``bound`` may in all: as long as there are
        fewer, or it has less than its part. So who floods the queue keeps nobody else out."""
        return self.waiting(Stage.INIT) < bound or is_under_fair_share(client, bound, self._queued, self.client_shares)

    def missing_siblings(self, job_id: str) -> tuple[int, frozenset[str]] | None:
        """See :meth:`.GroupBarrier.missing`."""
        return self._cohorts.missing(job_id)

    # -- events --------------------------------------------------------------------------------------------------

    def share(self, clients: Mapping[str, float]) -> None:
        """From now on clients have these shares, in proportion to each other's; 1 where none is said."""
        self.client_shares = dict(clients)
        for queue in (*self._queues.values(), *self._on_hold.values()):
            queue.share(self.client_shares)

    def submit(
        self, job_id: str, client: str, priority: int, environment: str = "", group: str | None = None
    ) -> list[Start]:
        """A new job arrives in INIT's queue."""
        self._jobs[job_id] = _Place(client, priority, Stage.INIT, _Where.OUTSIDE, environment)
        self._cohorts.join(job_id, environment, group)
        _add(self._live, environment, 1)
        return self._enqueue(job_id, Stage.INIT)

    def worked(self, job_id: str, then: Stage | None) -> list[Start]:
        """A stage is done with a job: its slot comes back; it goes on to ``then``, or leaves (``None``)."""
        self._leave_slot(job_id)
        if then is None:
            self._cohorts.leave(job_id)
            _add(self._live, self._jobs.pop(job_id).environment, -1)
            return self._fill()
        return self._enqueue(job_id, then)

    def set_aside(self, job_id: str) -> list[Start]:
        """A stage is done with a job that will be retried later: it holds nothing until :meth:`requeue`."""
        self._leave_slot(job_id)
        return self._fill()

    def requeue(self, job_id: str, stage: Stage) -> list[Start]:
        """A job that was set aside comes back to a stage's queue."""
        return self._enqueue(job_id, stage)

    def pause(self, job_id: str) -> list[Start]:
        """Take a waiting job off its queue for good, but keep its place counted until :meth:`remove`.

        For READY: its session still exists while it is being released, and the bound on sessions must know. If it was
        the last of its environment to come, no slot stays free for that any more.
        """
        place = self._jobs[job_id]
        self._take_off(job_id, place)
        self._moves(place, place.stage, _Where.PAUSED)
        return self._fill()

    def remove(self, job_id: str) -> list[Start]:
        """A job that no stage works on leaves, wherever it stands."""
        place = self._jobs[job_id]
        _add(self._live, place.environment, -1)
        if place.where in _WAITS:
            self._take_off(job_id, place)
        self._moves(place, place.stage, _Where.OUTSIDE)
        self._cohorts.leave(job_id)
        del self._jobs[job_id]
        return self._fill()

    def hold(self, environment: str, stages: frozenset[Stage]) -> list[Start]:
        """Put exactly these stages on hold for an environment; what waits for any other may start. It keeps
        its order."""
        held = self.held(environment)
        for stage in held ^ stages:
            waiting = self._jobs_that_wait(environment, stage)
            if stage in stages:
                aside = self._on_hold[environment, stage] = self._queue(stage)
                self._transfer(waiting, self._queues[stage], aside)
            else:
                self._transfer(waiting, self._on_hold.pop((environment, stage)), self._queues[stage])
        return self._fill()

    # -- inside --------------------------------------------------------------------------------------------------

    def _enqueue(self, job_id: str, stage: Stage) -> list[Start]:
        if stage is Stage.EVAL and job_id in self._cohorts:
            self._moves(self._jobs[job_id], stage, _Where.GATHERED)
            self._push(self._cohorts.gather(job_id), stage)
        else:
            self._push(job_id, stage)
        return self._fill()

    def _push(self, job_id: str | None, stage: Stage) -> None:
        if job_id is not None:
            place = self._jobs[job_id]
            self._moves(place, stage, _Where.WAITING)
            self._queue_of(place).push(job_id, place.client, place.priority, place.environment)

    def _take_off(self, job_id: str, place: _Place) -> None:
        """A job waits no more; of its cohort, which is incomplete then, nobody stands in the queue any more."""
        stood: str | None = job_id if place.where is _Where.WAITING else None
        following = None
        if place.stage is Stage.EVAL and job_id in self._cohorts:
            stood, following = self._cohorts.withdraw(job_id)
        if stood is not None:
            standing = self._jobs[stood]
            self._queue_of(standing).remove(stood, standing.client, standing.priority, standing.environment)
            if stood != job_id:
                self._moves(standing, standing.stage, _Where.GATHERED)
        self._push(following, Stage.EVAL)

    def _queue(self, stage: Stage) -> FairQueue:
        def load(client: str, environment: str) -> float:
            return self._has[stage, client, environment] / self._share(environment)

        return FairQueue(load, self.client_shares)

    def _queue_of(self, place: _Place) -> FairQueue:
        return self._on_hold.get((place.environment, place.stage), self._queues[place.stage])

    def _jobs_that_wait(self, environment: str, stage: Stage) -> list[str]:
        """In the order in which they were submitted."""
        return [
            job_id
            for job_id, place in self._jobs.items()
            if place.where is _Where.WAITING and place.stage is stage and place.environment == environment
        ]

    def _transfer(self, job_ids: list[str], source: FairQueue, target: FairQueue) -> None:
        for job_id in job_ids:
            place = self._jobs[job_id]
            source.remove(job_id, place.client, place.priority, place.environment)
            target.push(job_id, place.client, place.priority, place.environment)

    def _waiting_on_hold(self, stage: Stage) -> int:
        return sum(len(queue) for (_, held), queue in self._on_hold.items() if held is stage)

    def _leave_slot(self, job_id: str) -> None:
        place = self._jobs[job_id]
        heir, following = None, None
        if place.stage is Stage.EVAL and job_id in self._cohorts:
            heir, following = self._cohorts.scored(job_id)
        if place.where is _Where.WORKING and heir is not None:
            self._moves(self._jobs[heir], place.stage, _Where.WORKING)
        self._moves(place, place.stage, _Where.OUTSIDE)
        self._push(following, Stage.EVAL)

    def _moves(self, place: _Place, stage: Stage, where: _Where) -> None:
        """Put a job somewhere else, and count what it takes up there and no longer here."""
        self._count(place, -1)
        place.stage, place.where = stage, where
        self._count(place, 1)

    def _count(self, place: _Place, one: int) -> None:
        works = place.where is _Where.WORKING
        at = place.stage, place.environment
        if place.where is _Where.WAITING and place.stage is Stage.INIT:
            _add(self._queued, place.client, one)
        if works:
            _add(self._working, at, one)
        if works and place.stage is not Stage.INIT:
            self._has_more(place.stage, place, one)
        has_session = works if place.stage is Stage.INIT else place.where is not _Where.OUTSIDE
        if has_session and place.stage is not Stage.EVAL:
            _add(self._sessions, at, one)
            self._has_more(Stage.INIT, place, one)

    def _has_more(self, stage: Stage, place: _Place, one: int) -> None:
        _add(self._has, (stage, place.client, place.environment), one)
        self._queues[stage].holds(place.client, one)

    def _counted(self, what: Counter[tuple[Stage, str]], *stages: Stage) -> int:
        """Of these slots or sessions, those that take up room: not what stands in a stage on hold."""
        return sum(count for (at, name), count in what.items() if at in stages and (name, at) not in self._on_hold)

    def _free(self, stage: Stage) -> int:
        """Slots of a stage that are free; of INIT's, those whose sessions have somewhere to go."""
        slots = self.sizes.of(stage) - self._counted(self._working, stage)
        return min(slots, self._free_places) if stage is Stage.INIT else slots

    @property
    def _places(self) -> int:
        return self.sizes.run + self.sizes.ready

    @property
    def _free_places(self) -> int:
        return self._places - self._counted(self._sessions, Stage.INIT, Stage.RUN)

    def _may_start(self, stage: Stage) -> Set[str]:
        """The environments of which the next job of a stage may be: of those that wait there."""
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
            if self._free_places <= len(without_session):
                may &= without_session
        return may

    def _coming(self, stage: Stage) -> Set[str]:
        """The environments that wait for a stage, or will when what is upstream of it is done."""
        waiting = self._queues[Stage.INIT].environments
        if stage is Stage.INIT:
            return waiting
        upstream = waiting | {name for at, name in self._sessions if (name, at) not in self._on_hold}
        return self._queues[stage].environments | {name for name in upstream if (name, stage) not in self._on_hold}

    def _is_below_share(self, environment: str) -> bool:
        """It has fewer sessions than it would, were they divided now among those that have some or wait for one."""
        names = {name for _, name in self._sessions} | self._queues[Stage.INIT].environments
        share = self._share(environment) / sum(map(self._share, names))
        return self._sessions_of(environment) < share * self._places

    def _sessions_of(self, environment: str) -> int:
        return self._sessions[Stage.INIT, environment] + self._sessions[Stage.RUN, environment]

    def _share(self, environment: str) -> float:
        return self._shares.get(environment, 1.0)

    def _fill(self) -> list[Start]:
        """Start everything that may start. Downstream first, since that is what makes room upstream."""
        return [start for stage in (Stage.EVAL, Stage.RUN, Stage.INIT) for start in self._fill_stage(stage)]

    def _fill_stage(self, stage: Stage) -> list[Start]:
        queue, starts = self._queues[stage], []
        while len(queue) and (may := self._may_start(stage)):
            starts += self._start(queue.pop(may if may < queue.environments else None), stage)
        return starts

    def _start(self, job_id: str, stage: Stage) -> list[Start]:
        self._moves(self._jobs[job_id], stage, _Where.WORKING)
        if stage is not Stage.EVAL or job_id not in self._cohorts:
            return [Start(job_id, stage)]
        members = self._cohorts.start(job_id)
        for sibling in members.keys() - {job_id}:
            self._moves(self._jobs[sibling], stage, _Where.ALONG)
        return [Start(one, stage, member) for one, member in members.items()]


def _add[K](counter: Counter[K], key: K, more: int) -> None:
    """Count, and forget what is none: callers name themselves as they like."""
    counter[key] += more
    if not counter[key]:
        del counter[key]
