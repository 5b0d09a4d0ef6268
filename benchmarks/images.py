# SPDX-License-Identifier: Apache-2.0
"""Images: a sandbox from a mounted SIF and from its unpacked copy, many starts at once, what the start gates cost."""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.report import Figure, publish
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.gates import StartGates
from nemo_gym_prorl.sandbox.image import ensure_default_image
from nemo_gym_prorl.sandbox.install import ensure_runtime
from nemo_gym_prorl.sandbox.lease import state_root
from nemo_gym_prorl.sandbox.runtime import Runtime
from nemo_gym_prorl.sandbox.store import tool
from nemo_gym_prorl.sandbox.store.images import ImageStore


async def cold_start(image: Path, runtime: Runtime, repeats: int) -> float:
    """Milliseconds from asking for a sandbox to the answer of its first command, median."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        async with await Container.start(ContainerSpec(image=image), runtime) as container:
            await container.run("echo hello")
            times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


async def gate_cost(folder: Path, repeats: int) -> float:
    """Milliseconds to go through both gates and out again when nobody else does, median."""
    gates = StartGates.of(folder)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        async with gates.start(Path("/image"), 4):
            pass
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


async def together(image: Path, runtime: Runtime, count: int, places: int) -> tuple[float, float]:
    """Seconds until ``count`` sandboxes of one image that are asked for at once are up, and until half of them are."""
    gates = StartGates.of(state_root())
    begun = time.perf_counter()
    up: list[float] = []

    async def one() -> Container:
        async with gates.start(image, places):
            container = await Container.start(ContainerSpec(image=image), runtime)
        up.append(time.perf_counter() - begun)
        return container

    containers = await asyncio.gather(*(one() for _ in range(count)))
    await asyncio.gather(*(container.close() for container in containers))
    return max(up), statistics.median(up)


async def measure(runtime: Runtime, folder: Path, quick: bool) -> list[Figure]:
    """All figures."""
    default = ensure_default_image(print)
    sif = folder / "default.sif"
    work = folder / "work"
    work.mkdir()
    print("packing the default image", flush=True)
    tool.runtime_build(runtime, work, str(default), sif, timeout_s=600, unpacked=False)
    store = ImageStore(folder / "images", folder / "unpacked")
    begun = time.perf_counter()
    start = store.open(sif, runtime)
    unpacking = time.perf_counter() - begun
    repeats, count = (5, 8) if quick else (30, 32)
    for image in (sif, start.path):
        await cold_start(image, runtime, 3)
    mounted = await cold_start(sif, runtime, repeats)
    unpacked = await cold_start(start.path, runtime, repeats)
    places = 2 * (os.cpu_count() or 1)
    await together(start.path, runtime, 2, places)
    gated, gated_half = await together(start.path, runtime, count, places)
    free, free_half = await together(start.path, runtime, count, 10_000)
    start.let_go()
    return [
        Figure("create to first answer, from an unpacked copy, p50", unpacked, "ms", "<= 100"),
        Figure("create to first answer, from a mounted SIF, p50", mounted, "ms", "<= 250"),
        Figure("unpacking a SIF, once per machine", unpacking, "s"),
        Figure("through the start gates when nobody else goes, p50", await gate_cost(folder, 1000), "ms", "<= 1"),
        Figure(f"{count} starts at once, until half are up", gated_half, "s", peers={"without gates": free_half}),
        Figure(f"{count} starts at once, until all are up", gated, "s", peers={"without gates": free}),
    ]


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats; under a minute; writes nothing")
    quick = parser.parse_args().quick
    runtime = ensure_runtime(print)
    runtime.activate()
    with tempfile.TemporaryDirectory() as temporary:
        figures = asyncio.run(measure(runtime, Path(temporary), quick))
    publish("images", figures, quick=quick)


if __name__ == "__main__":
    main()
