# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A handler from a package outside this tree: installed, configured, and run over HTTP."""

import os
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nemo_gym_prorl.cli.scripted.server import ScriptedConfig
from nemo_gym_prorl.cli.scripted.server import serve as serve_scripted
from nemo_gym_prorl.cli.scripted.text import MODEL_NAME
from nemo_gym_prorl.failures import CallerError
from tests.agent import peers
from tests.agent.gym_host import hosting, instance, url_of
from tests.agent.test_gym_environment import counting, gym_rows, scripted


ROOT = Path(__file__).parents[2]

COIN = """
from nemo_gym_prorl.rollout.job import Outcome, Trajectory, Verdict, failure_state
from pydantic import BaseModel


class Coin:
    name = "coin"

    class Config(BaseModel):
        side: str

    def __init__(self, context):
        self.config = context.config

    async def init(self, job):
        return "a session: a sandbox, say"

    async def run(self, job, session):
        return Trajectory({"output": [{"type": "message", "text": self.config.side}]})

    async def release(self, job, session):
        "Give it back; then EVAL begins."

    async def eval(self, job, trajectory):
        return Verdict(0.5, {"reward": 0.5, "response": trajectory.response})

    def on_failure(self, job, stage, failure):
        return Outcome(failure_state(failure), {}, failure=failure)
"""
"""A kind of task that is no Gym environment."""

[BRIEF] = re.findall(
    r"^```python\n((?:(?!^```).)*class Brief.*?)^```",
    (ROOT / "docs" / "your-own-environment.md").read_text(),
    re.MULTILINE | re.DOTALL,
)
"""What the page shows."""

ENTRY_POINTS = """[nemo_gym_prorl.agent_handlers]
coin = coin_handler:Coin
brief = brief_handler:Brief
"""
COUNTER = "example_session_state_mgmt"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the installed package, for ``PYTHONPATH``."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "coin_handler.py").write_text(COIN)
    (folder / "brief_handler.py").write_text(BRIEF)
    about = folder / "coin_handler-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: coin-handler\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def deployment(**settings: Any) -> dict[str, Any]:
    """A service whose rows need no resources server, and a model server that nobody asks."""
    return {
        "policy_model": instance("responses_api_models", "vllm_model"),
        "agent": instance(
            "responses_api_agents",
            "prorl_agent",
            model_server={"type": "responses_api_models", "name": "policy_model"},
            **settings,
        ),
    }


async def test_a_rollout_runs_through_a_handler_of_another_package(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")]))
    block = {"handler": "coin", "handler_config": {"side": "heads"}, "data_sources": ["coins"]}
    tails = {"handler": "coin", "handler_config": {"side": "tails"}}
    config = deployment(environments={"toss": block, "tails": tails})
    async with hosting(config, "agent"), aiohttp.ClientSession() as http:
        url = url_of(config["agent"])
        for source, said in (("coins", "heads"), ("tails", "tails")):
            row = {"responses_create_params": {"input": "call it"}, "data_source": source}
            async with http.post(f"{url}/run", json=row) as answer:
                result = await answer.json()
                assert answer.status == 200, result
            assert result["reward"] == 0.5
            assert result["response"]["output"][0]["text"] == said
            assert result["rollout"]["environment"] == {"coins": "toss"}.get(source, source)
        async with http.get(f"{url}/status") as answer:
            assert (await answer.json())["environments"]["toss"]["handler"] == "coin"


async def test_the_handler_of_the_readme_runs_over_gyms_own_servers(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")]))
    [row, *_] = gym_rows(COUNTER)
    row = scripted(row, *counting(row["expected_count"] - row["initial_count"] - 1))
    reference = {"type": "resources_servers", "name": COUNTER}
    short = {"resources_server": reference, "handler": "brief", "handler_config": {"per_turn": 0.125}}
    async with serve_scripted(ScriptedConfig()) as policy_url:
        model = {"base_url": policy_url, "api_key": "none", "model": MODEL_NAME, "return_token_id_information": True}
        config = {
            **deployment(resources_server=reference, environments={"short": short}),
            "policy_model": instance("responses_api_models", "vllm_model", **model, uses_reasoning_parser=False),
            COUNTER: instance("resources_servers", COUNTER, domain="other"),
        }
        async with hosting(config), aiohttp.ClientSession() as http:
            rewards, accuracies = [], []
            for source in ("short", "any other"):
                async with http.post(f"{url_of(config['agent'])}/run", json={**row, "data_source": source}) as answer:
                    result = await answer.json()
                    rewards.append(result["reward"])
                    accuracies.append(result.get("accuracy"))
    assert rewards == [1.0 - 3 * 0.125, 1.0]
    assert accuracies == [1.0, None], "what dynamic sampling filters by is not shaped"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"handler": "coin"}, "environments.toss.handler_config.side: Field required"),
    (
        {"handler": "coin", "handler_config": {"sides": "heads"}},
        "environments.toss.handler_config",
    ),
    ({"handler": "coyn"}, "environments.toss.handler: no agent handler 'coyn' is installed; the nearest: coin"),
    (
        {"handler": "coin", "handler_config": {"side": "heads"}, "on_timeout": "zero"},
        "environments.toss.on_timeout: must be mask for handler 'coin'",
    ),
]


@pytest.mark.parametrize(("block", "complaint"), REFUSED)
async def test_a_configuration_that_the_handler_does_not_take_is_refused_by_name(
    block: dict[str, Any], complaint: str, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)
    with pytest.raises(CallerError, match=re.escape(complaint)):
        async with peers.deployment(environments={"toss": block}):
            pass
