# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's client with keys, in this process and without NeMo RL."""

from typing import Any

import pytest
from fastapi import FastAPI, Request
from nemo_gym import global_config, server_utils
from nemo_gym.config_types import BaseServerConfig
from omegaconf import OmegaConf

from nemo_gym_prorl.http.key_guard import KeyGuard
from nemo_gym_prorl.servers.gym_client import send_keys
from tests.rollout.serving import serve


async def test_each_server_gets_its_own_key_and_others_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTS_KEY", "s3cret")
    monkeypatch.setattr(server_utils, "request", server_utils.request)
    async with serve(echo("s3cret")) as guarded, serve(echo(None)) as open_to_all:
        config = OmegaConf.create({"agent": block(guarded, "${oc.env:AGENTS_KEY}"), "environment": block(open_to_all)})
        monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", config)
        client = server_utils.ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=config
        )

        async def seen(server: str, **options: Any) -> tuple[int, Any]:
            response = await client.post(server, url_path="/run", json={"row": 1}, **options)
            return response.status, await response.json()

        try:
            assert (await seen("agent"))[0] == 401
            send_keys()
            assert await seen("agent") == (200, ["Bearer s3cret", None, {"row": 1}])
            assert await seen("agent", headers={"X-Mine": "1"}) == (200, ["Bearer s3cret", "1", {"row": 1}])
            assert await seen("environment") == (200, [None, None, {"row": 1}])
        finally:
            await server_utils.get_global_aiohttp_client().close()
            monkeypatch.setattr(server_utils, "_GLOBAL_AIOHTTP_CLIENT", None)


def echo(key: str | None) -> FastAPI:
    """Answers with what it was shown."""
    app = FastAPI()
    app.add_middleware(KeyGuard, key=key)

    @app.post("/run")
    async def run(request: Request) -> list[Any]:
        return [request.headers.get("authorization"), request.headers.get("x-mine"), await request.json()]

    return app


def block(url: str, key: str | None = None) -> dict[str, Any]:
    """The configuration of a server that runs."""
    host, port = url.removeprefix("http://").split(":")
    return {"responses_api_agents": {"prorl_agent": {"host": host, "port": int(port), "control_token": key}}}
