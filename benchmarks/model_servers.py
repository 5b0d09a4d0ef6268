# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl_model`` and Gym's ``vllm_model`` as processes, over the stand-in engine, and what they cost.

Each is its ``app.py``, started as Gym starts it, with the merged configuration in its environment. Only Ray, with
which no turn has to do and which costs some of a small machine, is left out (:mod:`.server_process`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks import processes
from benchmarks.keep_alive import KeepAliveClient
from benchmarks.real_engines import free_port
from benchmarks.stand_in_engine import MODEL, make_model


OURS, PEER = "prorl_model", "vllm_model"
REPO = Path(__file__).parents[1]
_SITE = Path(__file__).parent / "server_process"
_START_S = 180


@dataclass(frozen=True, slots=True)
class Process:
    """A process that serves.

    Attributes:
        urls: where it can be called.
        pid: of the process that was started.
    """

    urls: list[str]
    pid: int

    def core_seconds(self) -> float:
        """CPU seconds so far, of it and of all that it started."""
        return sum(map(processes.precise_core_seconds, processes.below(self.pid)))


@contextlib.asynccontextmanager
async def engine(folder: Path, delay_s: float = 0.0, addresses: int = 1) -> AsyncIterator[Process]:
    """The stand-in engine, which also fills the folder with a tokenizer."""
    make_model(folder)
    ports = [free_port() for _ in range(addresses)]
    command = [
        sys.executable,
        "-m",
        "benchmarks.stand_in_engine",
        ",".join(map(str, ports)),
        str(delay_s),
        str(folder),
    ]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    async with _started(command, urls, "/health", os.environ | {"PYTHONPATH": str(REPO)}) as process:
        yield process


@contextlib.asynccontextmanager
async def model_server(kind: str, engines: list[str], folder: Path) -> AsyncIterator[Process]:
    """A model server.

    Args:
        kind: :data:`OURS` or :data:`PEER`.
        engines: its backends.
        folder: has the tokenizer.
    """
    port = free_port()
    settings = {
        "entrypoint": "app.py",
        "host": "127.0.0.1",
        "port": port,
        "base_url": [f"{url}/v1" for url in engines],
        "api_key": "none",
        "model": MODEL,
        "return_token_id_information": True,
        "uses_reasoning_parser": False,
    }
    app = REPO / "responses_api_models" / OURS / "app.py"
    if kind == OURS:
        settings["policy"] = {"tokenizer": str(folder), "engine": "vllm"}
    else:
        spec = find_spec("nemo_gym")
        assert spec is not None
        assert spec.origin is not None
        app = Path(spec.origin).parents[1] / "responses_api_models" / PEER / "app.py"
    config = {
        "policy_model": {"responses_api_models": {kind: settings}},
        "head_server": {"host": "127.0.0.1", "port": free_port()},
        "dry_run": False,
    }
    env = os.environ | {
        "NEMO_GYM_CONFIG_DICT": json.dumps(config),
        "NEMO_GYM_CONFIG_PATH": "policy_model",
        "PYTHONPATH": os.pathsep.join([str(_SITE), str(REPO)]),
        "PRORL_SAMPLES": str(folder),
    }
    async with _started([sys.executable, str(app)], [f"http://127.0.0.1:{port}"], "/openapi.json", env) as process:
        yield process


@contextlib.asynccontextmanager
async def _started(command: list[str], urls: list[str], path: str, env: dict[str, str]) -> AsyncIterator[Process]:
    with tempfile.TemporaryFile() as log:
        child = await asyncio.create_subprocess_exec(*command, env=env, stdout=log, stderr=log)
        try:
            async with asyncio.timeout(_START_S):
                while not await _answers(urls[-1], path):
                    if child.returncode is not None:
                        log.seek(0)
                        raise RuntimeError(f"{command[1:3]} ended:\n{log.read()[-3000:].decode(errors='replace')}")
                    await asyncio.sleep(0.2)
            yield Process(urls, child.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            await child.wait()


async def _answers(url: str, path: str) -> bool:
    client = KeepAliveClient(url)
    try:
        return (await client.call("GET", path)).status == 200
    except (OSError, ValueError):
        return False
    finally:
        client.close()


def sample(process: Process, on: bool) -> None:
    """Have a model server's processes begin, or end, to note at regular CPU times where they are."""
    for pid in processes.below(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1 if on else signal.SIGUSR2)


def samples(folder: Path) -> dict[str, collections.Counter[str]]:
    """What was noted: by the package whose code ran, and by the function of ours on whose behalf."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path in folder.glob("samples-*.json"):
        for name, counts in json.loads(path.read_text()).items():
            found[name].update(counts)
    return found
