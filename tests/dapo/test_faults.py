# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The runner over real services that refuse it or its rows, restart, or hold another state."""

from __future__ import annotations

import asyncio

import pytest

from nemo_gym_prorl.dapo.contract import NothingToLearn, SamplerConfig
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.fleet.forwarder import JobForwarder
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.api.schemas import TokenForm
from nemo_gym_prorl.rollout.settings import PipelineSettings, PoolSizes
from tests.dapo.test_runner import nodes, rows, runner


async def test_a_runner_that_one_service_refuses_leaves_nothing_behind_at_the_others() -> None:
    armed: list[int] = []

    async def refuse(method: str, path: str) -> int | None:
        return 403 if armed and (method, path) == ("POST", "/v1/rollouts") else None

    async with nodes(2) as up:
        up[1].fault = refuse
        async with runner(
            up, rows(40, late=[1], late_s=3600.0), SamplerConfig(1, 3, 9, reference_share=0.0), max_attempts=1
        ) as driver:
            while not (up[0].handler.sessions and up[1].handler.sessions):
                await asyncio.sleep(0.01)
            armed.append(1)
            job = next(iter(up[1].pipeline.store.live()))
            await up[1].pipeline.cancel(job)  # a failure: the member is submitted again
            for _ in range(2):
                with pytest.raises(ApiError, match="403"):
                    await asyncio.wait_for(driver.batch(), 30)
        assert not [*up[0].pipeline.store.live()]


async def test_what_cannot_be_run_ends_the_training_with_the_reason() -> None:
    async with nodes() as up:
        for dataset, epochs in ((rows(3), 1), (rows(3), None)):
            driver = runner(
                up,
                dataset,
                SamplerConfig(1, 2, 4, max_dropped=5, reference_share=0.0),
                epochs=epochs,
                environment="misspelt",
            )
            async with driver:
                for _ in range(2):
                    with pytest.raises(NothingToLearn, match=r"max_dropped: .* could not be run.*misspelt"):
                        await driver.batch()


async def test_what_was_cancelled_does_not_run_behind_its_back() -> None:
    """The service restarts without memory while rollouts are being cancelled, and is slow afterwards."""
    settings = PipelineSettings(
        stages=PoolSizes(init=400, ready=400, run=400, eval=64), max_attempts=1, cancel_grace_s=0.5
    )
    told: set[str] = set()

    async def slowly(method: str, path: str) -> None:
        if (method, path) == ("POST", "/v1/rollouts"):
            await asyncio.sleep(0.5)

    async with nodes(settings=settings) as up, RolloutClient(up[0].url) as client:
        service = JobForwarder(
            client,
            tokens=TokenForm.PACKED,
            on_ended=lambda job: told.add(job.id),
            on_lost=lambda rollout, *_: told.add(rollout),
            on_error=lambda error: pytest.fail(repr(error)),
            report=lambda _: None,
        )
        service.start()
        ids = [f"run:{number}:0:0" for number in range(100)]
        for rollout in ids:
            service.submit(rollout, {"row": rows(1, late=[0], late_s=3600.0)[0]})
        while len(up[0].handler.sessions) < 100:
            await asyncio.sleep(0.02)
        await up[0].stop()
        for rollout in ids:
            service.cancel(rollout)
        up[0].fault = slowly
        await up[0].start()
        while len(told) < 100:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        assert not up[0].handler.sessions
        await service.close()


async def test_a_start_that_fails_leaves_nothing_behind() -> None:
    async with nodes() as up:
        async with runner(up, rows(3, late=[0], late_s=5.0), SamplerConfig(1, 2, 2, reference_share=0.0)) as first:
            state = first.state()
        before = asyncio.all_tasks()
        second = runner(up, rows(3), SamplerConfig(1, 3, 3, reference_share=0.0), state=state)
        with pytest.raises(CallerError, match="group_size"):
            await second.__aenter__()
        await asyncio.sleep(0.1)
        assert not [task for task in asyncio.all_tasks() - before if "JobForwarder" in repr(task.get_coro())]
