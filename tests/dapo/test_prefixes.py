# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which groups begin again where, and when that is given up; the sampler's part with what it decides."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.dapo.contract import Decision, SamplerConfig, Submission
from nemo_gym_prorl.dapo.fates import Usage
from nemo_gym_prorl.dapo.prefixes import Helper, Kept, Prefixes
from nemo_gym_prorl.dapo.prompts import Epochs, SkipSolved
from nemo_gym_prorl.dapo.sampler import DynamicSampler


def helper(rollout: str, accuracy: float, turns: Sequence[int] = (1, 2, 3)) -> Helper:
    return Helper(rollout, accuracy, Kept("node", turns))


@given(
    turns=st.lists(st.integers(1, 99), min_size=1, max_size=20, unique=True).map(sorted),
    ends=st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted),
    failed=st.booleans(),
    tries=st.integers(1, 8),
)
def test_the_turn_from_which_both_come_about_is_found(
    turns: list[int], ends: list[int], failed: bool, tries: int
) -> None:
    """Before the first place all end as the first tries did, from the second on as the helper did."""
    early, late = ends
    ours, its = (0.0, 1.0) if failed else (1.0, 0.0)
    prefixes = Prefixes(tries)
    prefixes.saw("p", [helper("it", its, turns), helper("like us", ours, turns)])
    search = prefixes.search("p", ours)
    assert search is not None
    asked = []
    while True:
        assert search.prefix.rollout == "it"
        asked.append(search.prefix.turn)
        place = turns.index(asked[-1])
        if early <= place < late:
            break
        if not prefixes.goes_on(search, ours if place < early else its):
            break
    assert len(asked) == len({*asked}) <= tries
    assert prefixes.counts["begun"] == len(asked)
    if not prefixes.counts["given_up"]:
        return
    left = range(search.early + 1, search.late)
    assert len(asked) == tries or not left
    assert {*range(early, min(late, len(turns)))} <= {*left}, "what was not tried is where it could be"
    assert len(left) <= len(turns) / 2 ** len(asked)
    assert len(asked) <= math.log2(len(turns)) + 1


def test_who_helps_ended_otherwise_and_is_the_newest_of_those_that_did_so_most() -> None:
    prefixes = Prefixes(1)
    assert prefixes.search("p", 0.0) is None
    prefixes.saw("p", [helper("a", 0.0), helper("b", 1.0), helper("c", 0.5)])
    prefixes.saw("p", [helper("keeps nothing", 1.0, ()), helper("d", 1.0), helper("e", 0.5)])
    prefixes.saw("q", [helper("f", 1.0)])
    assert [search and search.helper.rollout for search in (prefixes.search("p", x) for x in (0.0, 0.4, 1.0))] == [
        "d",
        "d",
        "a",
    ]
    assert prefixes.search("q", 1.0) is None, "all are alike"
    found = prefixes.search("p", 0.0)
    assert found is not None
    prefixes.refused("p", found)
    assert prefixes.search("p", 0.0) is None
    assert prefixes.search("p", 1.0) is not None, "who failed is still kept"


KEPT = Kept("node", (1, 2, 3))


class Service:
    """Does what the sampler says, with two rollouts a group of one prompt."""

    def __init__(self, tries: int, curriculum: SkipSolved | None = None, staleness: int = 4) -> None:
        config = SamplerConfig(1, 2, 2, staleness, reference_share=0.0, prefix_tries=tries, max_fruitless=10)
        self.sampler = DynamicSampler(config, Epochs([{}]), curriculum, run="dapo")
        for _ in range(10):
            self.sampler.ask()
        self.decision = self.sampler.decide()

    def end(self, *rewards: float, masked: bool = False) -> list[Submission]:
        """What is to be submitted, when those before have these rewards."""
        for submission, reward in zip(self.decision.submit, rewards, strict=True):
            self.sampler.scored(submission.rollout, reward, Usage(1.0, 9.0), kept=KEPT, masked=masked)
        self.decision: Decision = self.sampler.decide()
        return self.decision.submit


def begun(submissions: list[Submission]) -> list[tuple[int, str, int] | int]:
    """Prompts' numbers, with the prefixes."""
    return [(it.prompt, it.prefix.rollout, it.prefix.turn) if it.prefix else it.prompt for it in submissions]


def test_failed_groups_get_a_head_start_and_solved_ones_a_handicap() -> None:
    service = Service(2)
    assert begun(service.end(0, 1)) == [1, 1]
    assert begun(service.end(0, 0)) == [(1, "dapo:0:1:0", 2)] * 2
    assert {it.rollout for it in service.decision.submit} == {"dapo:1:0:1", "dapo:1:1:1"}
    assert begun(service.end(1, 1)) == [(1, "dapo:0:1:0", 1)] * 2, "it was too late"
    assert begun(service.end(0, 1)) == [2, 2]
    [batch] = service.decision.batches
    assert [scored.rollout for scored in batch.groups[1]] == ["dapo:1:0:2", "dapo:1:1:2"]
    # The first tries of a group are remembered, and never its forks.
    assert begun(service.end(1, 1)) == [(2, "dapo:1:1:0", 2)] * 2


def test_by_default_nothing_begins_at_a_prefix() -> None:
    service = Service(0)
    service.end(0, 1)
    assert begun(service.end(0, 0)) == [2, 2]


def test_the_curriculum_hears_of_first_tries_only() -> None:
    service = Service(1, SkipSolved(2))
    service.end(0, 1)
    service.end(1, 1)  # solved once
    service.end(0, 1)  # from a handicap
    assert not service.sampler.finished
    assert [it.prompt for it in service.decision.submit] == [2, 2]
    service.end(1, 1)
    assert service.sampler._curriculum is not None
    service.end(0, 1)
    assert service.sampler._curriculum.skips("0"), "solved twice"


def test_a_group_that_is_too_old_begins_again_at_its_prompt() -> None:
    service = Service(1, staleness=0)
    assert begun(service.end(0, 1)) == []
    service.sampler.weights(1)
    service.decision = service.sampler.decide()
    assert begun(service.end(0, 0)) == [(1, "dapo:0:1:0", 2)] * 2


def test_a_group_that_varies_but_teaches_nothing_begins_nowhere_again() -> None:
    service = Service(1)
    service.end(0, 1)
    assert begun(service.end(0, 1, masked=True)) == [2, 2]
    assert begun(service.end(1, 1)) == [(2, "dapo:0:0:0", 2)] * 2, "what is masked helps nobody"
