# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The collector with real services, without NeMo RL."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import pickle
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nemo_gym_prorl.dapo.contract import NothingToLearn, SamplerConfig
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.nemo_rl.collector import CollectionPlan, Collector, Validation
from nemo_gym_prorl.nemo_rl.configuration import RewardShaping
from nemo_gym_prorl.nemo_rl.groups import TrainingGroup
from nemo_gym_prorl.nemo_rl.services import Servers
from tests.dapo.test_runner import Node, nodes, rows


def plan(node: Node, dataset: list[dict[str, Any]], config: SamplerConfig, **more: Any) -> CollectionPlan:
    # The controller's process gets a pickle.
    made = CollectionPlan(dataset, config, Servers((node.url,), ()), RewardShaping(), seed=None, **more)
    again: CollectionPlan = pickle.loads(pickle.dumps(made))
    return again


async def taken(collector: Collector, count: int) -> list[TrainingGroup]:
    async with asyncio.timeout(20):
        return await asyncio.gather(*(asyncio.wrap_future(collector.take()) for _ in range(count)))


def live(node: Node) -> list[Any]:
    return [*node.pipeline.store.live()]


async def test_groups_come_while_weights_are_announced_and_nothing_is_left() -> None:
    dataset = rows(40, late=[0], late_s=0.05)
    for uninformative in dataset[::4]:
        uninformative["rewards"] = [1]
    async with nodes() as [node]:
        collector = Collector(plan(node, dataset, SamplerConfig(2, 4, 16, max_staleness=1)))
        try:
            for version in range(4):
                collector.weights(version)
                for group in await taken(collector, 2):
                    assert [member.reward for member in group.members] == [0, 1, 0, 1]
                    assert [len(member.sequences[0][0].sampled) for member in group.members] == [1, 2, 3, 4]
                    assert version - 1 <= group.version <= version
            collector.weights(4)
            async with asyncio.timeout(20):
                while not live(node):
                    await asyncio.sleep(0.01)
        finally:
            await asyncio.to_thread(collector.close)
        assert not live(node)
        assert not node.handler.sessions
        with pytest.raises(CallerError, match="training is over"):
            await taken(collector, 1)


async def test_whoever_waits_is_told_what_ended_it() -> None:
    async with nodes() as [node]:
        collector = Collector(plan(node, rows(8, rewards=[1]), SamplerConfig(1, 2, 4, max_fruitless=5)))
        collector.weights(0)
        with pytest.raises(NothingToLearn, match="groups in a row had rewards without variance"):
            await taken(collector, 1)
        await asyncio.to_thread(collector.close)
        assert not live(node)


@pytest.mark.parametrize("temperature", [None, 0.6])
async def test_a_new_run_goes_on_from_the_batch_that_was_trained_on_last(temperature: float | None) -> None:
    """The next batch was complete when the checkpoint was written; it is neither trained on twice nor lost.

    Rollouts in flight are sampled again with another temperature.
    """
    dataset = rows(40)
    for number, row in enumerate(dataset):
        row["number"] = number
    changed = copy.deepcopy(dataset)
    for row in changed if temperature else []:
        row["responses_create_params"]["temperature"] = temperature
    config = SamplerConfig(2, 2, 8, max_staleness=1)
    async with nodes() as [node]:
        first = Collector(plan(node, dataset, config))
        first.weights(0)
        seen = [group.row["number"] for group in await taken(first, 2)]
        first.weights(1)
        await taken(first, 2)  # in the buffer, not trained on
        state = first.state(0)
        await asyncio.to_thread(first.close)
        second = Collector(plan(node, changed, config, state=json.loads(json.dumps(state))))
        try:
            for version in (1, 2):
                second.weights(version)
                groups = await taken(second, 2)
                seen += [group.row["number"] for group in groups]
                assert all(version - 1 <= group.version <= version for group in groups)
        finally:
            await asyncio.to_thread(second.close)
    assert seen == [0, 1, 2, 3, 4, 5]


@contextlib.asynccontextmanager
async def watched(collector: Collector) -> AsyncIterator[list[dict[str, float]]]:
    """Collect the validation metrics that NeMo RL's watchdog reads at intervals."""
    told: list[dict[str, float]] = []

    async def look() -> None:
        while True:
            found = {name: value for name, value in collector.metrics().items() if name.startswith("validation/")}
            told.extend([found] if found else [])
            await asyncio.sleep(0.05)

    looking = asyncio.create_task(look())
    try:
        yield told
    finally:
        looking.cancel()


async def test_validation_is_told_once_and_is_not_trained_on() -> None:
    """Validation runs concurrently with sampling, and the next weights wait for its metrics."""
    held = [{**row, "rewards": [place % 2], "number": "held out"} for place, row in enumerate(rows(7))]
    held[5] = {"responses_create_params": None}  # refused
    held[6]["plan"] = {"run": [{"how": "agent"}]}  # an agent failure counts as 0
    validation = Validation([{**row, "late": [0], "late_s": 0.3} for row in held], period=2, at_start=False, last=4)
    async with nodes() as [node]:
        collector = Collector(plan(node, rows(40), SamplerConfig(2, 2, 8, max_staleness=1), validation=validation))
        try:
            async with watched(collector) as told:
                for version in range(5):
                    await asyncio.to_thread(collector.finish_validation)
                    assert len(told) == (version > 2), "neither the first weights are due, nor the last"
                    collector.weights(version)
                    groups = await taken(collector, 2)
                    assert all(group.row.get("number") is None for group in groups)
        finally:
            await asyncio.to_thread(collector.close)
        assert not live(node)
    [found] = told
    assert found["validation/weight_version"] == 2
    assert found["validation/reward"] == pytest.approx(2 / 6)
    assert (found["validation/rollouts"], found["validation/without_reward"]) == (7, 1)
    assert "prorl/in_flight" in collector.metrics()


async def test_no_rollout_of_a_validation_outlives_a_run(caplog: pytest.LogCaptureFixture) -> None:
    long = [{**row, "late": [0, 1], "late_s": 3600.0} for row in rows(3)]
    async with nodes() as [node]:
        validation = Validation(long, period=1, at_start=True, last=10)
        collector = Collector(plan(node, rows(40), SamplerConfig(2, 2, 4), validation=validation))
        collector.weights(0)
        assert len(await taken(collector, 2)) == 2
        waiting = asyncio.ensure_future(asyncio.to_thread(collector.finish_validation))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await asyncio.to_thread(collector.close)
        await waiting
        assert not live(node)
    assert "the validation of weights 0 is cancelled because the training has ended" in caplog.text


@pytest.mark.parametrize("before", [False, True])
async def test_a_collector_that_is_closed_while_it_begins_begins_nothing(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Collector._run

    def slowly(self: Collector, version: int, started: threading.Event) -> None:
        time.sleep(0.5)
        begin(self, version, started)

    monkeypatch.setattr(Collector, "_run", slowly)
    async with nodes() as [node]:
        collector = Collector(plan(node, rows(40, late=[0, 1], late_s=3600.0), SamplerConfig(2, 2, 4)))
        if before:
            collector.close()
        beginning = asyncio.create_task(asyncio.to_thread(collector.weights, 0))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(collector.close)
        await beginning
        await asyncio.sleep(1.0)
        assert not live(node)
