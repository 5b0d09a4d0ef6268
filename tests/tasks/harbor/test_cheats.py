# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Cheats on the verifier, by grading mode."""

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.prorl_code.conftest import serving
from tests.tasks.harbor.cheats import CHEATS, CHECK, TEST, make_tools
from tests.tasks.harbor.folders import ANSWER, PLAIN, make_task, play, row_of, shown


pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(900)]

AT_ONCE = 3


@pytest.mark.longer("all cheats, else every third")
async def test_no_cheat_earns_a_reward_or_escapes_its_grade(tmp_path: Path) -> None:
    files = {"tests/check.py": CHECK, "tests/answer": "42\n"}
    task = row_of(make_task(tmp_path / "t", toml=PLAIN + "[verifier]\ntimeout_sec = 30\n", test=TEST, files=files))
    slots = asyncio.Semaphore(AT_ONCE)

    async def earned(base_url: str, command: str) -> object:
        async with slots:
            reply = await play(base_url, task, command)
            status, reward, verdict = shown(reply)
            return reward if status == 200 else f"{verdict}: {reply[1]['detail']}"

    with tempfile.TemporaryDirectory() as shared:
        os.chmod(shared, 0o755)  # noqa: PTH101
        tools = make_tools(Path(shared, "tools"))
        async with serving("prorl_harbor", verifier_tools=tools) as base_url:
            assert await earned(base_url, ANSWER) == 1.0
            names = [*[*CHEATS][:: 1 if LONG else 3], "nothing"]
            done = await asyncio.gather(*(earned(base_url, CHEATS.get(name, "true")) for name in names))
    assert {name: reward for name, reward in zip(names, done, strict=True) if reward != 0.0} == {}
