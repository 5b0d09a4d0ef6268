# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym 0.7's own harness agents, unchanged, on a real engine; they know a rollout only by its URL.

There is one agent for each route: Gym's own loop uses Responses, mini-swe-agent (through litellm, in a sandbox) uses
chat completions, and Claude Code uses Messages as streams. The tiny policy is untrained, so a grammar forces calls of
the agent's tool.

Each agent runs with a template without reasoning, and with one that drops reasoning before the latest question. Three
turns have one question, so the template keeps all reasoning and ``rewrites`` is 0.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from nemo_gym import base_responses_api_agent
from tokenizers import Tokenizer as FastTokenizer

from tests.agent.gym_host import hosting, instance, url_of
from tests.deployment.ray_cluster import ray_cluster
from tests.policy.engines import MODEL
from tests.policy.families import TEMPLATES


pytestmark = [
    pytest.mark.gym,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not hasattr(base_responses_api_agent.SimpleResponsesAPIAgent, "base_url_for_run"),
        reason="this Gym's agents know no URLs of rollouts",
    ),
]
TURNS = 3
ROLLOUTS = 3
MODEL_SERVER = {"type": "responses_api_models", "name": "policy_model"}
WEATHER = {"type": "resources_servers", "name": "weather"}
type Agent = tuple[dict[str, Any], str, dict[str, Any]]
"""Configuration block, grammar of the calls, and additional fields of the rows."""
THOUGHTS = {"chatml": "", "thinking": r"<think>\n[a-z ]{1,20}\n</think>\n\n"}
"""Grammar of the text before a call, by template."""


def servers(policy_url: str, name: str, **settings: Any) -> dict[str, Any]:
    """Return the model server, and Gym's smallest example."""
    return {
        "policy_model": instance(
            "responses_api_models",
            "prorl_model",
            **{"base_url": policy_url, "api_key": "none", "model": name},
            **{"return_token_id_information": True, "uses_reasoning_parser": True, **settings},
        ),
        "weather": instance("resources_servers", "example_single_tool_call", domain="agent"),
    }


def called(name: str, argument: str) -> str:
    """Return the grammar of a call in the template's format."""
    arguments = rf'\{{"{argument}": "echo [a-z]{{1,9}}"\}}'
    return rf'\n<tool_call>\n\{{"name": "{name}", "arguments": {arguments}\}}\n</tool_call>'


def simple_agent() -> Agent:
    agent = instance(
        "responses_api_agents", "simple_agent", max_steps=TURNS, resources_server=WEATHER, model_server=MODEL_SERVER
    )
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "name": "get_weather", "description": "", "strict": False, "parameters": parameters}
    return agent, called("get_weather", "city"), {"tools": [tool]}


def mini_swe_agent_2(image: str) -> Agent:
    agent = instance(
        "responses_api_agents",
        "mini_swe_agent_2",
        concurrency=ROLLOUTS,
        env="sandbox",
        step_limit=TURNS,
        model_server=MODEL_SERVER,
        sandbox_provider={"singularity": {}},
        sandbox_spec={"image": image},
        sandbox_environment_kwargs={"cwd": "/tmp", "activate_conda": False, "user": None},
    )
    return agent, called("bash", "command"), {}


def claude_code_agent() -> Agent:
    agent = instance(
        "responses_api_agents",
        "claude_code_agent",
        max_turns=TURNS,
        resources_server=WEATHER,
        model_server=MODEL_SERVER,
        model=MODEL,
        anthropic_api_key="none",
        allowed_tools="Bash",
    )
    return agent, called("Bash", "command"), {}


@pytest.fixture
def agent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    match request.param:
        case "mini_swe_agent_2":
            if importlib.util.find_spec("minisweagent") is None:
                pytest.skip("needs pip install mini-swe-agent==2.1.0 swebench==4.1.0")
            with ray_cluster() as override:
                monkeypatch.setenv("RAY_ADDRESS", override.partition("=")[2])
                monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
                yield mini_swe_agent_2(str(request.getfixturevalue("image")))
        case "claude_code_agent":
            if shutil.which("claude") is None:
                pytest.skip("needs npm install -g @anthropic-ai/claude-code")
            yield claude_code_agent()
        case _:
            yield simple_agent()


@pytest.mark.long("its agents take minutes; a caller of test_prorl_model.py knows as little as they do")
@pytest.mark.parametrize("family", list(THOUGHTS))
@pytest.mark.parametrize("agent", ["simple_agent", "mini_swe_agent_2", "claude_code_agent"], indirect=True)
async def test_the_chain_of_an_agent_that_knows_its_url(
    agent: Agent, family: str, engine_url: str, model_folder: Path, tmp_path: Path
) -> None:
    block, call, more = agent
    grammar = THOUGHTS[family] + call
    held = {"structured_outputs": {"regex": grammar}}
    template = tmp_path / "template.jinja"
    template.write_text(
        "{#- Claude Code asks for a reasoning_effort. -#}" + (TEMPLATES / f"{family}.jinja").read_text()
    )
    policy = {"tokenizer": str(model_folder), "chat_template": str(template)}
    config = servers(f"{engine_url}/v1", MODEL, policy=policy, extra_body=held) | {"agent": block}
    names = tuple(config)
    config |= {"policy_model_name": MODEL, "observability_enabled": True, "model_call_capture_dir": str(tmp_path)}
    config["token_id_capture"] = {"enabled": True, "all_agents": True, "dir": str(tmp_path)}

    async def run(index: int) -> dict[str, Any]:
        task = f"rollout number {index}, please"
        row = {
            "responses_create_params": {
                "input": [{"role": "user", "content": task}],
                "max_output_tokens": 128,
                **more,
            },
            **{"_ng_task_index": 7, "_ng_rollout_index": index},
            **{"instance_id": f"a__b-{index}", "subset": "verified", "split": "test", "problem_statement": task},
        }
        async with http.post(f"{url_of(config['agent'])}/run", json=row) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async with hosting(config, *names, cwd=tmp_path), aiohttp.ClientSession() as http:
        results = await asyncio.gather(*map(run, range(ROLLOUTS)))
        url = url_of(config["policy_model"])
        ledgers = []
        for index in range(ROLLOUTS):
            async with http.get(f"{url}/v1/rollouts/7-{index}/tokens") as answer:
                assert answer.status == 200, await answer.text()
                ledgers.append(await answer.json())
        tokenizer = FastTokenizer.from_file(str(model_folder / "tokenizer.json"))
        for index, (ledger, result) in enumerate(zip(ledgers, results, strict=True)):
            (sequence,) = ledger["sequences"]
            assert len(ledger["answers"]) == TURNS
            assert {name for name, number in ledger["counts"].items() if number} <= {"neutralised"}
            text = tokenizer.decode(sequence["ids"], skip_special_tokens=False)
            assert set(re.findall(r"rollout number (\d)", text)) == {str(index)}
            sampled = [sequence["ids"][start:end] for start, end, sampled, _ in sequence["spans"] if sampled]
            assert len(sampled) == TURNS
            assert all(re.fullmatch(grammar, tokenizer.decode(ids).rstrip()) for ids in sampled)
            # litellm moves a thought out of the content, so Gym's capture links no turns of such an agent.
            if family == "chatml" or "mini_swe_agent_2" not in block["responses_api_agents"]:
                check_gyms_capture(tmp_path, index, result["response"], sequence)
    print(json.dumps([[len(s["ids"]), sum(s["mask"])] for ledger in ledgers for s in ledger["sequences"]]))


def check_gyms_capture(folder: Path, index: int, response: dict[str, Any], sequence: dict[str, Any]) -> None:
    """Check that Gym's trainer receives the same tokens as one unmasked chain."""
    from nemo_gym.token_id_capture import trajectories_for_rollout

    built = trajectories_for_rollout(f"7-{index}", [folder], verified_response=response)
    assert not built["mask_sample"], built
    assert (built["metrics"]["n_calls"], built["metrics"]["chains"]) == (TURNS, 1)
    assert built["metrics"]["delivered_fraction"] == 1.0
    last = [item for item in built["rebuilt_response"]["output"] if item.get("generation_token_ids")][-1]
    assert last["prompt_token_ids"] + last["generation_token_ids"] == sequence["ids"]
