# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Servers that benchmarks start: real vLLM engines on the CPU, the router wheels of others, and benchmarks' own.

Engines are not bound to a core, so that two of them use both of a small machine. The model is small, yet so large that
prefill takes time. An engine is made slow by stopping its processes for two thirds of the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path


SCRIPTS = Path(__file__).parents[1] / "scripts"
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
ENGINE_START_S = 900
"""An engine's first start compiles what it imports; on a machine with other work two at once have taken 6 minutes."""
RUNS_S = 0.05
"""How long a slow engine runs before it is stopped for twice as long."""
WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""What begins so is ended by the kernel with this process, however that ends."""
WORDS = Path(os.__file__).read_text().split()


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
        *WITH_US,
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
def engines(
    python: Path, count: int, folder: Path, model: Path | None = None
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Real vLLM servers over one model, by URL; by default a small one of random weights."""
    if model is None:
        model = folder / "model"
        shape = ["--width", "384", "--layers", "6"]
        subprocess.run([python, SCRIPTS / "make_tiny_model.py", model, *shape], check=True, capture_output=True)
    servers: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for _ in range(count):
            port = free_port()
            command = [
                *WITH_US,
                *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
                *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
                *("--dtype", "float32", "--enforce-eager"),
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
        deadline = time.monotonic() + ENGINE_START_S
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
