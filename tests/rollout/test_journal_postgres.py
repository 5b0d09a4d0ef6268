# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The journal in a real PostgreSQL server, which dies under it."""

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.journal.journal import JournalFails
from nemo_gym_prorl.rollout.request import JobRequest
from tests.rollout.handlers import Act
from tests.rollout.standalone import standalone
from tests.rollout.test_journal import TOKEN, life, log_of, opened, run, told


pytestmark = pytest.mark.long("starts a database server; test_journal.py has the same over SQLite")
NOBODY = 65534


class Server:
    """A PostgreSQL of its own, started and ended as often as wanted."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self._folder, self._programs = folder, programs
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self.url = f"postgresql+psycopg://prorl@127.0.0.1:{self._port}/postgres"
        self._process: asyncio.subprocess.Process | None = None

    async def make(self) -> None:
        made = await self._run("initdb", "-D", "data", "-A", "trust", "-U", "prorl")
        assert await made.wait() == 0

    async def start(self) -> None:
        options = ["-D", "data", "-k", ".", "-p", str(self._port), "-c", "listen_addresses=127.0.0.1"]
        self._process = await self._run("postgres", *options)
        async with asyncio.timeout(60):
            while await (await self._run("pg_isready", "-h", "127.0.0.1", "-p", str(self._port))).wait():
                await asyncio.sleep(0.2)

    async def end(self) -> None:
        """At once, as if the machine had failed."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGQUIT)
            await self._process.wait()

    async def _run(self, program: str, *arguments: str) -> asyncio.subprocess.Process:
        who = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        return await asyncio.create_subprocess_exec(
            self._programs / program,
            *arguments,
            cwd=self._folder,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            **who,  # type: ignore[arg-type]
        )


def _programs() -> Path | None:
    """Where a distribution's package puts them; not on PATH."""
    return next(Path("/usr/lib/postgresql").glob("*/bin"), None)


@pytest.fixture
async def postgres() -> AsyncIterator[Server]:
    found = _programs()
    if found is None:
        pytest.skip("no PostgreSQL server on this machine")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        server = Server(folder, found)
        await server.make()
        await server.start()
        try:
            yield server
        finally:
            await server.end()


async def test_lives_follow_each_other_and_never_two_at_once(postgres: Server) -> None:
    async with life(postgres.url) as (pipeline, bench):
        done = await run(pipeline, "a", {"text": "x" * 100_000})
        await pipeline.accept(JobRequest({"plan": {"run": [Act("held")]}}, id="b"))
        with pytest.raises(CallerError, match=f"is in use by process {os.getpid()} on"):
            opened(postgres.url)
        cursor = pipeline.store.cursor
    async with life(postgres.url) as (pipeline, bench):
        again = await pipeline.store.fetch("a")
        assert again is not None
        assert told(again) == told(done)
        bench.handler.let_go.set()
        assert await pipeline.drain(60)
        assert await log_of(pipeline, cursor) == ["b"]


async def test_a_database_that_dies_loses_nothing(postgres: Server) -> None:
    async with life(postgres.url) as (pipeline, bench):
        waits = await pipeline.accept(JobRequest({"plan": {"run": [Act("held")]}}, id="waits"))
        await postgres.end()
        bench.handler.let_go.set()
        with pytest.raises(JournalFails, match="cannot be written"):
            await pipeline.accept(JobRequest({}, id="refused"))
        assert not await pipeline.wait(waits, 2), "nobody is told what is not in the journal"
        await postgres.start()
        assert await pipeline.wait(waits, 60)
        assert waits.state is JobState.SUCCEEDED
        await run(pipeline, "refused")
        assert await log_of(pipeline) == ["waits", "refused"]


async def test_a_killed_service_goes_on_where_it_was(postgres: Server) -> None:
    row = {"responses_create_params": {"input": "hi"}, "plan": {"run": [{"how": "ok", "seconds": 1.0}]}}
    async with standalone(TOKEN, postgres.url) as there, RolloutClient(there.url, TOKEN) as client:
        for number in range(8):
            await client.submit(row, id=f"r{number}")
        await there.end()
        await there.start()
        assert {(await client.wait(f"r{number}")).state for number in range(8)} == {JobState.SUCCEEDED}
        assert len((await client.ended("0")).rollouts) == 8
