# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Servers that benchmarks start as processes: ours, Gym's, and stand-ins for what is behind them.

Gym's servers and ours are their ``app.py`` with the merged configuration in the environment, as Gym starts them. Ray
is left out, since it takes no part in a turn and costs some of a small machine (``without_ray/sitecustomize.py``).
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
"""An ``app.py`` imports 2,000 modules, which takes a minute on a busy machine."""
AGENT, PEER_AGENT = "prorl_agent", "simple_agent"
MODEL_SERVER, PEER_MODEL_SERVER = "prorl_model", "vllm_model"
_LOCAL = {"entrypoint": "app.py", "host": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class Process:
    """A serving process: the URLs that it answers at, and its process id."""

    urls: list[str]
    pid: int

    def core_seconds(self) -> float:
        """Return CPU seconds so far, with those of live descendants."""
        return sum(map(processes.precise_core_seconds, processes.below(self.pid)))


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def started(
    command: list[str], ports: list[int], path: str = "/", variables: Mapping[str, str] | None = None
) -> AsyncIterator[Process]:
    """Run a server until it is no longer needed; yields once ``path`` is answered, whatever the status."""
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    paths = [*([str(REPO / "benchmarks/without_ray")] if variables else []), str(REPO)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | (variables or {})
    with tempfile.TemporaryFile() as log:
        child = await asyncio.create_subprocess_exec(sys.executable, *command, env=env, stdout=log, stderr=log)
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
    """A model and an environment that answer at once; yields their port."""
    port = free_port()
    async with started(["-m", "benchmarks.instant_servers", str(port)], [port]):
        yield port


@contextlib.asynccontextmanager
async def engine(folder: Path, delay_s: float = 0.0, addresses: int = 1) -> AsyncIterator[Process]:
    """The stand-in engine; fills the folder with its tokenizer."""
    make_model(folder)
    ports = [free_port() for _ in range(addresses)]
    words = ["-m", "benchmarks.stand_in_engine", ",".join(map(str, ports)), str(delay_s), str(folder)]
    async with started(words, ports, "/health") as process:
        yield process


@contextlib.asynccontextmanager
async def agent_server(kind: str, instant_port: int, **settings: Any) -> AsyncIterator[str]:
    """:data:`AGENT` or :data:`PEER_AGENT` over the instant servers; yields its URL."""
    port, instant = free_port(), {**_LOCAL, "port": instant_port}
    block = {
        **_LOCAL,
        "port": port,
        "num_workers": 1,
        "resources_server": {"type": "resources_servers", "name": "instant_environment"},
        "model_server": {"type": "responses_api_models", "name": "instant_model"},
        **settings,
    }
    config = {
        "agent": {"responses_api_agents": {kind: block}},
        "instant_environment": {"resources_servers": {"instant": {**instant, "domain": "other"}}},
        "instant_model": {"responses_api_models": {"instant": instant}},
    }
    app = _app("responses_api_agents", kind, is_ours=kind == AGENT)
    async with started([app], [port], "/", _gym("agent", config)) as process:
        yield process.urls[0]


@contextlib.asynccontextmanager
async def model_server(kind: str, engines: list[str], folder: Path) -> AsyncIterator[Process]:
    """:data:`MODEL_SERVER` or :data:`PEER_MODEL_SERVER` over engines; the folder has their tokenizer."""
    port, is_ours = free_port(), kind == MODEL_SERVER
    settings: dict[str, Any] = {
        **_LOCAL,
        "port": port,
        "base_url": [f"{url}/v1" for url in engines],
        "api_key": "none",
        "model": MODEL,
        "return_token_id_information": True,
        "uses_reasoning_parser": False,
    }
    if is_ours:
        settings["policy"] = {"tokenizer": str(folder), "engine": "vllm"}
    config = {"policy_model": {"responses_api_models": {kind: settings}}}
    app = _app("responses_api_models", kind, is_ours=is_ours)
    async with started([app], [port], "/openapi.json", _gym("policy_model", config)) as process:
        yield process


def _app(folder: str, kind: str, *, is_ours: bool) -> str:
    root = REPO
    if not is_ours:
        spec = find_spec("nemo_gym")
        assert spec is not None
        assert spec.origin is not None
        root = Path(spec.origin).parents[1]
    return str(root / folder / kind / "app.py")


def _gym(name: str, config: dict[str, Any]) -> dict[str, str]:
    whole = {**config, "head_server": {"host": "127.0.0.1", "port": free_port()}, "dry_run": False}
    return {"NEMO_GYM_CONFIG_DICT": json.dumps(whole), "NEMO_GYM_CONFIG_PATH": name, "RAY_AUTH_MODE": "disabled"}


async def _answers(url: str, path: str) -> bool:
    client = KeepAliveClient(url)
    try:
        await client.call("GET", path)
    except (OSError, ValueError):
        return False
    finally:
        client.close()
    return True
