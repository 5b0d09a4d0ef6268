# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Shipped example rows and their rollouts."""

import orjson
import pytest

from scripts.scripted_turns.harbor import SERVER, TASKS, example_row


@pytest.mark.parametrize("name", TASKS)
def test_shipped_rows_are_of_the_shipped_tasks_and_earned_all(name: str) -> None:
    row = example_row(name)
    rows = [orjson.loads(line) for line in (SERVER / "data/example.jsonl").read_bytes().splitlines()]
    assert row in rows
    rollouts = [orjson.loads(line) for line in (SERVER / "data/example_rollouts.jsonl").read_bytes().splitlines()]
    [rollout] = [one for one in rollouts if one["instance_id"] == row["instance_id"]]
    assert (rollout["reward"], rollout["verdict"], rollout["harbor"]) == (1.0, "passed", row["harbor"])
    assert rollout["grading_mode"] == ("separate" if name == "disk_report" else "strict")
