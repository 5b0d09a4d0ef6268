# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The backend pool under arbitrary events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gym_prorl.policy.pool.backend import (
    BLOCK_TOKENS,
    Assign,
    GiveUp,
    Health,
    Probe,
    blocks_of,
)
from nemo_gym_prorl.policy.pool.pool import BackendPool
from tests.policy.pool_machine import PoolMachine


TestPool = PoolMachine.TestCase
TestPool.settings = settings(stateful_step_count=60)


class Load:
    """A pool whose requests are answered at once, so that rollouts are live and idle."""

    def __init__(self, backends: int) -> None:
        self.pool = BackendPool(limit=1000)
        self.where: dict[str, str] = {}
        self.count = 0
        self.now = 0.0
        for index in range(backends):
            self.pool.add(f"b{index}", "http://localhost")

    def start(self, group: str | None = None, tokens: int = 0, prompt: Sequence[int] | None = None) -> str:
        """Start a rollout whose prompt only its group shares, unless a prompt is given."""
        self.count += 1
        name = f"r{self.count}"
        prompt = prompt or [int.from_bytes((group or name).encode()[:7])] * tokens
        (assign,) = self.pool.request(self.count, name, group, 0.0, len(prompt), blocks_of(prompt))
        assert isinstance(assign, Assign)
        self.where[name] = assign.backend
        self.pool.answered(self.count, 0.0)
        return name

    def turn(self, name: str, tokens: int = 0, seconds: Callable[[str], float] = lambda _: 0.0) -> bool:
        """Run one more turn of the backend's duration; return whether the rollout moved."""
        self.count += 1
        self.now += 100.0
        (assign,) = self.pool.request(self.count, name, None, self.now, tokens)
        assert isinstance(assign, Assign)
        self.pool.answered(self.count, self.now + seconds(assign.backend))
        before, self.where[name] = self.where[name], assign.backend
        return before != assign.backend

    def live(self) -> dict[str, int]:
        return {backend.id: len(backend.live) for backend in self.pool.backends.values()}


@given(backends=st.integers(1, 8), before=st.integers(0, 60), after=st.integers(1, 60))
def test_a_late_joiner_gets_its_share_of_the_new_and_no_burst(backends: int, before: int, after: int) -> None:
    load = Load(backends)
    for _ in range(before):
        load.start()
    behind = before - min(load.live().values()) * backends
    load.pool.add("late", "http://localhost")
    for _ in range(after):
        load.start()
    share = (after + behind) / (backends + 1)
    assert abs(load.live()["late"] - share) <= 1


@pytest.mark.parametrize(("prompt", "own", "backends"), [(30_000, 0, 1), (30_000, 40_000, 4), (1_000, 0, 4)])
def test_groups_stay_whole_where_their_prompt_is_long_beside_what_rollouts_own(
    prompt: int, own: int, backends: int
) -> None:
    load = Load(4)
    for _ in range(16):
        load.turn(load.start(), tokens=own)
    assert len({load.where[load.start("g", tokens=prompt)] for _ in range(32)}) == backends


def test_siblings_spread_though_a_large_prompt_is_shared_by_all() -> None:
    load = Load(4)
    for backend_id in load.pool.backends:
        load.pool.report(backend_id, waiting=0, kv_use=0.0, capacity=100_000)
    system = [0] * 80 * BLOCK_TOKENS
    for group in range(6):
        for _ in range(8):
            load.start(f"g{group}", prompt=[*system, *[1 + group] * BLOCK_TOKENS])
    assert max(load.live().values()) - min(load.live().values()) <= 2
    for backend in load.pool.backends.values():
        assert backend.kv_demand == (80 + len(backend.groups)) * BLOCK_TOKENS


def test_a_rollout_that_must_move_goes_where_it_takes_the_least_room() -> None:
    load = Load(3)
    pool = load.pool
    names = [load.start("g" if index == 2 else None, tokens=(100, 50, 60)[index]) for index in range(3)]
    assert [load.where[name] for name in names] == ["b0", "b1", "b2"]
    mover = load.start("g", tokens=50)
    assert load.where[mover] == "b2", "its sibling is there"
    pool.remove("b2")
    pool.request(100, mover, "g", 0.0, 70)
    assert pool.backend_of(mover) == "b1"
    assert (pool.backends["b0"].kv_demand, pool.backends["b1"].kv_demand) == (100, 120)


def test_a_failed_backend_is_probed_tried_with_one_request_and_trusted_again() -> None:
    pool = BackendPool()
    pool.add("a", "http://localhost")
    pool.request(1, "r1")
    assert pool.failed(1, 10.0) == []
    assert pool.tick(10.5) == []
    assert pool.tick(11.0) == [Probe("a")]
    assert pool.probed("a", False, 11.0) == []
    assert pool.tick(12.0) == []
    assert pool.tick(13.0) == [Probe("a")]
    pool.request(2, "r2")
    assert pool.probed("a", True, 13.0) == [Assign(1, "a", None)]
    assert pool.answered(1, 14.0) == [Assign(2, "a", None)]
    assert pool.backends["a"].health is Health.UP


def test_pools_that_share_backends_have_their_limit_once() -> None:
    pool = BackendPool(limit=5)
    pool.add("a", "http://localhost")
    pool.add("mine", "http://localhost", run="r")

    def begin(number: int) -> bool:
        placed = pool.request(number, f"r{number}") != []
        if placed:
            pool.answered(number, 0.0)
        return placed

    assert all(begin(number) for number in range(5))
    pool.share(2)
    assert len(pool.backends["a"].live) == 5, "who is there stays"
    assert not begin(5)
    assert [*map(pool.finish, ("r0", "r1"))] == [[], []]
    assert pool.finish("r2") == [Assign(5, "a", None)], "5 for 2 are 3 each"
    assert not begin(6)
    pool.add("new", "http://elsewhere", run="r")
    assert [pool.backends[name].limit for name in ("a", "mine", "new")] == [3, 5, 5], "a run has its own"
    assert pool.share(1) == [Assign(6, "a", None)]


def test_idle_rollouts_make_room_for_those_that_wait() -> None:
    pool = BackendPool(limit=1, patience_s=5.0)
    pool.add("a", "http://localhost")
    pool.request(1, "slow tool")
    pool.answered(1, 0.0)
    assert pool.request(2, "next") == []
    assert pool.tick(4.0) == []
    assert pool.tick(5.0) == [Assign(2, "a", None)]
    assert pool.request(3, "newer") == []
    assert pool.request(4, "slow tool") == []
    pool.answered(2, 6.0)
    assert pool.finish("next") == [Assign(4, "a", None)]


def test_a_hot_backend_takes_no_more_and_lets_rollouts_go() -> None:
    load = Load(2)
    names = [load.start() for _ in range(16)]
    for name in names:
        if load.where[name] == "b1" and load.live()["b1"] > 4:
            load.pool.finish(name)
    stays = next(name for name in names if load.where[name] == "b0")
    assert not load.turn(stays), "8 and 4 are no crowd"
    load.pool.report("b0", waiting=5, kv_use=0.97)
    assert load.turn(stays)
    assert {load.where[load.start()] for _ in range(12)} == {"b1"}
    load.pool.report("b0", waiting=0, kv_use=0.1)
    assert load.where[load.start()] == "b0"


def test_rollouts_leave_a_slow_backend_and_new_ones_avoid_it() -> None:
    load = Load(4)
    names = [load.start() for _ in range(16)]
    for _ in range(40):
        for name in names:
            load.turn(name, seconds=lambda backend: 5.0 if backend == "b2" else 1.0)
    assert load.pool.backends["b2"].slowness > 2.0
    assert load.live()["b2"] <= 1
    assert "b2" not in {load.where[load.start()] for _ in range(6)}


def test_a_backend_whose_cache_is_full_is_not_slow() -> None:
    load = Load(2)
    names = [load.start(tokens=50) for _ in range(8)]
    for backend_id in load.pool.backends:
        load.pool.report(backend_id, waiting=0, kv_use=0.5, capacity=210)
    for _ in range(10):
        for name in names:
            assert not load.turn(name, 50, lambda backend: 9.0 if backend == "b1" else 1.0)
    assert {backend.slowness for backend in load.pool.backends.values()} == {1.0}


def test_short_rollouts_leave_a_cache_that_overflows_for_one_with_room() -> None:
    load = Load(2)
    names = [load.start(tokens=50) for _ in range(8)]
    for backend_id in load.pool.backends:
        load.pool.report(backend_id, waiting=0, kv_use=0.5, capacity=400)
    long, short, *_ = (name for name in names if load.where[name] == "b0")
    assert not load.turn(long, 320), "it would cost most to read again"
    assert load.turn(short, 60)
    assert not load.turn(short, 60)
    assert (load.pool.backends["b0"].kv_demand, load.pool.backends["b1"].kv_demand) == (420, 260)


def test_turns_wait_as_long_as_anything_of_their_run_is_under_way() -> None:
    pool = BackendPool(limit=1, unreachable_s=600.0)
    pool.add("a", "http://localhost", "7", "x")
    assert pool.request(1, "r1", run="x") == [Assign(1, "a", "7")]
    assert pool.request(2, "r2", run="x") == []
    assert pool.request(3, "r3", run="y") == [], "it waits, though another run's backend might have room"
    assert pool.tick(599.0) == []
    (given_up,) = pool.tick(600.0)
    assert given_up == GiveUp(3, "no engine of training 'y' served for 600 s (there is none)")
    assert pool.withdraw(3, 600.0) == []
    assert pool.tick(100_000.0) == [], "its turn comes"
    pool.answered(1, 100_000.0)
    assert pool.finish("r1") == [Assign(2, "a", "7")]
    assert pool.waiting_of == {None: 0, "x": 0}, "nothing is kept of a run without backends and rollouts"
