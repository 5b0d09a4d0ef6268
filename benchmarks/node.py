# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""One node full of sandboxes: the cost of a start, commands beside 2,000 live sandboxes, and the end of all of them.

The peer is NeMo Gym's ``apptainer`` provider in the same run, with as many sandboxes as it starts in a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.report import Row, parser, publish, quantile
from benchmarks.sandboxes import GYM, Action, gym_apptainer, latencies, our_exec
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.images.builder import DEFAULT, ensure_image
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime


AT_A_TIME = 4
"""Number of concurrent starts and ends."""
PART_TIMEOUT_S = 400.0
GONE_TIMEOUT_S = 60.0
OURS = "ours"
UNITS = {
    **dict.fromkeys(("exec among them, p50", "exec among them, p99"), "ms"),
    **{"memory of each": "MiB", "idle, 1000 of them": "cores", "closing all": "s"},
}


@dataclass(frozen=True, slots=True)
class Scale:
    """Size of a run.

    Attributes:
        starts: number of sandboxes that are started one after another.
        alive: number of sandboxes that live at the same time.
        peers_s: seconds in which the peer starts as many sandboxes as it can.
        idle_s: seconds without work, in which the CPU of idle sandboxes is measured.
        samples: number of commands beside many live sandboxes.
        churn_s: seconds of creating, using and destroying sandboxes.
    """

    starts: int = 40
    alive: int = 2000
    peers_s: float = 60.0
    idle_s: float = 20.0
    samples: int = 500
    churn_s: float = 15.0


QUICK = Scale(12, 60, 2.0, 1.0, 50, 2.0)


@dataclass(frozen=True, slots=True)
class Bench:
    """Image, runtime and size of a run."""

    image: Path
    runtime: Runtime
    scale: Scale

    def opening(self, name: str) -> contextlib.AbstractAsyncContextManager[Action]:
        return contextlib.asynccontextmanager(SUBJECTS[name])(self.image, self.runtime)


SUBJECTS: dict[str, Callable[[Path, Runtime], AsyncIterator[Action]]] = {OURS: our_exec, GYM: gym_apptainer}


async def starts(bench: Bench) -> list[Row]:
    """Measure sequential starts until the first answer (milliseconds and core-seconds), and ends (core-seconds)."""
    wall: dict[str, float] = {}
    cores: dict[str, float] = {}
    ends: dict[str, float] = {}
    for name in SUBJECTS:
        count, taken, live = bench.scale.starts if name == OURS else max(3, bench.scale.starts // 4), [], []
        before = 0.0
        for number in range(count + 1):  # the first is a warm-up
            begin = time.perf_counter()
            opened = bench.opening(name)
            action = await opened.__aenter__()
            assert "hello" in await action()
            live.append(opened)
            if number:
                taken.append((time.perf_counter() - begin) * 1e3)
            else:
                before = processes.core_seconds(os.getpid())
        after = processes.core_seconds(os.getpid())
        wall[name], cores[name] = quantile(taken, 0.5), (after - before) / count
        # Concurrently, since the peer takes 10 s to end a sandbox.
        await asyncio.gather(*(opened.__aexit__(None, None, None) for opened in live))
        ends[name] = (processes.core_seconds(os.getpid()) - after) / len(live)
    return [
        Row(title, unit, found[OURS], theirs, name, goals.get(name))
        for title, unit, found, goals in (
            ("create to first answer, p50", "ms", wall, {GYM: "<= 0.036"}),
            ("create to first answer", "core-s", cores, {GYM: "<= 0.095"}),
            ("end of a sandbox", "core-s", ends, {}),
        )
        for name, theirs in found.items()
        if name != OURS
    ]


async def churn(bench: Bench) -> list[Row]:
    rates = {}
    for name in (OURS, GYM):
        begin = time.perf_counter()
        until = begin + bench.scale.churn_s

        async def again(name: str = name, until: float = until) -> int:
            count = 0
            while time.perf_counter() < until:
                async with bench.opening(name) as action:
                    assert "hello" in await action()
                count += 1
            return count

        done = sum(await asyncio.gather(*(again() for _ in range(AT_A_TIME))))
        rates[name] = done / (time.perf_counter() - begin)
    return [Row(f"create, use, destroy, {AT_A_TIME} at a time", "1/s", rates[OURS], rates[GYM], GYM, ">= 265")]


async def crowd(bench: Bench) -> list[Row]:
    """Measure commands beside many live sandboxes, and the memory and idle CPU of these sandboxes."""
    ours, theirs = dict[str, float](), dict[str, float]()
    await _crowd(bench, OURS, ours)
    try:
        async with asyncio.timeout(bench.scale.peers_s + 60):
            await _crowd(bench, GYM, theirs)
    except Exception as error:  # on a busy machine the provider raises, or exceeds the time limit
        print(f"{GYM} did not finish: {error!r}")
    goals = {"memory of each": "<= 0.13"}
    return [Row(name, UNITS.get(name, ""), ours[name], theirs.get(name), GYM, goals.get(name)) for name in ours]


async def _crowd(bench: Bench, name: str, found: dict[str, float]) -> None:
    """Add each figure to ``found`` once it is measured, so that a slow end does not discard earlier figures."""
    scale, me = bench.scale, os.getpid()
    until = time.perf_counter() + (PART_TIMEOUT_S if name == OURS else scale.peers_s)
    known = {me} if name == OURS else processes.below(me)  # our memory includes the supervisor's
    numbers = iter(range(scale.alive))
    opened: list[tuple[Any, Action]] = []

    async def some() -> None:
        for _ in numbers:
            if time.perf_counter() < until:
                manager = bench.opening(name)
                opened.append((manager, await manager.__aenter__()))

    def used() -> float:  # CPU seconds without those of this process, which measures
        return processes.core_seconds(me) - processes.precise_core_seconds(me)

    try:
        await asyncio.gather(*(some() for _ in range(AT_A_TIME)))
        found["alive at once"] = float(len(opened))
        taken = await latencies(lambda: random.choice(opened)[1](), scale.samples if name == OURS else 50)
        found |= {"exec among them, p50": quantile(taken, 0.5), "exec among them, p99": quantile(taken, 0.99)}
        found["memory of each"] = processes.memory_mib(processes.below(me) - known) / len(opened)
        before = used()
        await asyncio.sleep(scale.idle_s)
        found["idle, 1000 of them"] = max(0.0, used() - before) / scale.idle_s * 1e3 / len(opened)
    finally:
        begin = time.perf_counter()
        await asyncio.gather(*(manager.__aexit__(None, None, None) for manager, _ in opened))
    found["closing all"] = time.perf_counter() - begin


async def owner_dies(bench: Bench) -> list[Row]:
    """Measure the seconds from SIGKILL of the owner of many sandboxes until no process and no file of them is left."""
    count = bench.scale.alive
    command = [sys.executable, "-m", "benchmarks.node", "--own", str(count)]
    owner = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert owner.stdout
    try:
        folder = Path((await asyncio.wait_for(owner.stdout.readline(), PART_TIMEOUT_S)).decode().strip())
        members = processes.below(owner.pid) - {owner.pid}
        owner.kill()
        begin = time.perf_counter()
        await owner.wait()
        while _is_left(folder, members):
            if time.perf_counter() - begin > GONE_TIMEOUT_S:
                raise TimeoutError("something of a killed owner is left")
            await asyncio.sleep(0.02)
    finally:
        if owner.returncode is None:
            owner.kill()
    return [Row(f"killed owner of {count}: everything is gone", "s", time.perf_counter() - begin)]


def _is_left(folder: Path, members: set[int]) -> bool:
    return folder.exists() or any(map(processes.is_alive, members))


async def own(bench: Bench, count: int) -> None:
    """Start ``count`` sandboxes, print the supervisor's folder, and wait to be killed."""
    gate = asyncio.Semaphore(AT_A_TIME)

    async def one() -> Container:
        async with gate:
            return await Container.start(ContainerSpec(image=bench.image), bench.runtime)

    boxes = await asyncio.gather(*(one() for _ in range(count)))
    print(boxes[0].describe()["supervisor"], flush=True)
    await asyncio.sleep(PART_TIMEOUT_S)


async def main() -> None:
    options = parser(__doc__)
    options.add_argument("--own", type=int, help="for the benchmark itself: own so many sandboxes until killed")
    arguments = options.parse_args()
    processes.subreaper()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    runtime = ensure_runtime(lambda _line: None)
    runtime.activate()
    bench = Bench(ensure_image(DEFAULT, lambda _line: None), runtime, QUICK if arguments.quick else Scale())
    if arguments.own:
        await own(bench, arguments.own)
        return
    rows: list[Row] = []
    for part in (starts, churn, crowd, owner_dies):
        async with asyncio.timeout(PART_TIMEOUT_S):
            rows += await part(bench)
    publish("node", rows, quick=arguments.quick)


if __name__ == "__main__":
    asyncio.run(main())
