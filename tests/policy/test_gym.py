# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's own servers with ``prorl_model`` where ``vllm_model`` would be, before a real engine and a scripted one.

How Gym's command line starts it, tests/gym looks at.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer as FastTokenizer

from nemo_gym_prorl.policy.text.formats import FORMATS
from nemo_gym_prorl.policy.text.parsers import parse
from nemo_gym_prorl.policy.text.tokenizer import Tokenizer
from nemo_gym_prorl.scripted.server import ScriptedConfig, serve
from tests.handlers.gym_host import hosting, instance, url_of
from tests.policy.engines import MODEL
from tests.policy.families import FAMILIES, TEMPLATES, TOOLS, some_words


pytestmark = [pytest.mark.gym, pytest.mark.engine, pytest.mark.timeout(600)]


def servers(policy_url: str, name: str, **settings: Any) -> dict[str, Any]:
    """Gym's agent and its smallest example, over our model server."""
    return {
        "policy_model": instance(
            "responses_api_models",
            "prorl_model",
            **{"base_url": policy_url, "api_key": "none", "model": name},
            **{"return_token_id_information": True, "uses_reasoning_parser": True, **settings},
        ),
        "weather": instance("resources_servers", "example_single_tool_call", domain="agent"),
        "agent": instance(
            "responses_api_agents",
            "simple_agent",
            max_steps=4,
            resources_server={"type": "resources_servers", "name": "weather"},
            model_server={"type": "responses_api_models", "name": "policy_model"},
        ),
    }


async def collect(http: aiohttp.ClientSession, config: dict[str, Any], rows: list[dict[str, Any]]) -> list[Any]:
    """What Gym's agent makes of rows, together."""

    async def run(row: dict[str, Any]) -> Any:
        async with http.post(f"{url_of(config['agent'])}/run", json={"responses_create_params": row}) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    return await asyncio.gather(*map(run, rows))


def trained(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in result["response"]["output"] if item.get("generation_token_ids")]


def assert_chain(items: list[dict[str, Any]]) -> None:
    for item in items:
        assert len(item["generation_token_ids"]) == len(item["generation_log_probs"])
    for earlier, later in itertools.pairwise(items):
        chain = earlier["prompt_token_ids"] + earlier["generation_token_ids"]
        assert later["prompt_token_ids"][: len(chain)] == chain


async def test_gyms_own_agent_over_a_real_engine(engine_url: str, model_folder: Path) -> None:
    rng = random.Random(0)
    rows = [
        {
            "input": [{"role": "user", "content": some_words(rng)}],
            "tools": [{"type": "function", "strict": False, **TOOLS[0]["function"]}],
            "max_output_tokens": 64,
            "temperature": 1,
            "metadata": {"extra_body": json.dumps({"seed": seed})},  # so that a failure can be repeated
        }
        for seed in range(20)
    ]
    policy = {"tokenizer": str(model_folder), "chat_template": str(TEMPLATES / "thinking.jinja")}
    config = servers(f"{engine_url}/v1", MODEL, policy=policy)
    async with hosting(config), aiohttp.ClientSession() as http:
        results = await collect(http, config, rows)
        url = url_of(config["policy_model"])
        async with http.get(f"{url}/metrics") as response:
            metrics = await response.text()
        async with http.get(f"{url}/v1/backends") as response:
            backends = (await response.json())["backends"]
    assert len(results) == 20
    for result in results:
        assert_chain(trained(result))
    assert any(len(trained(result)) > 1 for result in results), "no rollout had two turns"
    tokenizer = Tokenizer(FastTokenizer.from_file(str(model_folder / "tokenizer.json")))
    for result in results:
        for item in trained(result):
            if item["type"] == "function_call" and item["status"] == "completed":
                ids = item["generation_token_ids"]
                # A turn that was cut short has no end, and may be a whole call all the same.
                text = tokenizer.decode(ids[:-1] if ids[-1] in tokenizer.special else ids)
                calls = parse(text, FORMATS[FAMILIES["thinking"].tool_format]).calls
                assert item["arguments"] in [call.arguments for call in calls]
    assert 'prorl_policy_sampled_tokens_total{backend="backend0",run=""}' in metrics
    assert "prorl_policy_retokenised_tokens_total 0.0" in metrics
    assert [(b["id"], b["health"]) for b in backends] == [("backend0", "up")]


async def test_a_scripted_policy_needs_no_tokenizer() -> None:
    script = {"turns": [{"tool_calls": [{"name": "get_weather", "arguments": {"city": "x"}}]}, {"content": "done"}]}
    row = {
        "input": [{"role": "user", "content": "how is it?"}],
        "tools": [
            {
                "type": "function",
                "name": "get_weather",
                "description": "",
                "strict": False,
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            }
        ],
        "metadata": {"script": json.dumps(script)},
    }
    async with serve(ScriptedConfig()) as url:
        config = servers(url, ScriptedConfig().model)
        async with hosting(config), aiohttp.ClientSession() as http:
            results = await collect(http, config, [row] * 4)
    assert [result["reward"] for result in results] == [1.0] * 4
    for result in results:
        assert len(trained(result)) == 2
        assert_chain(trained(result))
