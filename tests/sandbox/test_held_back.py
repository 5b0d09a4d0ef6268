# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Every wait for a session's program has a limit, whatever sandboxed processes trace or stop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import AgentError, InfrastructureError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions import kernel as kernels
from nemo_gym_prorl.sandbox.sessions import shell as shells
from nemo_gym_prorl.sandbox.sessions.kernel import Kernel
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from tests.sandbox.running import HANG_S


pytestmark = pytest.mark.sandbox

TRACER = """
import ctypes, sys, time
assert ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, 0) == 0
open("/tmp/traced", "w").close()
time.sleep(1000)
"""
"""While this tracer lives and does not wait, the kernel reports no end of the process that it seized."""

STOPPER = "(setsid sh -c '> /tmp/stops; while :; do kill -STOP -1; done' >/dev/null 2>&1 &)"


async def trace(container: Container, program: str) -> None:
    """Have a sandboxed process trace the program with a name, which needs no right."""
    start = f"setsid python3 -c '{TRACER}' $(pgrep -n {program})"
    await container.run(f"({start} >/dev/null 2>/tmp/why &) ; until [ -e /tmp/traced ]; do :; done", timeout_s=20)


@pytest.mark.parametrize("act", ["close", "restart", "time limit"])
async def test_a_shell_whose_end_is_not_told_is_given_up(
    kernel_image: Path, runtime: Runtime, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shells, "ENDING_S", 0.5)
    async with await Container.start(ContainerSpec(image=kernel_image), runtime) as container:
        shell = await Shell.start(container)
        await trace(container, "bash")
        async with asyncio.timeout(HANG_S):
            if act == "time limit":
                action = await shell.run("trap '' INT; while :; do :; done", timeout_s=0.5)
                assert (action.timed_out, action.exited) == (True, True)
                with pytest.raises(AgentError):
                    await shell.run("true")
            else:
                await getattr(shell, act)()
            await shell.restart()
            assert (await shell.run("echo new")).output == "new\n"


async def test_a_kernel_whose_end_is_not_told_is_given_up(
    kernel_image: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "INTERRUPT_GRACE_S", 0.5)
    async with await Container.start(ContainerSpec(image=kernel_image), runtime) as container:
        kernel = await Kernel.start(container)
        await trace(container, "python3")
        async with asyncio.timeout(HANG_S):
            stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
            cell = await kernel.run(stubborn, timeout_s=0.5)
            assert (cell.timed_out, cell.died) == (True, True)
            with pytest.raises(AgentError):
                await kernel.run("1")
            await kernel.restart()
            assert (await kernel.run("1")).data == [{"text/plain": "1"}]


async def test_sessions_that_are_stopped_on_their_way_in_are_given_up(
    kernel_image: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shells, "START_TIMEOUT_S", 2.0)
    async with await Container.start(ContainerSpec(image=kernel_image), runtime) as container:
        await container.run(f"{STOPPER}; until [ -e /tmp/stops ]; do :; done", timeout_s=1.0)
        ends: list[object] = []
        # A start may complete before the loop stops its process.
        while not any(isinstance(end, InfrastructureError | AgentError) for end in ends):
            async with asyncio.timeout(HANG_S):
                ends = await asyncio.gather(
                    Shell.start(container), Kernel.start(container, timeout_s=2.0), return_exceptions=True
                )
    allowed = InfrastructureError | AgentError | Shell | Kernel
    assert all(isinstance(end, allowed) for end in ends), ends
