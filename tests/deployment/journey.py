# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a stranger does: install the wheel beside some nemo-gym, go to an empty folder, use Gym's own command line.

The tests take this journey with the Gym they run on, ``scripts/gym_matrix.py`` with every Gym that is supported.
"""

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import orjson

from nemo_gym_prorl.cli.scripted.server import serve
from nemo_gym_prorl.cli.scripted.text import MODEL_NAME
from nemo_gym_prorl.deployment.deployment import GymDeployment
from nemo_gym_prorl.deployment.gym_cli import GymCli
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.sandbox.images.entries import cache_dir
from tests.deployment.gym_command import gym as gym_command


REPOSITORY = Path(__file__).parents[2]
AGENT = "prorl_code_agent"
SETTINGS = f"++{AGENT}.responses_api_agents.prorl_agent"
RUN_BUDGET_S = 45
IMPORTED = (
    *("nemo_gym.server_utils", "ray.dashboard.dashboard", "ray.dashboard.agent"),
    *("resources_servers.prorl_code.app", "nemo_gym_prorl.servers.agent_server"),
    "nemo_gym_prorl.servers.model_server",
)
"""Most of what a deployment's processes import."""
_HAS_CASES = "import importlib.util; print(importlib.util.find_spec('nemo_gym.verifier_fixture') is not None)"


async def install(base_python: str, gym_version: str, folder: Path) -> str:
    """Build the wheel and install it into an environment of its own; gives its interpreter.

    Args:
        base_python: interpreter for the environment.
        gym_version: nemo-gym to install with it.
        folder: where to do so.
    """
    uv = shutil.which("uv") or shutil.which("uv", path=str(cache_dir() / "uv" / "bin"))
    assert uv, "uv is neither on PATH nor in the cache: run scripts/bootstrap.sh"
    # From a copy: setuptools leaves its build folder behind, and takes up what an earlier build left there.
    source = folder / "source"
    shutil.copytree(REPOSITORY, source, ignore=shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info"))
    python = str(folder / "venv" / "bin" / "python")
    await _run(uv, "build", "--quiet", "--wheel", "--python", base_python, "--out-dir", str(folder), str(source))
    await _run(uv, "venv", "--quiet", "--python", base_python, str(folder / "venv"))
    wheel = next(str(path) for path in await asyncio.to_thread(folder.glob, "*.whl"))
    shutil.rmtree(source)
    minor = (await _run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")).strip()
    # Recent Gyms declare the latest patch release of Python without needing it: resolve as if we had it.
    pip = (uv, "pip", "install", "--quiet", "--python", python, "--python-version", f"{minor}.99")
    # "gym env test" runs pytest in the server's environment.
    await _run(*pip, f"nemo-gym=={gym_version}", wheel, "pytest", "pytest-asyncio")
    # Compiled here, as pip does and uv does not: a user who can't write there would do it in each process again.
    await _run("env", "-u", "PYTHONDONTWRITEBYTECODE", python, "-c", f"import {', '.join(IMPORTED)}")
    return python


async def take(python: str, folder: Path) -> dict[str, float]:
    """The journey with an installed wheel; gives seconds by step, and fails where a promise is not kept."""
    cwd = folder / "elsewhere"
    cwd.mkdir()
    cli = GymCli(folder / "cli", python=python, cwd=cwd)
    seconds: dict[str, float] = {}
    installation = await cli.prepare()
    assert installation.checkout is None, f"not the wheel: {installation}"

    listed = await gym_command(cli, "list", "environments", "--json")
    assert "prorl_code" in _names(listed.output)
    seconds["gym list environments"] = listed.seconds
    listed = await gym_command(cli, "list", "agents", "--json")
    assert "prorl_agent" in _names(listed.output)
    seconds["gym list agents"] = listed.seconds

    selection = ("--environment", "prorl_code", "--model-type", "prorl_model")
    policy = ("--model", MODEL_NAME, "--model-url", "http://127.0.0.1:1/v1", "--model-api-key", "none")
    seconds["gym env validate"] = (await gym_command(cli, "env", "validate", *selection, *policy)).seconds
    cases = (await _run(python, "-c", _HAS_CASES)).strip() == "True"
    for server in ("resources_servers/prorl_code", "responses_api_agents/prorl_agent"):
        tested = await gym_command(cli, "env", "test", f"+entrypoint={server}", "+should_validate_data=true")
        # Before Gym 0.7 the resources server's only test is skipped.
        assert (" passed" if server.startswith("responses") or cases else " skipped") in tested.output, tested.output
        assert " failed" not in tested.output, tested.output
        if server.startswith("resources"):
            assert "successfully validated" in tested.output, tested.output
        seconds[f"gym env test {server}"] = tested.seconds

    overrides = (f"{SETTINGS}.stages.run=3", f"{SETTINGS}.stages.eval=2", f"{SETTINGS}.budgets.run={RUN_BUDGET_S}")
    async with (
        serve() as base_url,
        GymDeployment(
            config_paths=["environments/prorl_code/config.yaml"],
            model_type="prorl_model",
            policy_base_url=base_url,
            policy_model_name=MODEL_NAME,
            overrides=overrides,
            work_dir=folder / "gym",
            python=python,
            cwd=cwd,
        ) as gym,
        RolloutClient(gym.url(AGENT)) as client,
    ):
        seconds["gym env start"] = gym.start_s
        slots = {stage.value: pool.slots for stage, pool in (await client.status()).stages.items()}
        assert slots == {"init": 8, "run": 3, "eval": 2}, slots

        slow = await client.submit(_slow_row())
        evaluating = time.monotonic()
        rows = await _evaluate(gym, folder)
        seconds["gym eval run, 5 rollouts"] = time.monotonic() - evaluating
        rewards = {row["task_id"]: row["reward"] for row in rows}
        assert len(rows) == 5, rewards
        assert set(rewards.values()) == {1.0}, rewards
        for row in rows:
            _require_token_chain(row)
        reads = await _run(
            python, "-c", "from nemo_gym_prorl.rollout.turn_records import *; print(gym_reads_trajectories())"
        )
        assert {"ng_trajectory" in row for row in rows} == {reads.strip() == "True"}
        if reads.strip() == "True":
            given = ("--rollouts", str(folder / "results" / "rollouts.jsonl"), "--output-dir", str(folder / "atif"))
            exported = await gym_command(
                cli, "eval", "export", "--format", "atif", *given, "--session-id", "s", "--agent-version", "1"
            )
            assert "Exported 5 " in exported.output, exported.output
            seconds["gym eval export, 5 rollouts"] = exported.seconds
        outcome = await client.wait(slow.id)
        assert outcome.state.value == "timed_out", outcome
        assert outcome.failure is not None
        assert outcome.failure.kind == "agent_timeout", outcome
        stopping = time.monotonic()
    seconds["stop"] = time.monotonic() - stopping
    assert gym.cli.mark.processes() == {}
    assert list(cwd.iterdir()) == [], "something was left in the working directory"
    return seconds


async def _evaluate(gym: GymDeployment, folder: Path) -> list[dict[str, Any]]:
    output = folder / "results" / "rollouts.jsonl"
    output.parent.mkdir()
    example = "resources_servers/prorl_code/data/example.jsonl"
    await gym_command(gym.cli, "eval", "run", "--no-serve", "--agent", AGENT, "-i", example, "-o", str(output))
    return [orjson.loads(line) for line in output.read_bytes().splitlines()]


def _slow_row() -> dict[str, Any]:
    row: dict[str, Any] = orjson.loads(
        (REPOSITORY / "resources_servers/prorl_code/data/example.jsonl").read_bytes().splitlines()[0]
    )
    script = {"turns": [{"content": "Let me think.", "latency_s": 600}]}
    row["responses_create_params"]["metadata"] = {"script": orjson.dumps(script).decode()}
    return row


def _require_token_chain(row: dict[str, Any]) -> None:
    chain: list[int] = []
    turns = [item for item in row["response"]["output"] if "generation_token_ids" in item]
    assert len(turns) > 1, row["task_id"]
    for item in turns:
        assert item["prompt_token_ids"][: len(chain)] == chain, row["task_id"]
        assert len(item["generation_log_probs"]) == len(item["generation_token_ids"]), row["task_id"]
        chain = item["prompt_token_ids"] + item["generation_token_ids"]


def _names(output: str) -> set[str]:
    """Names in a JSON listing, which Gym may surround with log lines."""
    listing = next(line for line in output.splitlines() if line.startswith("["))
    return {entry["name"] for entry in json.loads(listing)}


async def _run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()
