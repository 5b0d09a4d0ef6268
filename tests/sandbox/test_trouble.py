# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on the machine itself: a full disk, and processes that do not die."""

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
from nemo_gym_prorl.sandbox.supervisor import own_supervisor
from nemo_gym_prorl.sandbox.supervisor.errors import SandboxRefused


pytestmark = pytest.mark.sandbox

FOLDERS = "/tmp" if is_machine_root() else None


def alone(program: str, image: Path) -> None:
    """Run one of the programs, to its end."""
    repository = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory(prefix="prorl-a-", dir=FOLDERS) as folder:
        Path(folder).chmod(0o755)
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("alone.py")), program, folder, str(image)],
            env={**os.environ, "PYTHONPATH": str(repository)},
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


async def test_a_process_in_uninterruptible_sleep_ends_with_its_sandbox(image: Path, runtime: Runtime) -> None:
    """The parent of a ``vfork`` sleeps so until its child executes something or ends."""
    program = "import ctypes, time; ctypes.CDLL(None).vfork() or time.sleep(1000)"
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        await container.run(f"(python3 -c '{program}' >/dev/null 2>&1 &)")
        found = (await container.run("until ps -A -o stat= | grep ^D; do :; done", timeout_s=20)).stdout
        assert found.startswith("D")
        owner = Path(container.describe()["supervisor"])
    assert not (owner / container.name).exists()


@pytest.mark.skipif(is_machine_root(), reason="root may always start processes")
async def test_a_supervisor_that_can_start_no_process_lives_on(image: Path, runtime: Runtime) -> None:
    container = await Container.start(ContainerSpec(image=image), runtime)
    assert own_supervisor._current
    supervisor = own_supervisor._current.popen.pid
    children = children_of(supervisor)
    before = resource.prlimit(supervisor, resource.RLIMIT_NPROC)
    # The launcher among them starts processes in the supervisor's place.
    for pid in (supervisor, *children):
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_NPROC, (1, before[1]))
    try:
        with pytest.raises(SandboxRefused, match="no process can be started"):
            await container.run("true")
        with pytest.raises(InfrastructureError, match="no further process can be started"):
            await Container.start(ContainerSpec(image=image), runtime)
        closing = asyncio.create_task(container.close())
        # Its end waits for a process that removes what is left.
        await asyncio.sleep(1)
        assert not closing.done()
    finally:
        for pid in (supervisor, *children):
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_NPROC, before)
    await closing
    async with await Container.start(ContainerSpec(image=image), runtime) as another:
        assert (await another.run("echo alive")).stdout == "alive\n"
    while sandboxes(Path(another.describe()["supervisor"])):
        await asyncio.sleep(0.01)


def children_of(pid: int) -> list[int]:
    """The processes that it has forked, or that were for it."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def sandboxes(owner: Path) -> list[Path]:
    """The folders of all that there are."""
    return list(owner.glob("b-*"))
