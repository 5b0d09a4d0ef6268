# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""One node full of sandboxes: what the next one costs, how it is to live beside 2,000, and how all of them end.

Sandboxes are made both ways, directly and by the runtime. Peers do what they can in the same run: NeMo Gym's
``apptainer`` provider with as many containers as it starts in a minute, SWE-ReX with as many of its local sessions,
which have no container and so are flattered. Everything ends with this process, however it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.crowd import (
    AT_A_TIME,
    DIRECT,
    GYM,
    PEERS,
    QUICK,
    RUNTIME,
    Bench,
    Peer,
    Scale,
    alive,
    close_all,
    gym_apptainer,
)
from benchmarks.report import Figure, publish
from benchmarks.shell import ECHO, latencies, quantile
from nemo_gym_prorl.sandbox.images.building.default import DEFAULT, ensure_image
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime
from nemo_gym_prorl.sandbox.sessions.shell import Shell


PART_TIMEOUT_S = 400.0
GONE_TIMEOUT_S = 60.0


async def starts(bench: Bench) -> list[Figure]:
    """Create to first answer, one after the other: milliseconds and core-seconds, and what the end costs."""
    wall: dict[str, float] = {}
    cores: dict[str, float] = {}
    ends: dict[str, float] = {}

    async def ours(how: str) -> Peer:
        box = await bench.start(how)

        async def act() -> str:
            return (await box.run(ECHO)).stdout

        return Peer(act, box.close)

    makers: dict[str, tuple[Callable[[], Awaitable[Peer]], int]] = {
        how: (lambda how=how: ours(how), bench.scale.starts) for how in (DIRECT, RUNTIME)
    } | {name: (lambda maker=maker: maker(bench), max(3, bench.scale.starts // 4)) for name, maker in PEERS.items()}
    for name, (make, count) in makers.items():
        warm = await make()
        await warm.act()
        taken, live = [], [warm]
        before = processes.core_seconds(os.getpid())
        for _ in range(count):
            begin = time.perf_counter()
            live.append(await make())
            assert "hello" in await live[-1].act()
            taken.append((time.perf_counter() - begin) * 1e3)
        after = processes.core_seconds(os.getpid())
        wall[name], cores[name] = quantile(sorted(taken), 0.5), (after - before) / count
        # At once: a peer takes 10 s for each.
        await asyncio.gather(*(box.end() for box in live))
        ends[name] = (processes.core_seconds(os.getpid()) - after) / len(live)
    others = {name: value for name, value in wall.items() if name != DIRECT}
    used = {name: value for name, value in cores.items() if name != DIRECT}
    return [
        Figure("create to first answer, directly, p50", wall[DIRECT], "ms", goal="<= 15", peers=others),
        Figure("create to first answer, directly", cores[DIRECT], "core-s", goal="<= 0.02", peers=used),
        Figure("end of a sandbox", ends.pop(DIRECT), "core-s", peers=ends),
    ]


async def owner_dies(bench: Bench) -> list[Figure]:
    """An owner with many sandboxes is killed: until no process and no file of it is left."""
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
    return [Figure(f"killed owner of {count}: all gone", time.perf_counter() - begin, "s", goal="<= 5")]


def _is_left(folder: Path, members: set[int]) -> bool:
    return folder.exists() or any(_lives(pid) for pid in members)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def own(bench: Bench) -> None:
    """What the owner does: it has sandboxes, says where, and waits to be killed."""
    boxes = await bench.many(DIRECT, bench.scale.alive)
    print(boxes[0].describe()["supervisor"], flush=True)
    await asyncio.sleep(PART_TIMEOUT_S)
    await close_all(boxes)


async def mass_closing(bench: Bench) -> list[Figure]:
    """Sandboxes with a shell and three processes each close at once, beside idle processes; one beside them works."""
    seconds, bystander = {}, {}
    for how in (DIRECT, RUNTIME):
        seconds[how, 0], _late = await _close_busy(bench, how)
    with _idle_processes(bench.scale.bystanders):
        for how in (DIRECT, RUNTIME):
            seconds[how, 1], bystander[how] = await _close_busy(bench, how)
    count, beside = bench.scale.closing, bench.scale.bystanders
    return [
        Figure(f"closing {count} busy ones", seconds[DIRECT, 0], "s", peers={RUNTIME: seconds[RUNTIME, 0]}),
        Figure(
            f"the same beside {beside} idle processes", seconds[DIRECT, 1], "s", peers={RUNTIME: seconds[RUNTIME, 1]}
        ),
        Figure("a bystander's exec meanwhile, p99", bystander[DIRECT], "ms", peers={RUNTIME: bystander[RUNTIME]}),
    ]


async def _close_busy(bench: Bench, how: str) -> tuple[float, float]:
    boxes = await bench.many(how, bench.scale.closing)
    async with await bench.start(how) as beside:
        for box in boxes:
            shell = await Shell.start(box)
            await shell.run("sleep 1000 & sleep 1000 & sleep 1000 &")
        taken = [0.0]
        closing = asyncio.create_task(close_all(boxes))
        while not closing.done():
            begin = time.perf_counter()
            await beside.run(ECHO)
            taken.append((time.perf_counter() - begin) * 1e3)
        return await closing, quantile(sorted(taken), 0.99)


@contextlib.contextmanager
def _idle_processes(count: int) -> Any:
    script = f"i=0; while [ $i -lt {count} ]; do sleep 1000 & i=$((i+1)); done; echo up; wait"
    crowd = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert crowd.stdout
        crowd.stdout.readline()
        yield
    finally:
        os.killpg(crowd.pid, signal.SIGKILL)
        crowd.wait()


async def churn(bench: Bench) -> list[Figure]:
    """Create, use, destroy, over and over."""
    rates = {}
    makers: dict[str, Callable[[], Awaitable[Any]]] = {
        how: (lambda how=how: _use(bench, how)) for how in (DIRECT, RUNTIME)
    }

    async def peers_use() -> None:
        peer = await gym_apptainer(bench)
        await peer.act()
        await peer.end()

    for name, once in (makers | {GYM: peers_use}).items():
        if name != GYM:
            await once()
        done, until = 0, time.perf_counter() + bench.scale.churn_s
        begin = time.perf_counter()

        async def again(once: Callable[[], Awaitable[Any]] = once, until: float = until) -> int:
            count = 0
            while time.perf_counter() < until:
                await once()
                count += 1
            return count

        done = sum(await asyncio.gather(*(again() for _ in range(AT_A_TIME))))
        rates[name] = done / (time.perf_counter() - begin)
    ours = rates.pop(DIRECT)
    return [Figure(f"create, use, destroy, {AT_A_TIME} at a time", ours, "1/s", goal=">= 100", peers=rates)]


async def _use(bench: Bench, how: str) -> None:
    async with await bench.start(how) as box:
        assert (await box.run(ECHO)).stdout == "hello\n"


async def flood(bench: Bench) -> list[Figure]:
    """A shell beside one whose program prints without end."""
    late = {}
    async with (
        await bench.start(DIRECT) as loud,
        await bench.start(DIRECT) as quiet,
        await Shell.start(loud) as flooding,
        await Shell.start(quiet) as shell,
    ):

        async def act() -> str:
            return (await shell.run(ECHO)).output

        late["alone"] = quantile(await latencies(act, 2 * bench.scale.samples), 0.99)
        pouring = asyncio.create_task(flooding.run("yes", timeout_s=PART_TIMEOUT_S))
        await asyncio.sleep(0.5)
        late["flooded"] = quantile(await latencies(act, 2 * bench.scale.samples), 0.99)
        pouring.cancel()
        await asyncio.wait([pouring])
    return [Figure("shell beside a flood, p99", late["flooded"], "ms", peers={"alone": late["alone"]})]


@contextlib.asynccontextmanager
async def bounded(name: str) -> AsyncIterator[None]:
    """A part that takes too long is left out, and ended."""
    begin = time.perf_counter()
    try:
        async with asyncio.timeout(PART_TIMEOUT_S):
            yield
    except TimeoutError as error:
        print(f"{name}: given up: {error or 'it takes too long'}")
    print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)


async def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few of everything; under a minute; writes nothing")
    parser.add_argument("--own", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    processes.subreaper()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    runtime = ensure_runtime(lambda _line: None)
    runtime.activate()
    scale = QUICK if arguments.quick else Scale()
    if arguments.own:
        scale = Scale(alive=arguments.own)
    bench = Bench(ensure_image(DEFAULT, lambda _line: None), runtime, scale)
    if arguments.own:
        await own(bench)
        return
    figures: list[Figure] = []
    for part in (starts, churn, flood, mass_closing, alive, owner_dies):
        async with bounded(part.__name__):
            figures += await part(bench)
    publish("node", figures, packages=("nemo-gym", "swe-rex"), quick=arguments.quick)


if __name__ == "__main__":
    asyncio.run(main())
