# SPDX-License-Identifier: Apache-2.0
"""Routers over two real vLLM engines on the CPU: the second part of :mod:`benchmarks.routing`.

Engines are not bound to a core, so that two of them use both of a small machine. The model is small, yet so large that
prefill takes time: one engine alone can't keep up. Every router gets the same conversations, told apart by their first
word, so that none finds another's prefixes. The routers take turns, in another order each time, since one machine
holds it all, and ours starts afresh each time. Hit rates are by the engines' own counters.

An engine is made slow by stopping its processes for two thirds of the time: one engine in one repeat, the other in the
next, since a router that fills one engine first would else win or lose by which one that is.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.fleet import Rollout, agent_trace
from nemo_gym_prorl.policy.engines.vllm_completions import VllmCompletions
from nemo_gym_prorl.policy.pool.backend import Backend
from nemo_gym_prorl.policy.pool.placement import Placement
from nemo_gym_prorl.policy.pool.pool import BackendPool


SCRIPTS = Path(__file__).parents[1] / "scripts"
REPEATS = 4
SCENARIOS = {"2 real engines": False, "2 real engines, one is slow": True}
"""Whether one of them is slow."""
ENGINE_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "OMP_NUM_THREADS": "1",
    # Bound by itself, every engine of a machine takes the same core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Lets an engine do its work in one process, where several would spin for each other on few cores.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # No connection is closed between two turns: what routers make of that is not measured here.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
}
WHEELS = [("sglang", "cache_aware"), ("vllm", "consistent_hash"), ("vllm", "sticky_least_loaded")]
RUNS_S = 0.05
"""How long a slow engine runs before it is stopped for twice as long."""
CHARACTERS = 4
"""Of a token, about."""
WORDS = Path(os.__file__).read_text().split()

type Send = Callable[[str, str, str], Awaitable[None]]
"""Sends a prompt for a rollout of a group."""

type Finish = Callable[[str], None]
"""Says that a rollout has ended."""


class Replay:
    """Plays the trace once. ``salt`` is the first word of every prompt, ``seed`` fixes all others."""

    def __init__(self, seed: int, salt: str) -> None:
        self._seed = seed
        self._salt = salt
        self.trace = agent_trace("real", groups=12, siblings=4, turns=5.0, seed=3)
        self.latencies: list[float] = []

    def _words(self, of: str) -> Callable[[int], str]:
        draw = random.Random(f"{self._seed} {of}")
        return lambda count: " " + " ".join(draw.choices(WORDS, k=count))

    async def run(self, send: Send, finish: Finish) -> float:
        """Seconds until the last rollout has ended."""
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for rollout in self.trace.rollouts:
                group.create_task(self._play(rollout, send, finish))
        return time.monotonic() - started

    async def _play(self, rollout: Rollout, send: Send, finish: Finish) -> None:
        name, group, words = f"{rollout.id} {self._salt}", f"{rollout.group} {self._salt}", self._words(rollout.id)
        text = self._salt + self._words("system")(400) + self._words(rollout.group)(150)
        for turn in rollout.turns[:20]:
            text += words(turn.observed // 8)
            asked = time.monotonic()
            await send(text, name, group)
            self.latencies.append(time.monotonic() - asked)
            text += words(turn.written // 8)
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
    """What the replays through one router came to, by repeat.

    Attributes:
        hit_rates: by the engines' own counters.
        makespans_s: seconds.
        p99_turns_s: latency that one turn in a hundred exceeds, in seconds.
    """

    hit_rates: list[float] = field(default_factory=list)
    makespans_s: list[float] = field(default_factory=list)
    p99_turns_s: list[float] = field(default_factory=list)

    async def add(self, replay: Replay, urls: list[str], send: Send, finish: Finish) -> None:
        before = await asyncio.to_thread(_counters, urls)
        self.makespans_s.append(await replay.run(send, finish))
        after = await asyncio.to_thread(_counters, urls)
        self.hit_rates.append((after[0] - before[0]) / (after[1] - before[1]))
        self.p99_turns_s.append(sorted(replay.latencies)[int(len(replay.latencies) * 0.99)])


def _counters(urls: list[str]) -> tuple[float, float]:
    """Prefix-cache hits and queries of all engines, in tokens."""
    hits = queries = 0.0
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
            text = response.read().decode()
        hits += sum(map(float, re.findall(r"^vllm:prefix_cache_hits_total\S* (\S+)$", text, re.M)))
        queries += sum(map(float, re.findall(r"^vllm:prefix_cache_queries_total\S* (\S+)$", text, re.M)))
    return hits, queries


type Figures = dict[str, dict[str, Measured]]
"""By label and router."""


def measure() -> Figures:
    """Set everything up, replay, and take it down."""
    done = subprocess.run([SCRIPTS / "setup_vllm.sh"], check=True, capture_output=True, text=True)
    python = Path(done.stdout.strip().splitlines()[-1])
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(engines(python, 2, Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        routers = {}
        if (router_python := router_environment(python)) is not None:
            for wheel, policy in WHEELS:
                address = stack.enter_context(router(router_python, wheel, policy, list(servers)))
                routers[f"{wheel}-router {policy}"] = address
        return asyncio.run(_measure(servers, routers))


async def _measure(servers: dict[str, subprocess.Popen[bytes]], routers: dict[str, str]) -> Figures:
    urls = list(servers)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        post = Poster(session)
        turns = itertools.count()

        async def round_robin(prompt: str, rollout: str, group: str) -> None:
            await post(urls[next(turns) % len(urls)], prompt, rollout)

        async def session_hash(prompt: str, rollout: str, group: str) -> None:
            digest = hashlib.sha256(rollout.encode()).digest()
            await post(urls[int.from_bytes(digest[:8]) % len(urls)], prompt, rollout)

        def through(address: str) -> Send:
            async def routed(prompt: str, rollout: str, group: str) -> None:
                await post(address, prompt, rollout)

            return routed

        peers: dict[str, Send] = {"round robin": round_robin, "session hash (Gym)": session_hash}
        peers |= {name: through(address) for name, address in routers.items()}
        # The first requests warm an engine up.
        await Replay(-1, "warm").run(round_robin, _unheard)
        figures: Figures = {}
        for label, slow in SCENARIOS.items():
            results = figures[label] = {name: Measured() for name in ("prorl", *peers)}
            order = list(results)
            for repeat in range(REPEATS):
                random.Random(repeat).shuffle(order)
                one = servers[urls[repeat % len(urls)]]
                with slowed(one) if slow else contextlib.nullcontext():
                    for name in order:
                        replay = Replay(repeat, f"{label} {repeat} {name}")
                        if name in peers:
                            await results[name].add(replay, urls, peers[name], _unheard)
                            continue
                        async with pooled(session, urls, post) as (send, finish):
                            await results[name].add(replay, urls, send, finish)
    return figures


def _unheard(rollout: str) -> None:
    """Only our router wants to know that a rollout has ended."""


@contextlib.asynccontextmanager
async def pooled(session: aiohttp.ClientSession, urls: list[str], post: Poster) -> AsyncIterator[tuple[Send, Finish]]:
    """Our router, new."""
    placement = Placement(BackendPool(), VllmCompletions(session, "tiny"))
    placement.start()
    for index, url in enumerate(urls):
        placement.apply(placement.pool.add(f"e{index}", url))

    async def send(prompt: str, rollout: str, group: str) -> None:
        async def call(backend: Backend) -> None:
            await post(backend.url, prompt, rollout)

        await placement.run(rollout, group, call, len(prompt) // CHARACTERS)

    def finish(rollout: str) -> None:
        placement.apply(placement.pool.finish(rollout))

    try:
        yield send, finish
    finally:
        await placement.aclose()


@contextlib.contextmanager
def slowed(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A server and its workers run a third of the time."""
    over = threading.Event()

    def stutter() -> None:
        while not over.wait(RUNS_S):
            os.killpg(process.pid, signal.SIGSTOP)
            over.wait(2 * RUNS_S)
            os.killpg(process.pid, signal.SIGCONT)

    thread = threading.Thread(target=stutter)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


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
        while not serves(f"{url}/v1/models"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{wheel}-router with {policy} did not start")
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
def engines(python: Path, count: int, folder: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Real vLLM servers over one small model, by URL."""
    model = folder / "model"
    shape = ["--width", "384", "--layers", "6"]
    subprocess.run([python, SCRIPTS / "make_tiny_model.py", model, *shape], check=True, capture_output=True)
    servers: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for _ in range(count):
            port = free_port()
            command = [
                *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
                *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
                *("--dtype", "float32", "--enforce-eager", "--max-model-len", "16384"),
                *("--distributed-executor-backend", "uni"),
            ]
            with (folder / f"{port}.log").open("wb") as out:
                servers[f"http://127.0.0.1:{port}"] = subprocess.Popen(
                    command,
                    env=os.environ | ENGINE_VARIABLES,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                    cwd=folder,
                )
        deadline = time.monotonic() + 300
        while not all(serves(f"{url}/health") for url in servers):
            if time.monotonic() > deadline:
                logs = [path.read_text(errors="replace")[-1000:] for path in folder.glob("*.log")]
                raise SystemExit("the engines did not start: " + "\n".join(logs))
            time.sleep(1)
        yield servers
    finally:
        for process in servers.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


def router_environment(python: Path) -> Path | None:
    """A cached environment with both router wheels, next to vLLM's; ``None`` where they do not install."""
    home = python.parents[2] / "routers"
    if not (home / "complete").is_file():
        try:
            subprocess.run([python, "-m", "venv", "--clear", home], check=True, capture_output=True)
            pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            subprocess.run([*pip, "sglang-router", "vllm-router"], check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            print(f"the router wheels do not install here: {error.stderr.decode()[-300:]}")
            return None
        (home / "complete").touch()
    return home / "bin" / "python"


@contextlib.asynccontextmanager
async def server(module: str, *arguments: str) -> AsyncIterator[tuple[str, int]]:
    """A benchmark's own server as a process, begun with ``--serve KIND PORT``; yields its URL and process id.

    Args:
        module: that has it.
        arguments: the kind, and what follows the port.
    """
    port, (kind, *others) = free_port(), arguments
    command = [sys.executable, "-m", module, "--serve", kind, str(port), *others]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(180):
            while not await asyncio.to_thread(serves, f"http://127.0.0.1:{port}/up"):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        await process.wait()
