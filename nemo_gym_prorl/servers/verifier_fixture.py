# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's check of a verifier by cases whose reward is known: ``gym env test`` and ``gym env publish`` of Gym 0.7.

Gym calls ``verify`` of a fresh server with a row and a policy's answer. Our servers grade what the policy left in its
sandbox, too, so a case is played as a rollout is: a session is seeded with the row, the tool calls of the answer are
carried out in a real sandbox, and the reward is that of the server's own routes. Nothing stands in for anything.
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
"""In a server's folder: its cases."""

IMAGE = "tests/verifier_image.def.j2"
"""Beside them, where cases name an image ``prorl_NAME-verifier``: its recipe, on the image ``kernel``."""


def verifier_fixture(app: str, server: type[TaskServer]) -> Any:
    """What Gym looks for in a server's module as ``VERIFIER_FIXTURE``; ``None`` where Gym knows no such thing.

    Args:
        app: the module's ``__file__``. Beside it are :data:`CASES` and the configuration that ships with the server.
        server: the server's class.
    """
    if VerifierFixture is None:
        return None
    folder = Path(app).parent
    return VerifierFixture(
        server_factory=lambda: as_shipped(folder, server),
        request_model=TaskVerifyRequest,
        cases_path=folder / CASES,
        invoke=lambda made, request: play(made, request, folder / IMAGE),
        reseed=_nothing_to_seed,
    )


def as_shipped(folder: Path, server: type[TaskServer]) -> TaskServer:
    """A fresh server with the settings that its users have, as they stand in its folder."""
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
    """Play a case on a server that nobody serves yet, and end the server.

    Args:
        server: the server.
        request: the row, with a response whose tool calls are carried out in their order.
        recipe: of the image that rows name ``prorl_NAME-verifier``, if there is one.

    Raises:
        ValueError: a route refused, with its path and what it said.
        InfrastructureError: the image could not be built.
    """
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


def _nothing_to_seed(server: TaskServer, request: TaskVerifyRequest) -> None:
    """Gym asks for it before it compares two rewards of one case. No verifier of ours throws dice for a reward."""


def _build_image(server: str, recipe: Path) -> None:
    if not recipe.exists():
        return
    order = BuildRequest(
        str(recipe), str(ensure_image(KERNEL, ignore_progress)), f"{server}-verifier", format="folder"
    )
    build(order, ImageStore(), require_runtime(), ignore_progress)


async def _post(client: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
    content = {"content": body} if isinstance(body, str) else {"json": body}
    answer = await client.post(path, headers={"Content-Type": "application/json"}, **content)
    if not answer.is_success:
        raise ValueError(f"{path} answers {answer.status_code}: {answer.json()['detail']}")
    return answer
