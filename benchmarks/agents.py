# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Two thousand agents at four model servers: whether all are answered, and how much later than by the engine alone.

Each agent plays 50 turns with 20 s between them, as one that waits for its tools does. The stand-in engine, which is
eight backends to the server, takes a second for each turn. What is added is the latency at the agent over that second:
it holds what the server, the engine's process and the agents' own need on the cores that they share. Agents of
``prorl_model`` share its ledger, as ``prorl_agent``'s do, and read all tokens at the end; those of Gym's
``vllm_model`` echo all ids, as ``simple_agent`` does. The peer plays as many agents for the first 5 turns only, since
what it has to carry grows with the square of the turns; ours is told for those 5 turns, too.

Run with ``python -m benchmarks.agents [--quick] [--servers N]``; quick takes 160 agents that wait for less than a
second, which makes as many turns a second.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from tokenizers import Tokenizer

from benchmarks import processes
from benchmarks.keep_alive import KeepAliveClient
from benchmarks.model_agents import Agent, EchoingAgent, SharingAgent
from benchmarks.model_servers import OURS, PEER, Process, engine, model_server
from benchmarks.report import Figure, publish
from benchmarks.stand_in_engine import OBSERVED, pieces
from nemo_gym_prorl.serving import open_files


ENGINE_S = 1.0
BACKENDS = 8
SIBLINGS = 8
ANSWER_S = 300.0
"""An agent that has no answer by then gives up, which is an error."""
SERVERS = 4


@dataclass(frozen=True, slots=True)
class Scale:
    """How many agents, turns of each, turns that the peer carries, and seconds between turns."""

    agents: int
    turns: int
    peer_turns: int
    pause_s: float


FULL = Scale(2000, 50, 5, 20.0)
QUICK = Scale(160, 5, 5, 0.7)


@dataclass(slots=True)
class Crowd:
    """What agents met.

    Attributes:
        added: per turn's number, milliseconds over the engine's own time.
        errors: what went wrong, with how often.
        seconds: from the first turn to the last.
        cpu: core-seconds of the server, of the engine, and of the agents.
        late: milliseconds by which the engine itself was late, per turn.
        memory_mib: of the server at the end.
    """

    added: dict[int, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: float = 0.0
    cpu: tuple[float, float, float] = (0.0, 0.0, 0.0)
    late: list[float] = field(default_factory=list)
    memory_mib: float = 0.0

    def quantile(self, which: int, turns: int) -> float:
        """A percentile of what was added in the first turns."""
        return _percentile([one for turn in range(turns) for one in self.added[turn]], which)

    @property
    def turns(self) -> int:
        """How many were answered."""
        return sum(map(len, self.added.values()))


def _percentile(values: list[float], which: int) -> float:
    """Not a number, and so no goal that is met, where there are no values."""
    return statistics.quantiles(values, n=100)[which - 1] if len(values) > 1 else float("nan")


async def crowd(
    scale: Scale, turns: int, servers: list[Process], backend: Process, make: Callable[[int], Agent]
) -> Crowd:
    """All agents, each begun at a moment of its own."""
    met, draw = Crowd(), random.Random(0)
    cycle = scale.pause_s + ENGINE_S

    async def live(number: int, begin: float) -> None:
        agent = make(number)
        await asyncio.sleep(begin)
        try:
            for turn in range(turns):
                asked = time.perf_counter()
                async with asyncio.timeout(ANSWER_S):
                    await agent.turn()
                met.added[turn].append(1000 * (time.perf_counter() - asked - ENGINE_S))
                await asyncio.sleep(scale.pause_s)
            await agent.end()
        except (OSError, ValueError, LookupError) as error:
            met.errors[f"{type(error).__name__}: {str(error)[:200]}"] += 1

    def used() -> tuple[float, float, float]:
        of_servers = sum(server.core_seconds() for server in servers)
        return of_servers, backend.core_seconds(), processes.precise_core_seconds(os.getpid())

    before, began = used(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(scale.agents):
            group.create_task(live(number, draw.uniform(0, cycle)))
    met.seconds = time.perf_counter() - began
    server_s, engine_s, agents_s = (after - earlier for after, earlier in zip(used(), before, strict=True))
    met.cpu = (server_s, engine_s, agents_s)
    met.memory_mib = sum(processes.memory_mib(processes.below(server.pid)) for server in servers)
    client = KeepAliveClient(backend.urls[0])
    met.late = [1000 * late for late in orjson.loads((await client.call("GET", "/late")).body)]
    client.close()
    for error, times in met.errors.most_common(5):
        print(f"  {times} times {error}")
    return met


async def measure(scale: Scale, servers: int) -> list[Figure]:
    """The peer, then ours, each with an engine of its own."""
    open_files.raise_limit()
    found: dict[str, Crowd] = {}
    for kind, turns in ((PEER, scale.peer_turns), (OURS, scale.turns)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            async with (
                engine(folder, ENGINE_S, BACKENDS) as backend,
                contextlib.AsyncExitStack() as stack,
            ):
                started = [
                    await stack.enter_async_context(model_server(kind, backend.urls, folder))
                    for _ in range(servers if kind == OURS else 1)
                ]
                observed = pieces(Tokenizer.from_file(str(folder / "tokenizer.json")), OBSERVED - 10, seed=2)
                clients = [KeepAliveClient(server.urls[0]) for server in started]

                def sharing(number: int) -> Agent:
                    group = number // SIBLINGS
                    client = clients[group % len(clients)]  # noqa: B023
                    return SharingAgent(client, observed, f"rollout-{number}", f"group-{group}")  # noqa: B023

                def echoing(_: int) -> Agent:
                    return EchoingAgent(clients[0], observed)  # noqa: B023

                gc.collect()
                gc.freeze()  # else each collection looks through all that thousands of agents hold
                met = found[kind] = await crowd(scale, turns, started, backend, sharing if kind == OURS else echoing)
                for client in clients:
                    client.close()
        cores = ", ".join(
            f"{who} {spent / met.seconds:.2f}"
            for who, spent in zip(("server", "engine", "agents"), met.cpu, strict=True)
        )
        print(
            f"{kind}: {met.turns} turns in {met.seconds:.0f} s; cores of {cores}; p99 {met.quantile(99, turns):.1f} ms"
        )
    return _figures(scale, servers, found[OURS], found[PEER])


def _figures(scale: Scale, servers: int, ours: Crowd, peer: Crowd) -> list[Figure]:
    all_of_it = f"{scale.agents} agents of {scale.turns} turns, {scale.pause_s:g} s between, {servers} servers"
    first = f"their first {scale.peer_turns} turns"
    each = 1000 / max(1, ours.turns)
    theirs = 1000 / max(1, peer.turns)
    late = _percentile(ours.late, 99), _percentile(peer.late, 99)
    return [
        Figure(f"{all_of_it}: errors", ours.errors.total(), "", "<= 0"),
        Figure("added latency, p99", ours.quantile(99, scale.turns), "ms", "<= 50"),
        Figure("added latency, p50", ours.quantile(50, scale.turns), "ms"),
        Figure("turns answered a second", ours.turns / ours.seconds, "1/s"),
        Figure("of the added: the engine's own lateness, p99", late[0], "ms", peers={PEER: late[1]}),
        Figure("server CPU per turn", each * ours.cpu[0], "ms", peers={PEER: theirs * peer.cpu[0]}),
        Figure(
            "engine and agents, CPU per turn", each * sum(ours.cpu[1:]), "ms", peers={PEER: theirs * sum(peer.cpu[1:])}
        ),
        Figure("memory of the server at the end", ours.memory_mib, "MiB"),
        Figure(
            f"{first}: added latency, p99",
            ours.quantile(99, scale.peer_turns),
            "ms",
            peers={PEER: peer.quantile(99, scale.peer_turns)},
        ),
        Figure(
            f"{first}: added latency, p50",
            ours.quantile(50, scale.peer_turns),
            "ms",
            peers={PEER: peer.quantile(50, scale.peer_turns)},
        ),
        Figure(f"{first}: errors of the peer", peer.errors.total(), ""),
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="160 agents of 5 turns; under a minute; writes nothing")
    parser.add_argument("--servers", type=int, default=SERVERS, help="how many prorl_model (default: %(default)s)")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(QUICK if arguments.quick else FULL, arguments.servers))
    publish("agents", figures, quick=arguments.quick)


if __name__ == "__main__":
    main()
