# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A policy's server that keeps what it gets, and programs in a sandbox that call it."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers.base import SandboxSpec

from nemo_gym_prorl.sandbox.provider import SingularityProvider
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.tasks.sandbox import Sandbox
from tests.sandbox.egress import Origin, python


KEY = "rk-own-key"


class Policy(Origin):
    """A policy that answers as the path says, with the digest of the body or as many bytes as the path's number.

    Attributes:
        bodies: digest of each body that arrived whole.
        beyond: bytes that arrived behind a request.
        go: lets the next event of a stream be sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[str] = []
        self.beyond = b""
        self.go = asyncio.Semaphore(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        self.heads.append(head)
        kind, _, argument = head.split()[1].partition("?")[0].removeprefix("/v1/").partition("/")
        if kind == "early":
            writer.write(b"HTTP/1.1 401 No\r\nContent-Length: 2\r\n\r\nno")
            return
        body, lower = bytearray(), head.lower()
        if "\r\ntransfer-encoding: chunked\r\n" in lower:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        elif "\r\ncontent-length: " in lower:
            body += await reader.readexactly(int(lower.split("\r\ncontent-length: ")[1].split("\r\n")[0]))
        self.bodies.append(digest(body))
        sent = b"x" * int(argument) if argument.isdigit() else self.bodies[-1].encode()
        length = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(sent)
        chunks = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        match kind:
            case "go":
                self.go.release()
                writer.write(length + sent)
            case "events":
                writer.write(chunks)
                for number in range(3):
                    writer.write(b"8\r\ndata: %d\n\r\n" % number)
                    await self.go.acquire()
                writer.write(b"0\r\n\r\n")
            case "chunked" | "torn_chunks":
                end = b"0\r\n\r\n" if kind == "chunked" else b""
                writer.write(chunks + b"%x\r\n%b\r\n" % (len(sent), sent) + end)
            case "until_close":
                writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + sent)
            case "torn":
                writer.write(length + sent[:-1])
            case "hold":
                await reader.read()
            case "other":
                writer.write(b"SSH-2.0-x\r\n\r\n")
            case "gone":
                pass
            case _:
                writer.write(length + (b"" if head.startswith("HEAD") else sent))
        await writer.drain()
        if kind in ("hold", "torn", "torn_chunks", "until_close", "gone") or not writer.can_write_eof():
            return
        writer.write_eof()
        self.beyond += await reader.read()


def digest(body: bytes | bytearray) -> str:
    return hashlib.sha256(body).hexdigest()


@asynccontextmanager
async def policy(tls: ssl.SSLContext | None = None) -> AsyncIterator[Policy]:
    made = Policy()
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    server.close()


@asynccontextmanager
async def sandbox(image: Path, runtime: Runtime, **options: Any) -> AsyncIterator[Sandbox]:
    """A sandbox, by default without a network."""
    runtime.activate()
    provider = SingularityProvider(image=str(image), **options)
    made = Sandbox(provider, await provider.create(SandboxSpec()))
    try:
        yield made
    finally:
        await made.stop()


ASK = """
import socket, sys
s = socket.create_connection(("127.0.0.1", 61081), 60)
s.sendall(sys.argv[1].encode("latin-1"))
data, end = b"", "end"
try:
    while chunk := s.recv(65536):
        data += chunk
        s.settimeout(1)
except OSError as error:
    end = "open" if isinstance(error, TimeoutError) else "cut"
print(f"<{end}>" + data.decode("latin-1"), end="")
"""
"""Program that sends bytes to the policy's port and prints how the connection ends, and what came back."""


async def run(box: Sandbox, code: str, *arguments: object) -> str:
    """Run a Python program inside, and return what it says."""
    done = await box.exec(python(code, *arguments), timeout_s=120)
    return (done.stdout or "") + (done.stderr or "")


async def ask(box: Sandbox, request: str) -> str:
    """Send a request with these lines from inside; an empty line and a body may follow."""
    head, _, body = request.partition("\n\n")
    return await run(box, ASK, f"{head}\n\n{body}".replace("\n", "\r\n"))
