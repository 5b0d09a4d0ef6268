# SPDX-License-Identifier: Apache-2.0
"""The owner of a pool and a worker of it, in one process and over a real line: runs mean the same to both."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nemo_gym_prorl.policy.config import PolicyConfig
from nemo_gym_prorl.policy.engines.engine import BackendFailed
from nemo_gym_prorl.policy.pool.backend import Backend
from nemo_gym_prorl.policy.pool.dispatcher import Dispatcher
from nemo_gym_prorl.policy.workers.channel import Channel
from nemo_gym_prorl.policy.workers.owner import Owner
from nemo_gym_prorl.policy.workers.remote import Refused, RemoteBackends


@pytest.fixture
async def line() -> AsyncIterator[tuple[Owner, RemoteBackends, Dispatcher]]:
    config = PolicyConfig(base_url=[], model="m", engine="vllm_chat", unreachable_s=1.0)
    owner, (ours, theirs) = Owner(config, 1), socket.socketpair()
    worker = RemoteBackends(config, theirs, lambda: None)

    def hear(message: Any) -> None:
        if message == ["ready"]:
            owner.joined(0, channel)
        else:
            owner.said(0, message)

    await owner.start()
    channel = await Channel.over(ours, hear, lambda: None)
    await worker.start()
    async with asyncio.timeout(20):
        while worker.dispatcher is None:
            await asyncio.sleep(0.01)
    yield owner, worker, worker.dispatcher
    channel.close()
    await worker.aclose()
    await owner.aclose()


async def url_of(backend: Backend) -> str:
    return backend.url


async def test_a_worker_samples_at_its_rollouts_run_only(
    line: tuple[Owner, RemoteBackends, Dispatcher],
) -> None:
    _, worker, dispatcher = line
    for run in ("x", "y"):
        await worker.add(f"http://127.0.0.1:1/{run}", run=run, weight_version="1")
    with pytest.raises(Refused, match="of run 'x'"):
        await worker.add("http://127.0.0.1:1/x/v1", run="y")
    await worker.label("2", run="y")
    for number in range(6):
        run = "xy"[number % 2]
        placed = await dispatcher.run(f"r{number}", None, url_of, run=run)
        assert placed.result.endswith(f"/{run}")
        assert placed.weight_version == {"x": "1", "y": "2"}[run]
    assert await worker.pause(run="x") == {"drained": True}
    paused = asyncio.ensure_future(dispatcher.run("r0", None, url_of, run="x"))
    assert (await dispatcher.run("r1", None, url_of, run="y")).result.endswith("/y")
    assert not paused.done()
    await worker.resume(run="x", weight_version="3")
    assert (await paused).weight_version == "3"
    await worker.clear(run="x")
    assert [backend["run"] for backend in (await worker.listing())["backends"]] == ["y"]
    waits = asyncio.ensure_future(dispatcher.run("r0", None, url_of, run="x"))
    await asyncio.sleep(0.2)
    assert (await worker.listing(run="x"))["waiting"] == 1
    with pytest.raises(BackendFailed, match=r"no backend of run 'x' served for 1 s \(there is none\)"):
        await waits
    assert (await worker.listing())["waiting"] == 0
