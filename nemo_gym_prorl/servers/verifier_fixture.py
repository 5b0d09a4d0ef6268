# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Verifier fixture for ``gym env test`` and ``gym env publish`` of Gym 0.7: cases with known rewards.

Gym calls ``verify`` of a new server with a row and a response. Our servers also grade files in a sandbox, so a case is
executed like a rollout: a session is seeded, the response's tool calls run in a real sandbox, and the server's own
routes return the reward.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

from nemo_gym_prorl.sandbox.images.builder import KERNEL, BuildRequest, build, ensure_image
from nemo_gym_prorl.sandbox.images.entries import ignore_progress
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime
from nemo_gym_prorl.servers.task_server import CLOSE_PATH, RELEASE_PATH, TaskServer, TaskVerifyRequest


try:
    from nemo_gym.verifier_fixture import VerifierFixture
except ModuleNotFoundError:  # before Gym 0.7
    VerifierFixture = None

CASES = "tests/verifier_cases.jsonl"
"""Path of the file with cases in a server's folder."""

IMAGE = "tests/verifier_image.def"
"""Path, in a server's folder, of the optional recipe of its cases' image ``prorl_NAME-verifier``, based on the image
``kernel``."""


def verifier_fixture(app: str, server: type[TaskServer]) -> Any:
    """Return the ``VERIFIER_FIXTURE`` of the server's module ``app``, whose folder contains :data:`CASES` and the
    shipped configuration; ``None`` before Gym 0.7."""
    if VerifierFixture is None:
        return None
    folder = Path(app).parent
    return VerifierFixture(
        server_factory=lambda: as_shipped(folder, server),
        request_model=TaskVerifyRequest,
        cases_path=folder / CASES,
        invoke=lambda created, request: play(created, request, folder / IMAGE),
        reseed=lambda server, request: None,  # our verifiers are deterministic
    )


def as_shipped(folder: Path, server: type[TaskServer]) -> TaskServer:
    name = folder.name
    shipped = OmegaConf.load(folder / "configs" / f"{name}.yaml")
    config = server.model_fields["config"].annotation
    assert config is not None
    return server(
        config=config(**OmegaConf.select(shipped, f"{name}.resources_servers.{name}"), name=name, port=0),
        server_client=ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=0), global_config_dict=shipped
        ),
    )


async def play(server: TaskServer, request: TaskVerifyRequest, recipe: Path) -> dict[str, Any]:
    """Execute the tool calls of a case's response on a new server, and return the graded row. Without the file
    ``recipe``, no image is built."""
    await asyncio.to_thread(_build_image, server.config.name, recipe)
    row = request.model_dump(mode="json", exclude_unset=True)
    response = row.pop("response")
    app = server.setup_webserver()
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", timeout=None) as client,
    ):
        await _post(client, "/seed_session", row)
        for item in response["output"]:
            if item["type"] == "function_call":
                await _post(client, f"/{quote(item['name'], safe='')}", item["arguments"])
        await _post(client, RELEASE_PATH, {})
        graded: dict[str, Any] = (await _post(client, "/verify", row | {"response": response})).json()
        await _post(client, CLOSE_PATH, {})
    return graded


def _build_image(server: str, recipe: Path) -> None:
    if not recipe.exists():
        return
    request = BuildRequest(recipe.read_text(), str(ensure_image(KERNEL, ignore_progress)), f"{server}-verifier")
    build(request, ImageStore(), require_runtime(), ignore_progress)


async def _post(client: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
    content = {"content": body} if isinstance(body, str) else {"json": body}
    answer = await client.post(path, headers={"Content-Type": "application/json"}, **content)
    if not answer.is_success:
        raise ValueError(f"{path} answers {answer.status_code}: {answer.json()['detail']}")
    return answer
