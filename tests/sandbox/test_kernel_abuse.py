# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A program that speaks in a kernel's place: what it sends costs the server little, and is the agent's doing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from nemo_gym_prorl.failures import AgentError, Origin, Stage, classify
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.jupyter.kernel import Kernel, KernelBroken


pytestmark = pytest.mark.sandbox

MOST_MEMORY = 150 << 20
"""By which the server may grow, other tests' garbage included; each flood sends many times as much."""

CONNECTION = """
import os, socket, struct, time
def connection(end):
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if one.family == socket.AF_UNIX and str(one.getsockname()).endswith(end):
            peer = struct.unpack("3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            # ZeroMQ is connected to itself, too; the server has no number here.
            if peer == 0 and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                one.setblocking(True)
                return one
"""
"""Run in a kernel, in which it finds the socket by which its server is connected to it."""

FLOODS = {
    "endless message": "while True: one.sendall(b'\\x03' + (1 << 20).to_bytes(8, 'big') + bytes(1 << 20))",
    "endless tiny frames": "while True: one.sendall(b'\\x01\\x00' * (1 << 20))",
    "largest frames": "while True: one.sendall(b'\\x03' + (32 << 20).to_bytes(8, 'big') + bytes(32 << 20))",
    "one frame without end": "one.sendall(b'\\x02' + b'\\x7f' * 8)\nwhile True: one.sendall(bytes(1 << 20))",
    "no frame": "while True: one.sendall(b'\\xff' * (1 << 20))",
}


@contextlib.asynccontextmanager
async def bounded_memory() -> AsyncIterator[None]:
    """In the block this process does not grow by much."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = most = resident()

    async def look() -> None:
        nonlocal most
        while True:
            most = max(most, resident())
            # Enough has been seen; the machine is others' too.
            assert most - before < 4 * MOST_MEMORY
            await asyncio.sleep(0.01)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
        print(f"grew by {(most - before) >> 20} MiB")
        assert most - before < MOST_MEMORY


@pytest_asyncio.fixture
async def kernel(kernel_image: Path, runtime: Runtime) -> AsyncIterator[Kernel]:
    container = await Container.start(ContainerSpec(image=kernel_image), runtime)
    async with container, await Kernel.start(container) as live:
        yield live


@pytest_asyncio.fixture
async def neighbour(kernel_image: Path, runtime: Runtime) -> AsyncIterator[Kernel]:
    container = await Container.start(ContainerSpec(image=kernel_image), runtime)
    async with container, await Kernel.start(container) as live:
        yield live


async def slowest_cell(kernel: Kernel, during: asyncio.Task[object]) -> float:
    """Seconds that the slowest of many cells takes while something else goes on."""
    slowest = 0.0
    while not during.done():
        begin = time.monotonic()
        assert (await kernel.run("1")).data == [{"text/plain": "1"}]
        slowest = max(slowest, time.monotonic() - begin)
        await asyncio.sleep(0.01)
    return slowest


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
@pytest.mark.parametrize("socket", [1, 2], ids=["answers", "output"])
async def test_a_flooding_kernel_is_ended_and_costs_nobody(
    flood: str, socket: int, kernel: Kernel, neighbour: Kernel
) -> None:
    code = f"{CONNECTION}\none = connection('-{socket}')\n{flood}"
    async with bounded_memory():
        running = asyncio.create_task(kernel.run(code, timeout_s=150))
        slowest = await slowest_cell(neighbour, running)
        cell = await running
    assert cell.died
    assert not cell.timed_out
    assert "does not speak as one" in (cell.error or "")
    assert slowest < 5
    with pytest.raises(KernelBroken) as caught:
        await kernel.run("1")
    failure = classify(caught.value, Stage.RUN)
    assert failure.origin is Origin.AGENT
    assert not failure.retryable
    await kernel.restart()
    assert (await kernel.run("1")).data == [{"text/plain": "1"}]


async def test_a_dripping_kernel_is_ended_when_its_cells_time_is_up(kernel: Kernel) -> None:
    drip = f"{CONNECTION}\none = connection('-2')\nimport signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    drip += "one.sendall(b'\\x03' + (16 << 20).to_bytes(8, 'big'))\nwhile True: one.sendall(b'.'); time.sleep(0.05)"
    cell = await kernel.run(drip, timeout_s=1)
    assert cell.timed_out
    assert cell.died


async def test_whole_messages_without_end_are_bounded_too(kernel: Kernel, neighbour: Kernel) -> None:
    """As an honest kernel sends them, but faster, larger, and more of them than anybody keeps."""
    flood = """
import IPython, json
shell = IPython.get_ipython()
parent = json.dumps({"msg_id": shell.parent_header["header"]["msg_id"]}).encode()
def send(kind, content):
    header = json.dumps({"msg_type": kind}).encode()
    shell.kernel.iopub_thread.send_multipart([b"<IDS|MSG>", b"", header, parent, b"{}", content])
for _ in range(15):
    send("stream", b'{"text": "' + b"x" * (16 << 20) + b'"}')
    send("comm_msg", b'{"text": "' + b"x" * (16 << 20) + b'"}')
empty = json.dumps({"data": {"": ""}}).encode()
for _ in range(30_000):
    send("display_data", b'{"data": {}}')
    send("display_data", empty)
print("through")
"""
    async with bounded_memory():
        running = asyncio.create_task(kernel.run(flood, timeout_s=200))
        slowest = await slowest_cell(neighbour, running)
        cell = await running
    assert not cell.died
    assert cell.error is None
    assert cell.omitted > 16 << 20
    assert len(cell.data) < 20_000
    assert slowest < 5


KERNELAPP = """
import json, socket, sys, threading
address = json.load(open(sys.argv[-1]))["ip"]
def speak(number):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}-{number}")
    listener.listen()
    one, _ = listener.accept()
    ready = b"\\x05READY\\x0bSocket-Type\\x00\\x00\\x00\\x06ROUTER"
    one.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00NULL" + bytes(48) + b"\\x04" + bytes([len(ready)]) + ready)
    while True:
        one.sendall(FRAMES)
for number in (1, 2):
    threading.Thread(target=speak, args=(number,)).start()
"""


@pytest.mark.parametrize(
    "frames", ["b'\\x03' + (1 << 20).to_bytes(8, 'big') + bytes(1 << 20)", "b'\\x01\\x00' * 10_000", "b'\\xff' * 1000"]
)
async def test_a_flood_from_the_first_byte_is_the_agents_doing(
    frames: str, kernel_image: Path, runtime: Runtime, neighbour: Kernel, tmp_path: Path
) -> None:
    async with await Container.start(ContainerSpec(image=kernel_image), runtime) as container:
        where = await container.run("python3 -c 'import ipykernel; print(ipykernel.__path__[0], end=\"\")'")
        program = tmp_path / "kernelapp.py"
        program.write_text(KERNELAPP.replace("FRAMES", frames))
        await container.upload(program, f"{where.stdout}/kernelapp.py")
        async with bounded_memory():
            starting = asyncio.create_task(Kernel.start(container, timeout_s=30))
            slowest = await slowest_cell(neighbour, starting)
            with pytest.raises(AgentError):
                await starting
        assert slowest < 5
        assert container.alive


@pytest.fixture
def hostile_folder(tmp_path: Path) -> list[Path]:
    """Modules whose import would end or change a kernel that looks for them in its working folder."""
    (tmp_path / "ipykernel_launcher.py").write_text("raise SystemExit('not a kernel')")
    for name in ("random", "queue", "pkgutil", "json", "zmq", "ipykernel", "traitlets", "IPython", "typing"):
        (tmp_path / f"{name}.py").write_text("import os; open('/tmp/taken', 'a').write(__name__); os._exit(3)")
    return list(tmp_path.glob("*.py"))


async def test_no_module_of_the_working_folder_is_run_as_the_kernel(
    hostile_folder: list[Path], kernel_image: Path, runtime: Runtime
) -> None:
    own = textwrap.dedent("""
        import sys
        open("own.py", "w").write("answer = 42")
        import own
        print(own.answer, [m for m in sys.modules if m == "debugpy"])
    """)
    async with await Container.start(ContainerSpec(image=kernel_image), runtime) as container:
        for file in hostile_folder:
            await container.upload(file, f"{container.workdir}/{file.name}")
        async with await Kernel.start(container) as kernel:
            assert (await kernel.run(own)).output == "42 []\n"
        assert (await container.run("cat /tmp/taken")).exit_code != 0
