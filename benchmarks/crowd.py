# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Many sandboxes at once for ``bench-node``: how it is to live beside them, ours and what the peers have."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers.apptainer import ApptainerProvider
from nemo_gym.sandbox.providers.base import SandboxSpec

from benchmarks import processes
from benchmarks.report import Figure
from benchmarks.shell import ECHO, latencies, quantile
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.shell import Shell


DIRECT, RUNTIME = "direct", "runtime"
GYM, SWE_REX = "Gym apptainer", "SWE-ReX"

AT_A_TIME = 4
"""Starts and ends in flight."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything.

    Attributes:
        starts: sandboxes started one after the other.
        alive: sandboxes that live at once, made directly.
        alive_runtime: the same, made by the runtime.
        peers_s: seconds in which a peer starts as many as it can.
        idle_s: seconds in which nothing is done.
        samples: commands among many sandboxes.
        closing: sandboxes with a shell and three processes that close at once.
        bystanders: idle processes beside them.
        churn_s: seconds of creating, using and destroying.
    """

    starts: int = 40
    alive: int = 2000
    alive_runtime: int = 200
    peers_s: float = 60.0
    idle_s: float = 20.0
    samples: int = 500
    closing: int = 100
    bystanders: int = 5000
    churn_s: float = 15.0


QUICK = Scale(20, 60, 10, 3.0, 2.0, 100, 10, 200, 3.0)


@dataclass(frozen=True, slots=True)
class Bench:
    """What every part needs."""

    image: Path
    runtime: Runtime
    scale: Scale

    async def start(self, how: str) -> Container:
        """One sandbox."""
        return await Container.start(ContainerSpec(image=self.image, start=how), self.runtime)  # type: ignore[arg-type]

    async def many(self, how: str, count: int) -> list[Container]:
        """Many, some at a time."""
        gate = asyncio.Semaphore(AT_A_TIME)

        async def one() -> Container:
            async with gate:
                return await self.start(how)

        return await asyncio.gather(*(one() for _ in range(count)))


async def close_all(boxes: list[Container]) -> float:
    """Seconds until every one is gone."""
    begin = time.perf_counter()
    await asyncio.gather(*(box.close() for box in boxes))
    return time.perf_counter() - begin


# Peers: how one is started, used and ended


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody else's sandbox, or what comes nearest."""

    act: Callable[[], Awaitable[str]]
    end: Callable[[], Awaitable[Any]]


async def gym_apptainer(bench: Bench) -> Peer:
    """A container of NeMo Gym's provider."""
    provider = ApptainerProvider(create={"extra_start_args": ["--writable-tmpfs"]})
    handle = await provider.create(SandboxSpec(image=str(bench.image)))

    async def act() -> str:
        return (await provider.exec(handle, ECHO)).stdout or ""

    return Peer(act, lambda: provider.close(handle))


async def swe_rex(_bench: Bench) -> Peer:
    """A session of SWE-ReX on the bare machine."""
    from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
    from swerex.runtime.local import LocalRuntime

    runtime = LocalRuntime()
    await runtime.create_session(CreateBashSessionRequest())

    async def act() -> str:
        return (await runtime.run_in_session(BashAction(command=ECHO))).output

    return Peer(act, runtime.close)


PEER_TIMEOUT_S = 90.0
"""For a peer's crowd, from the first start to the last end."""

PEERS: dict[str, Callable[[Bench], Awaitable[Peer]]] = {GYM: gym_apptainer}
if find_spec("swerex"):
    PEERS[SWE_REX] = swe_rex


async def alive(bench: Bench) -> list[Figure]:
    """Life beside many others."""
    scale = bench.scale
    theirs: dict[str, dict[str, float]] = {}
    theirs[RUNTIME], _count = await _crowd(bench, RUNTIME, scale.alive_runtime)
    ours, count = await _crowd(bench, DIRECT, scale.alive)
    for name, maker in PEERS.items():
        try:
            async with asyncio.timeout(PEER_TIMEOUT_S):
                theirs[name] = await _peers_crowd(bench, maker)
        except Exception as error:
            # A peer that gives up on a busy machine, or does not come to an end, is left out.
            print(f"{name} failed: {error!r}")
    goals = {
        "exec, p50": "<= 10",
        "exec, p99": "<= 50",
        "shell action, p99": "<= 2",
        "idle, the supervisor": "<= 2",
        "idle, everything": "<= 2",
        "memory of each": "<= 2",
        "closing all": "<= 10",
    }
    units = {"exec, p50": "ms", "exec, p99": "ms", "shell action, p99": "ms", "memory of each": "MiB"}
    units |= {"idle, the supervisor": "% of a core", "idle, everything": "% of a core", "closing all": "s"}
    made = {name: values["alive"] for name, values in theirs.items()}
    figures = [Figure("sandboxes alive at once", count, "", goal=None if scale is QUICK else ">= 2000", peers=made)]
    for name, goal in goals.items():
        peers = {who: values[name] for who, values in theirs.items() if name in values}
        figures.append(Figure(f"{count} alive: {name}", ours[name], units[name], goal=goal, peers=peers))
    return figures


async def _crowd(bench: Bench, how: str, count: int) -> tuple[dict[str, float], int]:
    scale = bench.scale
    begin = time.perf_counter()
    boxes = await bench.many(how, count)
    print(f"{count} by {how}: {time.perf_counter() - begin:.1f} s", flush=True)
    try:
        found: dict[str, float] = {"alive": count}

        async def act() -> str:
            return (await random.choice(boxes).run(ECHO)).stdout

        ordered = await latencies(act, scale.samples)
        found["exec, p50"], found["exec, p99"] = quantile(ordered, 0.5), quantile(ordered, 0.99)
        shells = [await Shell.start(box) for box in random.sample(boxes, min(20, count))]

        async def type_it() -> str:
            return (await random.choice(shells).run(ECHO)).output

        found["shell action, p99"] = quantile(await latencies(type_it, 4 * scale.samples), 0.99)
        for shell in shells:
            await shell.close()
        found |= await _idle(scale.idle_s, count)
    finally:
        seconds = await close_all(boxes)
    return found | {"closing all": seconds}, count


async def _idle(seconds: float, count: int) -> dict[str, float]:
    """What those that live cost while nothing happens, in percent of a core, and their memory in MiB of each."""
    me = os.getpid()
    members = processes.below(me) - {me}
    memory = processes.memory_mib(members) / count
    supervisor = processes.supervisor_of(me)

    def used() -> tuple[float, float]:
        # Without this process, which does the counting.
        return processes.core_seconds(supervisor), processes.own_core_seconds(supervisor)

    before = used()
    await asyncio.sleep(seconds)
    everything, own = (100 * (after - earlier) / seconds for after, earlier in zip(used(), before, strict=True))
    return {"memory of each": memory, "idle, the supervisor": own, "idle, everything": everything}


async def _peers_crowd(bench: Bench, maker: Callable[[Bench], Awaitable[Peer]]) -> dict[str, float]:
    scale = bench.scale
    gate = asyncio.Semaphore(AT_A_TIME)
    until = time.perf_counter() + scale.peers_s
    me = os.getpid()
    known = processes.below(me)
    live: list[Peer] = []

    async def some() -> None:
        while time.perf_counter() < until and len(live) < scale.alive:
            async with gate:
                live.append(await maker(bench))

    await asyncio.gather(*(some() for _ in range(AT_A_TIME)))
    try:
        ordered = await latencies(lambda: random.choice(live).act(), min(scale.samples, 50))
        members = processes.below(me) - known
        memory = processes.memory_mib(members) / len(live)
        before = sum(map(processes.own_core_seconds, members))
        await asyncio.sleep(scale.idle_s)
        idle = 100 * (sum(map(processes.own_core_seconds, members)) - before) / scale.idle_s
    finally:
        begin = time.perf_counter()
        await asyncio.gather(*(peer.end() for peer in live))
    return {
        "alive": len(live),
        "exec, p50": quantile(ordered, 0.5),
        "exec, p99": quantile(ordered, 0.99),
        "memory of each": memory,
        "idle, everything": idle,
        "closing all": time.perf_counter() - begin,
    }
