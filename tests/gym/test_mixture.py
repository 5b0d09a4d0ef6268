# SPDX-License-Identifier: Apache-2.0
"""A mixture of two of Gym's environments behind one prorl_agent, started and used with Gym's own command line."""

import aiohttp
import orjson
import pytest
import yaml

from nemo_gym_prorl.deployment import GymDeployment
from nemo_gym_prorl.scripted.text import MODEL_NAME
from tests.handlers.test_gym_environment import counting, gym_rows, scripted


pytestmark = pytest.mark.gym

COUNTER, SYNONYMS = "example_session_state_mgmt", "example_multi_step"
AGENT = {
    "entrypoint": "app.py",
    "host": "127.0.0.1",
    "model_server": {"type": "responses_api_models", "name": "policy_model"},
    "environments": {
        "counter": {
            "resources_server": {"type": "resources_servers", "name": f"{COUNTER}_resources_server"},
            "data_sources": ["counting"],
            "budgets": {"run": 120},
        },
        "synonyms": {
            "resources_server": {"type": "resources_servers", "name": f"{SYNONYMS}_resources_server"},
            "max_steps": 1,
        },
    },
}
FILE = {
    "uv_venv_dir": "${oc.env:PRORL_GYM_VENVS,.}",
    "skip_venv_if_present": "${oc.decode:${oc.env:PRORL_GYM_REUSE,false}}",
    "mixture": {"responses_api_agents": {"prorl_agent": AGENT}},
}


async def test_gyms_command_line_runs_a_mixture_of_environments(scripted_policy, tmp_path):
    config = tmp_path / "mixture.yaml"
    config.write_text(yaml.safe_dump(FILE))
    [count, *_], [say, *_] = gym_rows(COUNTER), gym_rows(SYNONYMS)
    counted = scripted(count, *counting(count["expected_count"] - count["initial_count"] - 1))
    said = scripted(say, [("get_synonym_value", {"synonym": "a"})], "Done.")
    sources = ((counted, "counting"), (said, "synonyms"))
    rows, results = tmp_path / "rows.jsonl", tmp_path / "results.jsonl"
    rows.write_bytes(b"".join(orjson.dumps({**row, "data_source": source}) + b"\n" for row, source in sources))
    async with (
        GymDeployment(
            config_paths=[*(f"resources_servers/{name}/configs/{name}.yaml" for name in (COUNTER, SYNONYMS)), config],
            model_type="vllm_model/vllm_model_for_training",
            policy_base_url=scripted_policy,
            policy_model_name=MODEL_NAME,
            work_dir=tmp_path / "gym",
            start_timeout_s=500,
        ) as gym,
        aiohttp.ClientSession() as http,
    ):
        words = ("eval", "run", "--no-serve", "--agent", "mixture", "-i", str(rows), "-o", str(results))
        await gym.run_gym(*words, "--num-repeats", "2")
        async with http.get(f"{gym.url('mixture')}/status") as answer:
            status = await answer.json()
    done = [orjson.loads(line) for line in results.read_bytes().splitlines()]
    assert [row["rollout"]["environment"] for row in sorted(done, key=lambda row: row["_ng_task_index"])] == [
        *("counter", "counter", "synonyms", "synonyms")
    ]
    for row in done:
        counter = row["rollout"]["environment"] == "counter"
        assert row["rollout"]["finish_reason"] == ("stop" if counter else "max_steps")
        assert row["reward"] == 1.0 or not counter
    assert {name: about["budgets"]["run"] for name, about in status["environments"].items()} == {
        "counter": 120.0,
        "synonyms": 3600.0,
    }
    [metrics] = orjson.loads((tmp_path / "results_aggregate_metrics.json").read_bytes())
    assert metrics["agent_metrics"]["counter/mean/reward"] == 1.0
    assert any(name.startswith("synonyms/") for name in metrics["agent_metrics"])
