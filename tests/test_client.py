# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""HTTP client of the servers: what its callers rely on."""

import asyncio
import contextlib
import gzip
import re
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from nemo_gym_prorl.http import client
from nemo_gym_prorl.http.client import ConnectFailed, ConnectionDropped, HttpClient
from tests.agent.test_keys import certificate  # noqa: F401
from tests.policy.engines import free_port


class Peer:
    """Answers the requests of each connection with fixed bytes, and closes the connection after the last.

    Args:
        connections: answers per connection; the last entry serves all later connections.
    """

    def __init__(self, *connections: list[bytes]) -> None:
        self._answers = connections
        self.seen: list[tuple[int, bytes]] = []
        """Connection and bytes of each request."""
        self.ended: list[int] = []
        self._count = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self._count = self._count, self._count + 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for answer in self._answers[min(number, len(self._answers) - 1)]:
                head = await reader.readuntil(b"\r\n\r\n")
                sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
                body = await reader.readexactly(int(sizes[0].partition(b":")[2])) if sizes else b""
                self.seen.append((number, head + body))
                for at in range(0, len(answer), 5):
                    writer.write(answer[at : at + 5])
                    await writer.drain()
            if not answer:
                await reader.read()  # the client gives up
        self.ended.append(number)
        writer.close()


@contextlib.asynccontextmanager
async def before(peer: Peer, tls: ssl.SSLContext | None = None) -> AsyncIterator[HttpClient]:
    async with await asyncio.start_server(peer.serve, "127.0.0.1", 0, ssl=tls) as server, HttpClient() as http:
        peer.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}/path?a=b"
        async with asyncio.timeout(30):
            yield http


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n1;x=y\r\n}\r\n0\r\n\r\n"
CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
UNTIL_END = b"HTTP/1.1 200 OK\r\n\r\n{}"
ZIPPED = gzip.compress(b"{}")
COMPRESSED = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(ZIPPED), ZIPPED)


@pytest.mark.parametrize(
    ("answer", "status", "body", "stays"),
    [
        (OK, 200, b"{}", True),
        (CHUNKED, 200, b"{}", True),
        (COMPRESSED, 200, b"{}", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
        (b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", 307, b"", True),
        (CLOSING, 200, b"{}", False),
        (UNTIL_END, 200, b"{}", False),
    ],
    ids=["length", "chunks", "compressed", "nothing", "redirect", "closing", "until the end"],
)
async def test_an_answer_is_read_whole(answer: bytes, status: int, body: bytes, stays: bool) -> None:
    peer = Peer([answer, OK] if stays else [answer])
    async with before(peer) as http:
        got, then = [await http.request("POST", peer.url, {"X-A": "b"}, [b"1", b"2"]) for _ in range(2)]
    assert (got.status, got.body, then.body) == (status, body, b"{}")
    assert [number for number, _ in peer.seen] == ([0, 0] if stays else [0, 1])
    head, sent = peer.seen[0][1].split(b"\r\n\r\n")
    first, *fields = head.split(b"\r\n")
    assert (first, sent) == (b"POST /path?a=b HTTP/1.1", b"12")
    host = b"Host: %b" % peer.url.split("/")[2].encode()
    assert {host, b"Content-Length: 2", b"X-A: b"} <= {*fields}


@pytest.mark.parametrize("answer", [b"HTTP/1.1 20", OK[:-1], CHUNKED[:-4], b"ICY 200 OK\r\n\r\n"])
async def test_an_answer_that_ends_early_is_none(answer: bytes) -> None:
    peer = Peer([answer])
    async with before(peer) as http:
        with pytest.raises(ConnectionDropped) as dropped:
            await http.request("POST", peer.url, {"Authorization": "Bearer secret"})
    assert not re.search(r"secret|\n", str(dropped.value))
    assert dropped.value.begun == (answer != b"HTTP/1.1 20")
    assert len(peer.seen) == 1


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST"])
async def test_only_an_idempotent_request_is_sent_again(method: str) -> None:
    """The first connection ends as its third request arrives."""
    peer = Peer([OK, OK, b"H"], [OK])
    async with before(peer) as http:
        for _ in range(2):
            await http.request(method, peer.url, {})
        if method == "POST":
            with pytest.raises(ConnectionDropped):
                await http.request(method, peer.url, {})
        else:
            assert (await http.request(method, peer.url, {})).ok
    assert [number for number, _ in peer.seen] == [0, 0, 0, 1][: 3 if method == "POST" else 4]


async def test_a_connection_that_was_idle_for_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_IDLE_S", 0.1)
    peer = Peer([OK, OK])
    async with before(peer) as http:
        await http.request("GET", peer.url, {})
        await asyncio.sleep(0.2)
        await http.request("GET", peer.url, {})
    assert [number for number, _ in peer.seen] == [0, 1]


async def test_a_cancelled_request_closes_its_connection() -> None:
    peer = Peer([OK, b""])
    async with before(peer) as http:
        await http.request("GET", peer.url, {})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await http.request("POST", peer.url, {})
        while not peer.ended:
            await asyncio.sleep(0.01)


async def test_closing_ends_requests_in_flight_and_later_ones_open_anew() -> None:
    peer = Peer([b""], [OK])
    async with before(peer) as http:
        waiting = asyncio.create_task(http.request("GET", peer.url, {}))
        while not peer.seen:
            await asyncio.sleep(0.01)
        await http.close()
        with pytest.raises(ConnectionDropped):
            await waiting
        assert (await http.request("GET", peer.url, {})).ok


async def test_requests_side_by_side_have_connections_of_their_own() -> None:
    peer = Peer([OK] * 3)
    async with before(peer) as http:
        for _ in range(3):
            assert all(got.ok for got in await asyncio.gather(*(http.request("GET", peer.url, {}) for _ in range(4))))
    assert {number for number, _ in peer.seen} == {0, 1, 2, 3}


async def test_headers_keep_their_values() -> None:
    peer = Peer([b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\nset-cookie: c=\xfc\r\nContent-Length: 0\r\n\r\n"])
    async with before(peer) as http:
        answer = await http.request("GET", peer.url, {"X-Name": "ü"})
        assert answer.headers.getlist("Set-Cookie") == ["a=b", "c=\xfc"]
        for wrong in ("a\r\nX-B: c", "a\nb", "\0"):
            with pytest.raises(ValueError, match="control character"):
                await http.request("GET", peer.url, {"X-A": wrong})
        for url in ("ftp://127.0.0.1/", "127.0.0.1/", f"{peer.url} HTTP/1.1", f"{peer.url}\r\n"):
            with pytest.raises(ValueError, match="URL"):
                await http.request("GET", url, {})
    assert "X-Name: ü\r\n".encode() in peer.seen[0][1]


async def test_no_connection_has_its_cause() -> None:
    async with HttpClient() as http:
        with pytest.raises(ConnectFailed, match=r"cannot connect to 127\.0\.0\.1:\d+: ") as refused:
            await http.request("GET", f"http://127.0.0.1:{free_port()}", {})
    assert isinstance(refused.value.__cause__, ConnectionRefusedError)
    async with HttpClient(connect_s=1e-9) as http:
        with pytest.raises(ConnectFailed, match="within the time limit") as late:
            await http.request("GET", f"http://127.0.0.1:{free_port()}", {})
    assert isinstance(late.value.__cause__, TimeoutError)


async def test_tls_needs_a_known_certificate(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate, certificate.with_name("key.pem"))
    peer = Peer([OK, OK])
    async with before(peer, serving) as http:
        with pytest.raises(ConnectFailed, match="certificate verify failed"):
            await http.request("GET", peer.url, {})
        trusting = ssl.create_default_context(cafile=certificate)
        monkeypatch.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", trusting)
        assert [(await http.request("GET", peer.url, {})).body for _ in range(2)] == [b"{}", b"{}"]
