# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Siblings that are scored together, under every order of events: they start at once, in one slot."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nemo_gym_prorl.failures import Stage
from nemo_gym_prorl.rollout.scheduler import PoolSizes, StageScheduler, Start


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
        self.scheduler = StageScheduler(PoolSizes(8, 8, 8, slots), cohorts={"judged": SIZE})

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
