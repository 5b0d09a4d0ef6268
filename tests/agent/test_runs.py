# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of several trainers over one service and its model servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from nemo_gym_prorl.agent.gym_environment import GymContext
from nemo_gym_prorl.agent.gym_http import Address, GymServer
from nemo_gym_prorl.dapo.contract import SamplerConfig
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.http.client import HttpClient
from nemo_gym_prorl.nemo_rl import collector as collecting
from nemo_gym_prorl.nemo_rl.collector import CollectionPlan, Collector
from nemo_gym_prorl.nemo_rl.configuration import RewardShaping
from nemo_gym_prorl.nemo_rl.groups import TrainingGroup
from nemo_gym_prorl.nemo_rl.services import Servers, with_engines
from nemo_gym_prorl.rollout.job import Job, JobState
from tests.agent.crowd import TURNS, Crowd, Engine, crowd, in_thread, model_server, row
from tests.policy.model_process import Server, started
from tests.policy.test_prorl_model import assert_chain


GROUPS, SIZE = 5, 4
STAGES = {"init": 64, "ready": 64, "run": 64, "eval": 64}
POLICY = {"limit": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Without engines."""
    with model_server(tmp_path_factory.mktemp("runs"), **POLICY) as running:
        yield running


@pytest.fixture(scope="module")
def another(model: Server) -> Iterator[Server]:
    with model_server(model.log.parent, **POLICY) as running:
        yield running


@contextlib.asynccontextmanager
async def service(*models: Server) -> AsyncIterator[Crowd]:
    """Run a service before model servers, which have no engines afterwards."""
    async with crowd(*models, stages=STAGES) as running:
        yield running
        for server in models:
            for left in (await server.ask("GET", "/v1/backends"))[1]["backends"]:
                assert (await server.ask("DELETE", f"/v1/backends/{left['id']}"))[0] == 200


@pytest.fixture
async def pair(model: Server, another: Server) -> AsyncIterator[Crowd]:
    async with service(model, another) as running:
        yield running


@pytest.fixture
async def at(model: Server) -> AsyncIterator[Crowd]:
    async with service(model) as running:
        yield running


class Trainer:
    """A trainer's run over one engine, and the groups that it trains on."""

    def __init__(self, at: Crowd, name: str, url: str) -> None:
        self.servers = with_engines(Servers((at.url,), (at.model.url,)), [url], name)
        config = SamplerConfig(GROUPS, SIZE, 40, max_staleness=1)
        rows = [row(name) | {"number": number} for number in range(200)]
        self.collector = Collector(CollectionPlan(rows, config, self.servers, RewardShaping(), client=name))
        self.groups: list[TrainingGroup] = []

    async def batch(self, version: int) -> None:
        """Announce the weights' version, and train on a batch."""
        self.collector.weights(version)
        async with asyncio.timeout(200):
            self.groups += await asyncio.gather(*(asyncio.wrap_future(self.collector.take()) for _ in range(GROUPS)))

    async def close(self) -> None:
        await asyncio.to_thread(self.collector.close)
        await asyncio.to_thread(self.servers.withdraw)


def calls(job: Any) -> list[dict[str, Any]]:
    """What each turn of a rollout says it was sampled by."""
    output = job.result["response"]["output"]
    return [json.loads(item["arguments"]) for item in output if item["type"] == "function_call"]


async def test_a_run_whose_engines_are_gone_waits_and_falls_to_nobody(at: Crowd) -> None:
    async def register(url: str, run: str | None) -> int:
        return (await at.model.ask("POST", "/v1/backends", {"url": url, "run": run, "weight_version": "1"}))[0]

    mine, other, _ = engines = [Engine(name, delay_s=0.2) for name in ("mine", "other", "later")]
    with contextlib.ExitStack() as stack:
        my_url, other_url, later_url = (stack.enter_context(in_thread(engine.app())) for engine in engines)
        assert [await register(my_url, "mine"), await register(other_url, "other")] == [201, 201]
        for number in range(12):
            await at.service.submit(row("mine"), id=f"m{number}", run="mine")
        while mine.prompts.total() < 12 + 4:
            await asyncio.sleep(0.01)
        assert (await at.model.ask("DELETE", "/v1/backends?run=mine"))[0] == 200
        states = {number: (await at.service.get(f"m{number}")).state for number in range(12)}
        waiting = [number for number, state in states.items() if state is JobState.RUNNING]  # the others had ended
        assert waiting
        for number in range(12):
            await at.service.submit(row("other"), id=f"o{number}", run="other")
        others = [await at.service.wait(f"o{number}") for number in range(12)]
        assert {call["by"] for job in others for call in calls(job)} == {"other"}
        states = {number: (await at.service.get(f"m{number}")).state for number in range(12)}
        assert {states[number] for number in waiting} == {JobState.RUNNING}, "nothing is lost"
        assert not set(states.values()) - {JobState.RUNNING, JobState.SUCCEEDED}, "and nothing fails"
        assert [backend["run"] for backend in (await at.model.ask("GET", "/v1/backends"))[1]["backends"]] == ["other"]
        nowhere = {"backends": [], "waiting": len(waiting), "waiting_by_run": {"mine": len(waiting)}}
        assert (await at.model.ask("GET", "/v1/backends?run=mine"))[1] == nowhere
        assert await register(later_url, "mine") == 201
        jobs = [await at.service.wait(f"m{number}") for number in range(12)]
    assert {job.timings["run"].attempts for job in jobs} == {1}
    assert {call["by"] for job in jobs for call in calls(job)} == {"mine", "later"}
    assert set(other.prompts) == {"other"}


async def test_an_engine_is_one_runs(at: Crowd) -> None:
    with in_thread(Engine("first").app()) as url:
        assert (await at.model.ask("POST", "/v1/backends", {"url": f"{url}/v1", "run": "first", "id": "e"}))[0] == 201
        again = {"url": f"{url}/v1", "run": "first", "weight_version": "1"}
        assert (await at.model.ask("POST", "/v1/backends", again))[1]["id"] == "e", "it is the same one"
        for run, there in (("second", url), (None, url), ("second", url.replace("127.0.0.1", "localhost"))):
            status, said = await at.model.ask("POST", "/v1/backends", {"url": there, "run": run})
            assert (status, said["errors"][0]["field"]) == (409, "url")
            assert "is backend 'e' of training 'first'" in said["detail"]
        servers = with_engines(Servers((), (at.model.url,)), [url], "second")
        with pytest.raises(CallerError, match="of training 'first'"):
            await asyncio.to_thread(servers.announce, 1, needed=True)
        await asyncio.to_thread(servers.withdraw)
        [kept] = (await at.model.ask("GET", "/v1/backends"))[1]["backends"]
        assert (kept["run"], kept["weight_version"]) == ("first", "1")
        headers = {"X-Rollout-Id": "r", "X-Rollout-Run": "first"}
        body = {"input": "run:first;", "max_output_tokens": 99}
        assert (await at.model.ask("POST", "/v1/responses", body, headers))[0] == 200
        status, said = await at.model.ask("POST", "/v1/responses", body, headers | {"X-Rollout-Run": "second"})
        assert (status, said["errors"][0]["field"]) == (422, "X-Rollout-Run"), "a rollout has one run"


async def test_a_model_server_that_begins_anew_is_told_of_engines(at: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch may wait for just the engines that it has forgotten."""
    monkeypatch.setattr(collecting, "REMIND_S", 0.5)
    folder, engine = at.model.log.parent, Engine("A")
    with in_thread(engine.app()) as url:
        training = Trainer(at, "A", f"{url}/v1")
        try:
            await training.batch(0)
            engine.delay_s = 0.1
            at.model.kill()
            port = int(at.model.url.rpartition(":")[2])
            begun = asyncio.create_task(training.batch(1))
            at.model.process = (await asyncio.to_thread(started, None, folder, port, **POLICY)).process
            await begun
            assert len(training.groups) == 2 * GROUPS
            [backend] = (await at.model.ask("GET", "/v1/backends?run=A"))[1]["backends"]
            assert backend["weight_version"] == "1"
        finally:
            await training.close()
    assert (await at.model.ask("GET", "/v1/backends"))[1]["backends"] == []


# Several model servers


def turns_of(metrics: str) -> float:
    """How many turns a model server has taken."""
    said = [line for line in metrics.splitlines() if line.startswith("prorl_policy_turn_seconds_count")]
    return sum(float(line.split()[-1]) for line in said)


async def test_rollouts_are_shared_and_one_that_is_killed_costs_its_own_no_outcome(pair: Crowd) -> None:
    """Its rollouts begin anew, with tokens of one life only; those of the other go on."""
    with in_thread(Engine("own", delay_s=0.5).app()) as url:
        for model in pair.models:
            assert (await model.ask("POST", "/v1/backends", {"url": url}))[0] == 201
        before = [turns_of((await model.text("/metrics"))[1]) for model in pair.models]
        for number in range(24):
            await pair.service.submit(row(), id=f"s{number}", group=f"group-{number // 2}")
        async with asyncio.timeout(60):
            for model, earlier in zip(pair.models, before, strict=True):
                while turns_of((await model.text("/metrics"))[1]) <= earlier:
                    await asyncio.sleep(0.05)
        victim = pair.models[1]
        victim.kill()
        port = int(victim.url.rpartition(":")[2])
        victim.process = (await asyncio.to_thread(started, None, victim.log.parent, port, **POLICY)).process
        assert (await victim.ask("POST", "/v1/backends", {"url": url}))[0] == 201
        jobs = [await pair.service.wait(f"s{number}") for number in range(24)]
    assert {job.state for job in jobs} == {JobState.SUCCEEDED}
    again = {job.timings["run"].attempts > 1 for job in jobs}
    assert again == {True, False}, "some were its own, some were not"
    for job in jobs:
        turns = [item for item in job.result["response"]["output"] if item.get("generation_token_ids")]
        assert len(turns) == TURNS
        assert_chain(turns)
    for text in [(await model.text("/metrics"))[1] for model in pair.models]:
        # A turn that came to the other one would be read from text there.
        assert "prorl_policy_retokenised_tokens_total 0.0" in text


def test_siblings_meet_and_one_server_more_moves_its_share_only() -> None:
    http = HttpClient()
    named = [GymServer(f"policy_model_{index}", Address("http://h"), http) for index in range(4)]
    jobs = [Job(f"j{number}", {}, b"", "e", "h", 0.0, group=f"g{number // 2}") for number in range(4000)]
    three, four = (GymContext(None, named[0], further_models=tuple(named[1:count])) for count in (3, 4))
    placed = [three.model_of(job).name for job in jobs]
    assert placed[::2] == placed[1::2]
    assert max(Counter(placed).values()) < 4000 / 3 * 1.15
    moved = [(before, four.model_of(job).name) for before, job in zip(placed, jobs, strict=True)]
    moved = [(before, after) for before, after in moved if before != after]
    assert {after for _, after in moved} == {"policy_model_3"}
    assert 4000 / 4 * 0.85 < len(moved) < 4000 / 4 * 1.15
