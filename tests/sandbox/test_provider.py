# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""NeMo Gym's own sandbox API over the provider ``singularity``, in the installed Gym."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
from nemo_gym.sandbox import AsyncSandbox
from nemo_gym.sandbox.providers.base import SandboxHandle, SandboxSpec, SandboxStatus

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.provider import SingularityProvider
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions import commands


pytestmark = [pytest.mark.sandbox, pytest.mark.usefixtures("way")]

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def provider(image: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> SingularityProvider:
    runtime.activate()
    return SingularityProvider(image=str(image))


@pytest_asyncio.fixture
async def handle(provider: SingularityProvider) -> AsyncIterator[SandboxHandle]:
    made = await provider.create(SandboxSpec())
    yield made
    await provider.close(made)


def test_the_entry_point_leads_here() -> None:
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["nemo_gym.sandbox_providers"]["singularity"].partition(":")
    assert (module, name) == (SingularityProvider.__module__, SingularityProvider.__qualname__)
    assert SingularityProvider.name == "singularity"


async def test_gyms_facade_from_start_to_stop(provider: SingularityProvider, tmp_path: Path) -> None:
    spec = SandboxSpec(env={"A": "1"}, workdir="/srv/task", files={"/srv/task/hello.py": "print('hé')\n"})
    async with await AsyncSandbox(provider, spec).start() as sandbox:
        assert await sandbox.status() == SandboxStatus.RUNNING
        done = await sandbox.exec("pwd; echo $A$B; python3 hello.py; exit 3", env={"B": "2"})
        assert (done.stdout, done.stderr, done.return_code, done.error_type) == ("/srv/task\n12\nhé\n", "", 3, None)
        await sandbox.download("/srv/task/hello.py", tmp_path / "back.py")
        assert (tmp_path / "back.py").read_text() == "print('hé')\n"
        slow = await sandbox.exec("echo begun; sleep 100", timeout_s=2)
        assert (slow.stdout, slow.return_code, slow.error_type) == ("begun\n", 124, "timeout")
        assert (await sandbox.exec("id -u", user="root")).stdout == "0\n"
        unknown = await sandbox.exec("true", user="somebody")
        assert (unknown.return_code, unknown.error_type) == (125, "sandbox")
        assert (await sandbox.exec(f"sleep 1000 & : {'x' * (1 << 20)}; echo on", timeout_s=60)).stdout == "on\n"
        with pytest.raises(CallerError, match="target_path"):
            await sandbox.upload(tmp_path / "back.py", "/srv/task")
        with pytest.raises(CallerError, match="source_path"):
            await sandbox.download("/srv/missing", tmp_path / "none")
    assert await sandbox.status() == SandboxStatus.STOPPED


async def test_a_command_that_is_to_have_no_time_limit_has_none(
    provider: SingularityProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Gym's Compose starts its services; others have Gym's 180 s. Here limits are 200 times shorter."""
    short = SimpleNamespace(**{**vars(asyncio), "timeout": lambda limit: asyncio.timeout(limit and limit / 200)})
    async with await AsyncSandbox(provider, SandboxSpec()).start() as sandbox:
        monkeypatch.setattr(commands, "asyncio", short)
        service, other = await asyncio.gather(
            sandbox.exec("sleep 1.3; echo served", timeout_s=None), sandbox.exec("sleep 100")
        )
    assert (service.stdout, service.error_type) == ("served\n", None)
    assert other.error_type == "timeout"


async def test_an_entrypoint_runs_beside_the_commands(provider: SingularityProvider) -> None:
    handle = await provider.create(SandboxSpec(entrypoint=["sh", "-c", "echo up > /tmp/up; sleep 1000"]))
    for _ in range(100):
        if (await provider.exec(handle, "cat /tmp/up")).stdout == "up\n":
            break
    else:
        pytest.fail("the entrypoint did not run")
    await provider.close(handle)


async def test_another_process_can_use_a_sandbox(provider: SingularityProvider, handle: SandboxHandle) -> None:
    await provider.exec(handle, "echo shared > /tmp/file")
    descriptor = json.loads(json.dumps(await provider.serialize_handle(handle)))
    program = (
        "import asyncio, json, sys; from nemo_gym_prorl.sandbox.provider import SingularityProvider\n"
        "async def main():\n"
        "    p = SingularityProvider(); h = await p.connect(json.loads(sys.argv[1]))\n"
        "    print((await p.exec(h, 'cat /tmp/file')).stdout)\n"
        "asyncio.run(main())"
    )
    other = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, json.dumps(descriptor)), stdout=subprocess.PIPE, cwd=REPOSITORY
    )
    output, _ = await other.communicate()
    assert output == b"shared\n\n"
    assert (await provider.exec(handle, "cat /tmp/file")).stdout == "shared\n", "it lives on"
    with pytest.raises(ValueError, match="hostname"):
        await provider.connect({**descriptor, "hostname": "elsewhere"})
    await provider.close(handle)
    with pytest.raises(Exception, match="has ended"):
        await provider.connect(descriptor)
