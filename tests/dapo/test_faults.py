# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The runner when calls fail, are late, or get no answer: no outcome is lost, nothing hangs, nothing outlives it."""

from __future__ import annotations

import asyncio

import pytest

from nemo_gym_prorl.dapo.contract import NothingToLearn, SamplerConfig
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.fleet.forwarder import JobForwarder
from nemo_gym_prorl.rollout.api import client as client_module
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.api.schemas import TokenForm
from nemo_gym_prorl.rollout.settings import PipelineSettings, PoolSizes
from tests.dapo.test_runner import SETTINGS, Fault, kill, nodes, rows, runner


def once(status: int, method: str, begins: str) -> tuple[Fault, list[str]]:
    """The first such request fails, and is in the list then."""
    met: list[str] = []

    async def fault(of: str, path: str) -> int | None:
        if of == method and path.startswith(begins) and not met:
            met.append(path)
            return status
        return None

    return fault, met


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
            with pytest.raises(ApiError, match="403"):
                await asyncio.wait_for(driver.batch(), 30)
        assert not [*up[0].pipeline.store.live()]


@pytest.mark.parametrize(
    ("status", "method", "begins"),
    [
        (500, "GET", "/v1/rollouts/"),
        (502, "GET", "/v1/rollouts"),
        (429, "POST", "/v1/rollouts"),
        (408, "POST", "/v1/rollouts"),
        (503, "POST", "/v1/rollouts"),
    ],
)
async def test_one_call_that_fails_loses_nothing(status: int, method: str, begins: str) -> None:
    async with nodes() as up:
        up[0].fault, met = once(status, method, begins)
        async with runner(
            up, rows(1, late=[0, 1], late_s=0.2), SamplerConfig(1, 2, 2, reference_share=0.0), epochs=1
        ) as driver:
            assert await driver.batch() is not None
        assert met


async def test_an_outcome_before_the_answer_to_its_submission_is_not_missed() -> None:
    async def late(method: str, _: str) -> None:
        if method == "POST":
            await asyncio.sleep(0.4)

    async def listed_late(method: str, path: str) -> None:
        if (method, path) == ("GET", "/v1/rollouts"):
            await asyncio.sleep(0.2)

    async with nodes() as up:
        up[0].late, up[0].fault = late, listed_late
        async with runner(up, rows(1), SamplerConfig(1, 2, 2, reference_share=0.0), epochs=1) as driver:
            assert await driver.batch() is not None


async def test_submissions_that_wait_for_room_do_not_keep_results_from_being_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "_MAX_RETRY_AFTER_S", 0.2)
    settings = PipelineSettings(
        stages=PoolSizes(init=64, ready=64, run=64, eval=64), max_attempts=1, retain_bytes=3000
    )
    async with (
        nodes(settings=settings) as up,
        runner(up, rows(200), SamplerConfig(6, 8, 120, reference_share=0.0)) as driver,
    ):
        assert await driver.batch() is not None


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
    """The service dies while rollouts are being cancelled, and forgets them; it is slow when it is back."""
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


async def test_a_runner_that_broke_says_so_each_time() -> None:
    async def refuse(method: str, path: str) -> int | None:
        return 403 if (method, path) == ("GET", "/v1/rollouts") else None

    async with nodes() as up:
        up[0].fault = refuse
        async with runner(up, rows(3, late=[0], late_s=3600.0), SamplerConfig(1, 2, 2, reference_share=0.0)) as driver:
            for _ in range(2):
                with pytest.raises(ApiError, match="403"):
                    await driver.batch()


async def test_a_batch_that_was_given_up_is_not_lost() -> None:
    dataset = rows(12, late=[0], late_s=0.5)
    async with (
        nodes() as up,
        runner(up, dataset, SamplerConfig(1, 2, 2, max_staleness=0, reference_share=0.0)) as driver,
    ):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(driver.batch(), 0.1)
        batch = await driver.batch()
        assert batch is not None
        assert batch.number == 0
        driver.weights(1)
        await asyncio.sleep(1.0)
        assert driver.sampler.emitted == 1, "nobody asked for the next one"


async def test_what_an_earlier_runner_was_cancelling_is_cancelled_again() -> None:
    dataset = rows(8, late=[0, 1], late_s=3600.0)
    dataset[0] |= {"late": []}
    async with nodes(settings=SETTINGS) as up:
        config = SamplerConfig(1, 2, 8, max_staleness=0, reference_share=0.0)
        first = runner(up, dataset, config)
        await first.__aenter__()
        assert await first.batch() is not None
        state = first.state()
        await kill(first)
        assert state["sampler"]["flight"]["ending"]
        await up[0].stop()
        await up[0].start()
        async with runner(up, dataset, config, state=state) as second:
            while second.sampler.in_flight:
                await asyncio.sleep(0.01)
            assert not up[0].handler.sessions
