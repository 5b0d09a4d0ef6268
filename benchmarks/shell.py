# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Latency of one shell action and of one kernel cell; :mod:`benchmarks.node` measures starts and ends of sandboxes.

The peer of shells is NeMo Gym's ``apptainer`` provider, which runs the same ``echo`` in a container of the same image.
The peer of kernels is ``jupyter_client`` with ipykernel without a sandbox, which favours the peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from benchmarks import processes
from benchmarks.report import Row, parser, publish, quantile
from benchmarks.sandboxes import (
    GYM,
    gym_apptainer,
    latencies,
    our_shell,
)
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.images.builder import DEFAULT, KERNEL, ensure_image
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime
from nemo_gym_prorl.sandbox.sessions.kernel import Kernel


CELL = "print('hello')"
JUPYTER = "jupyter_client"


async def actions(image: Path, runtime: Runtime, *, quick: bool) -> list[Row]:
    subjects = {"ours": (our_shell, 300 if quick else 2000), GYM: (gym_apptainer, 30)}
    found: dict[str, list[float]] = {}
    for name, (subject, repeats) in subjects.items():
        async with contextlib.asynccontextmanager(subject)(image, runtime) as action:
            await latencies(action, 3)
            found[name] = await latencies(action, repeats)
    ours, theirs = found["ours"], found[GYM]
    return [
        Row(f"shell action, {title}", "ms", quantile(ours, share), quantile(theirs, share), GYM, goal)
        for share, title, goal in ((0.5, "p50", "<= 0.0125"), (0.99, "p99", "<= 0.054"))
    ]


async def cells(_image: Path, runtime: Runtime, *, quick: bool) -> list[Row]:
    """Measure the start of a kernel in a running sandbox, and one cell; the peer has no sandbox."""
    image = await asyncio.to_thread(ensure_image, KERNEL, print)
    started, theirs = [], []
    for _ in range(3 if quick else 30):
        async with await Container.start(ContainerSpec(image=image), runtime) as container:
            begin = time.perf_counter()
            async with await Kernel.start(container):
                started.append((time.perf_counter() - begin) * 1e3)
        begin = time.perf_counter()
        async with contextlib.asynccontextmanager(jupyter_cells)():
            theirs.append((time.perf_counter() - begin) * 1e3)
    async with (
        await Container.start(ContainerSpec(image=image), runtime) as container,
        await Kernel.start(container) as kernel,
        contextlib.asynccontextmanager(jupyter_cells)() as peer,
    ):

        async def action() -> str:
            return (await kernel.run(CELL)).output

        repeats = 50 if quick else 500
        ours, peers = await latencies(action, repeats), await latencies(peer, repeats)
    return [
        Row("kernel cell, p50", "ms", quantile(ours, 0.5), quantile(peers, 0.5), JUPYTER, "<= 0.6"),
        Row("kernel cell, p99", "ms", quantile(ours, 0.99), quantile(peers, 0.99), JUPYTER),
        Row("kernel start, p50", "ms", quantile(started, 0.5), quantile(theirs, 0.5), JUPYTER),
    ]


async def jupyter_cells() -> AsyncIterator[Callable[[], Awaitable[str]]]:
    """Start a kernel by ``jupyter_client`` without a sandbox, and yield a function that runs a cell in the kernel."""
    from jupyter_client.manager import start_new_async_kernel

    manager, client = await start_new_async_kernel()
    said: list[str] = []

    async def action() -> str:
        said.clear()
        await client.execute_interactive(
            CELL, allow_stdin=False, output_hook=lambda message: said.append(message["content"].get("text", ""))
        )
        return "".join(said)

    try:
        yield action
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)


async def main() -> None:
    quick = parser(__doc__).parse_args().quick
    processes.subreaper()
    runtime = ensure_runtime(print)
    runtime.activate()
    image = ensure_image(DEFAULT, print)
    rows = [row for part in (actions, cells) for row in await part(image, runtime, quick=quick)]
    publish("shell", rows, packages=("nemo-gym", "jupyter-client"), quick=quick)


if __name__ == "__main__":
    asyncio.run(main())
