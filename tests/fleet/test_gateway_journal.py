# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A fleet whose gateway dies: what it had accepted runs on at its node, or again, and each has one outcome."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import FailureKind
from nemo_gym_prorl.fleet.gateway import FleetGateway
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.storage.journal import Journal
from tests.cli.command_line import TOKEN, begin, prorl
from tests.fleet.fleets import Changing, Service, service
from tests.fleet.test_bad_nodes import Cut, hasty  # noqa: F401
from tests.fleet.test_gateway import HELD, lasting, until


def runs(node: Service) -> list[str]:
    """Ids, at the node, of what it has run, once for each time."""
    return [rollout for (rollout, what), times in node.handler.calls.items() if what == "run" for _ in range(times)]


@asynccontextmanager
async def command(port: int, journal: Path, *urls: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """``prorl fleet``, up."""
    process = await begin("", "fleet", *urls, "--port", str(port), "--journal", str(journal))
    assert process.stdout is not None
    said = b""
    try:
        async with asyncio.timeout(60):
            while b"RUN slots" not in said or b" 0 slots" in said.splitlines()[-1]:
                line = await process.stdout.readline()
                said += line
                assert line, said.decode()
        reading = asyncio.create_task(process.stdout.read())
        yield process
        reading.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.long("starts a gateway three times; one that ends leaves its rollouts at their nodes, too")
async def test_a_front_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with service() as one, service() as other, RolloutClient(f"http://127.0.0.1:{port}", TOKEN) as client:
        cursor = "0"
        for life in range(3):
            async with command(port, tmp_path, one.url, other.url):
                if life == 0:
                    await asyncio.gather(
                        *(client.submit(lasting(1.0), id=f"r{i}", group=f"g{i // 4}") for i in range(24))
                    )
                    cursor = (await client.ended("0", wait=20, limit=1)).cursor
                before = await client.ended("0", limit=1000, results=True)
                await asyncio.sleep(1.0)
                if life == 2:
                    for i in range(24):
                        assert (await client.wait(f"r{i}")).state is JobState.SUCCEEDED
                    whole = await client.ended("0", limit=1000, results=True)
                    rest = await client.ended(cursor, limit=1000)
        assert whole.rollouts[: len(before.rollouts)] == before.rollouts, "what was told stays"
        assert sorted(job.id for job in whole.rollouts) == sorted(f"r{i}" for i in range(24)), "one outcome each"
        assert [job.id for job in rest.rollouts] == [job.id for job in whole.rollouts[1:]], "cursors hold"
        ran = runs(one) + runs(other)
        assert len(ran) == len({*ran})
        again = len(ran) - 24
        assert again <= 4, "what was at a node went on there, but for what was placed in the last moment"


async def test_an_end_leaves_rollouts_at_their_nodes_and_a_node_that_is_gone_loses_them(tmp_path: Path) -> None:
    async with service() as stays, service() as goes:
        gateway = FleetGateway(Changing([stays.joined, goes.joined]), journal=Journal(str(tmp_path)))
        await gateway.start()
        await until(lambda: len(gateway.dispatcher.statuses) == 2)
        jobs = [await gateway.accept(JobRequest(HELD, id=f"r{i}")) for i in range(6)]
        jobs.append(await gateway.accept(JobRequest(HELD, id="taken back")))
        await until(lambda: len(stays.handler.sessions) + len(goes.handler.sessions) == 6)
        await gateway.cancel(jobs[-1])
        await gateway.close()
        assert not any(job.state.terminal for job in jobs[:-1])
        assert len(stays.pipeline.store.live()) + len(goes.pipeline.store.live()) == 6
        ran = set(runs(stays))
        stays.handler.let_go.set()

        gateway = FleetGateway(Changing([stays.joined]), journal=Journal(str(tmp_path)))
        await gateway.start()
        await gateway.store.wait_for_recovery()
        assert {job.id for job in gateway.store.live()} == {f"r{i}" for i in range(6)}
        for job in gateway.store.live():
            assert await gateway.wait(job, 30)
        ended = {job.id: job for job in gateway.store.find(state=None, group=None)}
        assert {job.state for job in ended.values()} == {JobState.SUCCEEDED}
        notes = [failure for job in ended.values() for failure in job.failures]
        assert {note.kind for note in notes} == {FailureKind.SHUTDOWN}
        assert len(notes) == len(goes.pipeline.store.live()), "these began again"
        assert ran <= set(runs(stays)), "those went on"
        assert len(runs(stays)) == 6
        await gateway.close()


async def test_a_second_front_is_refused_by_name(tmp_path: Path) -> None:
    async with service() as node:
        journal = Journal(str(tmp_path))
        code, said = await prorl("fleet", node.url, "--port", "1", "--journal", str(tmp_path))
        await journal.close()
        assert (code, f"journal: {tmp_path} is in use by another process" in " ".join(said.split())) == (1, True)
        code, told = await prorl("fleet", node.url, "--port", "1", "--journal", "here")
        assert code == 1
        assert "relative" in told
