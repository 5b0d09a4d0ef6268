# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Invariants of the sampler under random arrivals, failures, late cancellations and restarts."""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nemo_gym_prorl.dapo.contract import Batch, Decision, NothingToLearn, SamplerConfig, Submission
from nemo_gym_prorl.dapo.group import CheckpointRef, RolloutOutcome, Usage
from nemo_gym_prorl.dapo.prompts import Epochs, SkipSolved
from nemo_gym_prorl.dapo.sampler import DynamicSampler
from nemo_gym_prorl.failures import CallerError, Origin


ROWS = [{"prompt": number} for number in range(7)]
REWARDS = [0.0, 1.0, 0.1 + 0.2, 0.3]
"""The last two differ by one unit in the last place."""
CHECKPOINTS = CheckpointRef("node", (1, 2, 5))


class Sampling(RuleBasedStateMachine):
    """Driver that carries out decisions in any order."""

    @initialize(
        groups=st.integers(1, 3),
        size=st.integers(2, 4),
        in_flight=st.integers(1, 14),
        staleness=st.integers(0, 3),
        failures=st.integers(0, 2),
        references=st.sampled_from([0.0, 0.5, 1.0]),
        prefix_tries=st.sampled_from([0, 2]),
        epochs=st.sampled_from([None, 3]),
    )
    def begin(
        self,
        groups: int,
        size: int,
        in_flight: int,
        staleness: int,
        failures: int,
        references: float,
        prefix_tries: int,
        epochs: int | None,
    ) -> None:
        self.config = SamplerConfig(
            groups,
            size,
            max(in_flight, size),
            staleness,
            failures,
            reference_share=references,
            max_fruitless=10**6,
            max_dropped=10**6,
            first_version=5,
            prefix_tries=prefix_tries,
        )
        self.prompts = Epochs(ROWS, epochs=epochs)
        self.sampler = DynamicSampler(self.config, self.prompts, run="dapo")
        self.live: dict[str, Submission] = {}
        self.cancelling: set[str] = set()
        self.scored: dict[str, float] = {}
        self.known: dict[str, None] = {}
        self.batches: list[Batch] = []
        self.obey(self.sampler.decide())

    def obey(self, decision: Decision) -> None:
        for rollout in decision.cancel:
            assert rollout in self.live
            assert rollout not in self.cancelling
            self.cancelling.add(rollout)
        for rollout in decision.forget:
            del self.scored[rollout]
        for submission in decision.submit:
            assert submission.rollout not in self.known, "an id is given out once"
            assert submission.version == self.sampler.version
            if submission.prefix is not None:
                assert self.config.prefix_tries
                assert submission.prefix.rollout in self.known.keys() - self.live.keys()
                assert submission.prefix.turn in CHECKPOINTS.turns
            self.known[submission.rollout] = None
            self.live[submission.rollout] = submission
        for batch in decision.batches:
            self.check(batch)
            self.batches.append(batch)

    def check(self, batch: Batch) -> None:
        assert batch.number == len(self.batches) < self.sampler.asked
        assert batch.version == self.config.first_version + batch.number
        assert len(batch.groups) == self.config.groups_per_batch
        assert [*batch.groups] == sorted(batch.groups)
        for number, rollouts in batch.groups.items():
            assert len(rollouts) == self.config.group_size
            assert len({rollout.reward for rollout in rollouts}) > 1, "a group without variance"
            assert {rollout.rollout.split(":")[1] for rollout in rollouts} == {str(number)}
            assert [int(rollout.rollout.split(":")[2]) for rollout in rollouts] == [*range(self.config.group_size)]
            for rollout in rollouts:
                assert self.scored.pop(rollout.rollout) == rollout.reward, "once, with the reward that was told"
                assert 0 <= batch.version - rollout.version <= self.config.max_staleness

    def decide(self) -> None:
        try:
            self.obey(self.sampler.decide())
        except NothingToLearn:
            assert self.sampler.finished
            assert not self.batches
            assert not self.scored

    def ends(self, rollout: str, reward: float) -> None:
        if self.sampler.wants(rollout):
            self.scored[rollout] = reward
        self.sampler.scored(rollout, reward, Usage(1.0, 2.0), checkpoints=CHECKPOINTS)
        self.over(rollout)

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from([*self.live]))  # the order of submission, which does not depend on random ids

    def over(self, rollout: str) -> None:
        del self.live[rollout]
        self.cancelling.discard(rollout)
        self.decide()

    @rule(data=st.data(), reward=st.sampled_from(REWARDS))
    @precondition(lambda self: self.live)
    def scores(self, data: st.DataObject, reward: float) -> None:
        self.ends(self.pick(data), reward)

    @rule(data=st.data(), origin=st.sampled_from(Origin))
    @precondition(lambda self: self.live)
    def fails(self, data: st.DataObject, origin: Origin) -> None:
        rollout = self.pick(data)
        if origin is Origin.AGENT:
            self.ends(rollout, 0.0)
            return
        self.sampler.failed(rollout, origin, Usage(1.0, 2.0))
        self.over(rollout)

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def is_cancelled(self, data: st.DataObject) -> None:
        rollout = self.pick(data)
        self.sampler.cancelled(rollout)
        self.over(rollout)

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def is_interrupted(self, data: st.DataObject) -> None:
        rollout = self.pick(data)
        self.sampler.interrupted(rollout, Usage(1.0, 2.0))
        self.over(rollout)

    @rule(data=st.data())
    @precondition(lambda self: self.scored)
    def is_lost(self, data: st.DataObject) -> None:
        rollout = data.draw(st.sampled_from([*self.scored]))
        del self.scored[rollout]
        self.sampler.lost(rollout)
        self.decide()

    @rule(data=st.data())
    @precondition(lambda self: self.known)
    def is_told_of_twice(self, data: st.DataObject) -> None:
        ended = [rollout for rollout in self.known if rollout not in self.live]
        rollout = data.draw(st.sampled_from(ended or ["x"]))
        self.sampler.scored(rollout, 1.0)
        self.sampler.failed(rollout, Origin.TASK)

    @rule()
    def asks(self) -> None:
        self.sampler.ask()
        self.decide()

    @rule(steps=st.integers(0, 3))
    def trains(self, steps: int) -> None:
        newest = self.config.first_version + len(self.batches)
        self.sampler.weights(min(self.sampler.version + steps, newest))
        self.decide()

    @rule()
    def restarts(self) -> None:
        state = json.loads(json.dumps(self.sampler.state()))
        self.sampler = DynamicSampler(self.config, self.prompts, run="dapo")
        again = self.sampler.restore(state)
        for submission in again.submit:
            assert replace(submission, urgent=self.live[submission.rollout].urgent) == self.live[submission.rollout]
        assert {submission.rollout for submission in again.submit} == set(self.live) - set(again.cancel)
        ended = set(again.cancel) - self.cancelling
        assert set(again.cancel) >= self.cancelling
        assert all(self.live[rollout].prefix for rollout in ended), "forks begin again at their prompt"
        self.cancelling |= ended
        for rollout in again.forget:
            del self.scored[rollout]

    @rule(rewards=st.permutations([0.0, 1.0]))
    def goes_well_from_here(self, rewards: list[float]) -> None:
        """After any history: without further failures a batch comes, or the prompts end."""
        before = len(self.batches)
        if self.sampler.asked == before:
            self.asks()
        for _ in range(2000):
            if len(self.batches) > before or self.sampler.finished:
                return
            if not self.live:
                self.trains(1)
                if not self.live:
                    break
            rollout = next(iter(self.live))
            reward = rewards[int(rollout.split(":")[2]) % 2]
            self.ends(rollout, reward)
        assert self.sampler.finished, "nothing in flight, and no batch"

    @invariant()
    def every_rollout_is_accounted_for_once(self) -> None:
        if not hasattr(self, "sampler"):
            return
        sampler = self.sampler
        assert sampler.in_flight == len(self.live) <= self.config.max_in_flight
        assert len(sampler.results()) == len(self.scored)
        assert sampler.submitted == len(self.known) == sampler.in_flight + len(self.scored) + sampler.outcomes.rollouts
        per_batch = self.config.groups_per_batch * self.config.group_size
        assert sampler.outcomes[RolloutOutcome.EMITTED].rollouts == len(self.batches) * per_batch

    def teardown(self) -> None:
        if not hasattr(self, "sampler"):
            return
        decision = self.sampler.close()
        self.obey(decision)
        for rollout in [*self.live]:
            self.sampler.cancelled(rollout)
            self.over(rollout)
        assert not self.scored
        assert self.sampler.finished
        assert self.sampler.submitted == self.sampler.outcomes.rollouts


TestSampling = pytest.mark.longer("150 examples")(Sampling.TestCase)
TestSampling.settings = settings(max_examples=150 if os.environ.get("PRORL_TEST_LONG") else 50, stateful_step_count=60)


def eager(config: SamplerConfig, prompts: Epochs, curriculum: SkipSolved | None = None) -> DynamicSampler:
    """Return a sampler that was asked for many batches."""
    sampler = DynamicSampler(config, prompts, curriculum, run="dapo")
    for _ in range(100):
        sampler.ask()
    return sampler


@given(seed=st.integers(0, 10**6), size=st.integers(2, 4), groups=st.integers(1, 4), cap=st.integers(1, 40))
@settings(max_examples=60)
def test_the_batches_are_the_same_whatever_ends_first(seed: int, size: int, groups: int, cap: int) -> None:
    def batches(driver: random.Random) -> list[list[tuple[int, list[float]]]]:
        config = SamplerConfig(groups, size, max(cap, size), max_staleness=driver.randrange(3))
        sampler = eager(config, Epochs(ROWS, seed=seed))
        made: list[list[tuple[int, list[float]]]] = []
        live: list[str] = []
        while len(made) < 4:
            decision = sampler.decide()
            live = [
                rollout for rollout in live + [s.rollout for s in decision.submit] if rollout not in decision.cancel
            ]
            for rollout in decision.cancel:
                sampler.cancelled(rollout)
            made += [[(n, [r.reward for r in rs]) for n, rs in batch.groups.items()] for batch in decision.batches]
            newest = sampler.config.first_version + sampler.emitted
            if sampler.version < newest and (not live or driver.random() < 0.3):
                sampler.weights(driver.randint(sampler.version + 1, newest))
            elif live:
                rollout = live.pop(driver.randrange(len(live)))
                number, place = rollout.split(":")[1:3]
                outcome = random.Random(f"{seed}:{number}:{place}")
                if outcome.random() < 0.1:
                    sampler.failed(rollout, Origin.TASK)
                else:
                    sampler.scored(rollout, float(outcome.random() < 0.5))
        return made[:4]

    first = batches(random.Random(seed))
    assert first == batches(random.Random(seed + 1))
    assert [number for batch in first for number, _ in batch] == sorted(
        number for batch in first for number, _ in batch
    )


def finish(sampler: DynamicSampler, submissions: list[Submission], rewards: list[float]) -> Decision:
    """Score rollouts in the order of submission."""
    for submission, reward in zip(submissions, rewards, strict=True):
        sampler.scored(submission.rollout, reward, Usage(seconds=1.0, length=10.0))
    return sampler.decide()


def test_with_staleness_siblings_are_carried_over() -> None:
    sampler = eager(SamplerConfig(1, 2, 4, max_staleness=2), Epochs(ROWS, seed=None))
    submissions = sampler.decide().submit
    sampler.scored(submissions[2].rollout, 1.0)
    decision = finish(sampler, submissions[:2], [0.0, 1.0])
    assert len(decision.batches) == 1
    assert not decision.cancel
    assert [s.prompt for s in decision.submit] == [2, 2], "what ended makes room at once"
    sampler.weights(1)
    assert [s.prompt for s in sampler.decide().submit] == [3]
    decision = finish(sampler, [submissions[3]], [0.0])
    assert [[r.version for r in rs] for rs in decision.batches[0].groups.values()] == [[0, 0]]
    assert decision.batches[0].version == 1
    assert not decision.cancel


def test_no_more_groups_are_under_way_than_can_be_trained_on() -> None:
    sampler = eager(SamplerConfig(4, 2, None, max_staleness=1), Epochs(ROWS, seed=None))
    begun = {s.prompt for s in sampler.decide().submit}
    assert 4 < len(begun) <= 16, "two batches, of groups of which half may have no variance"


def test_a_member_that_fails_is_tried_again_and_one_that_is_refused_is_not() -> None:
    refused = eager(SamplerConfig(1, 2, 2), Epochs(ROWS, seed=None))
    first, second = refused.decide().submit
    refused.failed(first.rollout, Origin.TASK)
    assert refused.decide().cancel == [second.rollout]
    assert refused.dropped == {"refused": 1}
    sampler = eager(SamplerConfig(1, 2, 2, max_failures=1), Epochs(ROWS, seed=None))
    first, second = sampler.decide().submit
    sampler.scored(first.rollout, 1.0)
    sampler.failed(second.rollout, Origin.INFRASTRUCTURE)
    (again, _other) = sampler.decide().submit
    assert (again.rollout, again.urgent) == ("dapo:0:1:1", True)
    sampler.failed(again.rollout, Origin.INFRASTRUCTURE)
    decision = sampler.decide()
    assert sampler.dropped == {"failed": 1}
    assert decision.forget == [first.rollout]
    assert not decision.batches


def test_a_prompt_that_is_sampled_again_counts_once_for_the_curriculum() -> None:
    curriculum = SkipSolved(2)
    sampler = eager(SamplerConfig(1, 2, 4, max_staleness=0, reference_share=0.0), Epochs(ROWS, seed=None), curriculum)
    for version in range(3):
        submissions = sampler.decide().submit
        first, second = submissions[:2], submissions[2:4]
        finish(sampler, second, [1.0, 1.0])  # after the batch, so started again
        for rollout in finish(sampler, first, [0.0, 1.0]).cancel:
            sampler.cancelled(rollout)
        sampler.weights(version + 1)
        assert curriculum.state()["in_a_row"] == {}


def test_prompts_that_are_solved_are_left_out() -> None:
    sampler = eager(SamplerConfig(1, 2, 2), Epochs(ROWS[:2], seed=None), SkipSolved(1))
    decision = finish(sampler, sampler.decide().submit, [1.0, 1.0])
    assert [s.prompt for s in decision.submit] == [1, 1]
    decision = finish(sampler, decision.submit, [0.0, 0.0])
    assert [s.prompt for s in decision.submit] == [3, 3], "2 is prompt 0 again"
    assert finish(sampler, decision.submit, [1.0, 1.0]).forget, "what was decided comes first"
    with pytest.raises(NothingToLearn, match="skips every prompt"):
        sampler.decide()


def test_what_can_be_no_reward_or_no_version_is_refused() -> None:
    sampler = eager(SamplerConfig(1, 2, 2), Epochs(ROWS))
    sampler.decide()
    with pytest.raises(ValueError, match="must be finite numbers: nan"):
        sampler.scored("dapo:0:0:0", math.nan)
    with pytest.raises(ValueError, match="weights 1 were announced; expected 0 to 0"):
        sampler.weights(1)
    assert sampler.in_flight == 2


def test_what_was_in_flight_when_a_trainer_left_is_not_sampled_again_alone() -> None:
    """Rollouts in flight are slow ones, so siblings and other groups start again as well."""
    prompts = Epochs(ROWS, seed=None)
    config = SamplerConfig(1, 2, 4, reference_share=0.0)
    first = eager(config, prompts)
    one, two, three, four = first.decide().submit
    first.scored(one.rollout, 1.0)
    first.scored(three.rollout, 0.0)
    first.scored(four.rollout, 0.0)
    again = eager(config, prompts)
    joined = {submission.rollout for submission in again.restore(first.state()).submit}
    assert two.rollout in joined
    again.interrupted(two.rollout)
    decision = again.decide()
    assert decision.forget == [one.rollout]
    assert [(s.prompt, s.rollout.split(":")[2]) for s in decision.submit][:4] == [
        *((0, "0"), (0, "1")),
        *((1, "0"), (1, "1")),
    ], "the group without variance, too"
    assert again.outcomes[RolloutOutcome.FAILED].rollouts == 1


def test_a_state_of_another_version_is_refused() -> None:
    state = eager(SamplerConfig(1, 2, 2), Epochs(ROWS)).state()
    del state["queue"]
    with pytest.raises(CallerError, match=r"state: another version .* saved the state: .queue. is missing"):
        DynamicSampler(SamplerConfig(1, 2, 2), Epochs(ROWS)).restore(state)


def test_orders_differ_by_epoch_and_can_be_had_again() -> None:
    prompts = Epochs([{}] * 50, seed=3)
    epochs = [[prompts[epoch * 50 + place].key for place in range(50)] for epoch in range(6)]  # type: ignore[union-attr]
    assert all(sorted(epoch, key=int) == [str(number) for number in range(50)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert [prompts[place].key for place in range(50)] == epochs[0]  # type: ignore[union-attr]
    with pytest.raises(CallerError, match="no rows"):
        Epochs([])


def test_what_two_runs_submit_that_began_from_one_state_has_different_ids() -> None:
    prompts = Epochs([{"prompt": number} for number in range(40)], seed=None)
    config = SamplerConfig(1, 2, 4)
    first = eager(config, prompts)
    first.decide()
    state = json.loads(json.dumps(first.state()))
    seen: list[set[str]] = []
    for _ in range(2):
        again = DynamicSampler(config, prompts)
        joined = {submission.rollout for submission in again.restore(state).submit}
        new: set[str] = set()
        for rollout in sorted(joined):
            again.scored(rollout, 0.0)  # zero variance, so other groups begin
            new |= {submission.rollout for submission in again.decide().submit}
        seen.append(new - joined)
    assert seen[0]
    assert not seen[0] & seen[1]
