# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl demo`` as a user runs it, to its end."""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import orjson
import pytest

from nemo_gym_prorl.cli.scripted.demo import EXPECTED_REWARDS, SCRIPTS
from nemo_gym_prorl.cli.scripted.text import MODEL_NAME
from nemo_gym_prorl.processes import ProcessMark


pytestmark = [pytest.mark.gym, pytest.mark.sandbox, pytest.mark.long("starts a whole deployment")]

RUN_SLOTS = "++prorl_code_agent.responses_api_agents.prorl_agent.stages.run=4"


async def test_it_ends_in_a_table_and_a_file_and_says_that_it_was_scripted(shared_ray: str, tmp_path: Path):
    output, log = tmp_path / "demo.jsonl", tmp_path / "demo.log"
    mark = ProcessMark("PRORL_TEST_DEMO", os.urandom(8).hex())
    # Not below pytest's folder: that is private, and where root runs the demo, its sandboxes are somebody else's.
    state = tempfile.mkdtemp(prefix="prorl-demo-", dir="/tmp")
    main = "from nemo_gym_prorl.cli.app import main; main()"
    with log.open("wb") as stream:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", main, "demo", "--output", str(output), "--rollouts", "8", RUN_SLOTS, shared_ray),
            env={**os.environ, mark.name: mark.value, "COLUMNS": "100", "PRORL_STATE": state, "TMPDIR": str(tmp_path)},
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    status = await asyncio.wait_for(process.wait(), 280)
    printed = log.read_text()
    assert status == 0, printed
    assert await mark.wait_gone(30) == {}
    assert "no language model" in printed
    assert "8 of 8 rollouts scored" in printed
    records = [orjson.loads(line) for line in output.read_bytes().splitlines()]
    assert sorted(record["rollout"]["source"]["line"] for record in records) == [*range(1, len(SCRIPTS) + 1)]
    for record in records:
        rollout = record["rollout"]
        assert record["response"]["model"] == MODEL_NAME
        assert rollout["reward"] == EXPECTED_REWARDS[SCRIPTS[rollout["source"]["line"] - 1]], printed
        assert rollout["turns"] >= 1
        assert all(rollout["timings"][stage]["attempts"] == 1 for stage in ("init", "run", "eval"))
        assert record["response"]["output"]
        assert rollout["id"] in printed
