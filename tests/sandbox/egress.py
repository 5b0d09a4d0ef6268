# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Servers on this machine's loopback device, and programs in a sandbox that talk to them through its proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nemo_gym_prorl.sandbox.container import Container
from nemo_gym_prorl.sandbox.supervisor.protocol import EgressRequest


ALLOWED, OTHER = "127.0.0.2", "127.0.0.3"
"""Addresses of the host's loopback device that clients in a sandbox do not take for their own localhost."""


class Origin:
    """An HTTP server that counts its connections, and keeps the heads of requests."""

    def __init__(self) -> None:
        self.port = 0
        self.heads: list[str] = []
        self.connections = 0
        self.open = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._answer(reader, writer)
        finally:
            self.open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        _method, path, _version = head.split("\r\n")[0].split()
        kind, _, argument = path[1:].partition("/")
        body = b"hello"
        if kind == "bytes":
            body = b"x" * int(argument)
        elif kind == "sleep":
            await asyncio.sleep(float(argument))
        elif kind == "hold":
            await reader.read()
        elif kind == "count":
            length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
            body = str(len(await reader.readexactly(length))).encode()
        elif kind == "to":
            writer.write(f"HTTP/1.1 302 Found\r\nLocation: http://{argument}/\r\nContent-Length: 0\r\n\r\n".encode())
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()


@asynccontextmanager
async def origin(address: str = ALLOWED) -> AsyncIterator[Origin]:
    made = Origin()
    server = await asyncio.start_server(made.handle, address, 0)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    server.close()


ASK = """
import socket, sys
s = socket.create_connection(("127.0.0.1", 61080), 20)
s.sendall(sys.argv[1].encode("latin-1"))
data = b""
try:
    while chunk := s.recv(65536):
        data += chunk
        if b"Connection established" in data and len(sys.argv) > 2:
            s.sendall(sys.argv[2].encode("latin-1")); sys.argv.pop()
except OSError:
    pass
sys.stdout.buffer.write(data)
"""
"""Program that sends a text to the proxy, a second one through a tunnel, and prints what comes back."""


def python(code: str, *arguments: object) -> str:
    return shlex.join(["python3", "-c", code, *map(str, arguments)])


async def ask(container: Container, request: str, inside_tunnel: str | None = None) -> str:
    """Send lines to a sandbox's proxy from inside."""
    texts = [text.replace("\n", "\r\n") + "\r\n\r\n" for text in (request, inside_tunnel) if text is not None]
    return (await container.run(python(ASK, *texts), timeout_s=60)).stdout


FETCH = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read().decode())"


async def fetch(container: Container, url: str) -> tuple[int, str]:
    """Exit code and output of a program that knows the proxy by its variables."""
    done = await container.run(python(FETCH, url), timeout_s=60)
    return done.exit_code, done.stdout + done.stderr


async def uses(container: Container) -> dict[tuple[str, bool], dict[str, Any]]:
    """Report of the sandbox's proxy by host and decision."""
    message, _files = await container.ask(EgressRequest(container.name))
    json.dumps(message)
    return {(use["host"], use["allowed"]): use for use in message["hosts"]}
