# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts that go on from a checkpoint, and ones that begin at one: our own servers as Gym would start them, each a
process that is killed, with real sandboxes, a scripted policy, and what comes out held against an undisturbed run."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from nemo_gym_prorl.agent.agent_service import AgentService
from nemo_gym_prorl.agent.gym_environments import ServiceConfig
from nemo_gym_prorl.cli.scripted.server import ScriptedConfig
from nemo_gym_prorl.cli.scripted.server import serve as serve_scripted
from nemo_gym_prorl.cli.scripted.text import MODEL_NAME
from nemo_gym_prorl.dapo.scoring import inherited_turns, usage_of
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView, TokenForm
from nemo_gym_prorl.sandbox.snapshots import default_folder
from nemo_gym_prorl.tasks.code.code_rows import humaneval_row, problems
from tests.agent.gym_host import hosting, instance
from tests.agent.peers import agent_service
from tests.tasks import containers


TASK = "HumanEval/2"
SETUP = "export SAID=hello; count() { echo counted; }; mkdir -p work && cd work; NOT_EXPORTED=too"


def scripted(*commands: str, latency_s: float = 0.0) -> dict[str, Any]:
    """A row whose policy runs these commands, one a turn, and then is done."""
    turns = [
        {"content": None, "tool_calls": [{"name": "bash", "arguments": {"command": command}}], "latency_s": latency_s}
        for command in commands
    ]
    script = json.dumps({"turns": [*turns, {"content": "Done.", "tool_calls": []}]})
    row = humaneval_row(problems()[TASK])
    return {**row, "responses_create_params": {**row["responses_create_params"], "metadata": {"script": script}}}


def counting(turns: int, latency_s: float = 0.0) -> dict[str, Any]:
    """Each turn depends on what those before have left behind: files, folder, variables, functions and ``$?``."""
    grow = [
        f"echo $? $SAID $NOT_EXPORTED $(count) {turn} | tee -a log; wc -l < log; (exit {turn})"
        for turn in range(turns - 2)
    ]
    solve = "printf 'def truncate_number(number):\\n    return number %% 1.0\\n' > ../solution.py; cat log | md5sum"
    return scripted(SETUP, *grow, solve, latency_s=latency_s)


class Stage:
    """A service over servers that can be killed."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self._stacks: dict[str, AsyncExitStack] = {}
        self.hosts: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str) -> None:
        self._stacks[name] = AsyncExitStack()
        self.hosts[name] = await self._stacks[name].enter_async_context(hosting(self.config, name))

    async def kill(self, name: str) -> None:
        self.hosts[name].kill()
        await self._stacks.pop(name).aclose()

    async def restart(self, name: str) -> None:
        await self.kill(name)
        await self.start(name)

    async def close(self) -> None:
        for name in [*self._stacks]:
            await self.kill(name)

    @asynccontextmanager
    async def service(self, **settings: Any) -> AsyncIterator["Service"]:
        config = ServiceConfig(
            resources_server={"type": "resources_servers", "name": "prorl_code"},
            stages={"init": 4, "ready": 4, "run": 16, "eval": 2},
            **settings,
        )
        async with (
            agent_service(config, self.config, "policy_model") as (service, url),
            aiohttp.ClientSession(url) as http,
        ):
            yield Service(service, http, url)


class Service:
    def __init__(self, service: AgentService, http: aiohttp.ClientSession, url: str) -> None:
        self.pipeline, self._http, self._url = service.pipeline, http, url

    def client(self) -> RolloutClient:
        return RolloutClient(self._url)

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self._http.request(method, path, json=body) as response:
            return response.status, await response.json()

    async def submit(self, row: dict[str, Any], rollout: str) -> None:
        status, body = await self.call("POST", "/v1/rollouts", {"row": row, "id": rollout})
        assert status == 202, body

    async def done(self, rollout: str) -> dict[str, Any]:
        while True:
            status, body = await self.call("GET", f"/v1/rollouts/{rollout}?wait=60")
            assert status == 200, body
            if body["finished_at"] is not None:
                return dict(body)

    async def packed(self, rollout: str) -> JobView:
        async with self.client() as client:
            return await client.get(rollout, tokens=TokenForm.PACKED)

    async def turns(self, rollout: str, turns: int) -> None:
        job = self.pipeline.store.get(rollout)
        assert job is not None
        async with asyncio.timeout(60):
            while job.progress.turns < turns and not job.state.terminal:
                await asyncio.sleep(0.01)


def sampled(job: dict[str, Any]) -> list[Any]:
    """What is trained on, and what the policy was shown: without names that are drawn anew for each."""
    names = ("type", "output", "prompt_token_ids", "generation_token_ids", "generation_log_probs")
    return [{name: item[name] for name in names if name in item} for item in job["result"]["response"]["output"]]


def servers(policy_url: str) -> dict[str, Any]:
    """Return the configuration of a code environment and of a model server."""
    shipped = containers.shipped_config()
    code = shipped["prorl_code"]["resources_servers"]["prorl_code"] | {"image": containers.image()}
    model = {
        "base_url": policy_url,
        "api_key": "none",
        "model": MODEL_NAME,
        "return_token_id_information": True,
        "uses_reasoning_parser": False,
        "policy": {"engine": "vllm_chat"},
    }
    return {
        "prorl_code": instance("resources_servers", "prorl_code", **code),
        "policy_model": instance("responses_api_models", "prorl_model", **model),
        "sandbox": shipped["sandbox"],
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    async with serve_scripted(ScriptedConfig()) as policy_url:
        running = Stage(servers(policy_url))
        for name in ("prorl_code", "policy_model"):
            await running.start(name)
        yield running
        await running.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.long("starts and kills servers in processes of their own")
async def test_a_rollout_whose_servers_are_killed_goes_on_where_it_was(stage: Stage) -> None:
    async with stage.service(checkpoint_turns=1) as service:
        await service.submit(counting(10), "undisturbed")
        wanted = await service.done("undisturbed")
        assert (wanted["reward"], wanted["resumed"], wanted["turns"]) == (1.0, [], 11), wanted["failure"]
        for name, turn in (("prorl_code", 4), ("policy_model", 6)):
            await service.submit(counting(10, latency_s=0.2), name)
            await service.turns(name, turn)
            await stage.restart(name)
            job = await service.done(name)
            assert job["failed_attempts"], job
            [place] = job["resumed"]
            assert turn - 1 <= place["turn"] <= turn + 1
            assert place["lost"] == []
            assert (job["reward"], job["turns"], job["tool_calls"]) == (1.0, 11, 10)
            assert sampled(job) == sampled(wanted)


async def test_siblings_share_what_was_and_nothing_of_what_comes(stage: Stage) -> None:
    mine = "name=$(cat /proc/sys/kernel/random/uuid); touch seen-$name; sleep 0.5; ls | wc -l; echo $name"
    async with stage.service(checkpoint_turns=1) as service:
        await service.submit(
            scripted(SETUP, *[f"echo {turn} $SAID >> log" for turn in range(9)], mine, "ls"), "parent"
        )
        parent = await service.done("parent")
        status, answer = await service.call("POST", "/v1/rollouts/parent/fork?turn=10&n=8", {"group": "siblings"})
        assert status == 202, answer
        jobs = [await service.done(job["id"]) for job in answer["rollouts"]]
        prefix = sampled(parent)[:20]
        assert [job["forked_from"] for job in jobs] == [{"id": "parent", "turn": 10, "lost": []}] * 8
        assert all(sampled(job)[:20] == prefix for job in jobs)
        assert all(job["turns"] == 13 and job["group"] == "siblings" for job in jobs)
        last, first = sampled(parent)[18], sampled(jobs[0])[20]
        known = last["prompt_token_ids"] + last["generation_token_ids"]
        assert first["prompt_token_ids"][: len(known)] == known
        assert len(known) / len(first["prompt_token_ids"]) >= 0.95, "of its first own prompt an engine has"
        said = [sampled(job)[21]["output"].split() for job in [parent, *jobs]]
        assert {count for count, *_ in said} == {"2"}, "each sees the log and its own file, and nobody else's"
        assert len({name for _, name, *_ in said}) == 9
        assert [step["items"] for step in jobs[0]["steps"][:10]] == [step["items"] for step in parent["steps"][:10]]
        # A trainer is told whose turns they are, and takes the others' tokens.
        packed = [await service.packed(job["id"]) for job in [parent, *jobs]]
        assert [inherited_turns(job) for job in packed] == [0] + [10] * 8
        assert all(job.tokens and packed[0].tokens and job.tokens[:10] == packed[0].tokens[:10] for job in packed)
        whole = usage_of(packed[0]).length
        assert all(0 < usage_of(job).length < whole / 2 for job in packed[1:]), "what it took over is not counted"


async def test_the_client_forks(stage: Stage) -> None:
    async with stage.service(checkpoint_turns=2) as service, service.client() as client:
        parent = await client.submit(scripted(*["true"] * 5), group="g", budgets={"run": 77.0})
        ended = await client.wait(parent.id)
        assert ended.checkpoints == [2, 4]
        [latest] = await client.fork(parent.id)
        named = await client.fork(parent.id, 2, 2, ids=["a", "b"], group="h", client="me", budgets={"run": 66.0})
        again = await client.fork_once(parent.id, 2, id="a", group="h", client="me", budgets={"run": 66.0})
        assert latest.forked_from is not None
        assert (latest.forked_from.turn, latest.group) == (4, "g")
        assert [(job.id, job.group, job.client) for job in [*named, again]] == [
            ("a", "h", "me"),
            ("b", "h", "me"),
            ("a", "h", "me"),
        ]
        assert (await client.wait("a")).turns == 6
        with pytest.raises(ApiError, match="after turn 2, 4"):
            await client.fork(parent.id, 3)


async def test_what_cannot_be_forked_is_said(stage: Stage) -> None:
    async with stage.service(checkpoint_turns=3, checkpoint_s=1.0) as service:
        await service.submit(scripted(*["true"] * 7), "some")
        await service.done("some")
        for path, code, problem in (("none/fork", 404, "unknown-rollout"), ("some/fork?turn=4", 409, "no-checkpoint")):
            status, body = await service.call("POST", f"/v1/rollouts/{path}")
            assert (status, body["type"].rpartition(":")[2]) == (code, problem)
        assert "after turn 3, 6" in body["detail"]
        assert (await service.call("POST", "/v1/rollouts/some/fork?n=2", {"ids": ["a"]}))[0] == 422
        for file in default_folder().glob("checkpoint-prorl_code-*"):
            file.unlink()
        _, answer = await service.call("POST", "/v1/rollouts/some/fork", {"ids": ["late"]})
        assert [job["id"] for job in answer["rollouts"]] == ["late"]
        late = await service.done("late")
        assert (late["state"], late["failure"]["origin"], late["turns"]) == ("failed", "caller", 0)
        assert "the checkpoint of the fork is lost" in late["failure"]["reason"]
        await asyncio.sleep(1.0)
        service.pipeline.checkpoints.tidy()
        status, body = await service.call("POST", "/v1/rollouts/some/fork")
        assert (status, body["type"].rpartition(":")[2]) == (410, "checkpoints-forgotten")
    async with stage.service() as service:
        await service.submit(scripted("true"), "one")
        await service.done("one")
        status, body = await service.call("POST", "/v1/rollouts/one/fork")
        assert (status, body["type"].rpartition(":")[2]) == (422, "invalid-request")
        assert "checkpoint_turns" in body["detail"]
