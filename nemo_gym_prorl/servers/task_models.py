# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A Gym model server that a task asks on its own account: a judge.

What the policy says never passes here; nothing of it is a rollout. So a call that fails is ``verifier_error``,
whatever it failed of: it tells nothing about the policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym_prorl.agent.gym_http import CookieJar, GymServer, HttpClient, addresses, require_json
from nemo_gym_prorl.failures import FailureKind, InfrastructureError


RESPONSES_PATH = "/v1/responses"


class TaskModel:
    """A model server of the deployment.

    Args:
        config: Gym's merged configuration, which says where the servers are.
        server: its instance name.
        params: of each request besides its ``input``, as the Responses API has them.
        timeout_s: seconds for one answer, waiting for a place included.
        concurrency: how many are asked for at a time.

    Raises:
        InfrastructureError: there is no such server; names ``judge_model_server``.
    """

    def __init__(
        self, config: Mapping[str, Any], server: str, params: Mapping[str, Any], *, timeout_s: float, concurrency: int
    ) -> None:
        address = addresses(config).get(server)
        if address is None:
            raise InfrastructureError(f"there is no server {server!r}", field="judge_model_server")
        self._name = server
        self._params = dict(params)
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(concurrency)
        self._http = HttpClient()
        self._server = GymServer(server, address, self._http)

    async def __call__(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of the answer to these messages.

        Raises:
            InfrastructureError: ``verifier_error``, there is none.
        """
        request = self._params | {"input": list(messages)}
        what = f"{self._name} {RESPONSES_PATH}"
        try:
            async with asyncio.timeout(self._timeout_s), self._places:
                answer = await self._server.post(RESPONSES_PATH, request, CookieJar())
        except TimeoutError as error:
            raise _no_answer(f"{what}: no answer within {self._timeout_s:g} s") from error
        except InfrastructureError as error:
            raise _no_answer(error.reason) from error
        if not answer.ok:
            raise _no_answer(f"{what}: HTTP {answer.status}: {answer.text(500)}")
        response = require_json(answer, what, FailureKind.VERIFIER_ERROR)
        text = _text(response)
        if text is None:
            raise _no_answer(f"{what} answered no whole message: {answer.text(500)}")
        return text

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.close()


def _no_answer(reason: str) -> InfrastructureError:
    return InfrastructureError(reason, kind=FailureKind.VERIFIER_ERROR)


def _text(response: Any) -> str | None:
    """The last message's text; ``None`` if there is none, or if the answer was cut off."""
    if not isinstance(response, dict) or response.get("status") == "incomplete" or response.get("incomplete_details"):
        return None
    output = response.get("output")
    for item in reversed(output if isinstance(output, list) else []):
        if isinstance(item, dict) and item.get("type") == "message":
            parts = item.get("content")
            texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
            return "".join(text for text in texts if isinstance(text, str)) or None
    return None
