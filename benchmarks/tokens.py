# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""CPU and body bytes of a model server per turn, as a rollout grows to 64,000 tokens, compared with ``vllm_model``.

``prorl_model`` serves agents that use its ledger and agents that echo all ids each turn, as Gym's ``simple_agent``
does; Gym's ``vllm_model`` serves only the latter. Both servers run in the same round, in front of the same stand-in
engine. The CPU is that of all processes of a server. The figure at a length is the mean of the turns before, at and
after it. The order of the servers alternates; a figure is the median of the rounds.
"""

from __future__ import annotations

import asyncio
import collections
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.model_agents import Agent, EchoingAgent, KeepAliveClient, SharingAgent
from benchmarks.report import Row, median, parser, publish
from benchmarks.servers import MODEL_SERVER, PEER_MODEL_SERVER, Process, engine, model_server
from benchmarks.stand_in_engine import OBSERVED, pieces


LENGTHS = {"2k": 2_000, "16k": 16_000, "64k": 64_000}
QUICK_LENGTHS = {name: LENGTHS[name] for name in ("2k", "16k")}
ROUNDS = 3
SHARING, ECHOING = 16, 2
"""Concurrent rollouts; fewer of agents that echo, since their turns cost a hundred times as much."""
GOALS = {"2k": "<= 0.52", "16k": "<= 0.03", "64k": "<= 0.0021"}
ECHO_GOALS = {"64k": "<= 0.0105"}
_rollouts = count()


@dataclass(slots=True)
class Played:
    """Figures by turn, each a mean over the concurrent rollouts: CPU seconds, kB of bodies in both directions, and
    tokens of the prompt. ``end_cpu``: CPU seconds of a rollout's end."""

    cpu: list[float] = field(default_factory=list)
    kilobytes: list[float] = field(default_factory=list)
    context: list[float] = field(default_factory=list)
    end_cpu: float = 0.0

    def at(self, tokens: int, figures: list[float]) -> float:
        """Return the mean of the turn whose prompt length is nearest to ``tokens`` and of its two neighbours."""
        nearest = min(range(len(self.context)), key=lambda turn: abs(self.context[turn] - tokens))
        window = figures[max(0, nearest - 1) : nearest + 2]
        return sum(window) / len(window)


@dataclass(frozen=True, slots=True)
class ServerCase:
    """Benchmarked model server and its kind of agent. ``shares``: whether agents use the server's ledger
    (:class:`SharingAgent`), or send the whole history in each turn (:class:`EchoingAgent`)."""

    server: str
    shares: bool

    def agents(self, client: KeepAliveClient, observed: list[str]) -> list[Agent]:
        if not self.shares:
            return [EchoingAgent(client, observed) for _ in range(ECHOING)]
        names = [f"rollout-{next(_rollouts)}" for _ in range(SHARING)]
        return [SharingAgent(client, observed, name, names[0]) for name in names]


SHARED, ECHOED = ServerCase(MODEL_SERVER, True), ServerCase(MODEL_SERVER, False)
PEER = ServerCase(PEER_MODEL_SERVER, False)


async def play(case: ServerCase, process: Process, observed: list[str], tokens: int) -> Played:
    """Play concurrent rollouts until their prompts have ``tokens`` tokens, and one turn more."""
    client, played = KeepAliveClient(process.urls[0]), Played()
    agents = case.agents(client, observed)

    async def spent(work: Callable[[Agent], Awaitable[None]]) -> float:
        before = process.core_seconds()
        async with asyncio.TaskGroup() as group:
            for agent in agents:
                group.create_task(work(agent))  # type: ignore[arg-type]
        return (process.core_seconds() - before) / len(agents)

    is_over = False
    while not is_over:
        is_over = bool(played.context) and played.context[-1] >= tokens
        carried = client.carried
        played.cpu.append(await spent(lambda agent: agent.turn()))
        played.kilobytes.append((client.carried - carried) / len(agents) / 1000)
        played.context.append(sum(agent.context for agent in agents) / len(agents))
    played.end_cpu = await spent(lambda agent: agent.end())
    client.close()
    return played


async def measure(lengths: dict[str, int], rounds: int) -> list[Row]:
    runs: dict[ServerCase, list[Played]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with (
            engine(folder) as backend,
            model_server(MODEL_SERVER, backend.urls, folder) as ours,
            model_server(PEER_MODEL_SERVER, backend.urls, folder) as peer,
        ):
            observed = pieces(Tokenizer.from_file(str(folder / "tokenizer.json")), OBSERVED - 10, seed=2)
            servers = {MODEL_SERVER: ours, PEER_MODEL_SERVER: peer}
            for case in (SHARED, ECHOED, PEER):
                await play(case, servers[case.server], observed, 1000)  # warm up
            for turn in range(rounds):
                for case in (SHARED, ECHOED, PEER) if turn % 2 == 0 else (PEER, ECHOED, SHARED):
                    runs[case].append(await play(case, servers[case.server], observed, max(lengths.values())))
    return rows_of(runs, lengths)


def rows_of(runs: dict[ServerCase, list[Played]], lengths: dict[str, int]) -> list[Row]:
    def cpu(case: ServerCase, tokens: int) -> float:
        return median([1000 * played.at(tokens, played.cpu) for played in runs[case]])

    def carried(case: ServerCase, tokens: int) -> float:
        return median([played.at(tokens, played.kilobytes) for played in runs[case]])

    rows = []
    for case, text, goals in ((SHARED, "shared", GOALS), (ECHOED, "ids echoed", ECHO_GOALS)):
        for name, tokens in lengths.items():
            theirs, goal = cpu(PEER, tokens), goals.get(name)
            title = f"server CPU per turn, {name} tokens, {text}"
            rows.append(Row(title, "ms", cpu(case, tokens), theirs, PEER_MODEL_SERVER, goal))
    for case, text in ((SHARED, "shared"), (ECHOED, "ids echoed")):
        for name, tokens in lengths.items():
            title = f"bytes per turn, {name} tokens, {text}"
            rows.append(Row(title, "kB", carried(case, tokens), carried(PEER, tokens), PEER_MODEL_SERVER))
    ends = median([1000 * played.end_cpu for played in runs[SHARED]])
    return [*rows, Row("reading and forgetting the tokens of a rollout", "ms", ends)]


def main() -> None:
    quick = parser(__doc__).parse_args().quick
    lengths, rounds = (QUICK_LENGTHS, 1) if quick else (LENGTHS, ROUNDS)
    publish("tokens", asyncio.run(measure(lengths, rounds)), quick=quick)


if __name__ == "__main__":
    main()
