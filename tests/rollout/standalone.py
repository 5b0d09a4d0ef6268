# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout service with a planned handler as a process of its own, which a test can kill."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import uvicorn
from fastapi import FastAPI

from nemo_gym_prorl.rollout.settings import PipelineSettings
from nemo_gym_prorl.rollout.storage.journal import Journal
from tests.policy.engines import free_port
from tests.rollout.handlers import Bench, application


class Standalone:
    """The process, started and ended as often as wanted on one port.

    Args:
        token: its key.
        journal: where it keeps its jobs, if anywhere.
    """

    def __init__(self, token: str, journal: str = "") -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._token, self._journal = token, journal
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.rollout.standalone",
            str(self._port),
            self._token,
            self._journal,
            cwd=Path(__file__).parents[2],
            env=os.environ,
        )
        async with asyncio.timeout(60), aiohttp.ClientSession() as http:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(f"{self.url}/healthz"):
                        return
                await asyncio.sleep(0.1)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(how)
            await self._process.wait()


@contextlib.asynccontextmanager
async def standalone(token: str, journal: str = "") -> AsyncIterator[Standalone]:
    """A service that lives as long as the test."""
    service = Standalone(token, journal)
    await service.start()
    try:
        yield service
    finally:
        await service.end()


async def _main(port: int, token: str, journal: str) -> None:
    kept = Journal(journal, 7 * 24 * 3600.0, 2**30) if journal else None
    pipeline = Bench(PipelineSettings()).pipeline(kept)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        pipeline.start()
        yield
        await pipeline.close()

    app = application(pipeline, token)
    app.router.lifespan_context = lifespan
    await uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=1)
    ).serve()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), *sys.argv[2:]))
