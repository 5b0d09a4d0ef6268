# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Bias of the trained rollouts, and its estimate, compared with the true distribution."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.dapo import sampler
from benchmarks.sampling_clock import World, drive
from nemo_gym_prorl.dapo.bias import BiasMeter


WORLDS = {
    "heavy tail": {"variation": 2.0, "informative": 0.5},
    "15% time-outs": {"variation": 2.0, "informative": 0.5, "cut": 0.15},
    "half of the prompts ten times as long": {"variation": 0.4, "informative": 0.5, "long": 0.5},
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("staleness", [0, 4])
def test_what_is_trained_on_is_what_is_sampled(world: dict[str, float], staleness: int) -> None:
    of = World(seed=1, group_size=8, **world)  # type: ignore[arg-type]
    ours = sampler(of, staleness, prompts=8)
    run = drive(of, 40, ours)
    assert max(run.lags) <= staleness
    # With staleness 0 groups are resampled, and two samples of 200 groups differ by more than 3 %.
    near = 0.03 if staleness else 0.1
    assert run.bias(of) == (pytest.approx(1, abs=near), pytest.approx(1, abs=near))
    estimate = ours.length_bias
    assert estimate is not None
    assert estimate.low - 0.03 <= run.bias(of, estimate.end)[0] <= estimate.high + 0.03


@given(tries=st.lists(st.tuples(st.floats(1, 100), st.sampled_from([0.0, 1.0])), min_size=20, max_size=60))
def test_where_nothing_is_cut_off_the_bias_is_known(tries: list[tuple[float, float]]) -> None:
    meter = BiasMeter(0.1, "run")
    short = [number for number in range(0, len(tries) - 1, 2) if tries[number][0] < 50]
    varying = [number for number in range(0, len(tries) - 1, 2) if tries[number][1] != tries[number + 1][1]]
    for number in range(0, len(tries) - 1, 2):
        meter.opened(number, 2)
        for place in (0, 1):
            meter.record_outcome(number, place, *tries[number + place])
            meter.record_outcome(number, place, 10**6, 1.0)  # only the first try counts
    trained = [number for number in varying if number in short]
    for number in trained:
        meter.emitted(number, tries[number : number + 2])
    estimate = meter.length(len(tries))
    if not trained:
        assert estimate is None
        return
    assert estimate is not None

    def mean(numbers: list[int]) -> float:
        return sum(tries[number][0] + tries[number + 1][0] for number in numbers) / (2 * len(numbers))

    assert estimate.low <= estimate.value <= estimate.high
    assert estimate.value == pytest.approx(mean(trained) / mean(varying))
    if trained == varying:
        assert estimate.low == pytest.approx(estimate.high)


@pytest.mark.parametrize(("right", "wrong"), [(1.0, 0.0), (-0.5, -1.0)])
def test_accuracies_of_which_there_is_no_ratio_have_no_bias(right: float, wrong: float) -> None:
    """All correct rollouts are masked, or the accuracy is a penalty."""
    meter = BiasMeter(0.1, "run")
    meter.opened(0, 2)
    meter.record_outcome(0, 0, 10.0, right)
    meter.record_outcome(0, 1, 20.0, wrong)
    meter.emitted(0, [(20.0, wrong)])
    assert meter.accuracy(1) is None
    assert meter.length(1) is not None


def test_a_reference_runs_to_its_end_and_others_are_cut_off() -> None:
    meter = BiasMeter(0.5, "run")
    for number in range(200):
        meter.opened(number, 2)
    kept = [number for number in range(200) if meter.cut(number, 0)]
    assert 70 < len(kept) < 130
    assert not any(meter.cut(number, 1) for number in set(range(200)) - set(kept))
    assert all(meter.cut(number, 1) for number in kept)
