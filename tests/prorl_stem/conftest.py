# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The server on a real socket, with the configuration that ships with it and, where asked for, a judge."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

from nemo_gym_prorl.tasks.stem.problems import problem_of, row_for
from resources_servers.prorl_stem.app import ProRLStemConfig, ProRLStemServer
from scripts.scripted_turns.stem import script_for
from tests.prorl_code.conftest import PATHS, RESPONSE, Client
from tests.rollout.serving import serve
from tests.tasks import containers


CONFIG = Path(__file__).parents[2] / "resources_servers/prorl_stem/configs/prorl_stem.yaml"


def build(judge_url: str | None = None, **changes: Any) -> ProRLStemServer:
    """The server, made of its shipped configuration and some changes; its judge answers at the URL."""
    shipped: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(CONFIG), resolve=True)
    settings = shipped["prorl_stem"]["resources_servers"]["prorl_stem"] | {"image": containers.image()}
    if judge_url is not None:
        host, _, port = judge_url.removeprefix("http://").partition(":")
        server = {"host": host, "port": int(port)}
        shipped["judge_model"] = {"responses_api_models": {"prorl_model": server}}
        settings["judge_model_server"] = {"type": "responses_api_models", "name": "judge_model"}
    return ProRLStemServer(
        config=ProRLStemConfig(port=1, name="prorl_stem", **settings | changes),
        server_client=ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=OmegaConf.create(shipped)
        ),
    )


@asynccontextmanager
async def serving(judge_url: str | None = None, **changes: Any) -> AsyncIterator[str]:
    """The base URL of a running server; afterwards none of its containers may be left."""
    containers.image()
    before = containers.instances()
    async with serve(build(judge_url, **changes).setup_webserver()) as base_url:
        yield base_url
    assert containers.instances() <= before


def saying(text: str) -> dict[str, Any]:
    """The policy's last Responses object."""
    content = {"type": "output_text", "text": text, "annotations": []}
    said = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [content]}
    return RESPONSE | {"output": [said]}


async def play(base_url: str, row: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """A rollout by a script; gives the row as it comes back."""
    async with Client(base_url) as client:
        assert await client.post("/seed_session", row) == (200, PATHS, None)
        turns = script_for(problem_of(row), variant)["turns"]
        for turn in turns:
            for call in turn["tool_calls"]:
                observation = await client.tool(call["name"], **call["arguments"])
                assert not observation.startswith("Error"), observation
        assert (await client.post("/release_session"))[0] == 200
        status, verdict, _ = await client.post("/verify", row | {"response": saying(turns[-1]["content"])})
        assert status == 200, verdict
        assert (await client.post("/close_session"))[0] == 200
    return json.loads(json.dumps(verdict))


__all__ = ["Client", "build", "play", "row_for", "saying", "serving"]
