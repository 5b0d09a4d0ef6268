# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What the agent's OpenAPI document allows, and what it does not, sent to the agent by a tool that knows no mercy.

The agent runs as in a deployment, over Gym's servers and the scripted policy, in a process of its own. Whatever is
sent, an answer comes, none is a failure of the service, and the document declares each.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from nemo_gym_prorl.cli.scripted.server import ScriptedConfig
from nemo_gym_prorl.cli.scripted.server import serve as serve_scripted
from nemo_gym_prorl.cli.scripted.text import MODEL_NAME
from nemo_gym_prorl.http.keys import authorization
from tests.agent.gym_host import hosting, instance, url_of


KEY = "s3cret"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
ENDLESS = "/v1/events"
"""A stream; tests/rollout/test_api.py reads it."""

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.long("starts Gym's servers; tests/agent has each refusal"),
]


def _agent(**settings: Any) -> dict[str, Any]:
    return instance(
        "responses_api_agents",
        "prorl_agent",
        resources_server={"type": "resources_servers", "name": "environment"},
        model_server={"type": "responses_api_models", "name": "policy_model"},
        max_attempts=1,
        max_steps=2,
        prorl_wire=True,
        **settings,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agents() -> AsyncIterator[dict[str, str]]:
    """URLs of an agent without a key and of one with it."""
    async with serve_scripted(ScriptedConfig()) as policy_url:
        model = {"base_url": policy_url, "api_key": "none", "model": MODEL_NAME}
        config = {
            "policy_model": instance(
                "responses_api_models",
                "prorl_model",
                **model,
                return_token_id_information=True,
                uses_reasoning_parser=False,
                policy={"engine": "vllm_chat"},
            ),
            "environment": instance("resources_servers", "example_session_state_mgmt", domain="other"),
            "open": _agent(),
            "guarded": _agent(control_token=KEY),
        }
        async with hosting(config):
            yield {name: url_of(config[name]) for name in ("open", "guarded")}


SETTINGS = """
[parameters]
wait = 0.01   # a long-poll that waits its minute is none that hangs

[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 503]  # a service that drains, or was stopped, says so and means it

# Gym's profiler in the environment fails on fields that it cannot put into a table; the agent says that it did.
[[operations]]
include-path = "/aggregate_metrics"
checks.not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 500, 503]
"""


async def attack(url: str, folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and findings of a run against a service."""
    settings = folder / "schemathesis.toml"
    settings.write_text(SETTINGS)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", f"--config-file={settings}", "run", f"{url}/openapi.json"),
        *("--checks", CHECKS, "--phases", "coverage,fuzzing", *BOUNDS),
        *("--seed", "1", "--no-shrink", "--continue-on-failure", "--request-timeout", "60", "--warnings", "off"),
        *("--exclude-path", ENDLESS, *options),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


BOUNDS = ("--max-examples", "8", "--max-time", "60")

TAKES_AWAY = ("/stop", "/v1/drain", "/add_llm_server", "/clear_llm_server")
"""Routes that leave a service without work, or without a model that answers."""


async def test_nothing_that_can_be_sent_breaks_a_service_at_work(agents: dict[str, str], tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as http, http.post(f"{agents['open']}/start") as response:
        assert response.status == 200
    spared = [option for path in TAKES_AWAY for option in ("--exclude-path", path)]
    code, findings = await attack(agents["open"], tmp_path, *spared)
    assert code == 0, findings


async def test_nor_a_service_with_a_key_that_drains_and_stops(agents: dict[str, str], tmp_path: Path) -> None:
    header = f"Authorization:{authorization(KEY)['Authorization']}"
    code, findings = await attack(agents["guarded"], tmp_path, "--header", header)
    assert code == 0, findings
