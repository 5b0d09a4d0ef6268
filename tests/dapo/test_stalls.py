# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""No trainer waits forever, whatever its services do; in virtual time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemo_gym_prorl.dapo.contract import NothingToLearn, SamplerConfig
from nemo_gym_prorl.dapo.prompts import Epochs
from nemo_gym_prorl.dapo.runner import CLOSE_S, STALL_S, Runner, StalledError
from nemo_gym_prorl.dapo.sampler import DynamicSampler
from nemo_gym_prorl.rollout.settings import Budgets, PipelineSettings, PoolSizes
from tests.conftest import LONG
from tests.dapo.machines import Line, Machine
from tests.dapo.test_runner import rows
from tests.rollout.virtual_time import run_in_virtual_time


RUN_S = 600.0
SETTINGS = PipelineSettings(
    stages=PoolSizes(init=2, ready=2, run=4, eval=4), budgets=Budgets(init=60.0, run=RUN_S, eval=60.0), max_attempts=2
)
PROXY = ("/ 502", "/v1/rollouts 429", "/v1/rollouts 503", "/status 503")
HOW = ("dies", "freezes", "drains", *PROXY)
BATCHES = 4

type Fault = tuple[float, str, float | None]
"""Time of a failure, its kind, and its duration in seconds."""

faults = st.tuples(
    st.floats(0.0, 60.0), st.sampled_from(HOW), st.none() | st.sampled_from([0.01, 1.0, 20.0, 130.0, 400.0])
)


async def train(machines: list[Machine], schedule: list[tuple[int, Fault]], staleness: int, **fields: Any) -> int:
    """Train, check the bounds of all waits, and return the number of batches.

    Raises:
        StalledError: as the runner.
    """
    prompts = Epochs(rows(200, **({"late": [0, 1, 2, 3], "late_s": 5.0} | fields)), seed=None)
    config = SamplerConfig(1, 4, 16, max_staleness=staleness, reference_share=0.0)
    loop = asyncio.get_running_loop()

    async def befall(machine: Machine, at: float, how: str, seconds: float | None) -> None:
        await asyncio.sleep(at)
        await machine.fail(how, seconds)

    befalls = [asyncio.create_task(befall(machines[number], *fault)) for number, fault in schedule]
    count = 0
    try:
        async with Runner(DynamicSampler(config, prompts), prompts, [Line(machine) for machine in machines]) as runner:
            for _ in range(BATCHES):
                async with asyncio.timeout(6 * 3600):
                    batch = await runner.batch()
                assert batch is not None
                runner.weights(batch.version + 1)
                count += 1
            closing = loop.time()
        assert loop.time() - closing <= CLOSE_S + 1
    finally:
        for task in befalls:
            task.cancel()
        for machine in machines:
            await machine.pipeline.close()
    return count


@given(st.lists(faults, max_size=3), st.integers(0, 2))
@example([(0.0, "/v1/rollouts 429", None)], 1)  # a queue that other clients keep full
@example([(0.0, "dies", None)], 0)  # never up
@example([(0.2, "freezes", None)], 0)
@settings(max_examples=100 if LONG else 6)
def test_a_service_that_works_is_enough(schedule: list[Fault], staleness: int) -> None:
    async def play() -> None:
        machines = [Machine(name, SETTINGS) for name in "ab"]
        assert await train(machines, [(1, fault) for fault in schedule], staleness) == BATCHES

    run_in_virtual_time(play())


@given(st.lists(st.tuples(st.integers(0, 1), faults), max_size=5), st.integers(0, 2))
@settings(max_examples=100 if LONG else 6)
def test_a_training_goes_on_or_says_why_not(schedule: list[tuple[int, Fault]], staleness: int) -> None:
    async def play() -> None:
        machines = [Machine(name, SETTINGS) for name in "ab"]
        with suppress(StalledError, NothingToLearn):
            assert await train(machines, schedule, staleness) == BATCHES

    run_in_virtual_time(play())


@pytest.mark.parametrize(
    ("at", "how", "why"),
    [
        (2.0, "dies", "Server disconnected"),
        (2.0, "freezes", "TimeoutError|no answer"),
        (2.0, "drains", "takes no new rollouts|it drains"),
        (0.0, "/status 503", "its size is not known yet"),
        (2.0, "/v1/rollouts 429", ""),  # a full queue
    ],
)
def test_what_never_comes_back_is_a_stall_with_its_reason(at: float, how: str, why: str) -> None:
    async def play() -> None:
        with pytest.raises(StalledError, match=f"no rollout has changed its state for .*http://a:1.*({why})"):
            await train([Machine("a", SETTINGS)], [(0, (at, how, None))], 1)
        assert asyncio.get_running_loop().time() <= 2 * STALL_S + 2 * RUN_S

    run_in_virtual_time(play())


def test_weights_that_are_not_announced_are_a_stall_too() -> None:
    async def play() -> None:
        machine = Machine("a", SETTINGS)
        prompts = Epochs(rows(8), seed=None)
        sampler = DynamicSampler(SamplerConfig(1, 2, 4, max_staleness=0, reference_share=0.0), prompts)
        async with Runner(sampler, prompts, [Line(machine)]) as runner:
            await runner.batch()
            for _ in range(2):
                began = asyncio.get_running_loop().time()
                with pytest.raises(StalledError, match=r"weights 1 are awaited; announce them by weights\(\)"):
                    await runner.batch()
                assert asyncio.get_running_loop().time() - began >= STALL_S
            runner.weights(1)
            assert await runner.batch() is not None
        await machine.pipeline.close()

    run_in_virtual_time(play())
