# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl serve --ray`` over 1 to 8 nodes: rollouts a second, the front's CPU, and who deals rollouts out better.

Each node is a raylet with a deployment of its own on this one machine: HumanEval rollouts in real sandboxes, whose
scripted policy takes seconds for a turn, so that slots are the bound and not the machine's cores; the share of the
cores in use is told. A node has two slots of RUN, and every number of nodes the same number of rounds, so that a fleet
that is as good as its nodes has their number times the rate of one.

The peer deals groups to nodes in turn, as NeMo RL's shards of Gym do, to the same nodes with the same rollouts in the
same run. The turns of a rollout are drawn: log-normal between groups and within, in the mean about the same for all.

Run with ``python -m benchmarks.fleet [--quick]``; quick takes 1 and 2 nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import processes
from benchmarks.raylets import ENVIRONMENT, Raylets, raylets
from benchmarks.report import Figure, publish
from nemo_gym_prorl.demo_scripts import script_for
from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.scripted.policy import ScriptedConfig
from nemo_gym_prorl.scripted.server import serve as scripted
from nemo_gym_prorl.scripted.text import MODEL_NAME
from nemo_gym_prorl.tasks.code.rows import humaneval_row, problems


SIZES, QUICK_SIZES = (1, 2, 4, 8), (1, 2)
SLOTS, ROUNDS, TURN_S = 2, 3, 6.0
GROUPS_PER_NODE, SIBLINGS = 2, 8
HEAVY_TURN_S, MEDIAN_TURNS, MOST_TURNS = 2.0, 4, 60
BETWEEN, WITHIN = 0.8, 0.6
"""Standard deviations of the logarithm of a rollout's turns."""
IDLE_S = 10.0
"""For how long it is looked what the front uses while nothing runs, which is not the rollouts'."""
KEY = "bench-fleet"
AGENT = "++prorl_code_agent.responses_api_agents.prorl_agent"
"""What is said of it on the command line begins so."""
UP_S = 900.0


def _row(number: int, turns: int | None, turn_s: float) -> dict[str, Any]:
    problem = [*problems().values()][number % len(problems())]
    script = script_for(problem, "reference")
    script["turns"] = [{**turn, "latency_s": turn_s} for turn in script["turns"]]
    if turns is not None:
        first, *rest = script["turns"]
        idle = {**first, "tool_calls": [{"name": "bash", "arguments": {"command": "true"}}]}
        script["turns"] = [first, *[idle] * max(0, turns - len(rest) - 1), *rest]
    return humaneval_row(problem, script)


async def _makespan(
    clients: Sequence[RolloutClient], rows: Sequence[dict[str, Any]], siblings: int, name: str
) -> float:
    """Seconds until all have their reward; group ``g`` goes to client ``g % len(clients)``."""
    started = time.monotonic()

    async def one(number: int, row: dict[str, Any]) -> None:
        group = number // siblings
        client = clients[group % len(clients)]
        await client.submit(row, id=f"{name}-{number}", group=f"{name}-{group}")
        job = await client.wait(f"{name}-{number}")
        assert job.reward == 1.0, job

    await asyncio.gather(*(one(number, row) for number, row in enumerate(rows)))
    return time.monotonic() - started


class _Fleet:
    """A front in a process of its own."""

    def __init__(self, cluster: Raylets, url: str, pid: int) -> None:
        self.cluster, self.url, self.pid = cluster, url, pid

    async def grow(self, size: int) -> None:
        """Up to so many nodes, each of which is up."""
        while len(self.cluster.nodes) < size:
            await self.cluster.add()
        async with asyncio.timeout(UP_S):
            while len(await self.nodes()) < size:  # noqa: ASYNC110
                await asyncio.sleep(1)

    async def nodes(self) -> list[str]:
        """URLs of the nodes that are up."""
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http,
            http.get(f"{self.url}/v1/nodes") as answer,
        ):
            return [node["url"] for node in await answer.json() if node["usable"] and node["run_slots"]]


class FrontProcess:
    """``prorl serve prorl_code --ray`` in a process of its own, with further words of its command line."""

    def __init__(self, ray: str, policy: str, log: Path, key: str, *words: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = {"policy-url": policy, "policy-model": MODEL_NAME, "head-port": port, "ray": ray}
        self._words = [*words, *(f"--{name}={value}" for name, value in options.items())]
        self._log, self._environ = log, {**os.environ, **ENVIRONMENT, "PRORL_TOKEN": key}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Of the process that it is now."""
        assert self._process is not None, "it runs"
        return self._process.pid

    async def start(self) -> None:
        """Start it, for the first time or again; return when it listens."""
        program = [sys.executable, "-c", "from nemo_gym_prorl.cli import main; main()"]
        with self._log.open("ab") as stream:
            begin = stream.tell()
            self._process = await asyncio.create_subprocess_exec(
                *(*program, "serve", "prorl_code", *self._words), env=self._environ, stdout=stream, stderr=stream
            )
        async with asyncio.timeout(UP_S):
            while b"Front at" not in self._log.read_bytes()[begin:]:
                if self._process.returncode is not None:
                    raise RuntimeError(self._log.read_text())
                await asyncio.sleep(0.2)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it."""
        assert self._process is not None, "it was started"
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        await self._process.wait()


@contextlib.asynccontextmanager
async def front(ray: str, policy: str, log: Path, key: str, *words: str) -> AsyncIterator[FrontProcess]:
    """One that has been started, and is ended."""
    process = FrontProcess(ray, policy, log, key, *words)
    try:
        await process.start()
        yield process
    finally:
        await process.end()


@contextlib.asynccontextmanager
async def _fleet(folder: Path) -> AsyncIterator[_Fleet]:
    words = [f"{AGENT}.stages.{stage}={SLOTS}" for stage in ("init", "ready", "run", "eval")]
    log = folder / "front.log"
    async with (
        scripted(ScriptedConfig()) as policy,
        raylets(1) as cluster,
        front(cluster.address, policy, log, KEY, *words) as process,
    ):
        yield _Fleet(cluster, process.url, process.pid)


def _heavy(nodes: int) -> list[dict[str, Any]]:
    rng = random.Random(7)
    rows = []
    for group in range(nodes * GROUPS_PER_NODE):
        scale = MEDIAN_TURNS * math.exp(rng.gauss(0, BETWEEN))
        for _ in range(SIBLINGS):
            turns = min(MOST_TURNS, max(3, round(scale * math.exp(rng.gauss(0, WITHIN)))))
            rows.append(_row(group, turns, HEAVY_TURN_S))
    return rows


async def _measure(sizes: Sequence[int], folder: Path) -> list[Figure]:
    rates: dict[int, float] = {}
    busy: dict[int, float] = {}
    used, jobs = 0.0, 0
    async with _fleet(folder) as fleet, RolloutClient(fleet.url, KEY) as front:
        for size in sizes:
            await fleet.grow(size)
            await _makespan([front], [_row(i, None, 0.1) for i in range(size * SLOTS)], 1, f"warm-{size}")
            rows = [_row(i, None, TURN_S) for i in range(size * SLOTS * ROUNDS)]
            before = processes.precise_core_seconds(fleet.pid)
            await asyncio.sleep(IDLE_S)
            resting = (processes.precise_core_seconds(fleet.pid) - before) / IDLE_S
            before += resting * IDLE_S
            idle, total = _cpu()
            seconds = await _makespan([front], rows, 1, f"even-{size}")
            idle, total = _cpu()[0] - idle, _cpu()[1] - total
            used += processes.precise_core_seconds(fleet.pid) - before - resting * seconds
            jobs += len(rows)
            rates[size], busy[size] = len(rows) / seconds, 1 - idle / total
            print(f"{size} nodes: {rates[size]:.3f} rollouts/s, cores {busy[size]:.0%} busy", flush=True)
        largest = sizes[-1]
        rows = _heavy(largest)
        ours = await _makespan([front], rows, SIBLINGS, "ours")
        async with contextlib.AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(RolloutClient(url, KEY)) for url in await fleet.nodes()]
            theirs = await _makespan(nodes, rows, SIBLINGS, "theirs")
    figures = [
        Figure(
            f"rollouts a second, {size} nodes, over {size} times those of one",
            rates[size] / size / rates[sizes[0]],
            "share",
            goal=">= 0.95",
        )
        for size in sizes[1:]
    ]
    figures += [Figure(f"the machine's cores in use, {size} nodes", busy[size], "share") for size in sizes]
    return [
        *figures,
        Figure("front's CPU per rollout", used / jobs * 1e3, "ms"),
        Figure(f"front's CPU for {largest} idle nodes, Ray's driver included", resting, "cores"),
        Figure(
            f"seconds for {len(rows)} rollouts of heavy-tailed length, {largest} nodes",
            ours,
            "s",
            goal=">= 1.3",
            goal_value=theirs / ours,
            peers={"groups in turn": theirs},
        ),
    ]


def _cpu() -> tuple[float, float]:
    """Idle and all seconds of all cores."""
    numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return float(numbers[3] + numbers[4]), float(sum(numbers))


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory(prefix="bench-fleet-") as folder:
        figures = asyncio.run(_measure(QUICK_SIZES if quick else SIZES, Path(folder)))
    publish("fleet", figures, packages=("nemo-gym", "ray"), quick=quick)


if __name__ == "__main__":
    main()
