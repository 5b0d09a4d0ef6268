# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The program that keeps one server of a supervised deployment, with small servers of its own."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from nemo_gym_prorl.deployment.restarter import restarter_program
from nemo_gym_prorl.processes import ProcessMark


SERVER = "import os, time; open('pids', 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"


class Kept:
    """A server under a restarter, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = ProcessMark("PRORL_TEST_KEPT", os.urandom(8).hex())
        self.up, self.events = folder / "up", folder / "deaths.jsonl"
        (folder / "bin").mkdir()
        self.python = folder / "bin" / "python"
        self.python.write_text(restarter_program(Path(sys.executable), self.up, self.events))
        self.python.chmod(0o755)

    async def start(self, code: str = SERVER) -> asyncio.subprocess.Process:
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "NEMO_GYM_CONFIG_PATH": "mine", self.mark.name: self.mark.value}
        return await asyncio.create_subprocess_exec("python", "-c", code, cwd=self.folder, env=env)

    async def pid(self, number: int) -> int:
        """Process id of the server that was started as the ``number``-th."""
        async with asyncio.timeout(60):
            while len(
                pids := (self.folder / "pids").read_text().split() if (self.folder / "pids").exists() else []
            ) < (number):
                await asyncio.sleep(0.02)
        return int(pids[number - 1])


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


@pytest.mark.parametrize("disk_is_full", [False, True])
async def test_a_server_that_is_killed_is_started_again_with_growing_pauses(kept: Kept, disk_is_full: bool):
    if disk_is_full:
        kept.events = Path("/dev/full")
        kept.python.write_text(restarter_program(Path(sys.executable), kept.up, kept.events))
    restarter = await kept.start()
    await kept.pid(1)
    kept.up.touch()
    for number in (1, 2):
        os.kill(await kept.pid(number), signal.SIGKILL)
    await kept.pid(3)
    if not disk_is_full:
        deaths = [json.loads(line) for line in kept.events.read_text().splitlines()]
        assert [(death["name"], death["how"]) for death in deaths] == [("mine", "killed by signal 9")] * 2
        assert [death["pause_s"] for death in deaths] == [0.5, 1.0]
    restarter.send_signal(signal.SIGTERM)
    await asyncio.wait_for(restarter.wait(), 60)
    assert await kept.mark.wait_gone(30) == {}


async def test_before_the_deployment_is_up_an_end_is_final(kept: Kept):
    restarter = await kept.start("raise SystemExit(3)")
    assert await asyncio.wait_for(restarter.wait(), 60) == 3
    assert not kept.events.exists()


async def test_told_to_end_while_it_pauses_it_starts_nothing_more(kept: Kept):
    kept.up.touch()
    restarter = await kept.start("open('pids', 'a').write('1\\n')")
    while not kept.events.exists():
        await asyncio.sleep(0.02)
    restarter.send_signal(signal.SIGINT)
    await asyncio.wait_for(restarter.wait(), 60)
    assert await kept.mark.wait_gone(30) == {}


async def test_killing_the_restarter_ends_its_server(kept: Kept):
    restarter = await kept.start()
    await kept.pid(1)
    restarter.kill()
    await restarter.wait()
    assert await kept.mark.wait_gone(30) == {}


async def test_what_a_server_starts_by_name_is_not_kept(kept: Kept):
    code = "import shutil; open('found', 'w').write(shutil.which('python') or '')"
    restarter = await kept.start(code)
    await asyncio.wait_for(restarter.wait(), 60)
    assert (kept.folder / "found").read_text() != str(kept.python)
