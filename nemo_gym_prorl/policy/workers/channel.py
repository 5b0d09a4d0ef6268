# SPDX-License-Identifier: Apache-2.0
"""Messages between two processes over a socket pair: JSON, a line each, what is said in one turn of the event loop in
one write. The other end's death is the end of the stream."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Self, cast

import orjson


class Channel(asyncio.Protocol):
    """One end.

    Args:
        receive: called with each message, in order.
        lost: called once, when the other end is gone.
    """

    def __init__(self, receive: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._receive = receive
        self._lost = lost
        self._out: list[bytes] = []
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def over(cls, end: socket.socket, receive: Callable[[Any], None], lost: Callable[[], None]) -> Self:
        """Open one end; the socket belongs to it from now on."""
        _, channel = await asyncio.get_running_loop().create_connection(lambda: cls(receive, lost), sock=end)
        return channel

    def send(self, message: Any) -> None:
        """Say something; nobody hears it when the other end is gone."""
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        said, self._out = b"".join(self._out), []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(said)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio's protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Part of asyncio's protocol."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._receive(orjson.loads(line))

    def connection_lost(self, error: Exception | None) -> None:
        """Part of asyncio's protocol."""
        self._lost()
