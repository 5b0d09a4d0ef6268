# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Latency that a model server adds for 2,000 agents, compared with Gym's ``vllm_model``.

Each agent plays 20 turns with 20 s between turns, like an agent that waits for its tools. The stand-in engine has
eight addresses and takes one second per turn. Added latency is the time beyond that second, measured at the agent,
and includes CPU time of the server, the engine and the agents, which share the machine. Agents of ``prorl_model``
(four servers) use the server's ledger; agents of ``vllm_model`` (one server) echo all ids. The peer plays only the
first 5 turns, since its work is quadratic in the turns, and ratios compare those turns.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks import processes
from benchmarks.model_agents import Agent, EchoingAgent, KeepAliveClient, SharingAgent
from benchmarks.report import Row, parser, publish, quantile
from benchmarks.servers import MODEL_SERVER, PEER_MODEL_SERVER, Process, engine, model_server
from benchmarks.stand_in_engine import OBSERVED, pieces
from nemo_gym_prorl.http.server_process import raise_open_file_limit


ENGINE_S = 1.0
ADDRESSES = 8
SIBLINGS = 8
ANSWER_S = 300.0
"""Seconds after which an agent without an answer counts as an error."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Size of a run: numbers of agents, turns, the peer's turns and ``prorl_model`` servers; seconds between turns."""

    agents: int
    turns: int
    peer_turns: int
    pause_s: float
    servers: int


FULL = Scale(2000, 20, 5, 20.0, 4)
QUICK = Scale(40, 5, 5, 0.7, 1)


@dataclass(slots=True)
class Crowd:
    """Results of all agents with one kind of server.

    Attributes:
        added: milliseconds beyond the engine's time, by turn.
        errors: number of failed rollouts, by message.
        seconds: time from the first turn to the last.
        server_s: CPU seconds of the servers.
        memory_mib: memory of the servers at the end.
    """

    added: dict[int, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: float = 0.0
    server_s: float = 0.0
    memory_mib: float = 0.0

    def quantile(self, share: float, turns: int) -> float:
        return quantile([one for turn in range(turns) for one in self.added[turn]], share)

    @property
    def turns(self) -> int:
        return sum(map(len, self.added.values()))


async def play(scale: Scale, turns: int, servers: list[Process], make: Callable[[int], Agent]) -> Crowd:
    crowd, draw = Crowd(), random.Random(0)

    async def live(number: int, begin: float) -> None:
        agent = make(number)
        await asyncio.sleep(begin)
        try:
            for turn in range(turns):
                asked = time.perf_counter()
                async with asyncio.timeout(ANSWER_S):
                    await agent.turn()
                crowd.added[turn].append(1000 * (time.perf_counter() - asked - ENGINE_S))
                await asyncio.sleep(scale.pause_s)
            await agent.end()
        except (OSError, ValueError, LookupError) as error:
            crowd.errors[f"{type(error).__name__}: {str(error)[:200]}"] += 1

    def used() -> float:
        return sum(server.core_seconds() for server in servers)

    before, began = used(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(scale.agents):
            group.create_task(live(number, draw.uniform(0, scale.pause_s + ENGINE_S)))
    crowd.seconds = time.perf_counter() - began
    crowd.server_s = used() - before
    crowd.memory_mib = sum(processes.memory_mib(processes.below(server.pid)) for server in servers)
    for error, times in crowd.errors.most_common(5):
        print(f"  {times} times {error}")
    return crowd


async def measure(scale: Scale) -> list[Row]:
    raise_open_file_limit()
    crowds: dict[str, Crowd] = {}
    for kind, turns, count in (
        (PEER_MODEL_SERVER, scale.peer_turns, 1),
        (MODEL_SERVER, scale.turns, scale.servers),
    ):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            async with engine(folder, ENGINE_S, ADDRESSES) as backend, contextlib.AsyncExitStack() as stack:
                servers = [
                    await stack.enter_async_context(model_server(kind, backend.urls, folder)) for _ in range(count)
                ]
                observed = pieces(Tokenizer.from_file(str(folder / "tokenizer.json")), OBSERVED - 10, seed=2)
                clients = [KeepAliveClient(server.urls[0]) for server in servers]

                def make(
                    number: int,
                    kind: str = kind,
                    clients: list[KeepAliveClient] = clients,
                    observed: list[str] = observed,
                ) -> Agent:
                    group = number // SIBLINGS
                    if kind == PEER_MODEL_SERVER:
                        return EchoingAgent(clients[0], observed)
                    return SharingAgent(clients[group % len(clients)], observed, f"r-{number}", f"g-{group}")

                # Warm up: the first turn at an address of the engine takes seconds.
                first = [make(-1 - group * SIBLINGS) for group in range(2 * count * ADDRESSES)]
                await asyncio.gather(*(agent.turn() for agent in first))
                await asyncio.gather(*(agent.end() for agent in first))
                gc.collect()
                gc.freeze()  # a collection would otherwise traverse the state of thousands of agents
                crowds[kind] = await play(scale, turns, servers, make)
                for client in clients:
                    client.close()
    return rows_of(scale, crowds[MODEL_SERVER], crowds[PEER_MODEL_SERVER])


def rows_of(scale: Scale, ours: Crowd, peer: Crowd) -> list[Row]:
    first, name = scale.peer_turns, PEER_MODEL_SERVER
    rows = [
        Row(
            f"{title} latency added, first {first} turns",
            "ms",
            ours.quantile(share, first),
            peer.quantile(share, first),
            name,
            goal,
        )
        for title, share, goal in (("p99", 0.99, "<= 0.007"), ("p50", 0.5, None))
    ]
    cpu = [1000 * crowd.server_s / max(1, crowd.turns) for crowd in (ours, peer)]
    return [
        *rows,
        Row(f"p99 latency added, all {scale.turns} turns", "ms", ours.quantile(0.99, scale.turns)),
        Row("server CPU per turn (peer: first turns only)", "ms", *cpu, name),
        Row(f"rollouts of {scale.agents} that failed", "", ours.errors.total(), peer.errors.total(), name),
        Row("turns answered", "1/s", ours.turns / ours.seconds),
        Row("memory of the servers at the end", "MiB", ours.memory_mib),
    ]


def main() -> None:
    quick = parser(__doc__).parse_args().quick
    publish("agents", asyncio.run(measure(QUICK if quick else FULL)), quick=quick)


if __name__ == "__main__":
    main()
