# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Prefix sampling: choice of sources, bisection, and the sampler's decisions about prefix groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.dapo.contract import Decision, SamplerConfig, Submission
from nemo_gym_prorl.dapo.group import CheckpointRef, Group, Member, PrefixSampling, Usage
from nemo_gym_prorl.dapo.prompts import Epochs, SkipSolved
from nemo_gym_prorl.dapo.sampler import DynamicSampler


def group(*ended: tuple[str, float], key: str = "p", turns: Sequence[int] = (1, 2, 3)) -> Group:
    """Return a complete group of rollouts with these accuracies."""
    members = [
        Member(place, rollout=rollout, reward=accuracy, accuracy=accuracy, checkpoints=CheckpointRef("node", turns))
        for place, (rollout, accuracy) in enumerate(ended)
    ]
    return Group(0, 0, key, members)


@given(
    turns=st.lists(st.integers(1, 99), min_size=1, max_size=20, unique=True).map(sorted),
    ends=st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted),
    failed=st.booleans(),
    tries=st.integers(1, 8),
)
def test_the_turn_from_which_both_come_about_is_found(
    turns: list[int], ends: list[int], failed: bool, tries: int
) -> None:
    """Below the first index all end as the first tries did, from the second on as the source did."""
    early, late = ends
    ours, its = (0.0, 1.0) if failed else (1.0, 0.0)
    prefixes = PrefixSampling(tries)
    assert prefixes.next_search(group(("it", its), ("like us", ours), turns=turns)) is None
    asked: list[int] = []
    at_prefix = group(("a", ours), ("b", ours))
    while (search := prefixes.next_search(at_prefix)) is not None:
        assert search.prefix.rollout == "it"
        asked.append(search.prefix.turn)
        place = turns.index(asked[-1])
        rewards = [ours, its] if early <= place < late else [ours if place < early else its] * 2
        at_prefix = group(*zip("ab", rewards, strict=True))
        at_prefix.search = search
    assert len(asked) == len({*asked}) <= tries
    assert prefixes.counts["begun"] == len(asked)
    assert prefixes.counts["helped"] + prefixes.counts["given_up"] == 1
    if prefixes.counts["helped"]:
        return
    assert at_prefix.search is not None
    left = range(at_prefix.search.early + 1, at_prefix.search.late)
    assert len(asked) == tries or not left
    assert {*range(early, min(late, len(turns)))} <= {*left}, "what was not tried is where it could be"
    assert len(left) <= len(turns) / 2 ** len(asked)
    assert len(asked) <= math.log2(len(turns)) + 1


def test_who_helps_ended_otherwise_and_is_the_newest_of_those_that_did_so_most() -> None:
    prefixes = PrefixSampling(1)

    def helper(accuracy: float, key: str = "p") -> str | None:
        search = prefixes.next_search(group(("x", accuracy), ("y", accuracy), key=key, turns=()))
        return search and search.source.rollout

    assert helper(0.0) is None
    prefixes.next_search(group(("a", 0.0), ("b", 1.0), ("c", 0.5)))
    prefixes.next_search(group(("keeps nothing", 1.0), ("at all", 0.0), turns=()))
    prefixes.next_search(group(("d", 1.0), ("e", 0.5)))
    prefixes.next_search(group(("f", 1.0), ("g", 1.0), key="q"))
    assert [helper(0.0), helper(0.4), helper(1.0)] == ["d", "d", "a"]
    assert helper(1.0, "q") is None, "all are alike"
    found = prefixes.next_search(group(("x", 0.0), ("y", 0.0), turns=()))
    assert found is not None
    prefixes.refused("p", found)
    assert helper(0.0) is None
    assert helper(1.0) == "a", "who failed is still kept"


CHECKPOINTS = CheckpointRef("node", (1, 2, 3))


class Service:
    """Driver of a sampler with one prompt and groups of two rollouts."""

    def __init__(
        self,
        tries: int,
        curriculum: SkipSolved | None = None,
        *,
        staleness: int = 4,
        groups: int = 1,
        in_flight: int = 2,
        epochs: int | None = None,
    ) -> None:
        config = SamplerConfig(
            groups, 2, in_flight, staleness, reference_share=0.0, prefix_tries=tries, max_fruitless=10
        )
        self.sampler = DynamicSampler(config, Epochs([{}], epochs=epochs), curriculum, run="dapo")
        for _ in range(10):
            self.sampler.ask()
        self.decision = self.sampler.decide()

    def end(self, *rewards: float, masked: bool = False) -> list[Submission]:
        """Score the last submissions, and return the next ones."""
        for submission, reward in zip(self.decision.submit, rewards, strict=True):
            self.sampler.scored(submission.rollout, reward, Usage(1.0, 9.0), checkpoints=CHECKPOINTS, masked=masked)
        self.decision: Decision = self.sampler.decide()
        return self.decision.submit


def begun(submissions: list[Submission]) -> list[tuple[int, str, int] | int]:
    """Return prompt numbers, with prefixes where there are some."""
    return [(it.prompt, it.prefix.rollout, it.prefix.turn) if it.prefix else it.prompt for it in submissions]


def test_failed_groups_are_followed_by_a_head_start_and_solved_ones_by_a_handicap() -> None:
    service = Service(2)
    assert begun(service.end(0, 1)) == [1, 1]
    assert begun(service.end(0, 0)) == [(1, "dapo:0:1:0", 2)] * 2
    assert {it.rollout for it in service.decision.submit} == {"dapo:2:0:0", "dapo:2:1:0"}
    assert begun(service.end(1, 1)) == [(1, "dapo:0:1:0", 1)] * 2, "it was too late"
    assert begun(service.end(0, 1)) == [2, 2], "the next prompt"
    [batch] = service.decision.batches
    assert [scored.rollout for scored in batch.groups[3]] == ["dapo:3:0:0", "dapo:3:1:0"]
    assert batch.prompts == {3: 1}
    # Only first tries are sources, never forks.
    assert begun(service.end(1, 1)) == [(2, "dapo:1:1:0", 2)] * 2
    assert begun(service.end(1, 1)) == [(2, "dapo:1:1:0", 3)] * 2
    assert begun(service.end(1, 1)) == [3, 3], "it is given up"
    assert service.sampler.prefixes.counts == {"begun": 4, "helped": 1, "given_up": 1}
    assert service.sampler.dropped == {"no_variance": 5}


@pytest.mark.parametrize("ends", [(), (0, 1), (1, 1)], ids=["it runs", "it varies", "it was too late"])
def test_a_group_that_is_too_old_begins_again_where_it_began(ends: tuple[int, ...]) -> None:
    """A stale prefix group starts again, and so does the group before it, which gets no second prefix group."""
    service = Service(2, staleness=0, groups=2, in_flight=6)
    sampler, first = service.sampler, service.decision.submit
    assert [number_of(it) for it in first] == [0, 0, 1, 1, 2, 2]
    for it, reward in zip(first[:2] + first[4:], (0, 1, 0, 0), strict=True):
        sampler.scored(it.rollout, reward, checkpoints=CHECKPOINTS)
    at_prefix = [it for it in sampler.decide().submit if it.prefix]
    assert begun(at_prefix) == [(2, "dapo:0:1:0", 2)] * 2
    for it, reward in zip(at_prefix if ends else [], ends, strict=True):
        sampler.scored(it.rollout, reward, checkpoints=CHECKPOINTS)
    for it, reward in zip(first[2:4], (0, 1), strict=True):
        sampler.scored(it.rollout, reward, checkpoints=CHECKPOINTS)
    decision = sampler.decide()
    assert [[*batch.groups] for batch in decision.batches] == [[0, 1]]
    for rollout in decision.cancel:
        sampler.cancelled(rollout)
    sampler.weights(1)
    again = sampler.decide().submit
    number = number_of(at_prefix[0])
    turns = {number_of(it): it.prefix.turn for it in again if it.prefix}
    assert turns == ({max(turns): 1} if ends == (1, 1) else {number: 2})
    assert ends != (1, 1) or number not in turns
    before = sampler.prefixes.counts["begun"]
    unlucky = [it for it in again if it.prompt == 2 and it.prefix is None]
    assert len(unlucky) == 2
    for it in unlucky:
        sampler.scored(it.rollout, 0, checkpoints=CHECKPOINTS)
    assert sampler.prefixes.counts["begun"] == before


def number_of(submission: Submission) -> int:
    return int(submission.rollout.split(":")[1])


def test_a_group_that_varies_but_teaches_nothing_is_followed_by_none() -> None:
    service = Service(1)
    service.end(0, 1)
    assert begun(service.end(0, 1, masked=True)) == [2, 2]
    assert begun(service.end(1, 1)) == [(2, "dapo:0:0:0", 2)] * 2, "what is masked helps nobody"
