# SPDX-License-Identifier: Apache-2.0
"""The model server as Gym runs it, in front of a real vLLM."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from fastapi import FastAPI
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import DictConfig

from nemo_gym_prorl.failures import CallerError
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


TOKEN_FIELDS = {"prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts"}


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
        # An agent that carries no ids back.
        items += [{k: v for k, v in item.items() if k not in TOKEN_FIELDS} for item in answer["output"]]
        calls = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
        items += [{"type": "function_call_output", "call_id": call, "output": "a frog 🐸"} for call in calls]
        if not calls:
            items.append({"role": "user", "content": f"And then? {turn}"})


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


async def post(http: aiohttp.ClientSession, url: str, body: dict) -> tuple[int, dict]:
    async with http.post(url, json=body) as response:
        return response.status, await response.json()


async def test_chat_completions_and_messages_reach_the_same_policy(http: aiohttp.ClientSession, url: str) -> None:
    asked = [{"role": "user", "content": "Hello"}]
    status, chat = await post(http, f"{url}/v1/chat/completions", {"messages": asked, "max_tokens": 4})
    assert status == 200
    message = chat["choices"][0]["message"]
    assert len(message["generation_token_ids"]) == chat["usage"]["completion_tokens"] <= 4
    asked += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "More"}]
    _, more = await post(http, f"{url}/v1/chat/completions", {"messages": asked, "max_tokens": 4})
    chain = message["prompt_token_ids"] + message["generation_token_ids"]
    assert more["choices"][0]["message"]["prompt_token_ids"][: len(chain)] == chain
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
    status, anthropic = await post(http, f"{url}/v1/messages", body)
    assert (status, anthropic["role"]) == (200, "assistant")


async def test_what_cannot_be_done_is_refused_by_name(http: aiohttp.ClientSession, url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    status, problem = await post(http, f"{url}/v1/chat/completions", body | {"n": 2})
    assert (status, problem["field"]) == (400, "n")
    status, problem = await post(http, f"{url}/v1/chat/completions", body | {"tool_choice": "required"})
    assert (status, problem["field"]) == (400, "tool_choice")
    assert problem["type"] == "urn:nemo-gym-prorl:agent_request_failed"
    for name, text in [("extra_body", "{"), ("chat_template_kwargs", "[]")]:
        status, problem = await post(http, f"{url}/v1/chat/completions", body | {"metadata": {name: text}})
        assert (status, problem["field"]) == (400, f"metadata.{name}")


def test_a_drop_in_takes_the_keys_of_gyms_own_and_refuses_what_would_split_a_rollout(model_folder: Path) -> None:
    keys = {"uses_interleaved_reasoning": True, "sequential_reasoning_allowed": True, "is_responses_native": False}
    assert server("http://127.0.0.1:1", model_folder, **keys).setup_webserver()
    with pytest.raises(CallerError, match="num_workers: must be 1"):
        server("http://127.0.0.1:1", model_folder, num_workers=2).setup_webserver()


async def test_a_malformed_call_is_flagged_and_answered_like_any_other(http: aiohttp.ClientSession) -> None:
    """An engine that writes broken arguments: the agent gets a call that it cannot carry out, not an error."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def answer() -> dict:
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"what": '}}
        message = {"role": "assistant", "content": None, "tool_calls": [call], "prompt_token_ids": [1]}
        logged = {"content": [{"token": "token_id:7", "logprob": -0.5}]}
        return {"choices": [{"message": message, "logprobs": logged, "finish_reason": "tool_calls"}]}

    async with serving(app) as engine:
        model = server(engine, Path(), policy={})
        async with serving(model.setup_webserver()) as address:
            answered = await respond(http, address, [{"role": "user", "content": "?"}])
            await model._host.aclose()
    (item,) = answered["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "look", "incomplete")
    assert item["arguments"] == '{"what": '
    assert item["generation_token_ids"] == [7]


async def test_a_caller_that_hangs_up_stops_its_engine(http: aiohttp.ClientSession, url: str, engine_url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4000}
    endless = body | {"metadata": {"extra_body": '{"ignore_eos": true}'}}
    with pytest.raises(TimeoutError):
        await post_for(1.0, http, f"{url}/v1/chat/completions", endless)
    async with asyncio.timeout(20):
        while "num_requests_running" not in (text := await metrics(http, engine_url)) or running(text):
            await asyncio.sleep(0.1)


async def post_for(seconds: float, http: aiohttp.ClientSession, url: str, body: dict) -> None:
    async with asyncio.timeout(seconds):
        await post(http, url, body)


async def metrics(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(f"{url}/metrics") as response:
        return await response.text()


def running(text: str) -> float:
    return sum(map(float, re.findall(r"^vllm:num_requests_running\S* (\S+)$", text, re.MULTILINE)))
