# SPDX-License-Identifier: Apache-2.0
"""Which job goes where, and when: three bounded pools, their queues and the READY buffer between INIT and RUN.

Pure: it owns no task, clock or socket. Events go in (`submit`, `worked`, `retry`, `cancel`, …), decisions come out
(`Start` this job in that stage). The pipeline carries decisions out and reports back. A hundred thousand schedules of
it are checked in a second, which no test with real sandboxes could do.

Invariants:

- A stage never holds more jobs than its pool has slots.
- INIT starts only if the sandbox it makes has somewhere to go: jobs that hold a session (in INIT, READY or RUN) never
  exceed ``run + ready``. So READY is bounded by construction and nothing has to block when INIT is done. What
  waits in READY on hold is not counted: its server cannot be reached, and it must not take another environment's
  place. So an outage may add the sessions of at most as many environments as are out.
- A slot is taken by `Start` and given back by exactly one later event of that job.
- A stage that is on hold for an environment (:meth:`StageScheduler.hold`) starts nothing of it but what
  :meth:`StageScheduler.admit` lets past. Rows of other environments go on as if those on hold were not there.
- Among waiting jobs the highest priority goes first; among equals the client that holds the fewest slots of the stage,
  ties in turn; within a client first come, first served.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import Enum, auto

from nemo_gym_prorl.failures import Stage


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """How many jobs each stage works on at once, and how many initialised jobs may wait in READY.

    Raises:
        ValueError: a pool has no slot, or READY is negative; names the field.
    """

    init: int = 8
    ready: int = 8
    run: int = 32
    eval: int = 8

    def __post_init__(self) -> None:
        for name, least in (("init", 1), ("ready", 0), ("run", 1), ("eval", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"stages.{name} must be at least {least}, got {getattr(self, name)}")

    def of(self, stage: Stage) -> int:
        """Slots of one stage."""
        return int(getattr(self, stage.value))


@dataclass(frozen=True, slots=True)
class Start:
    """Begin to work on a job in a stage; the job holds one of its slots from now on."""

    job_id: str
    stage: Stage


class _Where(Enum):
    WAITING = auto()
    WORKING = auto()
    PAUSED = auto()
    """Off every queue but still counted where it was: a READY job whose session is being released."""
    OUTSIDE = auto()
    """Between two attempts: holds nothing."""


@dataclass(slots=True)
class _Place:
    client: str
    priority: int
    stage: Stage
    where: _Where
    environment: str


class _Level:
    """Waiting jobs of one priority. Its heap ranks clients; entries that are no longer true are skipped."""

    def __init__(self) -> None:
        self.jobs: dict[str, OrderedDict[str, None]] = {}
        """Ids in order, by client."""
        self.turns: dict[str, int] = {}
        """When each client was last served here, or came."""
        self._ranks: list[tuple[int, int, str]] = []

    def rank(self, client: str, held: Counter[str]) -> None:
        """The client has another number of slots, or another turn, than before."""
        heapq.heappush(self._ranks, (held[client], self.turns[client], client))
        if len(self._ranks) > 2 * len(self.jobs) + 16:
            self._ranks = [(held[name], turn, name) for name, turn in self.turns.items()]
            heapq.heapify(self._ranks)

    def first(self, held: Counter[str]) -> str:
        """The client that holds the fewest slots; among equals the one served longest ago."""
        while True:
            slots, turn, client = self._ranks[0]
            if self.turns.get(client) == turn and held[client] == slots:
                return client
            heapq.heappop(self._ranks)


class FairQueue:
    """Waiting jobs of one stage, by priority, then fair share, then arrival; and the slots that each client holds.

    An event costs O(log n), amortised, and once for each priority at which its client waits.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []
        """A heap of the levels there are, negated; the first of them is not empty, if any is."""
        self._waits_at: dict[str, set[int]] = {}
        self._held: Counter[str] = Counter()
        self._turn = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, job_id: str, client: str, priority: int) -> None:
        """Append a job; it must not be in the queue yet."""
        if priority not in self._levels:
            self._levels[priority] = _Level()
            heapq.heappush(self._priorities, -priority)
        level = self._levels[priority]
        if client not in level.jobs:
            level.jobs[client] = OrderedDict()
            self._waits_at.setdefault(client, set()).add(priority)
            self._moves_back(level, client)
        level.jobs[client][job_id] = None
        self._size += 1

    def remove(self, job_id: str, client: str, priority: int) -> None:
        """Take a job out from wherever it stands."""
        del self._levels[priority].jobs[client][job_id]
        self._forget_empty(priority, client)

    def pop(self) -> str:
        """Take the next job; its client holds one slot more. The queue must not be empty."""
        priority = -self._priorities[0]
        level = self._levels[priority]
        client = level.first(self._held)
        job_id, _ = level.jobs[client].popitem(last=False)
        self._moves_back(level, client)
        self._forget_empty(priority, client)
        self._holds(client, 1)
        return job_id

    def lend(self, client: str) -> None:
        """The client holds one slot more, for a job that did not wait here."""
        self._holds(client, 1)

    def give_back(self, client: str) -> None:
        """A slot of the client is free again."""
        self._holds(client, -1)

    def _holds(self, client: str, more: int) -> None:
        self._held[client] += more
        if not self._held[client]:
            del self._held[client]
        for priority in self._waits_at.get(client, ()):
            self._levels[priority].rank(client, self._held)

    def _moves_back(self, level: _Level, client: str) -> None:
        """Among equals, the client's turn is last now."""
        self._turn += 1
        level.turns[client] = self._turn
        level.rank(client, self._held)

    def _forget_empty(self, priority: int, client: str) -> None:
        self._size -= 1
        level = self._levels[priority]
        if level.jobs[client]:
            return
        del level.jobs[client], level.turns[client]
        self._waits_at[client].discard(priority)
        if not self._waits_at[client]:
            del self._waits_at[client]
        while self._priorities and not self._levels[-self._priorities[0]].jobs:
            del self._levels[-heapq.heappop(self._priorities)]


class StageScheduler:
    """The pools of one pipeline.

    Args:
        sizes: slots per stage and the READY bound.
    """

    def __init__(self, sizes: PoolSizes) -> None:
        self.sizes = sizes
        self._places: dict[str, _Place] = {}
        self._queues = {stage: FairQueue() for stage in Stage}
        self._working = dict.fromkeys(Stage, 0)
        self._paused_ready = 0
        self._on_hold: dict[tuple[str, Stage], FairQueue] = {}
        """What waits for a stage that is on hold for its environment."""

    # -- what is where -------------------------------------------------------------------------------------------

    def waiting(self, stage: Stage) -> int:
        """Jobs queued for a stage; for RUN that is the READY buffer."""
        return len(self._queues[stage]) + self._waiting_on_hold(stage)

    def working(self, stage: Stage) -> int:
        """Slots of a stage in use."""
        return self._working[stage]

    @property
    def sessions(self) -> int:
        """Jobs that hold, or are about to hold, a session: in INIT, READY or RUN."""
        return self._working[Stage.INIT] + self.waiting(Stage.RUN) + self._paused_ready + self._working[Stage.RUN]

    def is_waiting(self, job_id: str) -> bool:
        """The job stands in a queue, so nobody works on it."""
        return self._places[job_id].where is _Where.WAITING

    def is_held(self, job_id: str) -> bool:
        """The job waits for a stage that is on hold."""
        place = self._places[job_id]
        return place.where is _Where.WAITING and (place.environment, place.stage) in self._on_hold

    def held(self, environment: str) -> frozenset[Stage]:
        """The stages on hold for an environment."""
        return frozenset(stage for name, stage in self._on_hold if name == environment)

    def by_environment(self) -> Counter[tuple[str, Stage, bool]]:
        """How many jobs of each environment stand where: its name, the stage, and whether that works on them. Counted
        anew with each call."""
        return Counter(
            (place.environment, place.stage, place.where is _Where.WORKING)
            for place in self._places.values()
            if place.where in (_Where.WORKING, _Where.WAITING)
        )

    # -- events --------------------------------------------------------------------------------------------------

    def submit(self, job_id: str, client: str, priority: int, environment: str = "") -> list[Start]:
        """A new job arrives in INIT's queue."""
        self._places[job_id] = _Place(client, priority, Stage.INIT, _Where.OUTSIDE, environment)
        return self._enqueue(job_id, Stage.INIT)

    def worked(self, job_id: str, then: Stage | None) -> list[Start]:
        """A stage is done with a job: its slot comes back; it goes on to ``then``, or leaves (``None``)."""
        self._leave_slot(job_id)
        if then is None:
            del self._places[job_id]
            return self._fill()
        return self._enqueue(job_id, then)

    def set_aside(self, job_id: str) -> list[Start]:
        """A stage is done with a job that will be retried later: it holds nothing until :meth:`requeue`."""
        self._leave_slot(job_id)
        self._places[job_id].where = _Where.OUTSIDE
        return self._fill()

    def requeue(self, job_id: str, stage: Stage) -> list[Start]:
        """A job that was set aside comes back to a stage's queue."""
        return self._enqueue(job_id, stage)

    def pause(self, job_id: str) -> None:
        """Take a waiting job off its queue for good, but keep its place counted until :meth:`remove`.

        For READY: its session still exists while it is being released, and the bound on sessions must know.
        """
        place = self._places[job_id]
        self._queue_of(place).remove(job_id, place.client, place.priority)
        place.where = _Where.PAUSED
        if place.stage is Stage.RUN:
            self._paused_ready += 1

    def remove(self, job_id: str) -> list[Start]:
        """A job that no stage works on leaves, wherever it stands."""
        place = self._places.pop(job_id)
        if place.where is _Where.WAITING:
            self._queue_of(place).remove(job_id, place.client, place.priority)
        elif place.where is _Where.PAUSED and place.stage is Stage.RUN:
            self._paused_ready -= 1
        return self._fill()

    def hold(self, environment: str, stages: frozenset[Stage]) -> list[Start]:
        """Put exactly these stages on hold for an environment; what waits for any other may start. Within a client,
        what was on hold comes behind what arrived meanwhile from other environments."""
        held = self.held(environment)
        for stage in held ^ stages:
            waiting = self._jobs_that_wait(environment, stage)
            if stage in stages:
                aside = self._on_hold[environment, stage] = FairQueue()
                self._transfer(waiting, self._queues[stage], aside)
            else:
                self._transfer(waiting, self._on_hold.pop((environment, stage)), self._queues[stage])
        return self._fill()

    def admit(self, environment: str) -> list[Start]:
        """Start one job of an environment that waits for a stage on hold, the most downstream one, if there is a slot
        for it."""
        for stage in (Stage.EVAL, Stage.RUN, Stage.INIT):
            queue = self._on_hold.get((environment, stage))
            if queue is not None and len(queue) and self._room(stage):
                return [self._start_next(stage, queue)]
        return []

    # -- inside --------------------------------------------------------------------------------------------------

    def _enqueue(self, job_id: str, stage: Stage) -> list[Start]:
        place = self._places[job_id]
        place.stage, place.where = stage, _Where.WAITING
        self._queue_of(place).push(job_id, place.client, place.priority)
        return self._fill()

    def _queue_of(self, place: _Place) -> FairQueue:
        return self._on_hold.get((place.environment, place.stage), self._queues[place.stage])

    def _jobs_that_wait(self, environment: str, stage: Stage) -> list[str]:
        """In the order in which they were submitted."""
        return [
            job_id
            for job_id, place in self._places.items()
            if place.where is _Where.WAITING and place.stage is stage and place.environment == environment
        ]

    def _transfer(self, job_ids: list[str], source: FairQueue, target: FairQueue) -> None:
        for job_id in job_ids:
            place = self._places[job_id]
            source.remove(job_id, place.client, place.priority)
            target.push(job_id, place.client, place.priority)

    def _waiting_on_hold(self, stage: Stage) -> int:
        return sum(len(queue) for (_, held), queue in self._on_hold.items() if held is stage)

    def _leave_slot(self, job_id: str) -> None:
        place = self._places[job_id]
        self._queues[place.stage].give_back(place.client)
        self._working[place.stage] -= 1

    def _room(self, stage: Stage) -> bool:
        if self._working[stage] >= self.sizes.of(stage):
            return False
        if stage is Stage.INIT:
            return self.sessions - self._waiting_on_hold(Stage.RUN) < self.sizes.run + self.sizes.ready
        return True

    def _fill(self) -> list[Start]:
        """Start everything that may start. Downstream first, since that is what makes room upstream."""
        starts: list[Start] = []
        for stage in (Stage.EVAL, Stage.RUN, Stage.INIT):
            while len(self._queues[stage]) and self._room(stage):
                starts.append(self._start_next(stage, self._queues[stage]))
        return starts

    def _start_next(self, stage: Stage, queue: FairQueue) -> Start:
        job_id = queue.pop()
        place = self._places[job_id]
        if queue is not self._queues[stage]:
            queue.give_back(place.client)
            self._queues[stage].lend(place.client)
        place.where = _Where.WORKING
        self._working[stage] += 1
        return Start(job_id, stage)
