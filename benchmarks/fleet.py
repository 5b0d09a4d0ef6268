# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl serve --ray`` over 1 to 8 nodes: rollouts per second, and placement of groups.

Each node is a raylet with a deployment of its own on this machine, with two slots of RUN. HumanEval rollouts run in
real sandboxes. Their scripted policy takes seconds per turn, so that the slots are the bottleneck, not the machine's
cores. The peer of a fleet is the rate of one node times the number of nodes. The peer of placement assigns groups to
the same nodes round-robin, like NeMo RL's shards of Gym. These rollouts have log-normal numbers of turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.report import Row, parser, publish
from nemo_gym_prorl.cli.scripted.demo import script_for
from nemo_gym_prorl.cli.scripted.server import ScriptedConfig
from nemo_gym_prorl.cli.scripted.server import serve as scripted
from nemo_gym_prorl.cli.scripted.text import MODEL_NAME
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.tasks.code.code_rows import humaneval_row, problems
from tests.deployment.raylets import ENVIRONMENT, Raylets, raylets


@dataclass(frozen=True, slots=True)
class Scale:
    """Size of a run: numbers of nodes, rollouts per slot, seconds per turn of even and of heavy-tailed rollouts."""

    sizes: tuple[int, ...]
    rounds: int
    turn_s: float
    heavy_turn_s: float


FULL, QUICK = Scale((1, 2, 4, 8), 3, 6.0, 2.0), Scale((1, 2), 1, 2.0, 0.3)
SLOTS = 2
GROUPS_PER_NODE, SIBLINGS = 2, 8
MEDIAN_TURNS, MOST_TURNS = 4, 60
BETWEEN, WITHIN = 0.8, 0.6
"""Standard deviations of the logarithm of the number of turns, between and within groups."""
KEY = "bench-fleet"
AGENT = "++prorl_code_agent.responses_api_agents.prorl_agent"
"""Path of the agent's settings in command-line overrides."""
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
    """Return the seconds until all rollouts have their reward; group ``g`` goes to client ``g % len(clients)``."""
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
    """Fleet of raylets behind a front process (``prorl serve --ray``)."""

    def __init__(self, cluster: Raylets, url: str) -> None:
        self.cluster, self.url = cluster, url

    async def grow(self, size: int) -> None:
        while len(self.cluster.nodes) < size:
            await self.cluster.add()
        async with asyncio.timeout(UP_S):
            while len(await self.nodes()) < size:  # noqa: ASYNC110
                await asyncio.sleep(1)

    async def nodes(self) -> list[str]:
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http,
            http.get(f"{self.url}/v1/nodes") as answer,
        ):
            return [node["url"] for node in await answer.json() if node["usable"] and node["run_slots"]]


class FrontProcess:
    """Process of ``prorl serve prorl_code --ray``, with further arguments (``words``)."""

    def __init__(self, ray: str, policy: str, log: Path, key: str, *words: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = {"policy-url": policy, "policy-model": MODEL_NAME, "head-port": port, "ray": ray}
        self._words = [*words, *(f"--{name}={value}" for name, value in options.items())]
        self._log, self._environ = log, {**os.environ, **ENVIRONMENT, "PRORL_TOKEN": key}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        program = [sys.executable, "-c", "from nemo_gym_prorl.cli.app import main; main()"]
        with self._log.open("ab") as stream:
            begin = stream.tell()
            self._process = await asyncio.create_subprocess_exec(
                *(*program, "serve", "prorl_code", *self._words), env=self._environ, stdout=stream, stderr=stream
            )
        async with asyncio.timeout(UP_S):
            while b"Gateway at" not in self._log.read_bytes()[begin:]:
                if self._process.returncode is not None:
                    raise RuntimeError(self._log.read_text())
                await asyncio.sleep(0.2)

    async def end(self) -> None:
        assert self._process is not None, "it was started"
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._process.wait()


@contextlib.asynccontextmanager
async def front(ray: str, policy: str, log: Path, key: str, *words: str) -> AsyncIterator[FrontProcess]:
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
        yield _Fleet(cluster, process.url)


def _heavy(nodes: int, turn_s: float) -> list[dict[str, Any]]:
    rng = random.Random(7)
    rows = []
    for group in range(nodes * GROUPS_PER_NODE):
        scale = MEDIAN_TURNS * math.exp(rng.gauss(0, BETWEEN))
        for _ in range(SIBLINGS):
            turns = min(MOST_TURNS, max(3, round(scale * math.exp(rng.gauss(0, WITHIN)))))
            rows.append(_row(group, turns, turn_s))
    return rows


async def _measure(scale: Scale, folder: Path) -> list[Row]:
    rates: dict[int, float] = {}
    async with _fleet(folder) as fleet, RolloutClient(fleet.url, KEY) as front:
        for size in scale.sizes:
            await fleet.grow(size)
            await _makespan([front], [_row(i, None, 0.1) for i in range(size * SLOTS)], 1, f"warm-{size}")
            rows = [_row(i, None, scale.turn_s) for i in range(size * SLOTS * scale.rounds)]
            seconds = await _makespan([front], rows, 1, f"even-{size}")
            rates[size] = len(rows) / seconds
        largest = scale.sizes[-1]
        rows = _heavy(largest, scale.heavy_turn_s)
        ours = await _makespan([front], rows, SIBLINGS, "ours")
        async with contextlib.AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(RolloutClient(url, KEY)) for url in await fleet.nodes()]
            theirs = await _makespan(nodes, rows, SIBLINGS, "theirs")
    goals = {largest: ">= 0.95"}
    return [
        *(
            Row(f"rollouts, {n} nodes", "1/s", rates[n], n * rates[1], f"{n} times one node", goals.get(n))
            for n in scale.sizes[1:]
        ),
        Row(f"{len(rows)} heavy-tailed rollouts, {largest} nodes", "s", ours, theirs, "groups in turn", "<= 0.77"),
    ]


def main() -> None:
    quick = parser(__doc__).parse_args().quick
    with tempfile.TemporaryDirectory(prefix="bench-fleet-") as folder:
        rows = asyncio.run(_measure(QUICK if quick else FULL, Path(folder)))
    publish("fleet", rows, packages=("nemo-gym", "ray"), quick=quick)


if __name__ == "__main__":
    main()
