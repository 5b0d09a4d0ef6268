# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The quickstart's lines as they are typed: the wheel in an empty folder, as an ordinary user, one after the other.

Only the ports are others, so that it can run beside anything else: the policy's in the text, and that of Gym's head
server by an ``env.yaml``, which is Gym's way to say it once.
"""

import asyncio
import os
import re
import shutil
import tempfile
from pathlib import Path

import orjson
import pytest

from nemo_gym_prorl.processes import ProcessMark
from nemo_gym_prorl.sandbox.images.entries import cache_dir
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from tests.deployment import journey
from tests.policy.engines import free_port
from tests.sandbox.as_user import USER


AS_USER = Path(__file__).parents[1] / "sandbox" / "as_user.py"


def commands() -> list[str]:
    """The command lines of the quickstart's indented blocks."""
    text = (journey.REPOSITORY / "docs" / "quickstart.md").read_text().replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines() if re.match(r"    (gym|prorl) ", line)]


def the(start: str) -> str:
    found = [line for line in commands() if line.startswith(start)]
    assert len(found) == 1, f"the quickstart has {len(found)} lines that start with {start!r}"
    return found[0]


class Stranger:
    """An ordinary user with an empty folder, whose PATH begins with the wheel's environment."""

    def __init__(self, python: str, home: Path, runtime: Runtime) -> None:
        self.mark = ProcessMark("PRORL_TEST_README", os.urandom(8).hex())
        self.folder = home / "empty"
        self.folder.mkdir()
        self.policy_port, self.head_port = free_port(), free_port()
        (self.folder / "env.yaml").write_text(f"head_server: {{host: 127.0.0.1, port: {self.head_port}}}\n")
        self._home = home
        self._become = [python, str(AS_USER), str(USER)] if os.geteuid() == 0 else []
        self._env = {
            "PATH": os.pathsep.join([str(Path(python).parent), str(runtime.path.parent), "/usr/bin", "/bin"]),
            "HOME": str(home),
            "TMPDIR": str(home),
            "PRORL_CACHE": str(cache_dir()),
            self.mark.name: self.mark.value,
        }
        if os.geteuid() == 0:
            for path in (home, self.folder, self.folder / "env.yaml"):
                os.chown(path, USER, USER)

    async def types(self, line: str, log: str) -> asyncio.subprocess.Process:
        """Start a command; what it says goes to a file."""
        line = line.replace("8000", str(self.policy_port))
        with (self._home / log).open("wb") as stream:
            return await asyncio.create_subprocess_exec(
                *(*self._become, "bash", "-c", f"exec {line}"),
                cwd=self.folder,
                env=self._env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    async def says(self, line: str, log: str) -> str:
        """Run a command to its end, which has to be a good one."""
        process = await self.types(line, log)
        status = await process.wait()
        said = (self._home / log).read_text()
        assert status == 0, f"{line}\n{said[-6000:]}"
        return said

    async def waits(self, process: asyncio.subprocess.Process, log: str, for_what: str) -> None:
        """Wait until a running command says something."""
        while for_what not in (said := (self._home / log).read_text()):
            assert process.returncode is None, said[-6000:]
            await asyncio.sleep(0.3)


@pytest.mark.long("tests/deployment takes the golden path")
@pytest.mark.gym
@pytest.mark.sandbox
@pytest.mark.timeout(1500)
async def test_what_a_stranger_types_works(wheel_python: str, runtime: Runtime, image: Path) -> None:
    await take(wheel_python, runtime)


async def take(python: str, runtime: Runtime) -> None:
    """The stranger's way with an installed wheel. Not below pytest's folder, which only its owner may enter."""
    home = Path(tempfile.mkdtemp(prefix="prorl-readme-"))
    await asyncio.to_thread(home.chmod, 0o755)
    stranger = Stranger(python, home, runtime)
    try:
        policy = await stranger.types(the("prorl scripted"), "policy.log")
        await stranger.waits(policy, "policy.log", "no language model")
        gym = await stranger.types(the("gym env start"), "gym.log")
        await stranger.waits(gym, "gym.log", "servers ready! Polling")
        assert "uv venv" not in (home / "gym.log").read_text()
        await stranger.says(the("gym eval run"), "eval.log")
        rows = [orjson.loads(line) for line in (stranger.folder / "rollouts.jsonl").read_bytes().splitlines()]
        assert [row["reward"] for row in rows] == [1.0] * 5
        gym.terminate()
    finally:
        assert await stranger.mark.kill(settle_s=10) == {}
        shutil.rmtree(home, ignore_errors=True)
