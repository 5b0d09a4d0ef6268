# SPDX-License-Identifier: Apache-2.0
"""Several ``prorl_model`` behind one agent, as docs/policy.md configures them, started by Gym's own command line."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest
import yaml

from nemo_gym_prorl.gym.deployment import GymDeployment
from nemo_gym_prorl.scripted.server import ScriptedConfig, serve
from tests.policy.test_gym import CONFIGS, assert_chain, trained, write_rows


pytestmark = [pytest.mark.gym, pytest.mark.timeout(900)]

MODELS = ["policy_model", "policy_model_2"]
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
AGENT = {
    "entrypoint": "app.py",
    "host": "127.0.0.1",
    "resources_server": {"type": "resources_servers", "name": "example_single_tool_call"},
    "model_server": {"type": "responses_api_models", "name": MODELS[0]},
    "further_model_servers": MODELS[1:],
}


async def test_gym_starts_them_and_each_takes_rollouts(shared_ray: str, tmp_path: Path) -> None:
    turns = [{"tool_calls": [{"name": "get_weather", "arguments": {"city": "x"}}]}, {"content": "done"}]
    script = {"metadata": {"script": json.dumps({"turns": turns})}, "tools": [TOOL]}
    rows = [{"input": [{"role": "user", "content": f"how is it in {n}?"}], **script} for n in range(24)]
    write_rows(tmp_path / "rows.jsonl", rows)
    config = tmp_path / "several.yaml"
    copies = {name: {"_copy": MODELS[0]} for name in MODELS[1:]}
    config.write_text(yaml.safe_dump({**copies, "agent": {"responses_api_agents": {"prorl_agent": AGENT}}}))
    async with (
        serve(ScriptedConfig()) as url,
        GymDeployment(
            config_paths=[*CONFIGS, config],
            model_type=None,
            policy_base_url=url,
            policy_model_name=ScriptedConfig().model,
            overrides=[shared_ray],
        ) as deployment,
    ):
        source, results = tmp_path / "rows.jsonl", tmp_path / "results.jsonl"
        arguments = ("--no-serve", "--agent", "agent", "-i", str(source), "-o", str(results))
        await deployment.run_gym("eval", "run", *arguments)
        said = []
        async with aiohttp.ClientSession() as http:
            for name in MODELS:
                async with http.get(f"{deployment.url(name)}/metrics") as metrics:
                    said.append(await metrics.text())
    done = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["reward"] for row in done] == [1.0] * 24
    for row in done:
        assert len(trained(row)) == 2
        assert_chain(trained(row))
    for metrics in said:
        assert "prorl_policy_turn_seconds_count" in metrics, "each has taken turns"
        # A turn that came to another server would be another rollout there, its past read from text.
        assert "prorl_policy_retokenised_tokens_total 0.0" in metrics
