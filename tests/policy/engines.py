# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Real engines for the tests: vLLM on the CPU with a tiny random model."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.policy.families import lessons


SCRIPTS = Path(__file__).parents[2] / "scripts"
MODEL = "tiny"
START_S = 240
PROCESSED = ("--logprobs-mode", "processed_logprobs")


def vllm_python() -> Path:
    """Return the Python of the cached vLLM environment, built if missing; skip the test if that fails."""
    done = subprocess.run([SCRIPTS / "setup_vllm.sh"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no vLLM here: {done.stderr.strip().splitlines()[-1]}")
    return Path(done.stdout.strip().splitlines()[-1])


def tiny_model() -> Path:
    """Return the folder of the tiny model, made and trained on first use (one or two minutes)."""
    python = vllm_python()
    folder = python.parents[1] / "tiny-model"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        maker, taught, of = SCRIPTS / "make_tiny_model.py", folder / "lessons.jsonl", folder / "made-of"
        wanted = "\n".join(json.dumps(lesson) for lesson in lessons())
        made_of = hashlib.sha256((maker.read_text() + wanted).encode()).hexdigest()
        if not of.is_file() or of.read_text() != made_of:
            taught.write_text(wanted)
            subprocess.run([python, maker, folder, "--lessons", taught], check=True, capture_output=True)
            of.write_text(made_of)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def vllm(folder: Path, log: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a vLLM server; yield its URL and process once it answers."""
    port = free_port()
    command = [
        *(str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--enforce-eager", "--max-model-len", "8192", "--enable-prompt-tokens-details"),
        # A prompt that is read in parts and has a seed ends this build of vLLM: CPU generators cannot step back.
        *("--max-num-batched-tokens", "32768"),
        *("--distributed-executor-backend", "uni", *flags),
    ]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        # Else every engine takes the same core, and its processes spin there for each other.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    process = begin(command, log, environment)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"vLLM did not start: {log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield url, process
    finally:
        kill(process)


def begin(command: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a server in its own session; the kernel kills it with this process."""
    with log.open("wb") as out:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd=log.parent,
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a server with all its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False
