# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A supervisor killed during grading never makes a correct solution wrong."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from nemo_gym_prorl.failures import FailureKind
from nemo_gym_prorl.sandbox.supervisor import client as supervisors
from tests.prorl_code.conftest import Client
from tests.tasks import containers


pytestmark = pytest.mark.sandbox

SOLVED = "import time\ntime.sleep(0.3)\n\n\ndef truncate_number(number):\n    return number % 1\n"

LOST = {FailureKind.SESSION_LOST, FailureKind.PROVIDER_UNAVAILABLE}


def kill() -> None:
    assert supervisors.own_supervisor
    os.kill(supervisors.own_supervisor.popen.pid, signal.SIGKILL)


async def nothing_is_left() -> None:
    async with asyncio.timeout(60):
        while containers.instances():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "released", [True, pytest.param(False, marks=pytest.mark.long("the supervisor dies a stage earlier"))]
)
async def test_killed_supervisor_during_grading_gives_no_wrong_reward(client: Client, released: bool) -> None:
    rng = random.Random(released)
    met = 0
    for _ in range(3):
        await client.seed()
        await client.tool("str_replace_editor", command="create", path="solution.py", file_text=SOLVED)
        if released:
            assert (await client.post("/release_session"))[0] == 200
        verifying = asyncio.create_task(client.verify())
        await asyncio.sleep(rng.uniform(0, 0.6))
        met += not verifying.done()
        kill()
        status, said, kind = await asyncio.wait_for(verifying, 60)
        # A lost grading run is repeated in a fresh sandbox.
        if status == 200:
            assert (said["reward"], said["verdict"]) == (1.0, "passed"), said
        else:
            assert (status, kind in LOST) == (500, True), said
            assert "reward" not in said
        await client.post("/close_session")
    assert met, "none was killed in time"
    await nothing_is_left()
