# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures: shipped resources servers on a real socket, and their client."""

import importlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

from nemo_gym_prorl.servers.task_server import TaskServer, TaskServerConfig
from nemo_gym_prorl.tasks.code.code_rows import humaneval_row, problems
from tests.rollout.serving import serve
from tests.tasks import containers


SERVERS = {
    "prorl_code": "ProRLCode",
    "prorl_harbor": "ProRLHarbor",
    "prorl_math": "ProRLMath",
    "prorl_stem": "ProRLStem",
    "prorl_swe": "ProRLSwe",
}


def task_server[S: TaskServer](kind: type[S], config: TaskServerConfig, global_config: Any = None) -> S:
    """Create a server outside of a Gym deployment."""
    head = BaseServerConfig(host="127.0.0.1", port=1)
    client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create(global_config or {}))
    return kind(config=config, server_client=client)


def build(server: str = "prorl_code", judge_url: str | None = None, **changes: Any) -> TaskServer:
    """Create a server from its shipped configuration with changes; ``judge_url`` is the address of its judge."""
    app = importlib.import_module(f"resources_servers.{server}.app")
    path = Path(str(app.__file__)).with_name("configs") / f"{server}.yaml"
    shipped: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    settings = shipped[server]["resources_servers"][server]
    if server in ("prorl_code", "prorl_stem"):  # the others have images of their own
        settings |= {"image": containers.image()}
    if judge_url is not None:
        host, _, port = judge_url.removeprefix("http://").partition(":")
        shipped["judge_model"] = {"responses_api_models": {"prorl_model": {"host": host, "port": int(port)}}}
        settings["judge_model_server"] = {"type": "responses_api_models", "name": "judge_model"}
    config = getattr(app, f"{SERVERS[server]}Config")(port=1, name=server, **settings | changes)
    return task_server(getattr(app, f"{SERVERS[server]}Server"), config, shipped)


@asynccontextmanager
async def serving(server: str = "prorl_code", judge_url: str | None = None, **changes: Any) -> AsyncIterator[str]:
    """Serve a server and yield its base URL; no container may remain afterwards."""
    containers.image()
    before = containers.instances()
    async with serve(build(server, judge_url, **changes).setup_webserver()) as base_url:
        yield base_url
    assert containers.instances() <= before


PATHS = {"release_path": "/release_session", "checkpoint_path": "/checkpoint_session"}
"""Paths in the reply of ``/seed_session``."""

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


def saying(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}
    return RESPONSE | {"output": [item]}


class Client:
    """HTTP client of one rollout; keeps its cookies. A request may take ``timeout_s``; ``None`` for no limit."""

    def __init__(self, base_url: str, timeout_s: float | None = 300) -> None:
        self._base_url = base_url
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self.headers: dict[str, str] = {}

    async def __aenter__(self) -> "Client":
        jar = aiohttp.CookieJar(unsafe=True)  # cookies of an IP address
        self._http = aiohttp.ClientSession(self._base_url, cookie_jar=jar, timeout=self._timeout)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.close()

    async def post(self, path: str, body: Any = None) -> tuple[int, Any, str | None]:
        """Return status, body (decoded if JSON) and the failure kind of the header."""
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

    async def play(self, row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Play scripted turns on a row and return the verified row."""
        assert await self.post("/seed_session", row) == (200, PATHS, None)
        for call in (call for turn in turns for call in turn["tool_calls"]):
            observation = await self.tool(call["name"], **call["arguments"])
            assert not observation.startswith("Error"), observation
        status, verdict, _ = await self.post("/verify", {**row, "response": saying(turns[-1]["content"])})
        assert status == 200, verdict
        assert await self.post("/close_session") == (200, {}, None)
        return dict(verdict)


def row(task: str) -> dict[str, Any]:
    return humaneval_row(problems()[task])


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    async with serving() as url:
        yield url


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[Client]:
    async with Client(base_url) as made:
        yield made
