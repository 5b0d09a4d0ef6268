# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Environments whose sandboxes hold what is graded, under our agent and under Gym's own, which never heard of release;
our agent over several model servers."""

import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nemo_gym_prorl.demo_scripts import script_for
from nemo_gym_prorl.tasks.code.rows import humaneval_row, problems
from scripts.scripted_turns.swe import scripted_row
from tests.gym.families import MIXTURE, MODELS, WITH_GYMS_AGENT, Families
from tests.policy.test_gym_agents import assert_chain, trained
from tests.tasks.swe import tally


pytestmark = [pytest.mark.gym, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="package")]

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.mark.sandbox
async def test_both_agents_earn_the_same(families: Families, tmp_path: Path) -> None:
    problem = next(iter(problems().values()))
    given = {
        "prorl_code": [(humaneval_row(problem, script_for(problem, name)), name) for name in ("reference", "stub")],
        "prorl_swe": [(scripted_row(tally.row(), name), name) for name in ("oracle", "null")],
    }
    rows = [
        row
        | {"agent_ref": {"type": "responses_api_agents", "name": agent}, "plays": plays}
        | {"data_source": family.removeprefix("prorl_")}
        for family in WITH_GYMS_AGENT
        for agent in (MIXTURE, f"{family}_simple_agent")
        for row, plays in given[family]
    ]
    done = await families.collect(rows, tmp_path)
    earned = {(row["agent_ref"]["name"], row["plays"]): (row["reward"], row["verdict"]) for row in done}
    assert earned == {
        (agent, plays): outcome
        for family, plays, outcome in (
            ("prorl_code", "reference", (1.0, "passed")),
            ("prorl_code", "stub", (0.0, "no_solution")),
            ("prorl_swe", "oracle", (1.0, "resolved")),
            ("prorl_swe", "null", (0.0, "no_patch")),
        )
        for agent in (MIXTURE, f"{family}_simple_agent")
    }


async def test_each_of_several_model_servers_takes_rollouts(families: Families, tmp_path: Path) -> None:
    """As docs/policy.md configures them, started by Gym's own command line."""
    turns = [{"tool_calls": [{"name": "get_weather", "arguments": {"city": "x"}}]}, {"content": "done"}]
    script = {"metadata": {"script": json.dumps({"turns": turns})}, "tools": [TOOL]}
    asked = [{"input": [{"role": "user", "content": f"how is it in {n}?"}], **script} for n in range(24)]
    rows: list[dict[str, Any]] = [{"responses_create_params": row, "data_source": "weather"} for row in asked]
    before = [await turns_of(families, name) for name in MODELS]
    done = await families.collect(rows, tmp_path, "--agent", MIXTURE)
    assert [row["reward"] for row in done] == [1.0] * 24
    for row in done:
        assert len(trained(row)) == 2
        assert_chain(trained(row))
    for (taken, retokenised), name in zip(before, MODELS, strict=True):
        now, retokenised_now = await turns_of(families, name)
        assert now > taken, "each has taken turns"
        # A turn that came to another server would be another rollout there, its past read from text.
        assert retokenised_now == retokenised


async def turns_of(families: Families, model: str) -> tuple[float, float]:
    """How many turns a model server has taken, and how many tokens it had to read from text."""
    async with aiohttp.ClientSession() as http, http.get(f"{families.gym.url(model)}/metrics") as answer:
        said = await answer.text()

    def total(name: str) -> float:
        return sum(float(found) for found in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", said, re.MULTILINE))

    return total("prorl_policy_turn_seconds_count"), total("prorl_policy_retokenised_tokens_total")
