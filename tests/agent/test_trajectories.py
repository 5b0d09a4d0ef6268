# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``ng_trajectory`` of what ``/run`` answers: of every row for Gym's collector; a trainer's has the times alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.agent import agent_service
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.rollout.api.schemas import TokenForm
from nemo_gym_prorl.rollout.turn_records import gym_reads_trajectories
from tests.agent.peers import COLLECTED, ROW, Environment, Policy, deployment, hang, status


@pytest.fixture(autouse=True)
def any_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the Gym were recent enough."""
    monkeypatch.setattr(agent_service, "gym_reads_trajectories", lambda: True)


TROUBLES: dict[str, tuple[str, Callable[[], Any] | None, dict[str, Any], int]] = {
    "cut by max_steps": ("", None, {"max_steps": 2}, 2),
    "no session": ("/seed_session", status(500), {}, 1),
    "out of time in a tool": ("/count", hang(30), {"budgets": {"run": 0.5}, "on_timeout": "mask"}, 2),
    "masked by its verdict": ("/verify", None, {}, 3),
}
"""What goes wrong where, settings, and how many turns the record has: one more than the policy's, where it failed."""


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_rows_of_every_end_are_taken_by_gyms_own_exporter(trouble: str, tmp_path: Path) -> None:
    path, instead, settings, turns = TROUBLES[trouble]
    environment = Environment()
    if trouble.startswith("masked"):
        environment.instead[path] = lambda: {**environment.bodies[-1], "reward": 1.0, "mask_sample": True}
    elif instead is not None:
        environment.instead[path] = instead
    async with deployment(environment, Policy(defers=False), **settings) as at:
        row = await at.run({**COLLECTED, "task_id": "t7"})
    record = row["ng_trajectory"]
    assert (record["task_id"], record["rollout_id"], len(record["turns"])) == ("t7", "0-0", turns)
    assert ("failure_kind" in row) is (
        record["model_calls"][-1]["response_metadata"].get("response_source") == "local"
    )
    taken_by_gym(row, tmp_path)


def taken_by_gym(row: dict[str, Any], tmp_path: Path) -> None:
    """By its collector first, which writes the file, then by its exporter."""
    if not gym_reads_trajectories():
        return
    from nemo_gym.atif_export import ExportAtifConfig, export_rollouts_to_atif
    from nemo_gym.rollout_collection import _attach_trajectory_record

    row["agent_ref"] = {"type": "responses_api_agents", "name": "agent"}
    _attach_trajectory_record({**COLLECTED, **{name: row[name] for name in ("task_id",) if name in row}}, row)
    rows = tmp_path / "rollouts.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    config = ExportAtifConfig(
        rollouts_jsonl_fpath=rows, output_dirpath=tmp_path / "atif", session_id="s", agent_version="1"
    )
    assert export_rollouts_to_atif(config).trajectory_count == 1


async def test_a_trainer_is_given_the_times_and_nothing_twice() -> None:
    async with deployment(policy=Policy(versions=True)) as at, RolloutClient(at.url) as client:
        row = await at.run({**ROW, "_ng_task_index": 1})
        job = await client.submit(ROW)
        await client.wait(job.id)
        followed = await client.get(job.id)
        packed = await client.get(job.id, tokens=TokenForm.PACKED)
        listed = await client.list()
    assert "ng_trajectory" not in row
    first, second, last = row["rollout"]["steps"]
    assert [each["items"] for each in (first, second, last)] == [1, 1, 1]
    [tool] = first["tools"]
    assert tool["call_id"] == "c0"
    assert first["started_at"] <= tool["started_at"] <= second["started_at"]
    assert (last["tools"], last["input_tokens"], last["weights"]) == ([], None, ["w2", "w3"])
    assert [step["items"] for step in followed.steps or ()] == [1, 1, 1]
    assert packed.steps == followed.steps
    assert [view.steps for view in listed.rollouts] == [None] * 2
