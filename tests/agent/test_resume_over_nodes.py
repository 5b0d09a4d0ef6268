# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A fleet's rollouts that go on where a lost node was, and siblings of them at any node: real sandboxes, a scripted
policy, and nodes with an agent, a resources server and a model server each; the one that is killed is a process of its
own. What comes out is held against an undisturbed run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from omegaconf import OmegaConf

from nemo_gym_prorl.cli.scripted.server import ScriptedConfig
from nemo_gym_prorl.cli.scripted.server import serve as serve_scripted
from nemo_gym_prorl.fleet import forwarder
from nemo_gym_prorl.fleet.gateway import FleetGateway, gateway_app
from nemo_gym_prorl.fleet.placement import NodeJoined, NodeLeft
from nemo_gym_prorl.http.applications import served
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView
from tests.agent.gym_host import applications, hosting, instance, url_of
from tests.agent.peers import until
from tests.agent.test_resume import SETUP, counting, scripted, servers
from tests.fleet.fleets import Changing
from tests.rollout.serving import serve


SERVERS = ("prorl_code", "policy_model", "agent")
TURNS = 6


def node_config(policy_url: str, folder: Path) -> dict[str, Any]:
    agent = {
        "resources_server": {"type": "resources_servers", "name": "prorl_code"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
        "stages": {"init": 4, "ready": 0, "run": 4, "eval": 2},
        "checkpoint_turns": 1,
    }
    return {
        **servers(policy_url),
        "agent": instance("responses_api_agents", "prorl_agent", **agent),
        "checkpoint_folder": str(folder),
    }


class Fleet:
    """A front, and nodes that can be killed."""

    def __init__(self, folder: Path, policy_url: str) -> None:
        self.folder, self.policy_url = folder, policy_url
        self.nodes = Changing()
        self.said: list[str] = []
        self.front = FleetGateway(self.nodes, report=self.said.append)
        self.client: RolloutClient
        self.configs: dict[str, dict[str, Any]] = {}
        self._hosts: dict[str, AsyncExitStack] = {}

    async def start(self, node: str, *, apart: bool) -> None:
        config = self.configs[node] = node_config(self.policy_url, self.folder)
        self._hosts[node] = host = AsyncExitStack()
        if apart:
            await host.enter_async_context(hosting(config, *SERVERS))
            return
        for app, settings in applications(OmegaConf.create(config), SERVERS):
            await host.enter_async_context(app.router.lifespan_context(app))
            await host.enter_async_context(served(app, settings.host, settings.port))

    def url(self, node: str) -> str:
        return url_of(self.configs[node]["agent"])

    async def join(self, node: str) -> None:
        self.nodes.tell(NodeJoined(node, RolloutClient(self.url(node))))
        await until(lambda: node in self.front.dispatcher.statuses)

    async def kill(self, node: str) -> None:
        await self._hosts.pop(node).aclose()

    async def leave(self, node: str) -> None:
        self.nodes.tell(NodeLeft(node, "it was unplugged"))
        await until(lambda: node not in self.front.dispatcher.nodes)

    async def close(self) -> None:
        for node in [*self._hosts]:
            await self.kill(node)

    async def fork(self, rollout: str, turn: int, n: int = 1) -> tuple[int, Any]:
        url = f"{self.client.url}/v1/rollouts/{rollout}/fork?turn={turn}&n={n}"
        async with aiohttp.ClientSession() as http, http.post(url) as response:
            return response.status, await response.json()

    async def turns_at(self, node: str) -> dict[str, int]:
        """Turns taken by each rollout of a node, by the front's id."""
        async with RolloutClient(self.url(node)) as client:
            listing = await client.list(limit=1000)
        return {job.id.split("~")[0]: job.turns for job in listing.rollouts if not job.state.terminal}

    async def busy(self, prefix: str, turns: int) -> tuple[list[str], dict[str, int]]:
        """Start 8 rollouts; return their ids and the turns of those at node ``one`` once one there took so many."""
        names = [f"{prefix}-{number}" for number in range(8)]
        for name in names:
            await self.client.submit(counting(TURNS, latency_s=0.3), id=name)
        async with asyncio.timeout(60):
            while max((there := await self.turns_at("one")).values(), default=0) < turns:
                await asyncio.sleep(0.05)
        return names, there


def sampled(job: JobView) -> list[Any]:
    """As :func:`tests.agent.test_resume.sampled`."""
    names = ("type", "output", "prompt_token_ids", "generation_token_ids", "generation_log_probs")
    assert job.result is not None, job
    return [{name: item[name] for name in names if name in item} for item in job.result["response"]["output"]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with serve_scripted(ScriptedConfig()) as policy_url:
        running = Fleet(tmp_path_factory.mktemp("shared"), policy_url)
        await asyncio.gather(running.start("one", apart=True), running.start("two", apart=False))
        await running.front.start()
        async with serve(gateway_app(running.front, key=None)) as url, RolloutClient(url) as running.client:
            for node in ("one", "two"):
                await running.join(node)
            yield running
            await running.front.close()
        await running.close()


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.sandbox]


async def test_what_a_lost_node_ran_goes_on_elsewhere(fleet: Fleet) -> None:
    client = fleet.client
    await client.submit(counting(TURNS), id="undisturbed")
    wanted = await client.wait("undisturbed")
    assert (wanted.reward, wanted.resumed) == (1.0, []), wanted.failure
    names, there = await fleet.busy("cut", 4)
    await fleet.leave("one")  # a partition: it lives, and goes on with what concerns nobody any more
    ended = {name: await client.wait(name) for name in names}
    for name, job in ended.items():
        assert (job.reward, job.turns) == (1.0, TURNS + 1), job.failed_attempts
        assert sampled(job) == sampled(wanted)
        if name in there:
            assert [failure.kind for failure in job.failed_attempts] == ["session_lost"], job.failed_attempts
            assert [place.lost for place in job.resumed] == [[]], job
            assert job.resumed[0].turn >= there[name] - 1
    assert len(there) == 4
    async with RolloutClient(fleet.url("one")) as cut_off, asyncio.timeout(60):
        while (status := await cut_off.status()).sessions:
            await asyncio.sleep(0.1)
        assert status.states["succeeded"] >= 4, "whose rollouts end by themselves"
    await fleet.join("one")


async def test_siblings_begin_at_any_node_where_their_parent_was(fleet: Fleet) -> None:
    client = fleet.client
    row = scripted(SETUP, *[f"echo {turn} $SAID >> log" for turn in range(11)])
    await client.submit(row, id="parent", group="siblings")
    parent = await client.wait("parent")
    assert parent.reward is not None, parent.failure
    assert await client.checkpoints("parent") == [*range(1, 13)]
    assert (await client.get("parent")).checkpoints == [*range(1, 13)], "an outcome says so, too"
    status, answer = await fleet.fork("parent", 10, n=8)
    assert status == 202, answer
    forked = [one["id"] for one in answer["rollouts"]]
    prefix = sampled(parent)[:20]
    for one in forked:
        job = await client.wait(one)
        assert job.forked_from is not None, job
        assert (job.forked_from.id, job.forked_from.turn, job.turns) == ("parent", 10, 13), job.failure
        assert (job.resumed, job.group) == ([], "siblings")
        assert sampled(job)[:20] == prefix
    for node in ("one", "two"):
        async with RolloutClient(fleet.url(node)) as there:
            listing = await there.list(limit=1000)
            assert any(job.forked_from for job in listing.rollouts), "both have some"


@pytest.mark.long("restarts nodes")
async def test_a_node_is_killed_and_at_most_a_turn_is_lost(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarder, "GIVE_UP_S", 1.0)  # nobody tells that it is gone, as with a list of addresses
    client = fleet.client
    wanted = await client.wait("undisturbed")
    names, there = await fleet.busy("killed", 3)
    await fleet.kill("one")
    for name in names:
        job = await client.wait(name)
        assert (job.reward, job.turns) == (1.0, TURNS + 1), job.failed_attempts
        assert sampled(job) == sampled(wanted)
        if name in there and there[name] > 1:
            assert job.resumed[0].turn >= there[name] - 1
    status, late = await fleet.fork("parent", 10)
    assert status == 202, late
    job = await client.wait(late["rollouts"][0]["id"])
    assert (job.turns, sampled(job)[:20]) == (13, sampled(await client.wait("parent"))[:20]), job.failure
    status, problem = await fleet.fork("parent", 99)
    assert (status, "10, 11, 12" in problem["detail"]) == (409, True)
