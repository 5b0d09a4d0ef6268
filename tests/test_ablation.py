# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The ablation: its stack in virtual time loses no rollout, and its table has every row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import ablation
from benchmarks.ablation import PAPER, Scale
from benchmarks.stack import Stack, Variant, Work
from nemo_gym_prorl.dapo.group import Fate
from nemo_gym_prorl.dapo.sampler import DynamicSampler
from nemo_gym_prorl.rollout.scheduler import PoolSizes


SMALL = Work(4, 4, 0.5, PoolSizes(init=4, ready=4, run=16, eval=4), engines=2, capacity=400_000)
ROWS = {(staleness, name): row for staleness in (0, 4) for name, row in ablation.variants(staleness).items()}


def stack(row: Variant, work: Work = SMALL) -> Stack:
    return Stack(row, work, ablation.measured_times(), seed=1)


@pytest.mark.parametrize(("staleness", "name"), ROWS)
def test_each_rollout_is_accounted_for_once(staleness: int, name: str) -> None:
    """By the stages and by the schedule, which were told of the same ends; and a seed is always the same run."""
    one = stack(ROWS[staleness, name])
    sums = one.steps(3)
    schedule = one.schedule
    assert one.ended + one.in_stages == schedule.submitted
    assert one.in_stages == schedule.in_flight
    assert schedule.fates.rollouts + schedule.held + schedule.in_flight == schedule.submitted
    trained, more = divmod(schedule.fates[Fate.EMITTED].rollouts, SMALL.groups * SMALL.size)
    assert more == 0
    assert trained == 3 if staleness == 0 else trained >= 3
    assert stack(ROWS[staleness, name]).steps(3) == sums


def test_nothing_is_left_at_an_engine_of_what_was_cancelled() -> None:
    """Each request at an engine is that of a rollout which RUN works on."""
    one = stack(ROWS[0, "full"])
    for _ in range(4):
        one.steps(1)
        at_engines = [request.rollout.id for engine in one.engines for request in (*engine.running, *engine.waiting)]
        assert len(at_engines) == len(set(at_engines))
        assert one.schedule.fates[Fate.CANCELLED].rollouts
        assert isinstance(one.schedule, DynamicSampler)
        assert not {*at_engines} & {*one.schedule.state()["flight"]["ending"]}


def test_what_is_not_stopped_takes_more_time_for_nothing() -> None:
    stopped, left = (stack(ROWS[0, name]).steps(6)[-1] for name in ("full", "no early termination"))
    assert left.wasted_s / left.wasted > stopped.wasted_s / stopped.wasted


def test_a_shell_costs_what_was_measured() -> None:
    own, gyms = (stack(ROWS[0, name]).steps(2)[-1] for name in ("full", "a process per command, Gym's provider"))
    figure = ablation.published("shell")["shell action, p50"]
    assert own.shell_s / own.actions * 1e3 == pytest.approx(figure.value, rel=0.5)
    assert gyms.shell_s / gyms.actions * 1e3 == pytest.approx(figure.peers["Gym apptainer"], rel=0.5)


def test_the_table_has_every_row_with_the_papers_figure_beside_it() -> None:
    """The quick form, at a smaller scale."""
    scale = Scale(replace(SMALL, groups=1), warm_up=1, steps=1, seeds=(1, 2))
    figures = {figure.name: figure for figure in ablation.ablation(scale)}
    for setting in ablation.STALENESS:
        busy = {name: figures[f"{setting}, engines busy: {name}"] for name in ablation.variants(0)}
        assert busy["full"].peers == {PAPER: 0.78}
        assert busy["synchronous rounds"].peers == {}
        assert all(0 < figure.value <= 1 for figure in busy.values())
        throughput = figures[f"{setting}, rollouts of use per hour, over full's: no early termination"]
        assert throughput.peers[PAPER] == pytest.approx(0.30 / 0.37)
