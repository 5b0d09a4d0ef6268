# SPDX-License-Identifier: Apache-2.0
"""Which router keeps prefix caches warm and nobody waiting: ours against the others, on agent traffic.

Two parts. Real: two vLLM engines on the CPU, their own prefix-cache counters, and the ``sglang-router`` and
``vllm-router`` wheels as their authors ship them, where they install (Python 3.11, in a cached environment). The
routers take turns, in another order each time; figures are medians over the repeats, since one machine holds it all.
Simulated: 16 and 64 engines with a KV capacity (:mod:`benchmarks.fleet`), where an engine dies, is slow, or joins
late; and with caches that are small (all prefixes just fit, evenly spread) or scarce (they fit the fleet as a whole,
but not where placing by number of rollouts puts them).

The best possible hit rate is that of a fleet whose engines share one boundless cache, which bounds every router from
above whatever its caches hold. One cache of the fleet's pooled capacity comes within 0.02 of it even where caches are
scarce, so what is missing there is lost by spreading tokens unevenly, and is a router's to win.

Run with ``python -m benchmarks.routing [--quick]``; quick is the simulation of 16 engines alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import os
import random
import re
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.fleet import Fleet, Incident, Outcome, Rollout, agent_trace, best_hit_rate
from benchmarks.report import Figure, publish
from benchmarks.routers import PEERS, Ours, StickyLeastLoaded
from nemo_gym_prorl.policy.backend import Backend
from nemo_gym_prorl.policy.backends import BackendPool
from nemo_gym_prorl.policy.engines import VllmCompletions
from nemo_gym_prorl.policy.placement import Placement


SCRIPTS = Path(__file__).parents[1] / "scripts"
SEEDS = 3
REPEATS = 5
NOISE = 1.02
"""A makespan or latency within 2 % of the best counts as equal: the order of equal choices moves it as much."""
WORDS = Path(os.__file__).read_text().split()

type Send = Callable[[str, str, str], Awaitable[None]]
"""Sends a prompt for a rollout of a group."""


SCENARIOS: dict[str, tuple[float, dict[str, Any]]] = {
    "burst": (0.0, {}),
    "stream": (300.0, {}),
    "small caches": (0.0, {"capacity": 150_000}),
    "scarce caches": (0.0, {"capacity": 100_000}),
    "one dies": (0.0, {"incidents": (Incident(60.0, "die", 3),)}),
    "one is slow": (0.0, {"incidents": (Incident(0.0, "slow", 3),)}),
    "one joins late": (0.0, {"incidents": (Incident(60.0, "join", 3),)}),
}
"""Over how many seconds the groups arrive, and what the fleet is like."""


def simulated(quick: bool) -> list[Figure]:
    """Every scenario at every size, as means over several traces."""
    figures = []
    sizes, seeds = ((16,), 1) if quick else ((16, 64), SEEDS)
    keys = list(itertools.product(sizes, SCENARIOS))
    jobs = [(size, label, seed) for size, label in keys for seed in range(seeds)]
    with ProcessPoolExecutor() as processes:
        replayed = list(processes.map(_replayed, *zip(*jobs, strict=True)))
    for index, (size, label) in enumerate(keys):
        runs = replayed[index * seeds : (index + 1) * seeds]
        hits, makespans, latencies = (
            {name: statistics.mean(getattr(outcomes[name], field) for _, outcomes in runs) for name in runs[0][1]}
            for field in ("hit_rate", "makespan_s", "p99_turn_s")
        )
        where, ours = f"{size} engines, {label}", hits.pop(Ours.name)
        best = statistics.mean(best for best, _ in runs)
        figures.append(Figure(f"{where}: hit rate", ours, f"of {best:.3f} possible", ">= 0.98", ours / best, hits))
        figures.append(_against(f"{where}: makespan", makespans.pop(Ours.name), makespans))
        figures.append(_against(f"{where}: p99 turn", latencies.pop(Ours.name), latencies))
    return figures


def _replayed(size: int, label: str, seed: int) -> tuple[float, dict[str, Outcome]]:
    """The best hit rate of one trace, and what every router makes of it."""
    window_s, options = SCENARIOS[label]
    trace = agent_trace(label, groups=(8 if window_s else 4) * size, window_s=window_s, seed=seed)
    outcomes = {router.name: Fleet(trace, size, router(), **options).run() for router in (Ours, *PEERS)}
    return best_hit_rate(trace, size, StickyLeastLoaded()), outcomes


def _against(name: str, ours: float, peers: dict[str, float]) -> Figure:
    return Figure(name, ours, "s", f"<= {NOISE}", ours / min(peers.values()), peers)


def at_their_best(figures: list[Figure]) -> list[Figure]:
    """For each peer, the makespan or latency in which ours is furthest ahead of it: peer's over ours."""
    leads: dict[str, tuple[float, str]] = {}
    for figure in figures:
        for peer, value in figure.peers.items():
            if figure.unit == "s":
                leads[peer] = max(leads.get(peer, (0.0, "")), (value / figure.value, figure.name))
    return [Figure(f"ahead of {peer} in {name}", lead, "times", ">= 1.02") for peer, (lead, name) in leads.items()]


# Real engines


class Replay:
    """Replays one shape of trace, with fresh words for every router so that none finds another's prefixes."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng = random.Random(seed)
        self.trace = agent_trace("real", groups=6, siblings=4, turns=5.0, seed=3)
        self._system = self._words(400)
        self._prompts = {rollout.group: self._words(150) for rollout in self.trace.rollouts}
        self.latencies: list[float] = []

    def _words(self, count: int) -> str:
        return " " + " ".join(self._rng.choices(WORDS, k=count))

    async def run(self, send: Send, finish: Callable[[str], None]) -> float:
        """Seconds until the last rollout has ended."""
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for rollout in self.trace.rollouts:
                group.create_task(self._play(rollout, send, finish))
        return time.monotonic() - started

    async def _play(self, rollout: Rollout, send: Send, finish: Callable[[str], None]) -> None:
        name = f"{rollout.id}-{self._seed}"
        text = self._system + self._prompts[rollout.group]
        for turn in rollout.turns[:20]:
            text += self._words(turn.observed // 8)
            asked = time.monotonic()
            await send(text, name, f"{rollout.group}-{self._seed}")
            self.latencies.append(time.monotonic() - asked)
            text += self._words(turn.written // 8)
            await asyncio.sleep(min(turn.tool_s / 10, 2.0))
        finish(name)


def body(prompt: str, rollout: str) -> dict[str, object]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "user": rollout}


class Poster:
    """Posts prompts and fails on anything but an answer."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def __call__(self, url: str, prompt: str, rollout: str) -> None:
        headers = {"x-session-id": rollout}
        async with self._session.post(
            f"{url}/v1/completions", json=body(prompt, rollout), headers=headers
        ) as response:
            if response.status != 200:
                raise RuntimeError(f"{url} answered {response.status}: {(await response.text())[:300]}")
            await response.read()


@dataclass
class Measured:
    """What the replays through one router came to, by repeat."""

    hit_rates: list[float] = field(default_factory=list)
    makespans: list[float] = field(default_factory=list)
    p99_turns: list[float] = field(default_factory=list)

    async def replay(self, urls: list[str], seed: int, send: Send, finish: Callable[[str], None]) -> None:
        replay = Replay(seed)
        before = await asyncio.to_thread(_counters, urls)
        self.makespans.append(await replay.run(send, finish))
        after = await asyncio.to_thread(_counters, urls)
        self.hit_rates.append((after[0] - before[0]) / (after[1] - before[1]))
        self.p99_turns.append(sorted(replay.latencies)[int(len(replay.latencies) * 0.99)])

    def figures(self) -> tuple[float, float, float]:
        """Medians: hit rate by the engines' own counters, makespan and p99 turn latency in seconds."""
        hits, makespan, p99 = map(statistics.median, (self.hit_rates, self.makespans, self.p99_turns))
        return hits, makespan, p99


def _counters(urls: list[str]) -> tuple[float, float]:
    """Prefix-cache hits and queries of all engines, in tokens."""
    hits = queries = 0.0
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
            text = response.read().decode()
        hits += sum(map(float, re.findall(r"^vllm:prefix_cache_hits_total\S* (\S+)$", text, re.M)))
        queries += sum(map(float, re.findall(r"^vllm:prefix_cache_queries_total\S* (\S+)$", text, re.M)))
    return hits, queries


async def real(router_python: Path | None, urls: list[str]) -> list[Figure]:
    """The routers in turn, several times over, all over the same two engines."""
    with contextlib.ExitStack() as stack:
        wheels = [("sglang", "cache_aware"), ("vllm", "consistent_hash"), ("vllm", "sticky_least_loaded")]
        addresses = {
            f"{wheel}-router {policy}": stack.enter_context(router(router_python, wheel, policy, urls))
            for wheel, policy in wheels
            if router_python is not None
        }
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            post = Poster(session)
            turns = itertools.count()
            placement = Placement(BackendPool(), VllmCompletions(session, "tiny"))
            placement.start()
            for index, url in enumerate(urls):
                placement.apply(placement.pool.add(f"e{index}", url))

            async def ours(prompt: str, rollout: str, group: str) -> None:
                async def call(backend: Backend) -> None:
                    await post(backend.url, prompt, rollout)

                await placement.run(rollout, group, call)

            async def round_robin(prompt: str, rollout: str, group: str) -> None:
                await post(urls[next(turns) % len(urls)], prompt, rollout)

            async def session_hash(prompt: str, rollout: str, group: str) -> None:
                digest = hashlib.sha256(rollout.encode()).digest()
                await post(urls[int.from_bytes(digest[:8]) % len(urls)], prompt, rollout)

            def through(address: str) -> Send:
                async def routed(prompt: str, rollout: str, group: str) -> None:
                    await post(address, prompt, rollout)

                return routed

            sends: dict[str, Send] = {"prorl": ours, "round robin": round_robin, "session hash (Gym)": session_hash}
            sends |= {name: through(address) for name, address in addresses.items()}
            results = {name: Measured() for name in sends}

            def finish(rollout: str) -> None:
                placement.apply(placement.pool.finish(rollout))

            await Measured().replay(urls, -1, round_robin, finish)
            order = list(sends)
            for repeat in range(REPEATS):
                random.Random(repeat).shuffle(order)
                for index, name in enumerate(order):
                    await results[name].replay(urls, repeat * len(sends) + index, sends[name], finish)
            await placement.aclose()
    values = {name: result.figures() for name, result in results.items()}
    hits, makespans, latencies = ({name: value[index] for name, value in values.items()} for index in range(3))
    value = hits.pop("prorl")
    return [
        Figure("2 real engines: hit rate", value, "", ">= 0.98", value / max(hits.values()), hits),
        _against("2 real engines: makespan", makespans.pop("prorl"), makespans),
        _against("2 real engines: p99 turn", latencies.pop("prorl"), latencies),
    ]


@contextlib.contextmanager
def router(python: Path, wheel: str, policy: str, urls: list[str]) -> Iterator[str]:
    """One of the router wheels in front of the engines."""
    port, metrics = free_port(), free_port()
    command = [
        *(str(python), "-m", f"{wheel}_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
        *("--policy", policy, "--prometheus-port", str(metrics), "--worker-urls", *urls),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while not serves(f"{url}/v1/models") and time.monotonic() < deadline:
            time.sleep(0.3)
        yield url
    finally:
        process.terminate()
        process.wait()


def serves(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def engines(python: Path, count: int, folder: Path) -> Iterator[list[str]]:
    """Real vLLM servers over one tiny model; ``PRORL_TEST_ENGINES=URL,URL`` takes those that run already."""
    if running := os.environ.get("PRORL_TEST_ENGINES"):
        yield running.split(",")
        return
    model = folder / "model"
    subprocess.run([python, SCRIPTS / "make_tiny_model.py", model], check=True, capture_output=True)
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    processes, urls = [], []
    try:
        for _ in range(count):
            port = free_port()
            command = [
                *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
                *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
                *("--dtype", "float32", "--enforce-eager", "--max-model-len", "16384"),
            ]
            out = (folder / f"{port}.log").open("wb")
            processes.append(
                subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True, cwd=folder)
            )
            urls.append(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + 300
        while not all(serves(f"{url}/health") for url in urls):
            if time.monotonic() > deadline:
                raise SystemExit(f"the engines did not start; see {folder}")
            time.sleep(1)
        yield urls
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


def router_environment(python: Path) -> Path | None:
    """A cached environment with both router wheels, next to vLLM's; ``None`` where they do not install."""
    home = python.parents[2] / "routers"
    if not (home / "complete").is_file():
        try:
            subprocess.run([python, "-m", "venv", "--clear", home], check=True, capture_output=True)
            install = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "sglang-router", "vllm-router"]
            subprocess.run(install, check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            print(f"the router wheels do not install here: {error.stderr.decode()[-300:]}")
            return None
        (home / "complete").touch()
    return home / "bin" / "python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the simulation of 16 engines alone")
    quick = parser.parse_args().quick
    figures = simulated(quick)
    if not quick:
        done = subprocess.run([SCRIPTS / "setup_vllm.sh"], check=True, capture_output=True, text=True)
        python = Path(done.stdout.strip().splitlines()[-1])
        with tempfile.TemporaryDirectory() as folder, engines(python, 2, Path(folder)) as urls:
            figures += asyncio.run(real(router_environment(python), urls))
    figures += at_their_best(figures)
    load = os.getloadavg()
    figures.append(Figure("load average while measuring, 15 minutes", load[2], "", None))
    publish("routing", figures, packages=("nemo-gym",), quick=quick)


if __name__ == "__main__":
    main()
