# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The ``prorl`` command before a service with a planned handler."""

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

from nemo_gym_prorl.cli.app import main
from nemo_gym_prorl.rollout.settings import PipelineSettings
from tests.rollout.handlers import Bench, application
from tests.rollout.serving import serve


TOKEN = "t0ken"
GOOD = {"responses_create_params": {"input": "hi"}}
LONG = GOOD | {"plan": {"run": [{"seconds": 600}]}}
DEFECT = GOOD | {"plan": {"run": [{"how": "agent"}]}}


@asynccontextmanager
async def service(**settings: Any) -> AsyncIterator[tuple[str, Bench]]:
    """Its URL, and the handler's."""
    bench = Bench(PipelineSettings(**settings))
    pipeline = bench.pipeline()
    async with serve(application(pipeline, TOKEN)) as url:
        yield url, bench
        await pipeline.close()


def write(path: Path, *rows: Any) -> Path:
    """Rows as a file; text is a line as it stands."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


async def begin(url: str, *arguments: str) -> asyncio.subprocess.Process:
    """A command in a process of its own."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from nemo_gym_prorl.cli.app import main; main()", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"PRORL_TOKEN": TOKEN, "PRORL_URL": url, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
    )


async def prorl(*arguments: str, url: str | None = None, **env: str) -> tuple[int, str]:
    """Exit code and output of a command. Not in a process of its own, which works a second before it begins."""
    env = {"PRORL_TOKEN": TOKEN, "COLUMNS": "200"} | ({"PRORL_URL": url} if url else {}) | env
    return await asyncio.wait_for(asyncio.to_thread(_prorl, arguments, env), 60)


def _prorl(arguments: tuple[str, ...], env: dict[str, str]) -> tuple[int, str]:
    said, code = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(said), redirect_stderr(said):
        patched.setattr(sys, "argv", ["prorl", *arguments])
        # Signals are the main thread's right.
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
