# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 over connections that are kept, and nothing else: what thousands of agents cost is not what is measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass


_IDLE_S = 15.0
"""How long an idle connection may be used again, as in our own clients; Gym's servers keep it for 30 s."""
_MOST_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, the cookies that it set (as a ``Cookie`` header wants them), and the body."""

    status: int
    cookies: str
    body: bytes


class KeepAliveClient:
    """Calls one server.

    Args:
        url: ``http://HOST:PORT``.

    Attributes:
        sent, received: bytes of bodies both ways.
    """

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._host, self._port = host, int(port)
        self._idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.sent = self.received = 0

    async def call(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Call once.

        Raises:
            OSError: no connection, or it broke.
            ValueError: what came back is not an answer with a length.
        """
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
        self.sent += len(body)
        self.received += length
        return Answer(status, cookies, content)

    def close(self) -> None:
        """Close what is idle."""
        for _, _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            since, reader, writer = self._idle.pop()
            if time.monotonic() - since < _IDLE_S and not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._host, self._port, limit=_MOST_BYTES)


def _read_head(head: str) -> tuple[int, int, str]:
    """Status, length of the body, cookies."""
    first, *lines = head.split("\r\n")
    length, cookies = None, []
    for line in lines:
        name, _, value = line.partition(": ")
        if name.lower() == "content-length":
            length = int(value)
        elif name.lower() == "set-cookie":
            cookies.append(value.partition(";")[0])
    if length is None:
        raise ValueError(f"an answer without a length: {head[:200]!r}")
    return int(first.split()[1]), length, "; ".join(cookies)
