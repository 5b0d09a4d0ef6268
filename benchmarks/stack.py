# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The whole deployment over a scripted engine: CPU per turn by process, tool round trip, turns per second, memory.

A rollout has 20 turns with one ``bash`` call each, of 110 to 350 sampled tokens, and a last turn that answers. Ours is
``prorl_agent``, ``prorl_model`` and ``prorl_code`` with its sandboxes; the peer is Gym's ``simple_agent``,
``vllm_model`` and ``apptainer`` provider. The engine answers at once for CPU and rates. For the tool round trip the
engine decodes at the speed of an H100, also for rates compared with a client without agent and tools. CPU is that of
all processes of a stack, from the first seed to the end of the last sandbox, divided by the turns with a call. Other
load on the machine raises CPU and, much more, times: compare only figures of the same run.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from benchmarks import processes
from benchmarks.model_agents import KeepAliveClient
from benchmarks.report import Row, median, parser, publish, quantile
from benchmarks.servers import Process, free_port, started
from benchmarks.stack_engine import TASK, Script
from benchmarks.stack_players import Player, bare_player, bare_shell, our_player, our_stack, peer_player, peer_stack
from benchmarks.stand_in_engine import make_model, pieces, tokenizer_in
from nemo_gym_prorl.http.server_process import raise_open_file_limit
from nemo_gym_prorl.sandbox.images.builder import DEFAULT, ensure_image
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime
from nemo_gym_prorl.tasks.workbench import workbench_schemas


STEP_S, EACH_S = 0.0105, 0.000136
"""Seconds of a decoding step of an H100 with a 4B model, and seconds that each request in flight adds."""
BARE_TURNS = 3  # of the bare client, enough for its rate: all turns have the same distribution of lengths
SHARED_TOKENS = 1400
"""Tokens of the first message that all rollouts share."""
PEER, SHELLS = "Gym's stack", "3 bare shells + 2 ms"
WINDOW = (0.2, 0.7)
"""Fractions of the turns between which a rate is measured, without the start and the end of the run."""
SUPERVISOR = b"supervisor import server"  # part of the command line of this package's supervisor process
KNOWN_MS = 100.0  # CPU or waiting time of a tool call that checks the measurement
BURN = f"python3 -c 'import time\nwhile time.process_time() < {KNOWN_MS / 1000}: pass'"
GONE_S = 60  # seconds after a run within which its sandboxes must end


@dataclass(frozen=True, slots=True)
class Scale:
    """Size of a run.

    Attributes:
        rollouts: turns at an H100's speed, by number of concurrent rollouts. The peer plays the smallest number.
        turns: turns with a call, with an engine without latency.
        commands: number of commands in the bare shell.
    """

    rollouts: Mapping[int, int]
    turns: int = 20
    commands: int = 300


FULL, QUICK = Scale({64: 8, 256: 3}), Scale({8: 1}, 5, 50)


@dataclass(slots=True)
class Played:
    """Results of concurrent rollouts.

    Attributes:
        rate: turns per second at the engine.
        cycle_ms: mean milliseconds from a rollout's request to its next request.
        gaps: milliseconds from the engine's answer to the next request of the rollout.
        tools: milliseconds of tool calls, measured by the agent; empty for the peer.
        cpu: milliseconds of CPU per turn with a call, by part of the stack.
        memory_mib: memory of all processes when the first rollout ended.
    """

    rate: float
    cycle_ms: float
    gaps: list[float]
    tools: list[float]
    cpu: dict[str, float]
    memory_mib: float


class Bench:
    """Runs of rollouts over a scripted engine: creates the rows, and reads the engine's log."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self._engine, self._numbers = url, KeepAliveClient(url), itertools.count()
        self._shared = pieces(tokenizer_in(str(folder)), SHARED_TOKENS, seed=0)[0]

    def row(self) -> dict[str, Any]:
        """Return a new row with a unique first message."""
        number = next(self._numbers)
        text = f"{self._shared}\n{TASK % number}\n"
        params = {"input": [{"role": "user", "content": text}], "tools": workbench_schemas(["bash"])}
        tests = {"unit_tests": {"inputs": ["1"], "outputs": ["1"]}}
        return {"responses_create_params": params, "verifier_metadata": tests, "_ng_task_index": number}

    async def play(
        self, script: Script, rollouts: int, one: Player, parts: Mapping[str, Process] | None = None
    ) -> Played:
        """Play ``rollouts`` concurrent rollouts by ``one``, with the engine's ``script``. ``parts``: processes of the
        stack by name; ``None`` for a client without a stack."""
        await self._engine.call("POST", "/script", orjson.dumps(asdict(script)))
        parts, pids = parts or {}, [process.pid for process in (parts or {}).values()]
        await self._settled(pids)
        before, memory = cpu_seconds(parts), 0.0
        tasks = [asyncio.create_task(one(self.row())) for _ in range(rollouts)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            memory = processes.memory_mib({pid for root in pids for pid in processes.below(root)})
            tools = [taken for task in tasks for taken in await task]
        finally:
            for task in tasks:
                task.cancel()
        await self._settled(pids)
        turns, after = rollouts * script.turns, cpu_seconds(parts)
        log = orjson.loads((await self._engine.call("GET", "/log")).body)
        assert len(log) == turns + rollouts, f"{len(log)} turns instead of {turns + rollouts}"
        ends = sorted(answered for _, _, _, answered in log)
        first, last = (int(share * len(ends)) for share in WINDOW)
        pairs = [(one, following) for one, following in itertools.pairwise(sorted(log)) if one[0] == following[0]]
        cycles = [1e3 * (following[2] - one[2]) for one, following in pairs]
        gaps = [1e3 * (following[2] - one[3]) for one, following in pairs]
        rate = (last - first) / (ends[last] - ends[first])
        cpu = {part: 1e3 * (after[part] - before[part]) / turns for part in after}
        return Played(rate, sum(cycles) / len(cycles), gaps, tools, cpu, memory)

    @staticmethod
    async def _settled(pids: list[int]) -> None:
        for _ in range(5 * GONE_S):
            if not any(processes.is_isolated(pid) for root in pids for pid in processes.below(root)):
                return
            await asyncio.sleep(0.2)
        raise TimeoutError(f"sandboxes are left after {GONE_S} s")


def cpu_seconds(parts: Mapping[str, Process]) -> dict[str, float]:
    """Return the CPU seconds so far by part of the stack. The environment is split into its server, the supervisor and
    the sandboxes."""
    used = {part: processes.core_seconds(process.pid) for part, process in parts.items()}
    if "environment" in parts:
        pid = parts["environment"].pid
        own, below = processes.precise_core_seconds(pid), used["environment"]
        ours = sorted(each for each in processes.below(pid) if SUPERVISOR in processes.command_line(each))
        supervisor = processes.precise_core_seconds(ours[0]) if ours else 0.0  # not its forks, which are younger
        used |= {"environment": own, "supervisor": supervisor, "sandboxes": below - own - supervisor}
    return used


async def measure(scale: Scale, *, with_peer: bool) -> list[Row]:
    raise_open_file_limit()
    runtime = ensure_runtime(print)
    runtime.activate()
    image = ensure_image(DEFAULT, print)
    least, most = min(scale.rollouts), max(scale.rollouts)
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        client = bare_player(f"http://127.0.0.1:{port}", make_model(folder))
        async with started(["-m", "benchmarks.stack_engine", str(port), name], [port], "/health") as engine:
            bench = Bench(engine.urls[0], folder)
            shell = await bare_shell(image, runtime, scale.commands)
            rows = [Row(f"bare shell, p{100 * share:.0f}", "ms", quantile(shell, share)) for share in (0.5, 0.99)]
            async with our_stack(bench.url, folder, image, most) as parts, our_player(parts["agent"].urls[0]) as one:
                await bench.play(Script(2), 4, one, parts)  # warm up
                ours = {number: await bench.play(Script(scale.turns), number, one, parts) for number in scale.rollouts}
                for number, turns in scale.rollouts.items():
                    steps = Script(turns, step_s=STEP_S + number * EACH_S)
                    timed = await bench.play(steps, number, one, parts)
                    bare = await bench.play(replace(steps, turns=min(turns, BARE_TURNS)), number, client)
                    rows += rows_at_steps(number, timed, bare, quantile(shell, 0.5), judged=number == least)
                rows += await meter(bench, "ours", parts, one)
            peer = None
            if with_peer:
                async with (
                    peer_stack(bench.url, folder, image, least) as parts,
                    peer_player(parts["agent"].urls[0]) as one,
                ):
                    await bench.play(Script(1), 1, one, parts)
                    peer = await bench.play(Script(scale.turns), least, one, parts)
    for number, played in ours.items():
        rows += saturated(number, played, peer if number == least else None)
    return rows


async def meter(bench: Bench, name: str, parts: Mapping[str, Process], one: Player) -> list[Row]:
    """Check the measurement with tool calls of known cost, which burn CPU or sleep, minus calls that do neither."""
    commands = ("true", BURN, f"sleep {KNOWN_MS / 1000}")
    plain, burning, sleeping = [await bench.play(Script(16, command), 1, one, parts) for command in commands]
    cpu, took = sum(burning.cpu.values()) - sum(plain.cpu.values()), median(sleeping.gaps) - median(plain.gaps)
    figures = {f"{name}: CPU of a call that burns it": cpu, f"{name}: time of a call that sleeps": took}
    return [Row(title, "ms", figure, KNOWN_MS, "known") for title, figure in figures.items()]


def saturated(rollouts: int, ours: Played, peer: Played | None) -> list[Row]:
    """Return the rows of runs with an engine without latency."""
    rows = []

    def add(title: str, unit: str, figure: Callable[[Played], float], goal: str | None = None) -> None:
        theirs = figure(peer) if peer else None
        rows.append(Row(f"{title}, {rollouts} rollouts", unit, figure(ours), theirs, PEER, goal))

    add("CPU per turn", "ms", lambda played: sum(played.cpu.values()), "<= 0.25" if peer else None)
    for part in ours.cpu:
        add(f"CPU per turn: {part}", "ms", lambda played, part=part: played.cpu[part])  # type: ignore[misc]
    add("turns", "1/s", lambda played: played.rate)
    for share in (0.5, 0.99):
        title = f"engine's answer to the rollout's next request, p{100 * share:.0f}"
        add(title, "ms", lambda played, share=share: quantile(played.gaps, share))  # type: ignore[misc]
    add("memory", "MiB", lambda played: played.memory_mib)
    return rows


def rows_at_steps(rollouts: int, ours: Played, bare: Played, shell_ms: float, *, judged: bool) -> list[Row]:
    """Return the rows of runs at an H100's speed, with goals if ``judged``. Rates are those while all rollouts are in
    flight. ``shell_ms``: milliseconds of a command in a bare shell."""
    p50, p99 = (quantile(ours.tools, share) for share in (0.5, 0.99))
    mine, theirs = (1e3 * rollouts / one.cycle_ms for one in (ours, bare))
    crowd, at_steps = f"{rollouts} rollouts", "at an H100's steps"
    return [
        Row(f"tool round trip, {crowd}, p50", "ms", p50, 3 * shell_ms + 2, SHELLS, "<= 1" if judged else None),
        Row(f"tool round trip, {crowd}, p99", "ms", p99, p50, "its p50", "<= 5" if judged else None),
        Row(f"turns {at_steps}, {crowd}", "1/s", mine, theirs, "bare client", ">= 0.97"),
        Row(f"CPU per turn {at_steps}, {crowd}", "ms", sum(ours.cpu.values())),
        *(Row(f"CPU per turn {at_steps}, {crowd}: {part}", "ms", figure) for part, figure in ours.cpu.items()),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ours", action="store_true", help="without the peer")
    arguments = options.parse_args()
    rows = asyncio.run(measure(QUICK if arguments.quick else FULL, with_peer=not arguments.ours))
    publish("stack", rows, quick=arguments.quick or arguments.ours)


if __name__ == "__main__":
    main()
