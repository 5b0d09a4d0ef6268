# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""State machine that sends events to a backend pool in any order and checks every decision."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nemo_gym_prorl.policy.pool.backend import (
    BLOCK_TOKENS,
    Abort,
    Assign,
    Backend,
    Decision,
    GiveUp,
    Health,
    Probe,
    blocks_of,
)
from nemo_gym_prorl.policy.pool.pool import BackendPool


LIMIT = 3
PATIENCE_S = 5.0
UNREACHABLE_S = 30.0
RUNS = (None, "x")
PROMPT = 2 * BLOCK_TOKENS
"""Tokens of every rollout's first prompt: one block that all share, and one block of its group."""


def run_of(rollout: str) -> str | None:
    return RUNS[int(rollout[1:]) % len(RUNS)]


def prompt_of(group: int) -> list[int]:
    return [0] * BLOCK_TOKENS + [1 + group] * BLOCK_TOKENS


class PoolMachine(RuleBasedStateMachine):
    """Sends events to a pool in any order and checks every decision."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BackendPool(limit=LIMIT, patience_s=PATIENCE_S, unreachable_s=UNREACHABLE_S)
        self.idle_since: dict[str | None, float] = {}
        """Time since which a run has had no turn in flight."""
        self.now = 0.0
        self.tickets: dict[int, str] = {}
        self.waiting: list[int] = []
        self.flying: dict[int, str] = {}
        self.fresh: set[str] = set()
        self.ended: set[int] = set()
        self.probing: set[str] = set()
        self.prompts: dict[str, int] = {}
        self.count = 0

    def carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Assign(ticket=ticket, backend=backend_id, weight_version=version):
                    backend = self.pool.backends[backend_id]
                    assert ticket in self.waiting, "assigned twice, or after its end"
                    assert backend.health is not Health.DOWN
                    assert not backend.paused
                    assert version == backend.weight_version
                    assert len(backend.live) <= LIMIT
                    name = self.tickets[ticket]
                    assert backend.run == run_of(name), "a turn crossed to another run"
                    if name in self.fresh:
                        among = [t for t in self.waiting if run_of(self.tickets[t]) == run_of(name)]
                        first = min(among, key=lambda t: (self.tickets[t] not in self.fresh, t))
                        assert name == self.tickets[first], "a later rollout overtook an earlier one"
                        assert not backend.draining
                        self.fresh.remove(name)
                    self.waiting.remove(ticket)
                    self.flying[ticket] = backend_id
                case Abort(ticket=ticket, backend=backend_id):
                    assert self.flying.pop(ticket) == backend_id
                    self.waiting.append(ticket)
                case GiveUp(ticket=ticket):
                    assert ticket in self.waiting
                    assert self.now - self.idle_since[run_of(self.tickets[ticket])] >= UNREACHABLE_S
                case Probe(backend=backend_id):
                    assert self.pool.backends[backend_id].health is Health.DOWN
                    self.probing.add(backend_id)

    def some_backend(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.pool.backends)))

    def with_backends(self, run: str | None) -> str | None:
        return run if self.pool.of_run(run) else None

    @rule(run=st.sampled_from(RUNS))
    def add(self, run: str | None) -> None:
        self.count += 1
        self.carry_out(self.pool.add(f"b{self.count}", "http://localhost", "v0", run))

    @rule(rollout=st.integers(0, 11), tokens=st.integers(0, 2000))
    def request(self, rollout: int, tokens: int) -> None:
        self.count += 1
        name = f"r{rollout}"
        home = self.pool.backends.get(self.pool.backend_of(name) or "")
        at_home = home is not None and name in home.live and home.health is Health.UP
        # Fewer live rollouts than the escape margin: only its own word or its slowness can make a backend hot.
        stays = at_home and home is not None and not (home.paused or home.hot) and home.slowness == 1.0
        if stays and home is not None and home.capacity:
            stays = home.kv_demand + tokens <= home.capacity
        self.tickets[self.count] = name
        self.waiting.append(self.count)
        if self.pool.backend_of(name) is None:
            self.fresh.add(name)
        self.prompts[name] = tokens
        blocks = blocks_of(prompt_of(rollout % 3))
        self.carry_out(self.pool.request(self.count, name, f"g{rollout % 3}", self.now, tokens, blocks, run_of(name)))
        if stays and home is not None:
            assert self.flying[self.count] == home.id, "a rollout left its backend without need"

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), failed=st.booleans())
    def done(self, data: st.DataObject, failed: bool) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.flying)))
        self.flying.pop(ticket)
        if failed:
            self.waiting.append(ticket)
        else:
            self.ended.add(ticket)
        self.carry_out((self.pool.failed if failed else self.pool.answered)(ticket, self.now))

    @precondition(lambda self: self.flying or self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted([*self.flying, *self.waiting])))
        self.flying.pop(ticket, None)
        if ticket in self.waiting:
            self.waiting.remove(ticket)
        self.ended.add(ticket)
        self.carry_out(self.pool.withdraw(ticket, self.now))
        name = self.tickets[ticket]
        if not any(self.tickets[other] == name for other in (*self.flying, *self.waiting)):
            assert not any(name in backend.live for backend in self.pool.backends.values())

    @rule(rollout=st.integers(0, 11))
    def finish(self, rollout: int) -> None:
        self.carry_out(self.pool.finish(f"r{rollout}"))

    @rule(rollout=st.integers(0, 11))
    def drop(self, rollout: int) -> None:
        name = f"r{rollout}"
        gone = {ticket for ticket in (*self.flying, *self.waiting) if self.tickets[ticket] == name}
        self.flying = {ticket: at for ticket, at in self.flying.items() if ticket not in gone}
        self.waiting = [ticket for ticket in self.waiting if ticket not in gone]
        self.ended |= gone
        self.carry_out(self.pool.drop(name, self.now))
        assert not any(name in backend.live for backend in self.pool.backends.values())

    @precondition(lambda self: self.pool.backends)
    @rule(data=st.data(), every=st.booleans())
    def label(self, data: st.DataObject, every: bool) -> None:
        self.count += 1
        run = self.with_backends(data.draw(st.sampled_from(RUNS)))
        others = {b.id: b.weight_version for b in self.pool.backends.values() if b.run != run}
        self.pool.label(f"v{self.count}", None if every else self.some_backend(data), run)
        assert not every or others.items() <= {b.id: b.weight_version for b in self.pool.backends.values()}.items()

    @precondition(lambda self: self.pool.backends)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        self.carry_out(self.pool.drain(self.some_backend(data)))

    @precondition(lambda self: self.pool.backends)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        backend_id = self.some_backend(data)
        self.probing.discard(backend_id)
        self.carry_out(self.pool.remove(backend_id))

    @rule(run=st.sampled_from(RUNS))
    def clear(self, run: str | None) -> None:
        self.probing -= {backend.id for backend in self.pool.of_run(run)}
        self.carry_out(self.pool.clear(run))

    @precondition(lambda self: self.pool.backends)
    @rule(data=st.data(), every=st.booleans(), run=st.sampled_from(RUNS))
    def pause(self, data: st.DataObject, every: bool, run: str | None) -> None:
        chosen = self.pool.pause(None if every else self.some_backend(data), self.with_backends(run))
        assert all(backend.paused for backend in chosen)

    @precondition(lambda self: self.pool.backends)
    @rule(data=st.data(), every=st.booleans(), run=st.sampled_from(RUNS))
    def resume(self, data: st.DataObject, every: bool, run: str | None) -> None:
        self.count += 1
        chosen = None if every else self.some_backend(data)
        self.carry_out(self.pool.resume(chosen, f"v{self.count}", self.with_backends(run)))

    @precondition(lambda self: self.pool.backends)
    @rule(data=st.data(), waiting=st.integers(0, 2), kv_use=st.floats(0, 1), capacity=st.none() | st.integers(1, 9000))
    def report(self, data: st.DataObject, waiting: int, kv_use: float, capacity: int | None) -> None:
        backend_id = self.some_backend(data)
        self.carry_out(self.pool.report(backend_id, waiting=waiting, kv_use=kv_use, capacity=capacity))

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0, 40.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        decisions = self.pool.tick(self.now)
        given_up = {decision.ticket for decision in decisions if isinstance(decision, GiveUp)}
        self.carry_out(decisions)
        for ticket in given_up:  # as whoever carries it out has to
            self.waiting.remove(ticket)
            self.ended.add(ticket)
            self.carry_out(self.pool.withdraw(ticket, self.now))

    @precondition(lambda self: self.probing)
    @rule(data=st.data(), alive=st.booleans())
    def probed(self, data: st.DataObject, alive: bool) -> None:
        backend_id = data.draw(st.sampled_from(sorted(self.probing)))
        self.probing.discard(backend_id)
        self.carry_out(self.pool.probed(backend_id, alive, self.now))

    @invariant()
    def books_agree(self) -> None:
        assert len(self.waiting) == sum(self.pool.waiting_of.values())
        for run in RUNS:
            if any(run_of(self.tickets[ticket]) == run for ticket in self.flying):
                self.idle_since[run] = self.now
            else:
                self.idle_since.setdefault(run, self.now)
        for backend in self.pool.backends.values():
            assert backend.in_flight == {t for t, at in self.flying.items() if at == backend.id}
            assert len(backend.live) <= LIMIT
            assert sum(backend.groups.values()) == len(backend.live)
            shared = BLOCK_TOKENS * (len(backend.groups) + bool(backend.live))
            assert backend.kv_demand == shared + sum(max(0, self.prompts[name] - PROMPT) for name in backend.live)
        homes = [rollout for backend in self.pool.backends.values() for rollout in backend.live]
        assert len(homes) == len(set(homes)), "a rollout lives on two backends"

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        def room(backend: Backend) -> bool:
            serving = backend.health is Health.UP and not (backend.draining or backend.paused)
            return serving and len(backend.live) < (1 if backend.hot else LIMIT)

        roomy = {backend.run for backend in self.pool.backends.values() if room(backend)}
        paused = {r for backend in self.pool.backends.values() if backend.paused for r in backend.live}
        waiting = {self.tickets[ticket] for ticket in self.waiting}
        assert all(name in paused for name in waiting if run_of(name) in roomy)

    def teardown(self) -> None:
        """With one good backend per run, every ticket ends."""
        for run in RUNS:
            self.carry_out(self.pool.clear(run))
            self.carry_out(self.pool.add(f"last of {run}", "http://localhost", None, run))
        for _ in range(10 * len(self.tickets) + 10):
            for ticket in list(self.flying):
                self.flying.pop(ticket)
                self.ended.add(ticket)
                self.carry_out(self.pool.answered(ticket, self.now))
            self.now += PATIENCE_S
            self.carry_out(self.pool.tick(self.now))
        assert not self.waiting
        assert self.ended == set(self.tickets)
