# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Posts to engines over kept connections, held against servers that answer byte by byte what they are told to."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.policy.engines.connections import Connections, Dropped, post, without_echo
from tests.policy.engines import free_port


IDS = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=4), min_size=1, max_size=4)


def _parts(stretches: list[list[int]]) -> list[bytes]:
    """A list in JSON, in as many parts as there are stretches, an empty one, and its end."""
    texts = [b",".join(b"%d" % one for one in stretch) for stretch in stretches]
    return [b"[" + texts[0], *(b"," + text for text in texts[1:]), b"", b"]"]


@given(sent=IDS, more=st.sampled_from([b"", b"1", b",1"]))
def test_an_echo_is_left_out_if_it_is_the_same_to_the_byte(sent: list[list[int]], more: bytes) -> None:
    parts = _parts(sent)
    said = b"".join(parts)[:-1] + more + b"]"
    raw = b'{"text":"\\"prompt_token_ids\\":[7]","prompt_token_ids":%b,"n":"prompt_token_ids"}' % said
    known = orjson.loads(raw) | ({} if more else {"prompt_token_ids": None})
    assert orjson.loads(without_echo(raw, parts)) == known
    assert without_echo(raw, ()) == raw
    assert without_echo(raw[:-9], [*parts, b"1"]) == raw[:-9]


class Server:
    """Says what it is told to.

    Args:
        answers: one for each request of a connection; ``None`` ends it instead.
        ends: whether a connection ends after these.
    """

    def __init__(self, *answers: bytes | None, ends: bool = False) -> None:
        self._answers = answers
        self._ends = ends
        self.connections = 0
        self.requests: list[bytes] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._talk(reader, writer)
        writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in self._answers:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            self.requests.append(head + await reader.readexactly(int(length.partition(b":")[2])))
            if answer is None:
                return
            for at in range(0, len(answer), 7):
                writer.write(answer[at : at + 7])
                await writer.drain()
                await asyncio.sleep(0)
        if not self._ends:
            await reader.read()


@contextlib.asynccontextmanager
async def before(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening, Connections() as connections:
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/x?y=1"
        yield connections.kept


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
CHUNKS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n1;x=y\r\n}\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("server", "begun"),
    [
        (lambda: Server(None), False),
        (lambda: Server(OK[:-1], ends=True), True),
        (lambda: Server(CHUNKS[:-4], ends=True), True),
        (lambda: Server(b"HTTP/1.1 200", ends=True), False),  # no answer, as far as anybody read
        (lambda: Server(b"ICY 200 OK\r\n\r\n"), True),
    ],
    ids=["nothing", "short", "no last chunk", "half a head", "another protocol"],
)
async def test_answers_that_are_not_whole(server: Callable[[], Server], begun: bool) -> None:
    there = server()
    async with before(there) as session, asyncio.timeout(60):
        with pytest.raises(Dropped) as dropped:
            await post(session, there.url, {}, [b"1"])
        assert dropped.value.begun == begun


async def test_nobody_there_and_headers_that_would_be_two() -> None:
    there = Server(OK)
    async with before(there) as session:
        with pytest.raises(aiohttp.ClientConnectorError, match=r"Cannot connect to host 127\.0\.0\.1"):
            await post(session, f"http://127.0.0.1:{free_port()}/v1", {}, [b"1"])
        with pytest.raises(ValueError, match="control character"):
            await post(session, there.url, {"X-Key": "k\r\nX-Other: o"}, [b"1"])


async def test_an_engine_behind_tls_that_cannot_be_trusted_is_not_asked(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    made += ["-keyout", str(key), "-out", str(certificate)]
    assert await (await asyncio.create_subprocess_exec(*made, stderr=asyncio.subprocess.DEVNULL)).wait() == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    there = Server(OK)
    async with await asyncio.start_server(there.serve, "127.0.0.1", 0, ssl=context) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with Connections() as connections:
            with pytest.raises(aiohttp.ClientConnectorError, match="certificate verify failed"):
                await post(connections.kept, f"https://127.0.0.1:{port}/v1", {}, [b"1"])
    assert not there.requests
