# SPDX-License-Identifier: Apache-2.0
"""NeMo Gym's own objects over our provider, found by its entry point, in the Gym that is installed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from nemo_gym.sandbox import AsyncSandbox, Sandbox
from nemo_gym.sandbox.providers import base
from nemo_gym.sandbox.providers.base import SandboxCreateError, SandboxHandle, SandboxSpec, SandboxStatus

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.provider import SingularityProvider, close_pools
from nemo_gym_prorl.sandbox.runtime import Runtime


pytestmark = pytest.mark.sandbox

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
    spec = SandboxSpec(env={"A": "1"}, workdir="/work", files={"/work/hello.py": "print('hé')\n"})
    async with await AsyncSandbox(provider, spec).start() as sandbox:
        assert await sandbox.status() == SandboxStatus.RUNNING
        done = await sandbox.exec("pwd; echo $A$B; python3 hello.py; exit 3", env={"B": "2"})
        assert (done.stdout, done.stderr, done.return_code, done.error_type) == ("/work\n12\nhé\n", "", 3, None)
        await sandbox.download("/work/hello.py", tmp_path / "back.py")
        assert (tmp_path / "back.py").read_text() == "print('hé')\n"
        slow = await sandbox.exec("echo begun; sleep 100", timeout_s=0.3)
        assert (slow.stdout, slow.return_code, slow.error_type) == ("begun\n", 124, "timeout")
        assert (await sandbox.exec("id -u", user="root")).stdout == "0\n"
        with pytest.raises(CallerError, match="user"):
            await sandbox.exec("true", user="somebody")
    assert await sandbox.status() == SandboxStatus.STOPPED


def test_gyms_blocking_facade(image: Path, runtime: Runtime) -> None:
    runtime.activate()
    sandbox = Sandbox(SingularityProvider(image=str(image)), SandboxSpec())
    sandbox.start()
    assert sandbox.exec("echo hello").stdout == "hello\n"
    sandbox.stop()


async def test_a_dead_sandbox_is_stopped_and_closing_twice_is_harmless(
    provider: SingularityProvider, handle: SandboxHandle
) -> None:
    await provider.close(handle)
    await provider.close(handle)
    assert await provider.status(handle) == SandboxStatus.STOPPED
    done = await provider.exec(handle, "true")
    assert (done.return_code, done.error_type) == (125, "sandbox")


async def test_an_entrypoint_runs_beside_the_commands(provider: SingularityProvider) -> None:
    handle = await provider.create(SandboxSpec(entrypoint=["sh", "-c", "echo up > /tmp/up; sleep 1000"]))
    for _ in range(100):
        if (await provider.exec(handle, "cat /tmp/up")).stdout == "up\n":
            break
    else:
        pytest.fail("the entrypoint did not run")
    await provider.close(handle)


async def test_sandboxes_started_ahead(image: Path, runtime: Runtime, state: Path) -> None:
    try:
        for number in range(3):
            # A new object each time, as Gym makes them.
            provider = SingularityProvider(image=str(image), warm=1)
            handle = await provider.create(SandboxSpec(env={"N": str(number)}))
            assert (await provider.exec(handle, "echo $N; ls /tmp; touch /tmp/used")).stdout == f"{number}\n"
            await provider.close(handle)
        async with asyncio.timeout(30):
            while not any(state.glob("*/b-*")):  # noqa: ASYNC240
                await asyncio.sleep(0.01)
    finally:
        await close_pools()
    assert not any(state.glob("*/b-*"))  # noqa: ASYNC240


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"image": "/no/such/image"}, "image"),
        ({"image": "no-such-image"}, "no image named 'no-such-image'"),
        ({"image": "library://debian"}, "docker:// addresses, paths and names can"),
        ({"resources": {"gpu": 1}}, "resources.gpu"),
        ({"provider_options": {"netwrok": True}}, "netwrok"),
        ({"entrypoint": ["/no/such/program"]}, "entrypoint"),
        ({"workdir": "not/absolute"}, "workdir"),
    ],
)
async def test_bad_specs_are_refused_at_create(
    provider: SingularityProvider, state: Path, spec: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SandboxCreateError, match=reason):
        await provider.create(SandboxSpec(**spec))
    assert not any(state.glob("*/b-*"))  # noqa: ASYNC240


def test_unknown_options_are_named() -> None:
    with pytest.raises(CallerError, match=r"fakroot.*root"):
        SingularityProvider(fakroot=True)


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


needs_pty = pytest.mark.skipif(not hasattr(base, "SandboxPtySpec"), reason="this Gym defines no terminals")


@needs_pty
async def test_the_capabilities_gym_knows(provider: SingularityProvider) -> None:
    assert isinstance(provider, base.SupportsSandboxPty)
    assert isinstance(provider, base.ConnectableProvider)


@needs_pty
async def test_a_terminal(provider: SingularityProvider, handle: SandboxHandle) -> None:
    async with await provider.create_pty(handle, base.SandboxPtySpec(rows=30, cols=100, env={"PS1": "> "})) as session:
        assert isinstance(session, base.SandboxPtySession)
        assert session.mode == "pty"
        await session.write(b"stty size; tty\n")
        seen = b""
        while b"30 100\r\n/dev/pts/0\r\n" not in seen:
            seen += await session.read(timeout_s=5)
        await session.resize(31, 101)
        await session.write(b"stty size; exit 5\n")
        assert b"31 101\r\n" in b"".join([chunk async for chunk in session])
        assert await session.wait_exit(timeout_s=5) == 5
        assert await session.run_detached("echo beside; exit 2") == (b"beside\n", 2)


@needs_pty
async def test_a_session_on_pipes(provider: SingularityProvider, handle: SandboxHandle) -> None:
    spec = base.SandboxPtySpec(command="echo err >&2; cat", pty=False)
    async with await provider.create_pty(handle, spec) as session:
        assert session.mode == "pipe"
        assert await session.read_stderr(timeout_s=5) == b"err\n"
        await session.write(b"back\n")
        assert await session.read(timeout_s=5) == b"back\n"
        with pytest.raises(TimeoutError):
            await session.read(timeout_s=0.05)
        await session.send_signal("SIGTERM")
        assert await session.wait_exit(timeout_s=5) == 143
        assert await session.read(timeout_s=5) == b""
