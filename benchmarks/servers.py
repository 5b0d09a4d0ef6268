# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Servers that benchmarks start as processes: those of this package, Gym's, and stand-ins for model and engine.

A server of Gym or of this package is its ``app.py`` with the merged configuration in an environment variable, as Gym
starts it. Ray is not started, since Ray has no part in a turn but uses CPU (``without_ray/sitecustomize.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.model_agents import KeepAliveClient
from benchmarks.stand_in_engine import MODEL, make_model


REPO = Path(__file__).parents[1]
START_S = 180
"""Seconds that a server may take to start: an ``app.py`` imports 2,000 modules, a minute on a busy machine."""
AGENT, PEER_AGENT = "prorl_agent", "simple_agent"
MODEL_SERVER, PEER_MODEL_SERVER = "prorl_model", "vllm_model"
_LOCAL = {"entrypoint": "app.py", "host": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class Process:
    """Server process: the URLs at which it answers, and its pid."""

    urls: list[str]
    pid: int

    def core_seconds(self) -> float:
        """Return the CPU seconds so far of the process and its live descendants, including reparented orphans."""
        return sum(map(processes.precise_core_seconds, processes.below(self.pid)))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def started(
    command: list[str], ports: list[int], path: str = "/", variables: Mapping[str, str] | None = None
) -> AsyncIterator[Process]:
    """Run the Python interpreter with the arguments ``command`` within the context; yield once the last of ``ports``
    answers ``path`` with any status. With ``variables``, the environment of a Gym server, Ray is not started."""
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    paths = [*([str(REPO / "benchmarks/without_ray")] if variables else []), str(REPO)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | (variables or {})
    with tempfile.TemporaryFile() as log:
        child = await asyncio.create_subprocess_exec(
            sys.executable, *command, env=env, stdout=log, stderr=log, preexec_fn=processes.subreaper
        )
        try:
            async with asyncio.timeout(START_S):
                while not await _answers(urls[-1], path):
                    if child.returncode is not None:
                        log.seek(0)
                        raise RuntimeError(f"{command[:2]} ended:\n{log.read()[-3000:].decode(errors='replace')}")
                    await asyncio.sleep(0.2)
            yield Process(urls, child.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            await child.wait()


@contextlib.asynccontextmanager
async def instant_servers() -> AsyncIterator[int]:
    """Run a model server and an environment that answer at once; yield their common port."""
    port = free_port()
    async with started(["-m", "benchmarks.instant_servers", str(port)], [port]):
        yield port


@contextlib.asynccontextmanager
async def engine(folder: Path, delay_s: float = 0.0, addresses: int = 1) -> AsyncIterator[Process]:
    """Run the stand-in engine; write its tokenizer into the folder."""
    make_model(folder)
    ports = [free_port() for _ in range(addresses)]
    words = ["-m", "benchmarks.stand_in_engine", ",".join(map(str, ports)), str(delay_s), str(folder)]
    async with started(words, ports, "/health") as process:
        yield process


@contextlib.asynccontextmanager
async def agent_server(kind: str, instant_port: int, **settings: Any) -> AsyncIterator[str]:
    """Run :data:`AGENT` or :data:`PEER_AGENT` over the instant servers; yield the agent's URL."""
    instant = {**_LOCAL, "port": instant_port}
    beside = {
        "instant_environment": {"resources_servers": {"instant": {**instant, "domain": "other"}}},
        "instant_model": {"responses_api_models": {"instant": instant}},
    }
    agent = agent_of(kind, "instant_environment", "instant_model", num_workers=1, **settings)
    async with gym_servers({"agent": agent}, beside) as processes:
        yield processes["agent"].urls[0]


@contextlib.asynccontextmanager
async def model_server(kind: str, engines: list[str], folder: Path) -> AsyncIterator[Process]:
    """Run :data:`MODEL_SERVER` or :data:`PEER_MODEL_SERVER` over ``engines``; ``folder`` has their tokenizer."""
    async with gym_servers({"policy_model": model_of(kind, engines, folder)}) as processes:
        yield processes["policy_model"]


@dataclass(frozen=True, slots=True)
class GymServer:
    """Description of a server of Gym or of this package: folder (``responses_api_agents``, …), kind and settings."""

    folder: str
    kind: str
    settings: dict[str, Any]

    @property
    def app(self) -> Path:
        """Path of the server's program: a module of the benchmarks, else this package's ``app.py``, else Gym's."""
        spec = find_spec("nemo_gym")
        assert spec is not None
        assert spec.origin is not None
        own, within = Path(__file__).with_name(f"{self.kind}.py"), Path(self.folder, self.kind, "app.py")
        return next(app for app in (own, REPO / within, Path(spec.origin).parents[1] / within) if app.exists())


def agent_of(kind: str, environment: str, model: str, **settings: Any) -> GymServer:
    named = {
        "resources_server": {"type": "resources_servers", "name": environment},
        "model_server": {"type": "responses_api_models", "name": model},
    }
    return GymServer("responses_api_agents", kind, {**named, **settings})


def model_of(kind: str, engines: list[str], folder: Path) -> GymServer:
    """Return the description of a model server over ``engines``; ``folder`` has their tokenizer."""
    settings = {
        "base_url": [f"{url}/v1" for url in engines],
        "api_key": "none",
        "model": MODEL,
        "return_token_id_information": True,
        "uses_reasoning_parser": False,
    }
    if kind == MODEL_SERVER:
        settings["policy"] = {"tokenizer": str(folder), "engine": "vllm"}
    return GymServer("responses_api_models", kind, settings)


@contextlib.asynccontextmanager
async def gym_servers(
    servers: Mapping[str, GymServer], beside: Mapping[str, Any] | None = None
) -> AsyncIterator[dict[str, Process]]:
    """Run servers by name within the context, and yield their processes. All servers get one merged configuration,
    with the further entries ``beside``."""
    ports = {name: free_port() for name in servers}
    config: dict[str, Any] = {"head_server": {"host": "127.0.0.1", "port": free_port()}, "dry_run": False}
    config |= beside or {}
    for name, server in servers.items():
        config[name] = {server.folder: {server.kind: {**_LOCAL, "port": ports[name], **server.settings}}}
    env = {"NEMO_GYM_CONFIG_DICT": json.dumps(config), "RAY_AUTH_MODE": "disabled"}
    async with contextlib.AsyncExitStack() as stack:
        async with asyncio.TaskGroup() as group:
            starts = {}
            for name, server in servers.items():
                start = started([str(server.app)], [ports[name]], "/", env | {"NEMO_GYM_CONFIG_PATH": name})
                starts[name] = group.create_task(stack.enter_async_context(start))
        yield {name: start.result() for name, start in starts.items()}


async def _answers(url: str, path: str) -> bool:
    client = KeepAliveClient(url)
    try:
        await client.call("GET", path)
    except (OSError, ValueError):
        return False
    finally:
        client.close()
    return True
