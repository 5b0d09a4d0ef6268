# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Routers over two real vLLM engines on the CPU: ``prorl_model`` against the ``sglang-router`` and ``vllm-router``
wheels as their authors ship them, where they install. :mod:`benchmarks.routing` has the simulated fleets.

Each router is a server of its own, ours too, and all get the same requests: a conversation over
``/v1/chat/completions``, with a header that names the session. Nobody is told of groups, nor when a rollout ends.
Round robin and the session hash are played by the client itself, which saves them a hop. Every router gets the same
words, told apart by the first one, so that none finds another's prefixes; what an engine samples goes back as text.
The routers take turns, in another order each time, since one machine holds it all, and ours starts afresh each time.
Hit rates are by the engines' own counters.

One engine is slow in one repeat, the other in the next, since a router that fills one engine first would else win or
lose by which one that is. Each repeat has a trace of its own.

Hit rates are means, and held against the best peer's of the same repeats. Seconds scatter far more than goals allow
for, and the best of five peers would often be the luckiest. So one peer is named beforehand, the p99 is that of the
turns of all repeats, and a goal is missed if the 95 % confidence interval of the ratio lies above it, undecided if it
only reaches that far down. The others, whom no seconds are held against, play in each fourth repeat. The figures below
are older than that: four repeats of traces twice as long, their means, against the best peer of each line.

Run with ``python -m benchmarks.routing_real [--quick]``; quick plays a fraction of a tuning trace once, with no slow
engine, and takes as long as two engines take to start.
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
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import uvicorn
from fastapi import Response
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import DictConfig

from benchmarks.engines import Rollout, Trace
from benchmarks.real_engines import (
    SCRIPTS,
    WHEELS,
    WORDS,
    engines,
    router,
    router_environment,
    server,
    slowed,
)
from benchmarks.report import Figure, publish
from benchmarks.routing import BOUND, HIT_RATE
from benchmarks.statistic import interval, jackknife
from benchmarks.traces import agent_trace
from responses_api_models.prorl_model.app import ProrlModel, ProrlModelConfig


MODULE = "benchmarks.routing_real"
OURS = "prorl"
TUNING_SEED = 3
"""Of the trace that the router was tuned with; never reported."""
REPORT_SEEDS = tuple(range(201, 213))
"""One trace for each repeat."""
NAMED = "session hash (Gym)"
"""Whose seconds ours are held against: what a Gym server with several engines does, and of all peers the one with the
best makespans and p99 in the runs before it was named, both scenarios taken together."""
OTHERS = 4
"""In each so many-th repeat all routers play."""
GROUPS = 6
"""Prompts of a trace, 4 rollouts each."""
SCENARIOS = {"2 real engines": False, "2 real engines, one is slow": True}
"""Whether one of them is slow."""
SAMPLED = 8
"""Tokens per turn."""

type Send = Callable[[list[dict[str, str]], str], Awaitable[str]]
"""Sends a conversation in a session; what was answered."""


def trace(seed: int, groups: int) -> Trace:
    return agent_trace("real", groups=groups, siblings=4, turns=5.0, seed=seed)


class Replay:
    """Plays a trace once. ``salt`` is the first word of every conversation, ``seed`` fixes all others."""

    def __init__(self, played: Trace, seed: int, salt: str) -> None:
        self._trace = played
        self._seed = seed
        self._salt = salt
        self.latencies: list[float] = []

    def _words(self, of: str) -> Callable[[int], str]:
        draw = random.Random(f"{self._seed} {of}")
        return lambda count: " ".join(draw.choices(WORDS, k=count))

    async def run(self, send: Send) -> float:
        """Seconds until the last rollout has ended."""
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for rollout in self._trace.rollouts:
                group.create_task(self._play(rollout, send))
        return time.monotonic() - started

    async def _play(self, rollout: Rollout, send: Send) -> None:
        words = self._words(rollout.id)
        messages = [
            {"role": "system", "content": f"{self._salt} {self._words('system')(400)}"},
            {"role": "user", "content": self._words(rollout.group)(150)},
        ]
        for turn in rollout.turns[:20]:
            asked = time.monotonic()
            answer = await send(messages, f"{rollout.id} {self._salt}")
            self.latencies.append(time.monotonic() - asked)
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": words((turn.observed + turn.written) // 8 + 1)},
            ]
            await asyncio.sleep(min(turn.tool_s / 10, 2.0))


@dataclass
class Measured:
    """What the replays through one router came to, by repeat.

    Attributes:
        hit_rates: by the engines' own counters.
        makespans_s: seconds.
        latencies_s: seconds that each turn took.
    """

    hit_rates: dict[int, float] = field(default_factory=dict)
    makespans_s: dict[int, float] = field(default_factory=dict)
    latencies_s: dict[int, list[float]] = field(default_factory=dict)

    @property
    def repeats(self) -> list[int]:
        """Those in which it played."""
        return [*self.makespans_s]

    async def add(self, repeat: int, replay: Replay, urls: list[str], send: Send) -> None:
        before = await asyncio.to_thread(_counters, urls)
        self.makespans_s[repeat] = await replay.run(send)
        after = await asyncio.to_thread(_counters, urls)
        self.hit_rates[repeat] = (after[0] - before[0]) / (after[1] - before[1])
        self.latencies_s[repeat] = replay.latencies

    def makespan_s(self, repeats: Sequence[int]) -> float:
        """The mean of these repeats."""
        return statistics.mean(self.makespans_s[repeat] for repeat in repeats)

    def turn_s(self, share: float, repeats: Sequence[int]) -> float:
        """What this share of all turns of these repeats stays within."""
        turns = sorted(itertools.chain.from_iterable(self.latencies_s[repeat] for repeat in repeats))
        return turns[int(len(turns) * share)]


def _counters(urls: list[str]) -> tuple[float, float]:
    """Prefix-cache hits and queries of all engines, in tokens."""
    hits = queries = 0.0
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
            text = response.read().decode()
        hits += sum(map(float, re.findall(r"^vllm:prefix_cache_hits_total\S* (\S+)$", text, re.M)))
        queries += sum(map(float, re.findall(r"^vllm:prefix_cache_queries_total\S* (\S+)$", text, re.M)))
    return hits, queries


type Results = dict[str, dict[str, Measured]]
"""By label and router."""


def measure(quick: bool) -> Results:
    """Set everything up, replay, and take it down."""
    done = subprocess.run([SCRIPTS / "setup_vllm.sh"], check=True, capture_output=True, text=True)
    python = Path(done.stdout.strip().splitlines()[-1])
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = stack.enter_context(engines(python, 2, folder))
        routers = {}
        if (router_python := router_environment(python)) is not None:
            for wheel, policy in WHEELS:
                address = stack.enter_context(router(router_python, wheel, policy, list(servers)))
                routers[f"{wheel}-router {policy}"] = address
        return asyncio.run(_measure(servers, routers, str(folder / "model"), quick))


async def _measure(
    servers: dict[str, subprocess.Popen[bytes]], routers: dict[str, str], model: str, quick: bool
) -> Results:
    urls = list(servers)
    seeds, groups = ((TUNING_SEED,), 2) if quick else (REPORT_SEEDS, GROUPS)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        turns = itertools.count()

        def through(choose: Callable[[str], str]) -> Send:
            async def send(messages: list[dict[str, str]], name: str) -> str:
                return await _ask(session, choose(name), messages, name)

            return send

        def hashed(name: str) -> str:
            return urls[int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % len(urls)]

        peers = {
            "round robin": through(lambda _: urls[next(turns) % len(urls)]),
            "session hash (Gym)": through(hashed),
            **{name: through(lambda _, url=url: url) for name, url in routers.items()},
        }
        # The first requests warm an engine up.
        await Replay(trace(TUNING_SEED, 2), -1, "warm").run(peers["round robin"])
        results: Results = {}
        for label, slow in list(SCENARIOS.items())[: 1 if quick else None]:
            found = results[label] = {name: Measured() for name in (OURS, *peers)}
            order = list(found)
            for repeat, seed in enumerate(seeds):
                random.Random(repeat).shuffle(order)
                for name in order if repeat % OTHERS == 0 else [one for one in order if one in (OURS, NAMED)]:
                    replay = Replay(trace(seed, groups), repeat, f"{label} {repeat} {name}")
                    async with contextlib.AsyncExitStack() as stack:
                        if name == OURS:
                            url, _ = await stack.enter_async_context(server(MODULE, "model", model, *urls))
                            send = through(lambda _, url=url: url)
                        else:
                            send = peers[name]
                        # Whatever a router puts off until it is used is done by then.
                        await send([{"role": "user", "content": f"{label} {repeat} {name}"}], "first")
                        if slow:
                            stack.enter_context(slowed(servers[urls[repeat % len(urls)]]))
                        await found[name].add(repeat, replay, urls, send)
                    print(f"{label}, repeat {repeat + 1}, {name}: {found[name].makespans_s[repeat]:.1f} s", flush=True)
    return results


async def _ask(session: aiohttp.ClientSession, url: str, messages: list[dict[str, str]], name: str) -> str:
    """One turn; fails on anything but an answer."""
    body = {"model": "tiny", "messages": messages, "max_tokens": SAMPLED}
    headers = {"x-session-id": name, "x-rollout-id": name}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {(await response.text())[:300]}")
        return (await response.json())["choices"][0]["message"]["content"] or ""


def serve(port: int, model: str, urls: list[str]) -> None:
    """Run ``prorl_model``, in a process of its own as the other routers are."""
    # Gym's HTTP client asks for the deployment's configuration; there is none here.
    os.environ["NEMO_GYM_CONFIG_DICT"] = "{}"
    config = ProrlModelConfig(
        host="127.0.0.1",
        port=port,
        name="policy_model",
        entrypoint="app.py",
        base_url=[f"{url}/v1" for url in urls],
        model="tiny",
        return_token_id_information=False,
        uses_reasoning_parser=False,
        policy={"tokenizer": model, "engine": "vllm"},
    )
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=DictConfig({})
    )
    ours = ProrlModel(config=config, server_client=client)
    app = ours.setup_webserver()

    @app.get("/up")
    async def up() -> Response:
        return Response()

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def figures(results: Results) -> list[Figure]:
    """Of all repeats."""
    made = []
    for label, measured in results.items():
        everybody = measured.values()
        shared = [repeat for repeat in measured[OURS].repeats if all(repeat in each.repeats for each in everybody)]
        hits = {name: statistics.mean(each.hit_rates[repeat] for repeat in shared) for name, each in measured.items()}
        own = hits.pop(OURS)
        best = max(hits, key=lambda peer: hits[peer])
        spread = interval([measured[OURS].hit_rates[one] / measured[best].hit_rates[one] for one in shared])
        made.append(
            Figure(f"{label}: hit rate", own, "", f">= {HIT_RATE}", own / hits[best], hits, goal_interval=spread)
        )
        made.append(_against_named(f"{label}: makespan", measured, Measured.makespan_s))
        made.append(_against_named(f"{label}: p99 turn", measured, lambda each, of: each.turn_s(0.99, of)))
        medians = {name: each.turn_s(0.5, each.repeats) for name, each in measured.items()}
        made.append(Figure(f"{label}: p50 turn", medians.pop(OURS), "s", peers=medians))
    return made


def _against_named(
    name: str, measured: dict[str, Measured], seconds: Callable[[Measured, Sequence[int]], float]
) -> Figure:
    """Ours over the named peer."""
    ratio, spread = jackknife(
        lambda chosen: seconds(measured[OURS], chosen) / seconds(measured[NAMED], chosen), len(measured[OURS].repeats)
    )
    values = {router: seconds(each, each.repeats) for router, each in measured.items()}
    figure = Figure(f"{name}, over {NAMED}", values.pop(OURS), "s", f"<= {BOUND}", ratio, values, goal_interval=spread)
    figure.undecided = figure.met is False and spread is not None and ratio - spread <= BOUND
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fraction of a tuning trace, once")
    parser.add_argument("--serve", nargs="+", metavar="KIND PORT MODEL URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        _, port, model, *urls = arguments.serve
        serve(int(port), model, urls)
        return
    # Ended in any way, it takes the engines along, which have sessions of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    publish("routing_real", figures(measure(arguments.quick)), packages=("nemo-gym",), quick=arguments.quick)


if __name__ == "__main__":
    main()
