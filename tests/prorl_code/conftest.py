# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The server on a real socket, with the configuration that ships with it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

from nemo_gym_prorl.tasks.code.rows import humaneval_row, problems
from resources_servers.prorl_code.app import ProRLCodeConfig, ProRLCodeServer
from tests.rollout.serving import serve
from tests.tasks import containers


def build(**changes: Any) -> ProRLCodeServer:
    """The server, made of its shipped configuration and some changes."""
    shipped = containers.shipped_config()
    settings = shipped["prorl_code"]["resources_servers"]["prorl_code"] | {"image": containers.image()} | changes
    return ProRLCodeServer(
        config=ProRLCodeConfig(port=1, name="prorl_code", **settings),
        server_client=ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=OmegaConf.create(shipped)
        ),
    )


PATHS = {"release_path": "/release_session", "checkpoint_path": "/checkpoint_session"}
"""What a session is told of beyond Gym's routes."""


class Client:
    """One rollout's view of the server: its cookies go with every call."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self.headers: dict[str, str] = {}

    async def __aenter__(self) -> "Client":
        jar = aiohttp.CookieJar(unsafe=True)  # cookies of an IP address
        self._http = aiohttp.ClientSession(self._base_url, cookie_jar=jar)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.close()

    async def post(self, path: str, body: Any = None) -> tuple[int, Any, str | None]:
        """Status, body (decoded if it is JSON) and the failure kind of the header."""
        async with self._http.post(path, json={} if body is None else body, headers=self.headers) as response:
            text = await response.text()
            is_json = "json" in response.headers.get("Content-Type", "")
            return response.status, json.loads(text) if is_json else text, response.headers.get("X-ProRL-Failure-Kind")

    async def tool(self, name: str, **arguments: Any) -> str:
        status, observation, _ = await self.post(f"/{name}", arguments)
        assert status == 200, observation
        assert isinstance(observation, str)
        return observation

    async def seed(self, task: str = "HumanEval/2") -> None:
        status, paths, _ = await self.post("/seed_session", row(task))
        assert (status, paths["release_path"]) == (200, "/release_session"), paths

    async def verify(self, task: str = "HumanEval/2") -> tuple[int, Any, str | None]:
        return await self.post("/verify", row(task) | {"response": RESPONSE})


RESPONSE = {
    "id": "resp_1",
    "created_at": 0,
    "model": "none",
    "object": "response",
    "output": [],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}


def row(task: str) -> dict[str, Any]:
    return humaneval_row(problems()[task])


@asynccontextmanager
async def serving(**changes: Any) -> AsyncIterator[str]:
    """The base URL of a running server; afterwards none of its containers may be left."""
    containers.image()
    before = containers.instances()
    async with serve(build(**changes).setup_webserver()) as base_url:
        yield base_url
    assert containers.instances() <= before


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    async with serving() as url:
        yield url


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[Client]:
    async with Client(base_url) as made:
        yield made
