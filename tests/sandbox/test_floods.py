# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that flood their output: the server's memory and time stay bounded.

All sandboxes of a server share its event loop. So a flood costs nobody anything if each turn of the loop takes a
bounded piece of it, and if what is kept of it is bounded, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from nemo_gym_prorl.failures import Origin, Stage, classify
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.kernel import Kernel
from nemo_gym_prorl.sandbox.sessions.kernel_pipes import DATA_LIMIT, OUTPUT_LIMIT
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxBroken
from tests.conftest import tiered
from tests.sandbox.running import resident_bytes


pytestmark = pytest.mark.sandbox

MOST_MEMORY = 64 << 20
"""Bytes by which the server may grow; each flood sends many times as much."""

OWN = """
import os, struct
from IPython.display import display
channel = get_ipython().channel
events, mark = channel._events, channel.mark
def record(part, flags=3):
    return struct.pack("!HB", len(part), flags) + part
def event(*parts):
    return b"".join(struct.pack("!I", len(part)) + part for part in parts)
"""
"""Runs in a kernel and finds the pipes of the driver."""


FLOODS = {
    "bytes": "while True: os.write(1, bytes(1 << 20))",
    "forged marks": "while True: os.write(1, (mark + b'       7') * 160)",
    "wide text": "while True: display({'text/plain': 'x' * (8_380_000) + chr(0x1F600)}, raw=True)",
    "tiny displays": "while True: os.write(events, record(event(b'data', b'', b'')) * 100)",
}


@contextlib.asynccontextmanager
async def bounded_memory() -> AsyncIterator[None]:
    """Check that this process grows by less than :data:`MOST_MEMORY` in the block."""
    before = most = resident_bytes()

    async def look() -> None:
        nonlocal most
        while True:
            most = max(most, resident_bytes())
            # Stop early: the test has failed already.
            assert most - before < 4 * MOST_MEMORY
            await asyncio.sleep(0.01)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
        assert most - before < MOST_MEMORY


async def live_kernel(kernel_image: Path, runtime: Runtime) -> AsyncIterator[Kernel]:
    container = await Container.start(ContainerSpec(image=kernel_image), runtime)
    async with container, await Kernel.start(container) as live:
        yield live


kernel = pytest_asyncio.fixture(live_kernel, name="kernel")
neighbour = pytest_asyncio.fixture(live_kernel, name="neighbour")


async def work(kernel: Kernel, during: asyncio.Task[Any]) -> None:
    """Run cells until ``during`` is done; each cell must succeed."""
    done = 0
    while not during.done():
        assert (await kernel.run("1")).data == [{"text/plain": "1"}]
        done += 1
        await asyncio.sleep(0.01)
    assert done


@pytest.mark.parametrize("name", tiered(FLOODS, ["bytes", "tiny displays"]))
async def test_a_kernel_that_floods_is_bounded_and_costs_nobody(name: str, kernel: Kernel, neighbour: Kernel) -> None:
    async with bounded_memory():
        running = asyncio.create_task(kernel.run(f"{OWN}\n{FLOODS[name]}", timeout_s=2))
        await work(neighbour, running)
        cell = await running
    assert cell.timed_out
    assert sum(len(text) for data in cell.data for text in data.values()) <= DATA_LIMIT
    assert len(cell.output) < 2 * OUTPUT_LIMIT
    await kernel.restart()
    assert (await kernel.run("1")).data == [{"text/plain": "1"}]


SHELL_FLOODS = {
    "bash's own errors": "while :; do echo xxxxxxxxxxxxxxxx; done >&10 2>/dev/null & yes",
    "prompts": 'PS1=$(head -c 60000 /dev/zero | tr "\\0" x); yes',
}


@pytest.mark.parametrize("name", tiered(SHELL_FLOODS, ["prompts"]))
async def test_a_shell_that_floods_is_bounded_and_costs_nobody(
    name: str, container: Container, neighbour: Kernel
) -> None:
    async with await Shell.start(container) as shell, bounded_memory():
        running = asyncio.create_task(shell.run(SHELL_FLOODS[name], timeout_s=2, silence_s=None))
        await work(neighbour, running)
        assert (await running).timed_out


async def test_a_command_that_floods_is_bounded_and_costs_nobody(container: Container, neighbour: Kernel) -> None:
    async with bounded_memory():
        running = asyncio.create_task(container.run("yes & yes >&2", timeout_s=2))
        await work(neighbour, running)
        assert (await running).timed_out


async def test_a_kernel_without_its_pipes_is_ended(kernel: Kernel) -> None:
    cell = await kernel.run(f"{OWN}\nimport time\nprint('said')\nos.close(events)\nwhile True: time.sleep(1)")
    assert (cell.output, cell.died, cell.timed_out) == ("said\n", True, False)
    assert "has closed its pipe" in (cell.error or "")
    with pytest.raises(SandboxBroken) as caught:
        await kernel.run("1")
    failure = classify(caught.value, Stage.RUN)
    assert failure.origin is Origin.AGENT
    assert not failure.retryable


@pytest.fixture
def hostile_folder(tmp_path: Path) -> list[Path]:
    """Modules whose import would end or change a kernel that looks for them in its working folder."""
    for name in ("random", "queue", "pkgutil", "json", "getpass", "traitlets", "IPython", "typing"):
        (tmp_path / f"{name}.py").write_text("import os; open('/tmp/taken', 'a').write(__name__); os._exit(3)")
    return list(tmp_path.glob("*.py"))


async def test_no_module_of_the_working_folder_is_run_as_the_kernel(
    hostile_folder: list[Path], kernel_image: Path, runtime: Runtime
) -> None:
    own = textwrap.dedent("""
        open("own.py", "w").write("answer = 42")
        import own
        print(own.answer)
    """)
    async with await Container.start(ContainerSpec(image=kernel_image), runtime) as container:
        for file in hostile_folder:
            await container.files.upload(file, f"{container.workdir}/{file.name}")
        async with await Kernel.start(container) as kernel:
            assert (await kernel.run(own)).output == "42\n"
        assert (await container.run("cat /tmp/taken")).exit_code != 0
