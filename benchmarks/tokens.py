# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a turn costs the model server, in CPU and in bytes on the wire, as a rollout grows to 64k tokens.

``prorl_model`` with agents that share its ledger (what is new goes there, tokens are read once, at the end), and with
agents that echo all ids each turn, as Gym's ``simple_agent`` does; Gym's ``vllm_model``, which knows only the latter,
with the same. Both servers run in the same round as processes of their own, and in front of the same
stand-in engine, which answers at once and says all that vLLM says. CPU is that of all of a server's processes.

Several rollouts take their turns side by side; what is told of a length is the mean of the turns before, at and after
it. Three rounds, in which the servers take turns at being first: the median, with the lowest and highest.

Run with ``python -m benchmarks.tokens [--quick | --profile]``; quick stops at 16k after one round, a profile tells
where the CPU goes and writes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.keep_alive import KeepAliveClient
from benchmarks.model_agents import Agent, EchoingAgent, SharingAgent
from benchmarks.model_servers import OURS, PEER, Process, engine, model_server, sample, samples
from benchmarks.report import Figure, publish
from benchmarks.stand_in_engine import OBSERVED, pieces


LENGTHS = {"2k": 2_000, "16k": 16_000, "64k": 64_000}
QUICK = {name: LENGTHS[name] for name in ("2k", "16k")}
ROUNDS = 3
SHARING, ECHOING = 16, 2
"""Rollouts side by side; those that echo cost a hundred times as much."""

GOALS = {"2k": "<= 2", "64k": "<= 2"}
GOALS_ECHOED = {"64k": "<= 10"}
GOAL_PER_CORE = ">= 500"
"""Turns per core-second at 16k."""

PROFILED = 32_000
"""Tokens of prompts, about, that rollouts of each kind are grown to for a profile."""

_rollouts = count()


@dataclass(slots=True)
class Played:
    """Per turn and rollout, mean of those side by side: CPU seconds, kB both ways, tokens of the prompt."""

    cpu: list[float] = field(default_factory=list)
    kilobytes: list[float] = field(default_factory=list)
    context: list[float] = field(default_factory=list)
    end_cpu: float = 0.0

    def at(self, tokens: int, what: list[float]) -> float:
        """Mean over the turn whose prompt is nearest to so many tokens, and those before and after it."""
        nearest = min(range(len(self.context)), key=lambda turn: abs(self.context[turn] - tokens))
        window = what[max(0, nearest - 1) : nearest + 2]
        return sum(window) / len(window)


@dataclass(frozen=True, slots=True)
class Way:
    """A server, and how agents use it."""

    server: str
    shares: bool

    def agents(self, client: KeepAliveClient, observed: list[str]) -> list[Agent]:
        """Agents with rollouts of their own."""
        if not self.shares:
            return [EchoingAgent(client, observed) for _ in range(ECHOING)]
        names = [f"rollout-{next(_rollouts)}" for _ in range(SHARING)]
        return [SharingAgent(client, observed, name, names[0]) for name in names]


SHARED, ECHOED, GYM = Way(OURS, True), Way(OURS, False), Way(PEER, False)


async def play(way: Way, process: Process, observed: list[str], tokens: int) -> Played:
    """Play rollouts of one way until their prompts have so many tokens, and a turn more."""
    client, played = KeepAliveClient(process.urls[0]), Played()
    agents = way.agents(client, observed)

    async def spent(work: Callable[[Agent], Awaitable[None]]) -> float:
        before = process.core_seconds()
        async with asyncio.TaskGroup() as group:
            for agent in agents:
                group.create_task(work(agent))  # type: ignore[arg-type]
        return (process.core_seconds() - before) / len(agents)

    over = False
    while not over:
        over = bool(played.context) and played.context[-1] >= tokens
        carried = client.sent + client.received
        played.cpu.append(await spent(lambda agent: agent.turn()))
        played.kilobytes.append((client.sent + client.received - carried) / len(agents) / 1000)
        played.context.append(sum(agent.context for agent in agents) / len(agents))
    played.end_cpu = await spent(lambda agent: agent.end())
    client.close()
    return played


@contextlib.asynccontextmanager
async def servers(folder: Path):  # type: ignore[no-untyped-def]
    """Both servers over one engine."""
    async with (
        engine(folder) as backend,
        model_server(OURS, backend.urls, folder) as ours,
        model_server(PEER, backend.urls, folder) as peer,
    ):
        yield {OURS: ours, PEER: peer}


def _observed(folder: Path) -> list[str]:
    return pieces(Tokenizer.from_file(str(folder / "tokenizer.json")), OBSERVED - 10, seed=2)


async def measure(lengths: dict[str, int], rounds: int) -> list[Figure]:
    """Play all ways, several times."""
    runs: dict[Way, list[Played]] = collections.defaultdict(list)
    longest = max(lengths.values())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with servers(folder) as processes:
            observed = _observed(folder)
            for way in (SHARED, ECHOED, GYM):
                await play(way, processes[way.server], observed, 1000)  # what is done once is done
            for number in range(rounds):
                for way in (SHARED, ECHOED, GYM) if number % 2 == 0 else (GYM, ECHOED, SHARED):
                    played = await play(way, processes[way.server], observed, longest)
                    runs[way].append(played)
                    told = ", ".join(f"{n}: {1000 * played.at(at, played.cpu):.2f}" for n, at in lengths.items())
                    print(
                        f"round {number + 1}, {way.server}, {'shared' if way.shares else 'echoed'}: {told} ms",
                        flush=True,
                    )
    return list(_figures(runs, lengths))


def _figures(runs: dict[Way, list[Played]], lengths: dict[str, int]) -> Iterator[Figure]:
    def cpu(way: Way, tokens: int) -> list[float]:
        return [1000 * played.at(tokens, played.cpu) for played in runs[way]]

    def carried(way: Way, tokens: int) -> list[float]:
        return [played.at(tokens, played.kilobytes) for played in runs[way]]

    for name, tokens in lengths.items():
        peers = {PEER: cpu(GYM, tokens)}
        title = "server CPU per turn"
        yield Figure.of(f"{name} tokens, shared: {title}", cpu(SHARED, tokens), "ms", GOALS.get(name), peers)
        yield Figure.of(
            f"{name} tokens, ids echoed: {title}", cpu(ECHOED, tokens), "ms", GOALS_ECHOED.get(name), peers
        )
    per_core = {way: [1000 / each for each in cpu(way, LENGTHS["16k"])] for way in (SHARED, GYM)}
    title = "16k tokens, shared: turns per core-second"
    yield Figure.of(title, per_core[SHARED], "1/s", GOAL_PER_CORE, {PEER: per_core[GYM]})
    last = next(reversed(lengths))
    ends = [1000 * played.end_cpu for played in runs[SHARED]]
    yield Figure.of(f"{last} tokens, shared: reading and forgetting the tokens, once a rollout", ends, "ms")
    for name, tokens in lengths.items():
        peers = {PEER: carried(GYM, tokens)}
        yield Figure.of(f"{name} tokens, shared: bytes per turn", carried(SHARED, tokens), "kB", None, peers)
        yield Figure.of(f"{name} tokens, ids echoed: bytes per turn", carried(ECHOED, tokens), "kB", None, peers)
    first, longest = lengths["2k"], lengths[last]
    growth = {
        way: [there / here for here, there in zip(carried(way, first), carried(way, longest), strict=True)]
        for way in (SHARED, GYM)
    }
    title = f"shared: bytes per turn, {last} over 2k"
    yield Figure.of(title, growth[SHARED], "times", "<= 1.1", {PEER: growth[GYM]})


async def profile() -> None:
    """Print where the CPU of our server goes at each length."""
    for way in (SHARED, ECHOED):
        for length, tokens in LENGTHS.items():
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                async with engine(folder) as backend, model_server(OURS, backend.urls, folder) as process:
                    milliseconds = await _profiled(way, process, _observed(folder), tokens)
                print(f"\n{length} tokens, {'shared' if way.shares else 'echoed'}: {milliseconds:.2f} ms a turn")
                _print_profile(folder, milliseconds)


async def _profiled(way: Way, process: Process, observed: list[str], tokens: int) -> float:
    """Sample the turns about a length, of as many rollouts as make enough samples; milliseconds of a turn."""
    client, spent, turns = KeepAliveClient(process.urls[0]), 0.0, 0
    for _ in range(1 + PROFILED // tokens):
        agents = way.agents(client, observed)
        while agents[0].context < tokens - 1000:
            await asyncio.gather(*(agent.turn() for agent in agents))
        before = process.core_seconds()
        sample(process, on=True)
        for _ in range(5):
            await asyncio.gather(*(agent.turn() for agent in agents))
            turns += len(agents)
        sample(process, on=False)
        spent += process.core_seconds() - before
        await asyncio.gather(*(agent.end() for agent in agents))  # and so the samples are written
    client.close()
    return 1000 * spent / turns


def _print_profile(folder: Path, milliseconds: float) -> None:
    for kind, counts in samples(folder).items():
        whole = max(1, counts.total())
        print(f"  by {kind}, {whole} samples:")
        for name, number in counts.most_common(14):
            print(f"    {number / whole:6.1%}  {milliseconds * number / whole:7.3f} ms  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 16k, one round; under a minute; writes nothing")
    parser.add_argument("--profile", action="store_true", help="where the CPU of our server goes; writes nothing")
    arguments = parser.parse_args()
    if arguments.profile:
        asyncio.run(profile())
        return
    lengths, rounds = (QUICK, 1) if arguments.quick else (LENGTHS, ROUNDS)
    publish("tokens", asyncio.run(measure(lengths, rounds)), quick=arguments.quick)


if __name__ == "__main__":
    main()
