# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated engines share prefixes as real ones do, and our router keeps up with its peers there."""

from __future__ import annotations

import pytest

from benchmarks.engines import Engine, Request, Rollout, Trace, Turn
from benchmarks.routers import CacheAware, CumulativeHeap, Ours
from benchmarks.routing import TUNING_DRAWS, drawn
from benchmarks.traces import Fleet, agent_trace


SIBLINGS = Trace(2_000, 30_000, tuple(Rollout(f"r{i}", "g", 0.0, (Turn(0, 100, 0.0),)) for i in range(8)))


def play(engine: Engine) -> None:
    """Until all that was sent has ended."""
    now = 0.0
    list(engine.admit(SIBLINGS))
    while engine.running:
        now += engine.next_change()
        engine.advance(now)
        for request in [each for each in engine.running if each.is_done]:
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


@pytest.mark.parametrize("capacity", [200_000, 400_000])
def test_groups_with_long_prompts_are_as_quick_as_with_the_best_peers(capacity: int) -> None:
    trace = agent_trace(4, siblings=32, prompt=30_000, seed=1, turns=4.0)
    ours, *peers = (
        Fleet(trace, 4, router(), capacity=capacity).run() for router in (Ours, CacheAware, CumulativeHeap)
    )
    assert ours.makespan_s <= 1.02 * min(peer.makespan_s for peer in peers)
    assert ours.p99_turn_s <= 1.02 * min(peer.p99_turn_s for peer in peers)


def test_drawn_shapes_are_in_their_ranges() -> None:
    for index in TUNING_DRAWS:
        size, shape = drawn(index)
        assert 2 <= size <= 16
        assert 4 <= shape.trace["siblings"] <= 64
        assert 1_000 <= shape.trace["prompt"] <= 60_000
        assert shape.fleet["capacity"] >= 2 * shape.trace["prompt"]
