# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Faults of the supervisor and the machine at chosen moments: nothing is left, and clients get an error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor.protocol import PutRequest, SandboxLost, SandboxRefused
from tests.sandbox.running import child_pids, gone_within_s, kill_supervisor, supervisor_pid, until


REPOSITORY = Path(__file__).parents[2]


pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(300)]


async def test_a_helper_inside_ends_with_the_supervisor(container: Container) -> None:
    """It has another user's rights by then, for which the kernel forgets what it was told; it would hold the lock, and
    the connection by whose end the server learns of all this."""
    folder = Path(container.describe()["supervisor"])
    source, nothing_comes = os.pipe()
    try:
        copying = asyncio.create_task(container.ask(PutRequest(container.name, "/x", 0o644), [source]))
        while (await container.run("ls -A / | grep -cE '^[.][0-9a-f]{32}$'")).stdout != "1\n":
            await asyncio.sleep(0.01)
        kill_supervisor()
        async with asyncio.timeout(gone_within_s()):
            with pytest.raises(SandboxLost):
                await copying
            await until(lambda: not folder.exists())
    finally:
        os.close(source)
        os.close(nothing_comes)


FOLDERS = "/tmp" if is_machine_root() else None


def alone(program: str, image: Path) -> None:
    """Run one of the programs, to its end."""
    with tempfile.TemporaryDirectory(prefix="prorl-a-", dir=FOLDERS) as folder:
        Path(folder).chmod(0o755)
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("alone.py")), program, folder, str(image)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.stdout.endswith("passed\n"), done.stdout[-2000:] + done.stderr[-4000:]


def test_a_full_disk_ends_no_sandbox_but_fails_new_ones(image: Path, runtime: Runtime) -> None:
    alone("full_disk", image)


@pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse is not ours to use")
@pytest.mark.skipif(not is_machine_root(), reason="only root may mount for others")
def test_a_process_that_does_not_die_is_reported_and_harms_nobody(image: Path, runtime: Runtime) -> None:
    alone("deaf_disk", image)


@pytest.mark.skipif(is_machine_root(), reason="root may always start processes")
async def test_a_supervisor_that_can_start_no_process_lives_on(image: Path, runtime: Runtime) -> None:
    container = await Container.start(ContainerSpec(image=image), runtime)
    supervisor = supervisor_pid()
    children = child_pids(supervisor)
    before = resource.prlimit(supervisor, resource.RLIMIT_NPROC)
    # Also the launcher, which forks in place of the supervisor.
    for pid in (supervisor, *children):
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_NPROC, (1, before[1]))
    try:
        with pytest.raises(SandboxRefused, match="no process can be started"):
            await container.run("true")
        with pytest.raises(InfrastructureError, match="no further process can be started"):
            await Container.start(ContainerSpec(image=image), runtime)
        closing = asyncio.create_task(container.close())
        # Closing waits for a process that removes the files.
        await asyncio.sleep(1)
        assert not closing.done()
    finally:
        for pid in (supervisor, *children):
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_NPROC, before)
    await closing
    async with await Container.start(ContainerSpec(image=image), runtime) as another:
        assert (await another.run("echo alive")).stdout == "alive\n"
    while list(Path(another.describe()["supervisor"]).glob("b-*")):  # noqa: ASYNC240
        await asyncio.sleep(0.01)
