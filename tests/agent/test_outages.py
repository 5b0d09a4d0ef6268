# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The default handler over servers that die and come back, on real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response

from nemo_gym_prorl.agent.gym_environment import GymContext, GymEnvironmentHandler
from nemo_gym_prorl.agent.gym_http import Address, GymServer
from nemo_gym_prorl.http.client import HttpClient
from nemo_gym_prorl.rollout.handler import Environments
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.settings import PoolSizes
from tests.rollout.handlers import FastSettings


ROW = {"responses_create_params": {"input": "hi"}}
JOBS = 40


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Servers:
    """A model and an environment, each of which can be killed and started again on its port."""

    def __init__(self) -> None:
        self.ports = {"resources": free_port(), "model": free_port()}
        self.seeded = 0
        self._running: dict[str, tuple[uvicorn.Server, asyncio.Task[None]]] = {}
        self._app = FastAPI()

        @self._app.post("/{path:path}")
        async def answer(path: str, request: Request) -> Response:
            body = orjson.loads(await request.body())
            await asyncio.sleep(0.01)
            content: dict[str, Any] = {}
            if path == "seed_session":
                self.seeded += 1
            elif path == "v1/responses":
                said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "42"}]}
                content = {"id": "r", "object": "response", "output": [said]}
            elif path == "verify":
                content = {**body, "reward": 1.0}
            return Response(orjson.dumps(content), media_type="application/json")

    async def start(self, name: str) -> None:
        server = uvicorn.Server(
            uvicorn.Config(self._app, host="127.0.0.1", port=self.ports[name], log_level="error", lifespan="off")
        )
        self._running[name] = server, asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)

    async def kill(self, name: str) -> None:
        server, task = self._running.pop(name)
        server.should_exit = server.force_exit = True
        await task

    async def close(self) -> None:
        for name in [*self._running]:
            await self.kill(name)


@asynccontextmanager
async def deployment() -> AsyncIterator[tuple[Servers, Pipeline, GymEnvironmentHandler]]:
    servers, http = Servers(), HttpClient()
    named = {name: GymServer(name, Address(f"http://127.0.0.1:{port}"), http) for name, port in servers.ports.items()}
    handler = GymEnvironmentHandler(GymContext(named["resources"], named["model"]))
    pipeline = Pipeline(
        Environments.of(handler),
        FastSettings(
            stages=PoolSizes(init=2, ready=2, run=4, eval=2),
        ),
    )
    for name in servers.ports:
        await servers.start(name)
    yield servers, pipeline, handler
    await pipeline.close()
    await http.close()
    await servers.close()


@pytest.mark.parametrize("name", ["resources", "model"])
async def test_rollouts_wait_for_a_server_that_was_killed_and_none_is_lost(name: str) -> None:
    async with deployment() as (servers, pipeline, handler):
        jobs = [pipeline.submit(JobRequest(ROW)) for _ in range(JOBS)]
        await pipeline.wait(jobs[5], 30)
        assert not await handler.unreachable()
        await servers.kill(name)
        async with asyncio.timeout(30):
            while name not in {outage.server for outage in pipeline.outages}:
                await asyncio.sleep(0.01)
        assert [*await handler.unreachable()] == [name]
        await asyncio.sleep(0.5)  # ten times what three tries of a rollout take
        assert not any(job.state in (JobState.FAILED, JobState.TIMED_OUT) for job in jobs)
        await servers.start(name)
        assert await pipeline.drain(60)
        assert {job.state for job in jobs} == {JobState.SUCCEEDED}
        assert servers.seeded <= JOBS * 1.2
        assert not pipeline.outages
