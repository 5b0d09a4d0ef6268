# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Bearer keys for Gym's own HTTP client, and tasks' requests to Gym's model servers.

Gym's client sends no keys, so a server with a key refuses Gym's collector and NeMo RL's actor. :func:`send_keys` makes
the client of the current process send each server its key from Gym's configuration::

    ray.get(actor.__ray_call__.remote(send_keys))

:class:`TaskModel` sends requests that belong to no rollout, such as a judge's, to a model server. Any failure is
``verifier_error``, since a failed request says nothing about the policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

from nemo_gym.config_types import ModelServerRef
from omegaconf import OmegaConf
from pydantic import BaseModel, Field

from nemo_gym_prorl.agent.gym_http import CookieJar, GymServer, addresses, require_json
from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.http.client import HttpClient
from nemo_gym_prorl.http.keys import authorization


def send_keys(caller: object = None) -> None:
    """Make Gym's client send each server that server's own key, and no other key.

    Call the function after Gym has read its configuration, because the keys are read once. Ray passes the actor as
    ``caller``.
    """
    from nemo_gym import server_utils
    from nemo_gym.global_config import get_global_config_dict

    config = cast("dict[str, Any]", OmegaConf.to_container(get_global_config_dict(), resolve=True))
    keys = {urlsplit(known.url).netloc: authorization(known.key) for known in addresses(config).values()}
    send_without_key = server_utils.request

    async def request(method: str, url: str, _internal: bool = False, **options: Any) -> Any:
        headers = {**(options.pop("headers", None) or {}), **keys.get(urlsplit(url).netloc, {})}
        return await send_without_key(method, url, _internal, headers=headers, **options)

    server_utils.request = request


RESPONSES_PATH = "/v1/responses"


class TaskModel:
    """Client of a model server of the deployment, for requests that belong to no rollout.

    Args:
        config: Gym's merged configuration, which contains the servers' addresses and keys.
        params: parameters of each request besides ``input``, in the format of the Responses API.
        timeout_s: seconds for one request, including the wait for a free slot.

    Raises:
        InfrastructureError: ``config`` has no such server; the error's field is ``judge_model_server``.
    """

    def __init__(
        self, config: Mapping[str, Any], server: str, params: Mapping[str, Any], *, timeout_s: float, concurrency: int
    ) -> None:
        address = addresses(config).get(server)
        if address is None:
            raise InfrastructureError(f"the configuration has no server {server!r}", field="judge_model_server")
        self.name = server
        self._params = dict(params)
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(concurrency)
        self._http = HttpClient()
        self._server = GymServer(server, address, self._http)

    async def __call__(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text of the last message in the model's response."""
        request = self._params | {"input": list(messages)}
        what = f"{self.name} {RESPONSES_PATH}"
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                answer = await self._server.post(RESPONSES_PATH, request, CookieJar())
        except TimeoutError as error:
            raise _verifier_error(f"{what}: no answer within {self._timeout_s:g} s") from error
        except InfrastructureError as error:
            raise _verifier_error(error.reason) from error
        if not answer.ok:
            raise _verifier_error(f"{what}: HTTP {answer.status}: {answer.text(500)}")
        response = require_json(answer, what, FailureKind.VERIFIER_ERROR)
        text = _text(response)
        if text is None:
            raise _verifier_error(f"{what}: the answer has no complete message: {answer.text(500)}")
        return text

    async def aclose(self) -> None:
        await self._http.close()


class JudgeModelConfig(BaseModel):
    """Settings of an environment's optional judge model; a mixin for its configuration."""

    judge_model_server: ModelServerRef | None = None
    judge_responses_create_params: dict[str, Any] = Field(default_factory=dict)
    judge_timeout_s: float = Field(default=120.0, gt=0)
    judge_concurrency: int = Field(default=32, ge=1)

    def judge_model(self, global_config: Any) -> TaskModel | None:
        """Return the client of the judge model of Gym's merged configuration; ``None`` if none is configured."""
        if self.judge_model_server is None:
            return None
        config: Any = OmegaConf.to_container(global_config, resolve=True)
        return TaskModel(
            config,
            self.judge_model_server.name,
            self.judge_responses_create_params,
            timeout_s=self.judge_timeout_s,
            concurrency=self.judge_concurrency,
        )


def _verifier_error(reason: str) -> InfrastructureError:
    return InfrastructureError(reason, kind=FailureKind.VERIFIER_ERROR)


def _text(response: Any) -> str | None:
    if not isinstance(response, dict) or response.get("status") == "incomplete" or response.get("incomplete_details"):
        return None
    output = response.get("output")
    for item in reversed(output if isinstance(output, list) else []):
        if isinstance(item, dict) and item.get("type") == "message":
            parts = item.get("content")
            texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
            return "".join(text for text in texts if isinstance(text, str)) or None
    return None
