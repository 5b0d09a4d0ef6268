# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The server on a real socket with real sandboxes, and a checker with real workers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime
from nemo_gym_prorl.tasks.math.checker import CheckLimits, MathChecker
from resources_servers.prorl_math.app import ProRLMathConfig, ProRLMathServer
from tests.prorl_code.conftest import RESPONSE, Client
from tests.rollout.serving import serve
from tests.tasks import containers


CONFIG = OmegaConf.load("resources_servers/prorl_math/configs/prorl_math.yaml")


def build(**changes: Any) -> ProRLMathServer:
    """The server, made of its shipped configuration and some changes."""
    settings = CONFIG.prorl_math.resources_servers.prorl_math
    return ProRLMathServer(
        config=ProRLMathConfig(**{"port": 1, "name": "prorl_math", **settings, **changes}),
        server_client=ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=CONFIG
        ),
    )


@asynccontextmanager
async def serving(**changes: Any) -> AsyncIterator[str]:
    """The base URL of a running server; afterwards none of its containers may be left."""
    require_runtime().activate()
    before = containers.instances()
    async with serve(build(**changes).setup_webserver()) as base_url:
        yield base_url
    assert containers.instances() <= before


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serving(checking_cpu_s=1) as base_url, Client(base_url) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checker() -> AsyncIterator[MathChecker]:
    """Its tests share its workers, of which each takes seconds to start, and an event loop."""
    made = MathChecker(CheckLimits(cpu_s=1))
    yield made
    await made.aclose()


def said(message: str) -> dict[str, Any]:
    """A Responses object whose last message is this."""
    content = [{"type": "output_text", "text": message, "annotations": []}]
    item = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}
    return RESPONSE | {"output": [item]}
