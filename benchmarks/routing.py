# SPDX-License-Identifier: Apache-2.0
"""Which router keeps prefix caches warm and nobody waiting: ours against the others, on agent traffic.

Two parts. Real: two vLLM engines on the CPU, their own prefix-cache counters, and the ``sglang-router`` and
``vllm-router`` wheels as their authors ship them, where they install (Python 3.11, in a cached environment).
Simulated: 16 and 64 engines with a KV capacity (:mod:`benchmarks.fleet`), where an engine dies, is slow, or joins
late.

Run with ``python -m benchmarks.routing [--quick]``; quick is the simulation of 16 engines alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import re
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp

from benchmarks.fleet import Fleet, Incident, Rollout, Trace, agent_trace, best_hit_rate
from benchmarks.report import Figure, publish
from benchmarks.routers import PEERS, Ours, StickyLeastLoaded
from nemo_gym_prorl.policy.backends import Backend, BackendPool
from nemo_gym_prorl.policy.engines import VllmCompletions
from nemo_gym_prorl.policy.placement import Placement


SCRIPTS = Path(__file__).parents[1] / "scripts"
NOISE = 1.02
"""A makespan or latency within 2 % of the best counts as equal: the order of equal choices moves it as much."""
WORDS = Path(os.__file__).read_text().split()

type Send = Callable[[str, str, str], Awaitable[None]]
"""Sends a prompt for a rollout of a group."""


def simulated(quick: bool) -> list[Figure]:
    """Every scenario at every size."""
    figures = []
    for size in (16,) if quick else (16, 64):
        burst = agent_trace("burst", groups=4 * size)
        stream = agent_trace("stream", groups=8 * size, window_s=300.0, seed=1)
        scenarios: list[tuple[str, Trace, dict[str, object]]] = [
            ("burst", burst, {}),
            ("stream", stream, {}),
            ("small caches", burst, {"capacity": 150_000}),
            ("one dies", burst, {"incidents": (Incident(60.0, "die", 3),)}),
            ("one is slow", burst, {"incidents": (Incident(0.0, "slow", 3),)}),
            ("one joins late", burst, {"incidents": (Incident(60.0, "join", 3),)}),
        ]
        for label, trace, options in scenarios:
            best = best_hit_rate(trace, size, StickyLeastLoaded())
            ours, *others = (Fleet(trace, size, router(), **options).run() for router in (Ours, *PEERS))
            peers = dict(zip((peer.name for peer in PEERS), others, strict=True))
            where = f"{size} engines, {label}"
            figures += [
                Figure(
                    f"{where}: hit rate",
                    ours.hit_rate,
                    f"of {best:.3f} possible",
                    ">= 0.98",
                    ours.hit_rate / best,
                    {name: outcome.hit_rate for name, outcome in peers.items()},
                ),
                _against(f"{where}: makespan", ours.makespan_s, {n: o.makespan_s for n, o in peers.items()}),
                _against(f"{where}: p99 turn", ours.p99_turn_s, {n: o.p99_turn_s for n, o in peers.items()}),
            ]
    return figures


def _against(name: str, ours: float, peers: dict[str, float]) -> Figure:
    return Figure(name, ours, "s", f"<= {NOISE}", ours / min(peers.values()), peers)


# Real engines


class Replay:
    """Replays one shape of trace, with fresh words for every router so that none finds another's prefixes."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.trace = agent_trace("real", groups=6, siblings=4, turns=5.0, seed=3)
        self._system = self._words(400)
        self._prompts = {rollout.group: self._words(150) for rollout in self.trace.rollouts}
        self.latencies: list[float] = []

    def _words(self, count: int) -> str:
        return " " + " ".join(self._rng.choices(WORDS, k=count))

    async def run(self, send: Send) -> float:
        """Seconds until the last rollout has ended."""
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for rollout in self.trace.rollouts:
                group.create_task(self._play(rollout, send))
        return time.monotonic() - started

    async def _play(self, rollout: Rollout, send: Send) -> None:
        text = self._system + self._prompts[rollout.group]
        for turn in rollout.turns[:20]:
            text += self._words(turn.observed // 8)
            asked = time.monotonic()
            await send(text, rollout.id, rollout.group)
            self.latencies.append(time.monotonic() - asked)
            text += self._words(turn.written // 8)
            await asyncio.sleep(min(turn.tool_s / 10, 2.0))


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


async def measured(urls: list[str], replay: Replay, send: Send) -> tuple[float, float, float]:
    """Hit rate by the engines' own counters, makespan and p99 turn latency, in seconds."""
    before = await asyncio.to_thread(_counters, urls)
    makespan = await replay.run(send)
    after = await asyncio.to_thread(_counters, urls)
    replay.latencies.sort()
    p99 = replay.latencies[int(len(replay.latencies) * 0.99)]
    return (after[0] - before[0]) / (after[1] - before[1]), makespan, p99


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
    """One replay per router, all over the same two engines."""
    results: dict[str, tuple[float, float, float]] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        post = Poster(session)
        placement = Placement(BackendPool(), VllmCompletions(session, "tiny"))
        placement.start()
        for index, url in enumerate(urls):
            placement.apply(placement.pool.add(f"e{index}", url))

        async def ours(prompt: str, rollout: str, group: str) -> None:
            async def call(backend: Backend) -> None:
                await post(backend.url, prompt, rollout)

            await placement.run(rollout, group, call)

        turns = itertools.count()

        async def round_robin(prompt: str, rollout: str, group: str) -> None:
            await post(urls[next(turns) % len(urls)], prompt, rollout)

        async def session_hash(prompt: str, rollout: str, group: str) -> None:
            await post(urls[random.Random(rollout).randrange(len(urls))], prompt, rollout)

        seeds = itertools.count()
        results["prorl"] = await measured(urls, Replay(next(seeds)), ours)
        await placement.aclose()
        results["round robin"] = await measured(urls, Replay(next(seeds)), round_robin)
        results["session hash (Gym)"] = await measured(urls, Replay(next(seeds)), session_hash)
        for wheel, policy in (
            ("sglang", "cache_aware"),
            ("vllm", "consistent_hash"),
            ("vllm", "sticky_least_loaded"),
        ):
            if router_python is None:
                continue
            with router(router_python, wheel, policy, urls) as address:

                async def routed(prompt: str, rollout: str, group: str, at: str = address) -> None:
                    await post(at, prompt, rollout)

                results[f"{wheel}-router {policy}"] = await measured(urls, Replay(next(seeds)), routed)
    figures = []
    for index, (name, unit) in enumerate((("hit rate", ""), ("makespan", "s"), ("p99 turn", "s"))):
        peers = {peer: values[index] for peer, values in results.items() if peer != "prorl"}
        value = results["prorl"][index]
        if index == 0:
            figures.append(
                Figure(f"2 real engines: {name}", value, unit, ">= 0.98", value / max(peers.values()), peers)
            )
        else:
            figures.append(_against(f"2 real engines: {name}", value, peers))
    return figures


@contextlib.contextmanager
def router(python: Path, wheel: str, policy: str, urls: list[str]) -> Iterator[str]:
    """One of the router wheels in front of the engines."""
    port, metrics = _free_port(), _free_port()
    command = [
        *(str(python), "-m", f"{wheel}_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
        *("--policy", policy, "--prometheus-port", str(metrics), "--worker-urls", *urls),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while not _serves(f"{url}/v1/models") and time.monotonic() < deadline:
            time.sleep(0.3)
        yield url
    finally:
        process.terminate()
        process.wait()


def _serves(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _free_port() -> int:
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
            port = _free_port()
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
        while not all(_serves(f"{url}/health") for url in urls):
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
    publish("routing", figures, packages=("nemo-gym",), quick=quick)


if __name__ == "__main__":
    main()
