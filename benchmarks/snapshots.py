# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Snapshots: what a sandbox has written, 10 MB in ten files, kept as after a turn, and a sandbox that goes on from it.

The peer is GNU tar, started for it on the same files in the host's own folder: it knows of no ids and no overlays, and
stops nobody who writes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from nemo_gym.sandbox.providers.base import SandboxSpec

from benchmarks.report import Figure, publish
from nemo_gym_prorl.sandbox.images.building.default import DEFAULT, ensure_image
from nemo_gym_prorl.sandbox.provider import SingularityProvider


FILES, SIZE = 10, 1_000_000
REPEATS, QUICK_REPEATS = 300, 30


async def measure(folder: Path, repeats: int) -> list[Figure]:
    """All figures."""
    kept, plain = folder / "kept", folder / "plain"
    for each in (kept, plain):
        each.mkdir()
    for number in range(FILES):
        (plain / str(number)).write_bytes(os.urandom(SIZE))
    provider = SingularityProvider(image=str(ensure_image(DEFAULT, print)), snapshots=str(kept))
    handle = await provider.create(SandboxSpec())
    other = await provider.create(SandboxSpec())
    write = f"mkdir /w && cd /w && for n in $(seq {FILES}); do head -c {SIZE} /dev/urandom > $n; done; sync ."
    done = await provider.exec(handle, write)
    assert done.return_code == 0, done.stderr

    async def checkpoint() -> None:
        await provider.delete_snapshot((await provider.checkpoint(handle, "turn")).name)

    async def checkpoint_of_nothing() -> None:
        await provider.delete_snapshot((await provider.checkpoint(other, "turn")).name)

    async def tar() -> None:
        words = ["tar", "--create", "--file", kept / "plain.tar", "--directory", plain, "."]
        await asyncio.to_thread(lambda: subprocess.run(words, check=True))
        (kept / "plain.tar").unlink()

    snapshot = await provider.snapshot(handle)

    async def create(**options: str) -> None:
        await provider.close(await provider.create(SandboxSpec(provider_options=options)))

    ours, theirs, empty = await _each(repeats, checkpoint, tar, checkpoint_of_nothing)
    restored, fresh = await _each(repeats // 5, lambda: create(snapshot_id=snapshot), create)
    for each in (handle, other):
        await provider.close(each)
    await provider.aclose()
    return [
        Figure("10 MB kept, p50", ours, "ms", "<= 20", peers={"GNU tar, by itself": theirs}),
        Figure("nothing kept, p50", empty, "ms"),
        Figure("a sandbox with 10 MB from there, made and closed, p50", restored, "ms", peers={"an empty one": fresh}),
    ]


async def _each(repeats: int, *works: Callable[[], Awaitable[None]]) -> list[float]:
    """The median of each in ms; in turn, so that all have the same machine."""
    times: list[list[float]] = [[] for _ in works]
    for number in range(repeats + 3):
        for work, took in zip(works, times, strict=True):
            begun = time.perf_counter()
            await work()
            if number >= 3:
                took.append((time.perf_counter() - begun) * 1e3)
    return [sorted(took)[len(took) // 2] for took in times]


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder), QUICK_REPEATS if options.quick else REPEATS))
    publish("snapshots", figures, quick=options.quick)


if __name__ == "__main__":
    main()
