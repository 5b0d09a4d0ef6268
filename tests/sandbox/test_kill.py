# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A command that has to end does, wherever it is on its way, and whatever those inside do to it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.spec import Start
from nemo_gym_prorl.sandbox.supervisor import own_supervisor


pytestmark = pytest.mark.sandbox

FREEZE = "(setsid sh -c 'while :; do kill -STOP -1; done' >/dev/null 2>&1 &)"
"""Stops whatever comes, itself and the container's first process excepted."""


@pytest.mark.parametrize("start", ["direct", "runtime"])
async def test_a_time_limit_is_kept_where_newcomers_are_stopped(image: Path, runtime: Runtime, start: Start) -> None:
    async with await Container.start(ContainerSpec(image=image, start=start), runtime) as container:
        # It may stop the shell that starts it, too.
        await container.run(FREEZE, timeout_s=1.0)
        # Far beyond what they may take together, and far below what it took to wait for each that was stopped.
        async with asyncio.timeout(20):
            done = [await container.run("exec sleep 4321", timeout_s=0.3) for _ in range(5)]
        assert all(one.timed_out for one in done)
        assert all(one.exit_code == 137 for one in done)
        # Those that were stopped on their way hold nothing: the sandbox ends as any other.
        async with asyncio.timeout(30):
            await container.close()


async def gone(container: Container, command: str) -> None:
    """Wait until nothing that begins with this runs, and for a while nothing comes; left alone it would for hours."""
    listed = f"ps -A -o args= | grep '^{command}'"
    async with asyncio.timeout(60):
        while (await container.run(listed)).stdout:
            await asyncio.sleep(0.05)
    for _ in range(5):
        assert (await container.run(listed)).stdout == ""
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("busy", [False, True])
async def test_a_cancelled_command_never_runs_on(container: Container, busy: bool) -> None:
    """Nor where the supervisor hears of that and of the command's begin at once."""
    assert own_supervisor._current
    supervisor, rng = own_supervisor._current.popen.pid, random.Random(0)
    for number in range(30):
        task = asyncio.create_task(container.run(f"exec sleep 54{number:02}"))
        await asyncio.sleep(rng.choice([0.0, 0.001, 0.002, 0.004, 0.008, 0.02]))
        if busy:
            os.kill(supervisor, signal.SIGSTOP)
            await asyncio.sleep(0.03)
        task.cancel()
        await asyncio.wait([task])
        os.kill(supervisor, signal.SIGCONT)
    await gone(container, "sleep 54")


async def test_a_command_that_waits_for_a_busy_supervisor_ends_in_time_and_does_not_run_on(
    container: Container,
) -> None:
    assert own_supervisor._current
    supervisor = own_supervisor._current.popen.pid
    os.kill(supervisor, signal.SIGSTOP)
    try:
        async with asyncio.timeout(30):
            done = await container.run("sleep 0.5; touch /ran", timeout_s=0.2)
        assert done.timed_out
    finally:
        os.kill(supervisor, signal.SIGCONT)
    assert (await container.run("sleep 1; ls /ran")).stdout == ""


async def test_other_signals_reach_the_whole_group(container: Container) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    try:
        process = await container.spawn(["/bin/sh", "-c", "sleep 1000 & wait"], [null] * 3)
    finally:
        os.close(null)
    await container.signal(process, signal.SIGTERM)
    async with asyncio.timeout(20):
        assert await process.ended == -signal.SIGTERM
    await container.signal(process, signal.SIGTERM)
