# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The scheduler against random schedules: bounds, shares, and siblings that are scored together."""

from __future__ import annotations

import heapq
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nemo_gym_prorl.failures import Stage
from nemo_gym_prorl.rollout.scheduling.fair_queue import FairQueue
from nemo_gym_prorl.rollout.scheduling.scheduler import StageScheduler, Start
from nemo_gym_prorl.rollout.settings import PoolSizes


NEXT = {Stage.INIT: Stage.RUN, Stage.RUN: Stage.EVAL, Stage.EVAL: None}


ENVIRONMENTS = ("swe", "math", "code")


def environment_of(job_id: str) -> str:
    return job_id.partition("-")[0]


class Schedules(RuleBasedStateMachine):
    """Every legal sequence of events keeps the bounds, and nothing that could start is left waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.working: dict[str, Stage] = {}
        self.waiting: dict[str, Stage] = {}
        self.aside: dict[str, Stage] = {}
        self.paused: dict[str, Stage] = {}
        self.held: dict[str, frozenset[Stage]] = {name: frozenset() for name in ENVIRONMENTS}
        self.overflow = Counter[str]()
        self.count = 0

    @initialize(init=st.integers(1, 3), ready=st.integers(0, 2), run=st.integers(1, 3), eval_=st.integers(1, 2))
    def start(self, init: int, ready: int, run: int, eval_: int) -> None:
        self.sizes = PoolSizes(init=init, ready=ready, run=run, eval=eval_)
        self.scheduler = StageScheduler(self.sizes)

    def apply(self, starts: list[Start]) -> None:
        for start in starts:
            assert self.waiting.pop(start.job_id) is start.stage, "only what waits for a stage is started in it"
            assert start.stage not in self.held[environment_of(start.job_id)], "nor what is on hold"
            self.working[start.job_id] = start.stage

    @rule(client=st.sampled_from("abc"), priority=st.integers(-1, 1), environment=st.sampled_from(ENVIRONMENTS))
    def submit(self, client: str, priority: int, environment: str) -> None:
        job_id = f"{environment}-{self.count}"
        self.count += 1
        self.waiting[job_id] = Stage.INIT
        self.apply(self.scheduler.submit(job_id, client, priority, environment))

    @rule(environment=st.sampled_from(ENVIRONMENTS), stages=st.frozensets(st.sampled_from(Stage)))
    def hold(self, environment: str, stages: frozenset[Stage]) -> None:
        self.held[environment] = stages
        self.apply(self.scheduler.hold(environment, stages))
        # What stands in a stage that was on hold counts again, beside what took its place meanwhile.
        self.overflow = self.counted - self.bounds

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def stage_works(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.working)))
        stage = self.working.pop(job_id)
        then = NEXT[stage]
        if then is not None:
            self.waiting[job_id] = then
        if stage is Stage.INIT and self.stands_on_hold(job_id, stage):
            self.overflow["sessions"] += 1  # it came up all the same, and counts again
        self.apply(self.scheduler.worked(job_id, then))

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def stage_fails_and_is_retried_later(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.working)))
        stage = self.working.pop(job_id)
        self.aside[job_id] = Stage.EVAL if stage is Stage.EVAL else Stage.INIT
        self.apply(self.scheduler.set_aside(job_id))

    @precondition(lambda self: self.aside)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.aside)))
        stage = self.aside.pop(job_id)
        self.waiting[job_id] = stage
        self.apply(self.scheduler.requeue(job_id, stage))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel_a_waiting_job(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.scheduler.is_waiting(job_id)
        self.paused[job_id] = self.waiting.pop(job_id)
        self.apply(self.scheduler.pause(job_id))

    @precondition(lambda self: self.paused or self.aside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.paused | self.aside)))
        self.paused.pop(job_id, None)
        self.aside.pop(job_id, None)
        self.apply(self.scheduler.remove(job_id))

    def stands_on_hold(self, job_id: str, stage: Stage) -> bool:
        return stage in self.held[environment_of(job_id)]

    @property
    def sessions(self) -> dict[str, Stage]:
        """Jobs that have one, and where they are."""
        having = self.working | {job: at for job, at in (self.waiting | self.paused).items() if at is Stage.RUN}
        return {job: at for job, at in having.items() if at is not Stage.EVAL}

    @property
    def counted(self) -> Counter[str]:
        """What takes up room: slots by stage, and sessions."""
        slots = Counter[str](at for job, at in self.working.items() if not self.stands_on_hold(job, at))
        slots["sessions"] = sum(not self.stands_on_hold(job, at) for job, at in self.sessions.items())
        return slots

    @property
    def bounds(self) -> Counter[str]:
        return Counter({stage.value: self.sizes.of(stage) for stage in Stage}) + Counter(
            sessions=self.sizes.run + self.sizes.ready
        )

    def coming(self, stage: Stage) -> set[str]:
        """Environments for which a slot of a stage stays free, if they have none there."""
        come = {environment_of(job) for job in self.may_start(Stage.INIT)}
        if stage is not Stage.INIT:
            come |= {environment_of(job) for job, at in self.sessions.items() if not self.stands_on_hold(job, at)}
        return {environment_of(job) for job in self.may_start(stage)} | {
            name for name in come if stage not in self.held[name]
        }

    def is_below_share(self, environment: str) -> bool:
        having = Counter(environment_of(job) for job in self.sessions)
        names = {environment_of(job) for job in self.may_start(Stage.INIT)} | having.keys()
        return having[environment] < self.bounds["sessions"] / len(names)

    def may_start(self, stage: Stage) -> list[str]:
        return [job for job, at in self.waiting.items() if at is stage and not self.stands_on_hold(job, at)]

    @invariant()
    def counts_agree(self) -> None:
        working = Counter(self.working.values())
        waiting = Counter(self.waiting.values())
        for stage in Stage:
            assert self.scheduler.working(stage) == working[stage]
            assert self.scheduler.waiting(stage) == waiting[stage]
        assert self.scheduler.by_environment() == Counter(
            (environment_of(job), stage, jobs is self.working)
            for jobs in (self.working, self.waiting)
            for job, stage in jobs.items()
        )
        for job_id, stage in (self.waiting | self.working).items():
            assert self.scheduler.is_held(job_id) == (stage in self.held[environment_of(job_id)])

    @invariant()
    def nothing_that_may_start_waits(self) -> None:
        assert self.scheduler.sessions == len(self.sessions)
        for stage in Stage:
            may, coming = {environment_of(job) for job in self.may_start(stage)}, self.coming(stage)
            without = coming - {environment_of(job) for job, at in self.working.items() if at is stage}
            free = self.bounds[stage] - self.counted[stage]
            if free <= len(without):
                may = {name for name in may & without if stage is not Stage.INIT or self.is_below_share(name)}
            if stage is Stage.INIT:
                places = self.bounds["sessions"] - self.counted["sessions"]
                without = coming - {environment_of(job) for job in self.sessions}
                may = may & without if places <= len(without) else may
                free = min(free, places)
            assert free <= 0 or not may

    @invariant()
    def bounds_hold(self) -> None:
        counted, bounds = self.counted, self.bounds
        for what, count in counted.items():
            assert count <= bounds[what] + self.overflow[what], "more only as an outage ended, and ever less"
        self.overflow &= counted - bounds


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=100, stateful_step_count=50)


SHARES = {"swe": 3.0, "math": 1.0, "code": 0.5}


def test_priority_goes_first_then_who_has_least_for_its_share_then_who_waited_longest() -> None:
    held = Counter[tuple[str, str]]()
    queue = FairQueue(lambda client, environment: held[client, environment] / SHARES[environment], {"b": 2.0})
    for number in range(3):
        for client in "ab":
            for environment in ("swe", "math"):
                queue.push(f"{client}-{environment}-{number}", client, 0, environment)
    queue.push("b-code-urgent", "b", 1, "code")

    def served(count: int, among: frozenset[str] | None = None) -> list[str]:
        found = []
        for _ in range(count):
            job_id = queue.pop(among)
            client, environment, _ = job_id.split("-")
            held[client, environment] += 1
            queue.add_load(client, 1)
            found.append(job_id)
        return found

    assert served(1) == ["b-code-urgent"]
    assert served(4) == ["a-swe-0", "b-swe-0", "a-math-0", "b-math-0"]
    assert served(1, frozenset({"math"})) == ["b-math-1"]
    queue.remove("a-swe-1", "a", 0, "swe")
    queue.add_load("b", -5)
    queue.share({})
    assert served(2) == ["b-swe-1", "b-swe-2"]
    assert len(queue) == 4


@pytest.mark.parametrize("by", ["client", "environment"])
@pytest.mark.parametrize(
    "seconds", [{}, {("one", Stage.RUN): 200}, {("three", Stage.RUN): 200, ("three", Stage.INIT): 9}]
)
def test_clients_and_environments_have_their_shares_of_sandboxes_and_slots(
    by: str, seconds: dict[tuple[str, Stage], int]
) -> None:
    """Also where no row waits for INIT, and where rows of one take longer than those of the other."""
    shares = {"one": 1.0, "three": 3.0}
    scheduler = StageScheduler(PoolSizes(init=16, ready=4, run=32, eval=8), shares if by == "environment" else {})
    if by == "client":
        scheduler.share(shares)
    ends: list[tuple[float, int, str, Stage]] = []
    now, count, running, slots = 0.0, 0, Counter[str](), Counter[str]()

    def begin(starts: list[Start]) -> None:
        nonlocal count
        for start in starts:
            count += 1
            client = environment_of(start.job_id)
            running[client] += start.stage is Stage.RUN
            lasts = seconds.get((client, start.stage), 1 + (start.stage is Stage.RUN) * 20)
            heapq.heappush(ends, (now + lasts * (1 + count % 7 / 10), count, start.job_id, start.stage))

    for number in range(2000):
        for name in shares:
            client, environment = (name, "") if by == "client" else ("trainer", name)
            begin(scheduler.submit(f"{name}-{number}", client, 0, environment))
    while scheduler.waiting(Stage.INIT) and now < 1500:
        before = now
        now, _, job_id, stage = heapq.heappop(ends)
        if before > 500:
            for client, jobs in running.items():
                slots[client] += jobs * (now - before)
        running[environment_of(job_id)] -= stage is Stage.RUN
        begin(scheduler.worked(job_id, NEXT[stage]))
    assert slots["one"] / slots.total() == pytest.approx(0.25, abs=0.04)


SIZE = 3


class Groups(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.group: dict[str, str] = {}
        self.live = set[str]()
        self.upstream: dict[str, Stage] = {}
        self.gathered: list[str] = []
        self.scoring: dict[str, int] = {}
        self.aside: list[str] = []
        self.held = False
        self.overflow = 0
        self.cohorts = set[int]()

    @initialize(slots=st.integers(1, 2))
    def start(self, slots: int) -> None:
        self.slots = slots
        self.scheduler = StageScheduler(PoolSizes(init=8, ready=8, run=8, eval=slots), cohorts={"judged": SIZE})

    def apply(self, starts: list[Start]) -> None:
        together = Counter[int]()
        before = {self.group[job] for job in self.scoring}
        for start in starts:
            if start.stage is not Stage.EVAL:
                self.upstream[start.job_id] = start.stage
                continue
            assert start.member is not None
            assert not self.held
            assert start.member.cohort not in self.cohorts, "a number of its own"
            assert start.member.index == together[start.member.cohort]
            assert self.group[start.job_id] not in before, "one cohort of a group at a time"
            together[start.member.cohort] += 1
            self.gathered.remove(start.job_id)
            self.scoring[start.job_id] = start.member.cohort
        self.cohorts |= together.keys()
        assert set(together.values()) <= {SIZE}
        for cohort in together:
            assert len({self.group[job] for job, of in self.scoring.items() if of == cohort}) == 1

    @rule(group=st.sampled_from("ab"), client=st.sampled_from("xy"))
    def submit(self, group: str, client: str) -> None:
        job = f"{group}{len(self.group)}"
        self.group[job] = group
        self.live.add(job)
        self.apply(self.scheduler.submit(job, client, 0, "judged", group))

    @precondition(lambda self: self.upstream)
    @rule(data=st.data())
    def stage_works(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.upstream)))
        then = Stage.RUN if self.upstream.pop(job) is Stage.INIT else Stage.EVAL
        if then is Stage.EVAL:
            self.gathered.append(job)
        self.apply(self.scheduler.worked(job, then))

    @precondition(lambda self: self.scoring)
    @rule(data=st.data(), again=st.booleans())
    def is_scored(self, data: st.DataObject, again: bool) -> None:
        job = data.draw(st.sampled_from(sorted(self.scoring)))
        del self.scoring[job]
        if again:
            self.aside.append(job)
        else:
            self.live.remove(job)
        self.apply(self.scheduler.set_aside(job) if again else self.scheduler.worked(job, None))

    @precondition(lambda self: self.aside)
    @rule()
    def retry(self) -> None:
        self.gathered.append(job := self.aside.pop())
        self.apply(self.scheduler.requeue(job, Stage.EVAL))

    @precondition(lambda self: self.gathered)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.gathered)))
        self.gathered.remove(job)
        self.live.remove(job)
        assert self.scheduler.is_waiting(job)
        self.apply(self.scheduler.pause(job))
        self.apply(self.scheduler.remove(job))

    @rule()
    def hold(self) -> None:
        self.held = not self.held
        self.apply(self.scheduler.hold("judged", frozenset({Stage.EVAL} if self.held else ())))
        self.overflow = max(0, len({*self.scoring.values()}) - self.slots)

    @invariant()
    def a_cohort_takes_one_slot(self) -> None:
        if self.group:
            taken = len({*self.scoring.values()})
            assert self.scheduler.working(Stage.EVAL) == taken
            assert self.scheduler.waiting(Stage.EVAL) == len(self.gathered)
            assert self.held or taken <= self.slots + self.overflow
            self.overflow = min(self.overflow, max(0, taken - self.slots))

    @invariant()
    def no_group_that_is_whole_waits_for_nothing(self) -> None:
        if not self.held and len({*self.scoring.values()}) < getattr(self, "slots", 0):
            busy = {self.group[job] for job in self.scoring}
            waiting = Counter(self.group[job] for job in self.gathered)
            assert all(count < SIZE for group, count in waiting.items() if group not in busy)

    @invariant()
    def who_misses_siblings_knows_how_many(self) -> None:
        for job in self.gathered:
            siblings = {other for other in self.live if self.group[other] == self.group[job]}
            assert self.scheduler.missing_siblings(job) == (max(0, SIZE - len(siblings)), frozenset(siblings))


TestGroups = Groups.TestCase
TestGroups.settings = settings(max_examples=60, stateful_step_count=50)
