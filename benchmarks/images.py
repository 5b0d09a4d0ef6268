# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Images: a sandbox from a mounted SIF and from its unpacked copy, many starts at once."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.report import Figure, publish
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.images.building import runtime_build
from nemo_gym_prorl.sandbox.images.building.default import DEFAULT, ensure_image
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.provider import STARTS
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime


async def cold_start(image: Path, runtime: Runtime, repeats: int) -> float:
    """Milliseconds from asking for a sandbox to the answer of its first command, median."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        async with await Container.start(ContainerSpec(image=image), runtime) as container:
            await container.run("echo hello")
            times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


async def together(image: Path, runtime: Runtime, count: int, places: int) -> tuple[float, float]:
    """Seconds until ``count`` sandboxes of one image that are asked for at once are up, and until half of them are."""
    gate = asyncio.Semaphore(places)
    begun = time.perf_counter()
    up: list[float] = []

    async def one() -> Container:
        async with gate:
            container = await Container.start(ContainerSpec(image=image), runtime)
        up.append(time.perf_counter() - begun)
        return container

    containers = await asyncio.gather(*(one() for _ in range(count)))
    await asyncio.gather(*(container.close() for container in containers))
    return max(up), statistics.median(up)


async def measure(runtime: Runtime, folder: Path, quick: bool) -> list[Figure]:
    """All figures."""
    default = ensure_image(DEFAULT, print)
    work = folder / "work"
    work.mkdir()
    print("packing the default image", flush=True)
    sif = runtime_build.build(runtime, work, str(default), timeout_s=600, unpacked=False)
    sif = sif.rename(folder / "default.sif")
    store = ImageStore(folder / "images", folder / "unpacked")
    begun = time.perf_counter()
    start = store.open(sif, runtime)
    unpacking = time.perf_counter() - begun
    repeats, count = (5, 8) if quick else (30, 32)
    for image in (sif, start.path):
        await cold_start(image, runtime, 3)
    mounted = await cold_start(sif, runtime, repeats)
    unpacked = await cold_start(start.path, runtime, repeats)
    await together(start.path, runtime, 2, STARTS)
    gated, gated_half = await together(start.path, runtime, count, STARTS)
    free, free_half = await together(start.path, runtime, count, 10_000)
    start.release()
    return [
        Figure("create to first answer, from an unpacked copy, p50", unpacked, "ms", "<= 100"),
        Figure("create to first answer, from a mounted SIF, p50", mounted, "ms", "<= 250"),
        Figure("unpacking a SIF, once per machine", unpacking, "s"),
        Figure(f"{count} starts at once, until half are up", gated_half, "s", peers={"all at once": free_half}),
        Figure(f"{count} starts at once, until all are up", gated, "s", peers={"all at once": free}),
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
