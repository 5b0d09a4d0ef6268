# SPDX-License-Identifier: Apache-2.0
"""Environments whose sandboxes hold what is graded, under our agent and under Gym's own, which never heard of release;
started and used with Gym's command line."""

from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from nemo_gym_prorl.demo_scripts import script_for
from nemo_gym_prorl.gym.deployment import GymDeployment
from nemo_gym_prorl.scripted.text import MODEL_NAME
from nemo_gym_prorl.tasks.code.humaneval import problems, row_for
from scripts.scripted_turns.swe import scripted_row
from tests.tasks.swe import tally


FAMILIES = ("prorl_code", "prorl_swe")


def simple_agent(family: str) -> dict[str, Any]:
    """Gym's agent for a family."""
    servers = {
        "resources_server": ("resources_servers", family),
        "model_server": ("responses_api_models", "policy_model"),
    }
    named = {key: {"type": kind, "name": name} for key, (kind, name) in servers.items()}
    return {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py", "host": "127.0.0.1", **named}}}


@pytest.mark.gym
@pytest.mark.sandbox
@pytest.mark.timeout(900)
async def test_both_agents_earn_the_same(scripted_policy: str, shared_ray: str, tmp_path: Path) -> None:
    config = tmp_path / "simple.yaml"
    config.write_text(yaml.safe_dump({f"{family}_simple_agent": simple_agent(family) for family in FAMILIES}))
    problem = next(iter(problems().values()))
    given = {
        "prorl_code": [(row_for(problem, script_for(problem, name)), name) for name in ("reference", "stub")],
        "prorl_swe": [(scripted_row(tally.row(), name), name) for name in ("oracle", "null")],
    }
    rows = [
        row | {"agent_ref": {"type": "responses_api_agents", "name": f"{family}_{agent}"}, "plays": plays}
        for family in FAMILIES
        for agent in ("agent", "simple_agent")
        for row, plays in given[family]
    ]
    source, results = tmp_path / "rows.jsonl", tmp_path / "results.jsonl"
    source.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    async with GymDeployment(
        config_paths=[*(f"resources_servers/{name}/configs/{name}.yaml" for name in FAMILIES), config],
        model_type="prorl_model",
        policy_base_url=scripted_policy,
        policy_model_name=MODEL_NAME,
        overrides=[shared_ray],
        work_dir=tmp_path / "gym",
        start_timeout_s=500,
    ) as gym:
        await gym.run_gym("eval", "run", "--no-serve", "-i", str(source), "-o", str(results))
    done = [orjson.loads(line) for line in results.read_bytes().splitlines()]
    earned = {(row["agent_ref"]["name"], row["plays"]): (row["reward"], row["verdict"]) for row in done}
    assert earned == {
        (f"{family}_{agent}", plays): outcome
        for agent in ("agent", "simple_agent")
        for family, plays, outcome in (
            ("prorl_code", "reference", (1.0, "passed")),
            ("prorl_code", "stub", (0.0, "failed")),
            ("prorl_swe", "oracle", (1.0, "resolved")),
            ("prorl_swe", "null", (0.0, "no_patch")),
        )
    }
