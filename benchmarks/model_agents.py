# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Agents that play rollouts with a model server at little CPU cost of their own.

A :class:`SharingAgent` works like ``prorl_agent``: each turn sends only the new items, and the tokens are read once,
at the end. An :class:`EchoingAgent` works like Gym's ``simple_agent``: each turn sends the whole history, with token
ids and log-probs. Both use HTTP/1.1 over keep-alive connections and no HTTP library.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from benchmarks.stand_in_engine import TOOL, WRITTEN


_IDLE_S = 15.0
"""Seconds after which an idle connection is not reused; Gym's servers close idle connections after 30 s."""
_MAX_HEAD_BYTES = 2**26
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


@dataclass(frozen=True, slots=True)
class Answer:
    """HTTP answer: status, cookies in the form of a ``Cookie`` header, and body."""

    status: int
    cookies: str
    body: bytes


class KeepAliveClient:
    """HTTP client of one server, with a pool of keep-alive connections.

    Args:
        url: ``http://HOST:PORT``.

    Attributes:
        carried: bytes of all request and answer bodies so far.
    """

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._host, self._port = host, int(port)
        self._idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.carried = 0

    async def call(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send one request, and return the answer of any status. Raise an ``OSError`` if the connection fails, and a
        ``ValueError`` for an answer without ``Content-Length``."""
        lines = [f"{method} {path} HTTP/1.1", f"host: {self._host}:{self._port}", f"content-length: {len(body)}"]
        lines += ["content-type: application/json", *(f"{name}: {value}" for name, value in (headers or {}).items())]
        reader, writer = await self._connection()
        try:
            writer.write("\r\n".join([*lines, "\r\n"]).encode() + body)
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                status, length, cookies = _read_head(head)
                content = await reader.readexactly(length)
            except asyncio.IncompleteReadError as error:
                raise ConnectionResetError(f"{method} {path}: the connection ended") from error
        except BaseException:
            writer.close()
            raise
        self._idle.append((time.monotonic(), reader, writer))
        self.carried += len(body) + length
        return Answer(status, cookies, content)

    def close(self) -> None:
        for _, _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            since, reader, writer = self._idle.pop()
            if time.monotonic() - since < _IDLE_S and not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._host, self._port, limit=_MAX_HEAD_BYTES)


def _read_head(head: str) -> tuple[int, int, str]:
    first, *lines = head.split("\r\n")
    fields = [(name.lower(), value) for name, _, value in (line.partition(": ") for line in lines)]
    length = next((int(value) for name, value in fields if name == "content-length"), None)
    if length is None:
        raise ValueError(f"an answer without a length: {head[:200]!r}")
    cookies = [value.partition(";")[0] for name, value in fields if name == "set-cookie"]
    return int(first.split()[1]), length, "; ".join(cookies)


class Agent:
    """Agent of one rollout.

    Args:
        client: client of the model server.
        observed: texts of the observations, used cyclically; the first is the task.

    Attributes:
        context: tokens of the last prompt.
    """

    def __init__(self, client: KeepAliveClient, observed: Sequence[str]) -> None:
        self._client, self._observed = client, observed
        self._turns = 0
        self._call_id: str | None = None
        self.context = 0

    async def turn(self) -> None:
        """Send the next observation, and receive the policy's turn. Raise an ``OSError`` without an answer, and a
        ``ValueError`` for an error status or an answer without a tool call."""
        text = self._observed[self._turns % len(self._observed)]
        new: dict[str, Any] = {"role": "user", "content": text}
        if self._call_id is not None:
            new = {"type": "function_call_output", "call_id": self._call_id, "output": text}
        self._turns += 1
        answer = orjson.loads((await self._ask(new)).body)
        item = answer["output"][-1]
        if item["type"] != "function_call":
            raise ValueError(f"no call, but {orjson.dumps(item)[:300]!r}")
        self._call_id = item["call_id"]
        self.context = answer["usage"]["input_tokens"]
        self._keep(answer)

    async def end(self) -> None:
        """Finish the rollout at the model server."""

    async def _ask(self, new: dict[str, Any]) -> Answer:
        raise NotImplementedError

    def _keep(self, answer: dict[str, Any]) -> None:
        raise NotImplementedError

    async def _checked(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        answer = await self._client.call(method, path, body, headers)
        if answer.status != 200:
            raise ValueError(f"{method} {path} answered {answer.status}: {answer.body[:300]!r}")
        return answer


class SharingAgent(Agent):
    """Agent that sends only the new items of a turn, and reads the tokens at the end."""

    def __init__(self, client: KeepAliveClient, observed: Sequence[str], rollout: str, group: str) -> None:
        super().__init__(client, observed)
        self._path = f"/v1/rollouts/{rollout}"
        self._headers = {"x-rollout-id": rollout, "x-rollout-group": group, "x-rollout-tokens": "deferred"}
        self._previous: dict[str, str] = {}

    async def _ask(self, new: dict[str, Any]) -> Answer:
        body = orjson.dumps({**_PARAMS, "input": [new], **self._previous})
        return await self._checked("POST", "/v1/responses", body, self._headers)

    def _keep(self, answer: dict[str, Any]) -> None:
        self._previous = {"previous_response_id": answer["id"]}

    async def end(self) -> None:
        tokens = orjson.loads((await self._checked("GET", f"{self._path}/tokens", b"", {})).body)
        if len(tokens["answers"]) != self._turns or len(tokens["sequences"]) != 1:
            raise ValueError(f"{self._turns} turns, but tokens of {len(tokens['answers'])} in {self._path}")
        await self._checked("DELETE", self._path, b"", {})


class EchoingAgent(Agent):
    """Agent that sends the whole history in each turn."""

    def __init__(self, client: KeepAliveClient, observed: Sequence[str]) -> None:
        super().__init__(client, observed)
        self._items = b""
        self._cookies: dict[str, str] = {}

    async def _ask(self, new: dict[str, Any]) -> Answer:
        self._items += (b"," if self._items else b"") + orjson.dumps(new)
        body = orjson.dumps(_PARAMS)[:-1] + b',"input":[' + self._items + b"]}"
        answer = await self._checked("POST", "/v1/responses", body, self._cookies)
        self._cookies = {"cookie": answer.cookies} if answer.cookies else self._cookies
        return answer

    def _keep(self, answer: dict[str, Any]) -> None:
        if not answer["output"][-1].get("generation_token_ids"):
            raise ValueError("an answer without its tokens")
        self._items += b"," + orjson.dumps(answer["output"])[1:-1]
