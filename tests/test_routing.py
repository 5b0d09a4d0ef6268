# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What routers are compared on: engines that share prefixes as real ones do, goals that say when they are missed."""

from __future__ import annotations

import pytest

from benchmarks import routing_real
from benchmarks.engines import Engine, Request, Rollout, Trace, Turn
from benchmarks.routers import CacheAware, CumulativeHeap, Ours
from benchmarks.routing import BOUND, SHAPES, TUNING_DRAWS, drawn
from benchmarks.routing_real import NAMED, OURS, Measured
from benchmarks.statistic import jackknife
from benchmarks.traces import Fleet, agent_trace


SIBLINGS = Trace("siblings", 2_000, 30_000, tuple(Rollout(f"r{i}", "g", 0.0, (Turn(0, 100, 0.0),)) for i in range(8)))


def play(engine: Engine) -> None:
    """Until all that was sent has ended."""
    now = 0.0
    list(engine.admit(SIBLINGS))
    while engine.running:
        now += engine.next_change()
        engine.advance(now)
        for request in [each for each in engine.running if each.prefill == 0 and each.decode <= 1e-6]:
            engine.running.remove(request)
            engine.release(request, SIBLINGS)
        list(engine.admit(SIBLINGS))


def sent(capacity: int) -> Engine:
    engine = Engine(0, capacity)
    engine.waiting.extend(Request(rollout, 0, 32_000, 0.0) for rollout in SIBLINGS.rollouts)
    return engine


def test_a_prompt_that_siblings_send_at_once_is_read_once_and_held_once() -> None:
    engine = sent(33_000)
    (first,) = engine.admit(SIBLINGS)
    assert (first[1], first[0].prefill) == (0, 32_000.0)
    engine.advance(engine.next_change())
    assert [hit for _, hit in engine.admit(SIBLINGS)] == [31_999] * 7, "they found what the first one had read"
    assert engine.pinned == 32_000 + 8 * 100


@pytest.mark.parametrize("capacity", [33_000, 40_000, 400_000])
def test_an_engine_forgets_nothing_that_it_uses_and_keeps_its_books(capacity: int) -> None:
    engine = sent(capacity)
    play(engine)
    assert (engine.pinned, dict(engine.used), engine.readers) == (0, {}, {})
    assert engine.cached == sum(engine.cache.values()) <= capacity


def test_a_request_that_is_cut_off_while_it_reads_leaves_nothing_behind() -> None:
    engine = sent(400_000)
    ((request, _),) = engine.admit(SIBLINGS)
    engine.running.remove(request)
    engine.release(request, SIBLINGS)
    assert (engine.pinned, engine.cached, engine.readers) == (0, 0, {})
    ((_, hit),) = engine.admit(SIBLINGS)
    assert hit == 0, "nobody has read it to its end"


@pytest.mark.parametrize("label", ["long group prompts", "long group prompts, small caches"])
def test_groups_with_long_prompts_are_as_quick_as_with_the_best_peers(label: str) -> None:
    trace = agent_trace(label, groups=4, seed=1, turns=4.0, **SHAPES[label].trace)
    ours, *peers = (
        Fleet(trace, 4, router(), **SHAPES[label].fleet).run() for router in (Ours, CacheAware, CumulativeHeap)
    )
    assert ours.makespan_s <= BOUND * min(peer.makespan_s for peer in peers)
    assert ours.p99_turn_s <= BOUND * min(peer.p99_turn_s for peer in peers)


def test_drawn_shapes_are_what_they_say() -> None:
    for index in TUNING_DRAWS:
        size, shape = drawn(index)
        assert 2 <= size <= 16
        assert 4 <= shape.trace["siblings"] <= 64
        assert 1_000 <= shape.trace["prompt"] <= 60_000
        assert shape.fleet["capacity"] >= 2 * shape.trace["prompt"]


def test_a_jackknife_of_a_mean_is_its_interval() -> None:
    values = [3.0, 5.0, 4.0, 8.0]
    whole, spread = jackknife(lambda chosen: sum(values[k] for k in chosen) / len(chosen), 4)
    assert whole == 5.0
    assert spread == pytest.approx(3.182 * (14 / 3) ** 0.5 / 2)
    assert jackknife(lambda _: 7.0, 1) == (7.0, None)


@pytest.mark.parametrize(
    ("ours", "met", "undecided"),
    [([1.0, 1.1, 0.9, 1.0], True, False), ([1.0, 1.3, 0.9, 1.2], None, True), ([1.30, 1.31, 1.29, 1.3], False, False)],
)
def test_a_goal_is_missed_where_its_interval_lies_above_it(
    ours: list[float], met: bool | None, undecided: bool
) -> None:
    def measured(seconds: list[float]) -> Measured:
        # The slowest turn in a hundred, of all repeats together, is the makespan of some.
        turns = {repeat: [each / 10] * 90 + [each] * 10 for repeat, each in enumerate(seconds)}
        makespans = {repeat: each * 20 for repeat, each in enumerate(seconds)}
        return Measured(dict.fromkeys(turns, 0.9), makespans, turns)

    # It does not play in all repeats.
    quick = measured([0.5] * 2)
    found = {OURS: measured(ours), NAMED: measured([1.0] * 4), "quick by luck": quick}
    figures = {figure.name: figure for figure in routing_real.figures({"2": found})}
    makespan, p99 = figures[f"2: makespan, over {NAMED}"], figures[f"2: p99 turn, over {NAMED}"]
    assert (makespan.met, makespan.undecided) == (met, undecided)
    assert makespan.peers["quick by luck"] == 10.0
    assert p99.value == max(ours)
    assert p99.goal_value == pytest.approx(max(ours))
