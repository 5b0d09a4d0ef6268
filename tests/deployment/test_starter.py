# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Servers end with the Gym that started them, however that ends; with Gym's whole start: test_deployment.py."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from nemo_gym_prorl.http.server_process import STARTER_VARIABLE
from nemo_gym_prorl.processes import ProcessMark


SERVER = """
import time
from nemo_gym_prorl.http.server_process import exit_with_starter
exit_with_starter()
open("up", "w").close()
time.sleep(600)
"""
ENDING = """
import atexit, time
from nemo_gym_prorl.http.server_process import exit_with_starter
def end():
    open("up", "w").close()
    time.sleep(2)
    open("down", "w").close()
atexit.register(end)
exit_with_starter()
"""
GYM = f"""
import subprocess, sys, time
import nemo_gym
import hydra_plugins.prorl_gym  # as Hydra does
subprocess.Popen(["/bin/sh", "-c", '"$0" -c "$1"; true', sys.executable, {SERVER!r}])
time.sleep(600)
"""


async def test_a_server_ends_when_the_gym_that_started_it_is_killed(tmp_path: Path) -> None:
    mark = ProcessMark("PRORL_TEST_STARTER", os.urandom(8).hex())
    environ = {**os.environ, mark.name: mark.value, "PRORL_CACHE": str(tmp_path)}
    with (tmp_path / "log").open("wb") as log:
        gym = await asyncio.create_subprocess_exec(sys.executable, "-c", GYM, env=environ, cwd=tmp_path, stderr=log)
    try:
        async with asyncio.timeout(60):
            while not (tmp_path / "up").exists():
                await asyncio.sleep(0.05)
        gym.send_signal(signal.SIGKILL)
        await gym.wait()
        assert await mark.wait_gone(10) == {}
        assert "the Gym that started it has ended" in (tmp_path / "log").read_text()
    finally:
        await mark.kill(settle_s=0)


async def test_a_server_that_is_ending_when_its_gym_ends_goes_on_ending(tmp_path: Path) -> None:
    gym = await asyncio.create_subprocess_exec("sleep", "600")
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ENDING),
        env={**os.environ, STARTER_VARIABLE: str(gym.pid)},
        cwd=tmp_path,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        while not (tmp_path / "up").exists():
            await asyncio.sleep(0.05)
    gym.kill()
    await gym.wait()
    _, said = await asyncio.wait_for(server.communicate(), 60)
    assert (server.returncode, b"Traceback" in said) == (0, False), said.decode()
    assert (tmp_path / "down").exists()
