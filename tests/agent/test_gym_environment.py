# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""prorl_agent over Gym's own servers: same rewards as Gym's own agent, and what it adds.

Gym's resources servers, its ``simple_agent`` and its ``vllm_model`` run unmodified; the policy is scripted.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from nemo_gym_prorl.agent.gym_environments import ServiceConfig
from nemo_gym_prorl.cli.scripted.server import ScriptedConfig
from nemo_gym_prorl.cli.scripted.server import serve as serve_scripted
from nemo_gym_prorl.cli.scripted.text import MODEL_NAME
from tests.agent.gym_host import hosting, instance, url_of
from tests.agent.peers import agent_service


ENVIRONMENTS = ("example_session_state_mgmt", "example_multi_step", "mcqa")
MAX_MODEL_LEN = 20_000


def gym_rows(environment: str) -> list[dict[str, Any]]:
    """The example rows that Gym ships with a resources server."""
    spec = find_spec("nemo_gym")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parents[1] / "resources_servers" / environment / "data" / "example.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def scripted(row: dict[str, Any], *turns: Any, latency_s: float = 0.0) -> dict[str, Any]:
    """The row with a script: a turn is text, or a list of (tool, arguments) calls, and takes so long."""
    script = []
    for turn in turns:
        if isinstance(turn, str):
            script.append({"content": turn, "tool_calls": []})
        else:
            script.append({"content": None, "tool_calls": [{"name": name, "arguments": args} for name, args in turn]})
    params = {
        **row["responses_create_params"],
        "metadata": {"script": json.dumps({"turns": [{**turn, "latency_s": latency_s} for turn in script]})},
    }
    return {**row, "responses_create_params": params}


class Stage:
    def __init__(self, config: dict[str, Any], http: aiohttp.ClientSession) -> None:
        self.config, self.http = config, http

    async def simple_agent(self, environment: str, row: dict[str, Any]) -> dict[str, Any]:
        return await self._run(url_of(self.config[f"{environment}_simple_agent"]), row)

    @asynccontextmanager
    async def prorl_agent(self, environment: str, model: str = "policy_model", **settings: Any) -> AsyncIterator[Any]:
        """Our service on a real socket; yields a function that runs a row."""
        reference = {"type": "resources_servers", "name": environment}
        config = ServiceConfig(resources_server=reference, **settings)
        async with agent_service(config, self.config, model) as (_, url):
            yield lambda row: self._run(url, row)

    async def _run(self, url: str, row: dict[str, Any]) -> dict[str, Any]:
        async with self.http.post(f"{url}/run", json=row) as response:
            body = await response.json()
            assert response.status == 200, body
            return dict(body)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    async with serve_scripted(ScriptedConfig(max_model_len=MAX_MODEL_LEN)) as policy_url:
        model = {
            "base_url": policy_url,
            "api_key": "none",
            "model": MODEL_NAME,
            "return_token_id_information": True,
            "uses_reasoning_parser": False,
        }
        config = {
            "policy_model": instance("responses_api_models", "vllm_model", **model),
            "token_keeper": instance("responses_api_models", "prorl_model", **model, policy={"engine": "vllm_chat"}),
        }
        for environment in ENVIRONMENTS:
            config[environment] = instance("resources_servers", environment, domain="other")
            config[f"{environment}_simple_agent"] = instance(
                "responses_api_agents",
                "simple_agent",
                resources_server={"type": "resources_servers", "name": environment},
                model_server={"type": "responses_api_models", "name": "policy_model"},
            )
        async with hosting(config), aiohttp.ClientSession() as http:
            yield Stage(config, http)


pytestmark = pytest.mark.asyncio(loop_scope="module")


def counting(add: int) -> list[Any]:
    """A script for the counter: two calls in one turn, then a look, then the answer."""
    increments = [("increment_counter", {"count": 1}), ("increment_counter", {"count": add})]
    return [increments, [("get_counter_value", {})], "Done."]


def scripts(environment: str, row: dict[str, Any]) -> list[list[Any]]:
    """Right and wrong replies to a row, with tool errors, unknown tools and malformed arguments among them."""
    if environment == "example_session_state_mgmt":
        missing = row["expected_count"] - row["initial_count"] - 1
        return [
            counting(missing),
            counting(missing + 1),
            [[("increment_counter", {"count": "many"})], *counting(missing)],
            [[("no_such_tool", {})], *counting(missing)],
            [[("increment_counter", '{"count": ')], *counting(missing)],
            ["I would rather not."],
        ]
    if environment == "example_multi_step":
        values = row["expected_synonym_values"]
        look_up = [[("get_synonym_value", {"synonym": name}) for name in row["expected_synonyms"]]]
        return [
            [*look_up, [("extract_synonym_values", {"synonym_values": values})], "Extracted."],
            [*look_up, [("extract_synonym_values", {"synonym_values": values[::-1]})], "Extracted."],
            ["Nothing to extract."],
        ]
    right = row["expected_answer"]
    return [[f"\\boxed{{{right}}}"], ["\\boxed{Z}"], ["No idea."]]


@pytest.mark.parametrize("environment", ENVIRONMENTS)
async def test_same_rewards_as_simple_agent_on_the_same_replies(stage: Stage, environment: str) -> None:
    async with stage.prorl_agent(environment) as run:
        rewards = []
        for row in gym_rows(environment)[:1]:
            for turns in scripts(environment, row):
                theirs = await stage.simple_agent(environment, scripted(row, *turns))
                ours = await run(scripted(row, *turns))
                assert ours["reward"] == theirs["reward"], turns
                assert [kind_of(item) for item in ours["response"]["output"]] == [
                    kind_of(item) for item in theirs["response"]["output"]
                ]
                for item in theirs["response"]["output"]:
                    if item["type"] == "function_call_output":
                        assert item["output"] in [other.get("output") for other in ours["response"]["output"]]
                rewards.append(ours["reward"])
        assert {0.0, 1.0} <= set(rewards), "the comparison saw right and wrong replies"


async def test_arguments_that_break_readers_are_answered_like_any_other(stage: Stage) -> None:
    [row, *_] = gym_rows("example_session_state_mgmt")
    missing = row["expected_count"] - row["initial_count"] - 1
    odd = [("no_such_tool", text) for text in ("[" * 5000, "1" * 5000, '{"n": 100000000000000000000}')]
    async with stage.prorl_agent("example_session_state_mgmt") as run:
        done = await run(scripted(row, odd, *counting(missing)))
    told = [item["output"] for item in done["response"]["output"] if item["type"] == "function_call_output"]
    assert ["Invalid tool call arguments" in text for text in told[:3]] == [True, True, False]
    assert done["reward"] == 1.0


def kind_of(item: dict[str, Any]) -> tuple[Any, ...]:
    """What two agents must agree on in an output item; ids are random."""
    return (item["type"], item.get("name"), item.get("arguments"), item.get("generation_token_ids"))


async def test_of_a_server_that_keeps_the_tokens_a_trainer_gets_the_same_trajectory(stage: Stage) -> None:
    [row, *_] = gym_rows("example_session_state_mgmt")
    async with stage.prorl_agent("example_session_state_mgmt") as run:
        in_full = await run(scripted(row, *counting(2)))
    async with stage.prorl_agent("example_session_state_mgmt", "token_keeper") as run:
        kept = await run(scripted(row, *counting(2)))
    assert kept["reward"] == in_full["reward"] == 1.0
    for ours, theirs in zip(kept["response"]["output"], in_full["response"]["output"], strict=True):
        for field in ("type", "name", "arguments", "output", "prompt_token_ids", "generation_log_probs"):
            assert ours.get(field) == theirs.get(field)
        sampled = theirs.get("generation_token_ids")
        assert ours.get("generation_token_ids") == (sampled and [int(token) for token in sampled])


async def test_concurrent_tool_calls_come_back_in_order(stage: Stage) -> None:
    [row, *_] = gym_rows("example_multi_step")
    names = row["expected_synonyms"]
    turns = [[("get_synonym_value", {"synonym": name}) for name in names], "Done."]
    async with stage.prorl_agent("example_multi_step", tool_concurrency=8) as run:
        result = await run(scripted(row, *turns))
    observations = [item for item in result["response"]["output"] if item["type"] == "function_call_output"]
    values = [json.loads(item["output"])["synonym_value"] for item in observations]
    assert values == [sum(map(ord, name)) for name in names]


@pytest.mark.parametrize("route", ["verify", "../verify"])
async def test_a_policy_cannot_call_the_servers_own_routes(stage: Stage, route: str) -> None:
    [row, *_] = gym_rows("example_session_state_mgmt")
    async with stage.prorl_agent("example_session_state_mgmt") as run:
        result = await run(scripted(row, [(route, {"initial_count": row["expected_count"]})], "Done."))
    [observation] = [item for item in result["response"]["output"] if item["type"] == "function_call_output"]
    assert "Not Found" in observation["output"]
    assert result["rollout"]["tool_calls"] == 0
