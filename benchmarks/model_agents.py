# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Agents that play rollouts with a model server, in the two ways in which that is done, at hardly any cost.

A :class:`SharingAgent` does as ``prorl_agent`` does (``handlers/conversation.py``): it names its rollout, sends what
is new, and reads the tokens once, at the end. An :class:`EchoingAgent` does as Gym's ``simple_agent`` does: the whole
history goes back each turn, token ids and log-probs included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from benchmarks.keep_alive import Answer, KeepAliveClient
from benchmarks.stand_in_engine import TOOL, WRITTEN


_TOOLS = [
    {
        "type": "function",
        "name": TOOL,
        "description": "Run Python code in a sandbox and read what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "what to run"}},
            "required": ["code"],
        },
        "strict": False,
    }
]
_PARAMS: dict[str, Any] = {"tools": _TOOLS, "temperature": 1.0, "max_output_tokens": 2 * WRITTEN}


class Agent:
    """One rollout.

    Args:
        client: of the model server.
        observed: texts that its tool gives, one after the other; the first is the task.
    """

    def __init__(self, client: KeepAliveClient, observed: Sequence[str]) -> None:
        self._client = client
        self._observed = observed
        self._turns = 0
        self._call: str | None = None
        self.context = 0
        """Tokens of the last prompt."""

    async def turn(self) -> None:
        """Observe and ask for the policy's turn.

        Raises:
            OSError, ValueError: no answer, or none that an agent can go on with.
        """
        text = self._observed[self._turns % len(self._observed)]
        new: dict[str, Any] = {"role": "user", "content": text}
        if self._call is not None:
            new = {"type": "function_call_output", "call_id": self._call, "output": text}
        self._turns += 1
        answer = orjson.loads((await self._ask(new)).body)
        item = answer["output"][-1]
        if item["type"] != "function_call":
            raise ValueError(f"no call, but {orjson.dumps(item)[:300]!r}")
        self._call = item["call_id"]
        self.context = answer["usage"]["input_tokens"]
        self._heard(answer, new)

    async def end(self) -> None:
        """What is to be done when the rollout is over."""

    async def _ask(self, new: dict[str, Any]) -> Answer:
        raise NotImplementedError

    def _heard(self, answer: dict[str, Any], new: dict[str, Any]) -> None:
        raise NotImplementedError

    async def _checked(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        answer = await self._client.call(method, path, body, headers)
        if answer.status != 200:
            raise ValueError(f"{method} {path} answered {answer.status}: {answer.body[:300]!r}")
        return answer


class SharingAgent(Agent):
    """Sends what is new, and reads the tokens at the end."""

    def __init__(self, client: KeepAliveClient, observed: Sequence[str], rollout: str, group: str) -> None:
        super().__init__(client, observed)
        self._path = f"/v1/rollouts/{rollout}"
        self._headers = {"x-rollout-id": rollout, "x-rollout-group": group, "x-rollout-tokens": "deferred"}
        self._previous: dict[str, str] = {}

    async def _ask(self, new: dict[str, Any]) -> Answer:
        body = orjson.dumps({**_PARAMS, "input": [new], **self._previous})
        return await self._checked("POST", "/v1/responses", body, self._headers)

    def _heard(self, answer: dict[str, Any], new: dict[str, Any]) -> None:
        self._previous = {"previous_response_id": answer["id"]}

    async def end(self) -> None:
        tokens = orjson.loads((await self._checked("GET", f"{self._path}/tokens", b"", {})).body)
        if len(tokens["answers"]) != self._turns or len(tokens["sequences"]) != 1:
            raise ValueError(f"{self._turns} turns, but tokens of {len(tokens['answers'])} in {self._path}")
        await self._checked("DELETE", self._path, b"", {})


class EchoingAgent(Agent):
    """Sends everything again each turn."""

    def __init__(self, client: KeepAliveClient, observed: Sequence[str]) -> None:
        super().__init__(client, observed)
        self._items = b""
        self._cookies = ""

    async def _ask(self, new: dict[str, Any]) -> Answer:
        self._items += (b"," if self._items else b"") + orjson.dumps(new)
        body = orjson.dumps(_PARAMS)[:-1] + b',"input":[' + self._items + b"]}"
        answer = await self._checked("POST", "/v1/responses", body, {"cookie": self._cookies} if self._cookies else {})
        self._cookies = answer.cookies or self._cookies
        return answer

    def _heard(self, answer: dict[str, Any], new: dict[str, Any]) -> None:
        if not answer["output"][-1].get("generation_token_ids"):
            raise ValueError("an answer without its tokens")
        self._items += b"," + orjson.dumps(answer["output"])[1:-1]
