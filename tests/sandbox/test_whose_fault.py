# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Attribution of failures to the agent or the machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.kernel import Kernel
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.spec import Start
from nemo_gym_prorl.sandbox.supervisor import lifecycle, sandbox, state_dir
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxBroken, SandboxLost
from tests.sandbox.requests import request_for
from tests.sandbox.running import child_pids, supervisor_pid, until


pytestmark = pytest.mark.sandbox


def kill_joiners(supervisor: int, known: set[int], ended: asyncio.Event) -> None:
    """Kill new helpers of the supervisor once they have started a process."""
    while not ended.is_set():
        fresh = child_pids(supervisor) - known
        for pid in fresh:
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text(errors="replace")
                numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
                # Processes inside have two numbers.
                if len(fresh) > 1 and len(numbers) == 1:
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("start", ["direct", "runtime"])
async def test_a_killed_helper_is_no_result(image: Path, runtime: Runtime, start: Start) -> None:
    """Also where it was killed between the two words that it says: which process it started, and that this may
    begin."""
    async with await Container.start(ContainerSpec(image=image, start=start), runtime) as container:
        await container.run("true")
        supervisor = supervisor_pid()
        ended, refused = asyncio.Event(), list[str]()
        killing = asyncio.create_task(asyncio.to_thread(kill_joiners, supervisor, child_pids(supervisor), ended))
        try:
            # On a busy machine most helpers end before they are found.
            enough_at = asyncio.get_running_loop().time() + 20
            while not refused or (len(refused) < 10 and asyncio.get_running_loop().time() < enough_at):
                try:
                    done = await container.run("echo ok; exit 7")
                    assert (done.exit_code, done.stdout) == (7, "ok\n")
                except InfrastructureError as error:
                    refused.append(error.reason)
        finally:
            ended.set()
            await killing
    assert all("helper was killed" in reason for reason in refused)


async def test_a_session_that_the_agent_broke_is_its_own_doing(kernel_image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=kernel_image, start="runtime"), runtime) as container:
        async with await Kernel.start(container) as kernel:
            await container.run("mv $(command -v python3) /tmp/python3")
            with pytest.raises(SandboxBroken, match="IPython does not start in the sandbox any more"):
                await kernel.restart()
        await container.run("mv $(command -v bash) /tmp/bash")
        # The image has bash, though no shell was started.
        with pytest.raises(SandboxBroken, match="bash does not start in the sandbox any more"):
            await Shell.start(container)


END_FROM_INSIDE = """
import os, resource, time
try: resource.prlimit(1, resource.RLIMIT_NPROC, (0, 0))
except OSError: pass
for number in [*range(1, 65)] * 3:
    try: os.kill(1, number)
    except OSError: pass
    try: os.kill(-1, 9)
    except OSError: pass
    time.sleep(0.01)
"""
"""Some signals end the runtime's first process, a shell."""


@pytest.mark.parametrize(
    ("start", "inside", "error", "reason"),
    [
        ("runtime", True, SandboxBroken, "was ended from inside: its first process (exited with code|was ended by)"),
        ("runtime", False, SandboxLost, r"has ended; its first process was killed \(SIGKILL\) from outside"),
        ("direct", False, SandboxLost, r"has ended; its first process was killed \(SIGKILL\) from outside"),
    ],
)
async def test_who_ended_a_sandbox_is_said_and_logged(
    kernel_image: Path,
    runtime: Runtime,
    caplog: pytest.LogCaptureFixture,
    start: Start,
    inside: bool,
    error: type[Exception],
    reason: str,
) -> None:
    async with await Container.start(ContainerSpec(image=kernel_image, start=start), runtime) as container:
        if inside:
            with contextlib.suppress(SandboxBroken):
                await container.execute(["python3", "-c", END_FROM_INSIDE], timeout_s=30)
        else:
            [number, *_] = (container.folder / state_dir.PID_NAMESPACE_FILE).read_text().split()
            os.kill(int(number), signal.SIGKILL)
            await until(lambda: not container.alive)
        with pytest.raises(error, match=reason):
            await container.check()
        await until(lambda: not container.alive)
        with pytest.raises(error, match=reason):
            await container.run("true")
        logged = [record.message for record in caplog.records if container.name in record.message]
        assert len(logged) == 1, logged
        assert "has ended early: its first process " in logged[0]


async def test_a_first_process_from_a_prepared_image_cannot_be_ended_from_inside(
    kernel_image: Path, runtime: Runtime
) -> None:
    async with await Container.start(ContainerSpec(image=kernel_image, start="direct"), runtime) as container:
        await container.execute(["python3", "-c", END_FROM_INSIDE], timeout_s=30)
        await container.run("for number in $(seq 64); do kill -$number 1; done")
        await container.check()
        assert (await container.run("echo alive")).stdout == "alive\n"


class MemoryGroup(cgroups.Group):
    """A control group in an ordinary folder."""

    def kill(self) -> None:
        """Nothing is in it."""


@pytest.mark.parametrize(("ooms", "whose"), [(0, "the machine ran out of memory"), (1, "memory: all of 9 MiB used")])
async def test_what_the_kernel_kills_for_the_machines_memory_is_not_the_agents_doing(
    tmp_path: Path, ooms: int, whose: str
) -> None:
    (tmp_path / "memory.events").write_text(f"low 0\nhigh 0\nmax 5\noom {ooms}\noom_kill 1\noom_group_kill 0\n")
    told: list[str] = []
    client: Any = SimpleNamespace(post=lambda message: told.append(message["reason"]))
    box = sandbox.Sandbox("b-1", tmp_path, request_for(memory_mib=9), [client], [], stage=sandbox.SandboxStage.UP)
    box.group = MemoryGroup(tmp_path, frozenset({"memory"}))
    boxes = lifecycle.Sandboxes.__new__(lifecycle.Sandboxes)
    boxes._loop = asyncio.get_running_loop()
    boxes._check_oom_kills(box)
    assert len(told) == 1
    assert whose in told[0]
    assert boxes._lacked_memory(box) is not bool(ooms)

    # A check without ``memory`` ignores that.
    boxes._all = {"b-1": box}
    await boxes.check(client, "b-1", memory=False)
    with contextlib.nullcontext() if ooms else pytest.raises(sandbox.NoSandbox):
        await boxes.check(client, "b-1", memory=True)
