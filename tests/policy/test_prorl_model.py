# SPDX-License-Identifier: Apache-2.0
"""The model server as Gym runs it, in front of a real vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import DictConfig

from responses_api_models.prorl_model.app import ProrlModel, ProrlModelConfig
from tests.policy.engines import serving


TOOLS = [
    {
        "type": "function",
        "name": "look",
        "description": "Look at something.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
        "strict": None,
    }
]


def server(base_url: str, model_folder: Path, **config: object) -> ProrlModel:
    settings = {
        "host": "127.0.0.1",
        "port": 0,
        "name": "policy_model",
        "entrypoint": "app.py",
        "base_url": base_url,
        "model": "tiny",
        "policy": {"tokenizer": str(model_folder)},
    }
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=DictConfig({})
    )
    return ProrlModel(config=ProrlModelConfig.model_validate(settings | config), server_client=client)


@pytest.fixture
async def url(engine_url: str, model_folder: Path) -> AsyncIterator[str]:
    model = server(f"{engine_url}/v1", model_folder)
    async with serving(model.setup_webserver()) as address:
        yield address
        await model._host.aclose()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield session


async def respond(http: aiohttp.ClientSession, url: str, items: list[dict], **more: object) -> dict:
    headers = more.pop("headers", {})
    # A random model ends its turn at random, too.
    metadata = {"extra_body": '{"ignore_eos": true}'}
    body = {"input": items, "max_output_tokens": 16, "metadata": metadata, "temperature": 1.0, "tools": TOOLS, **more}
    async with http.post(f"{url}/v1/responses", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_turns_are_an_exact_prefix_chain(http: aiohttp.ClientSession, url: str) -> None:
    items: list[dict] = [{"role": "user", "content": "What is in the box? 📦"}]
    previous: dict | None = None
    for turn in range(3):
        answer = await respond(http, url, items)
        last = answer["output"][-1]
        assert len(last["generation_token_ids"]) == len(last["generation_log_probs"]) == 16
        if previous is not None:
            chain = previous["prompt_token_ids"] + previous["generation_token_ids"]
            assert last["prompt_token_ids"][: len(chain)] == chain
        previous = last
        # An agent of its own, that carries no ids back.
        text = last["content"][0]["text"]
        items += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And then? {turn}"}]


async def test_previous_response_id_continues_with_what_is_new(http: aiohttp.ClientSession, url: str) -> None:
    headers = {"X-Rollout-Id": "r1", "X-Rollout-Tokens": "deferred"}
    first = await respond(http, url, [{"role": "user", "content": "Hello"}], headers=headers)
    assert "prompt_token_ids" not in first["output"][-1]
    more = {"headers": headers, "previous_response_id": first["id"]}
    second = await respond(http, url, [{"role": "user", "content": "More"}], **more)
    async with http.get(f"{url}/v1/rollouts/r1/tokens") as response:
        tokens = await response.json()
    (sequence,) = tokens["sequences"]
    assert len(sequence["ids"]) == len(sequence["mask"]) == len(sequence["log_probs"])
    assert sum(sequence["mask"]) == 32
    assert tokens["answers"][first["id"]]["end"] < tokens["answers"][second["id"]]["start"]
