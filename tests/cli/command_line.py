# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Helpers that run the ``prorl`` command against a service with a planned handler."""

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from nemo_gym_prorl.cli.app import main
from nemo_gym_prorl.http.access import KeyGuard
from nemo_gym_prorl.rollout.api import PipelineMetrics, rollout_router
from nemo_gym_prorl.rollout.service import PipelineSettings
from tests.rollout.handlers import Bench
from tests.rollout.serving import serve


TOKEN = "t0ken"
GOOD = {"responses_create_params": {"input": "hi"}}
LONG = GOOD | {"plan": {"run": [{"seconds": 600}]}}
DEFECT = GOOD | {"plan": {"run": [{"how": "agent"}]}}


@asynccontextmanager
async def service(**settings: Any) -> AsyncIterator[tuple[str, Bench]]:
    """Yield the URL of a service and its test bench."""
    bench = Bench(PipelineSettings(**settings))
    pipeline = bench.pipeline()
    app = FastAPI()
    app.add_middleware(KeyGuard, key=TOKEN)
    app.include_router(rollout_router(pipeline, PipelineMetrics(pipeline)))
    async with serve(app) as url:
        yield url, bench
        await pipeline.close()


def write(path: Path, *rows: Any) -> Path:
    """Write rows as a JSONL file; strings are written unchanged."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


async def begin(url: str, *arguments: str) -> asyncio.subprocess.Process:
    """Start a command in its own process."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from nemo_gym_prorl.cli.app import main; main()", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"PRORL_TOKEN": TOKEN, "PRORL_URL": url, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
    )


async def prorl(*arguments: str, url: str | None = None, **env: str) -> tuple[int, str]:
    """Run a command in this process, because a new process takes a second to start; return exit code and output."""
    env = {"PRORL_TOKEN": TOKEN, "COLUMNS": "200"} | ({"PRORL_URL": url} if url else {}) | env
    return await asyncio.wait_for(asyncio.to_thread(_prorl, arguments, env), 60)


def _prorl(arguments: tuple[str, ...], env: dict[str, str]) -> tuple[int, str]:
    said, code = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(said), redirect_stderr(said):
        patched.setattr(sys, "argv", ["prorl", *arguments])
        # Only the main thread may set signal handlers.
        patched.setattr(asyncio.SelectorEventLoop, "add_signal_handler", lambda *_: None)
        patched.setattr(signal, "signal", lambda *_: None)
        for name, value in env.items():
            patched.setenv(name, value)
        try:
            main()
        except SystemExit as end:
            if isinstance(end.code, str):  # as the interpreter does
                said.write(f"{end.code}\n")
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, said.getvalue()
