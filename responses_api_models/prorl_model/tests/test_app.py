# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tests of the model server with scripted turns; tests with real engines are in the repository's ``tests/policy``."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from pydantic import ValidationError
from starlette.testclient import TestClient

from nemo_gym_prorl.cli.scripted.server import serve
from nemo_gym_prorl.cli.scripted.text import MODEL_NAME
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.servers.model_server import ProrlModel, ProrlModelConfig


NOWHERE = "http://127.0.0.1:1/v1"
TURNS = ("/v1/responses", "/v1/chat/completions", "/v1/messages")


def model(base_url: str = NOWHERE, **settings: Any) -> ProrlModel:
    address = {"name": "policy_model", "entrypoint": "app.py", "host": "127.0.0.1", "port": 1}
    config = ProrlModelConfig(**{**address, "base_url": base_url, "model": MODEL_NAME, **settings})
    head = BaseServerConfig(host="127.0.0.1", port=1)
    return ProrlModel(
        config=config, server_client=ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
    )


def test_gyms_routes_and_those_of_tokens_and_backends_stand_side_by_side() -> None:
    with TestClient(model().setup_webserver()) as client:
        paths = set(client.get("/openapi.json").json()["paths"])
    assert {*TURNS, "/v1/rollouts/{rollout}/tokens", "/v1/backends", "/metrics"} <= paths


def test_a_turn_begins_with_what_the_turn_before_sampled() -> None:
    asyncio.run(_two_turns())


async def _two_turns() -> None:
    """Run two turns of an agent that sends no token ids back; a cookie identifies the agent."""
    call = {"name": "bash", "arguments": {"command": "ls"}}
    script = {"turns": [{"content": "I look.", "tool_calls": [call]}, {"content": "Done."}]}
    asked: dict[str, Any] = {
        "input": [{"role": "user", "content": "What is there?"}],
        "tools": [{"type": "function", "name": "bash", "parameters": {"type": "object"}, "strict": None}],
        "metadata": {"script": json.dumps(script)},
    }
    async with serve() as base_url:
        app = model(base_url).setup_webserver()
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://model") as client,
        ):
            chain: list[int] = []
            for said in ("function_call", "message"):
                answer = (await client.post("/v1/responses", json=asked)).json()
                last = answer["output"][-1]
                assert last["type"] == said
                assert last["prompt_token_ids"][: len(chain)] == chain
                assert len(last["generation_log_probs"]) == len(last["generation_token_ids"]) > 0
                chain = last["prompt_token_ids"] + last["generation_token_ids"]
                asked["input"] += [
                    {key: value for key, value in item.items() if "token" not in key and "log_probs" not in key}
                    for item in answer["output"]
                ]
                if said == "function_call":
                    result = {"type": "function_call_output", "call_id": last["call_id"], "output": "nothing"}
                    asked["input"].append(result)


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"base_url": None}, "base_url"), ({"policy_model": "x"}, "policy_model"), ({"api_key": 7}, "api_key")],
)
def test_a_setting_that_is_none_is_named(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        model(**settings)
    assert refused.value.errors()[0]["loc"][0] == field


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"num_workers": 2}, "num_workers"),
        ({"policy": {"engine": "abacus"}}, "engine"),
        ({"policy": {"engine": "vllm"}}, "tokenizer"),
        ({"host": "0.0.0.0"}, "policy.control_token"),
        ({"extra_body": {"n": 2}}, "extra_body"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(settings: dict[str, Any], field: str) -> None:
    with pytest.raises((CallerError, ValidationError)) as refused:
        model(**settings).setup_webserver()
    named = refused.value.field if isinstance(refused.value, CallerError) else refused.value.errors()[0]["loc"][-1]
    assert named == field
