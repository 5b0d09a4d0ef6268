# SPDX-License-Identifier: Apache-2.0
"""What the tests with a real Gym share. Starting a deployment takes some 20 s, so a module's tests share theirs."""

import asyncio
import importlib.metadata
import shutil
import sys
from pathlib import Path

import pytest

from nemo_gym_prorl.deployment import GymCli
from nemo_gym_prorl.sandbox.cache import cache_dir


REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def cli(tmp_path: Path) -> GymCli:
    """Gym's command line on the running interpreter."""
    return GymCli(tmp_path)


@pytest.fixture(scope="session")
def wheel_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter in an environment of its own into which this repository was installed as a wheel."""
    uv = shutil.which("uv") or shutil.which("uv", path=str(cache_dir() / "uv" / "bin"))
    assert uv, "uv is neither on PATH nor in the cache: run scripts/bootstrap.sh"
    folder = tmp_path_factory.mktemp("wheel")
    # From a copy: setuptools leaves its build folder behind, and takes up what an earlier build left there.
    source = folder / "source"
    shutil.copytree(REPOSITORY, source, ignore=shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info"))
    python = folder / "venv" / "bin" / "python"

    async def build() -> None:
        await run(uv, "build", "--quiet", "--wheel", "--out-dir", str(folder), str(source))
        wheel = next(folder.glob("*.whl"))
        await run(uv, "venv", "--quiet", "--python", sys.executable, str(folder / "venv"))
        # The same Gym as here. Recent ones ask for the latest patch release of Python without needing it.
        target = f"{sys.version_info.major}.{sys.version_info.minor}.99"
        gym = f"nemo-gym=={importlib.metadata.version('nemo-gym')}"
        await run(
            uv, "pip", "install", "--quiet", "--python", str(python), "--python-version", target, gym, str(wheel)
        )
        await run(uv, "pip", "install", "--quiet", "--python", str(python), "pytest", "pytest-asyncio")

    asyncio.run(build())
    return str(python)


async def run(*command: str) -> None:
    """Run a command; fail with its output."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
