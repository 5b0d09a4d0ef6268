# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A sandbox reaches the hosts that its ``network`` field allows, through its proxy, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.processes import process_command_line
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.egress.proxy import Refusal, parse_request
from nemo_gym_prorl.sandbox.limits import usage
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor import client
from tests.sandbox.egress import ALLOWED, OTHER, Origin, ask, fetch, origin, python, uses
from tests.sandbox.running import open_files, resident_bytes, supervisor_pid, until
from tests.sandbox.without import Off, Without


pytestmark = pytest.mark.sandbox


async def start(image: Path, runtime: Runtime, network: Any, **options: Any) -> Container:
    return await Container.start(ContainerSpec(image=image, network=network, **options), runtime)


def proxies(supervisor: int | None = None) -> list[int]:
    """Pids of a supervisor's proxy process, by default of this process's own supervisor."""
    children = usage.child_pids(supervisor or supervisor_pid())
    return [pid for pid in children if b"egress.proxy" in command_line(pid)]


def command_line(pid: int) -> bytes:
    """Command line of a process; empty once it has ended."""
    with contextlib.suppress(OSError):
        return process_command_line(pid)
    return b""


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("options", [{}, {"root": False}], ids=str)
async def test_an_allowed_host_is_reached_and_counted(image: Path, runtime: Runtime, options: dict[str, Any]) -> None:
    async with origin() as server, await start(image, runtime, [ALLOWED, "localhost"], **options) as container:
        url = f"http://{ALLOWED}:{server.port}"
        assert await fetch(container, f"{url}/x?y=1") == (0, "hello\n")
        assert server.heads[0].startswith("GET /x?y=1 HTTP/1.1\r\nHost: " + url[7:])
        tunnel = await ask(container, f"CONNECT {ALLOWED}:{server.port} HTTP/1.1", f"GET / HTTP/1.1\nHost: {ALLOWED}")
        assert tunnel.startswith("HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK")
        assert tunnel.endswith("hello")
        posted = f"import urllib.request as u; print(u.urlopen('{url}/count', b'x' * 3_000_000).read())"
        assert (await container.run(python(posted))).stdout == "b'3000000'\n"
        # A list's name does not open this machine, unless its address is listed as well.
        refused = await ask(container, f"GET http://localhost:{server.port}/ HTTP/1.1")
        assert refused.startswith("HTTP/1.1 403 localhost has no address that this sandbox's network allows\r\n")
        assert await fetch(container, f"http://{OTHER}:{server.port}/") != (0, "hello\n")
        found = await uses(container)
        assert {key: use["connections"] for key, use in found.items()} == {
            (ALLOWED, True): 3,
            ("localhost", False): 1,
            (OTHER, False): 1,
        }
        assert found[ALLOWED, True]["bytes_out"] > 3_000_000
        assert found[ALLOWED, True]["bytes_in"] > 15
        assert server.connections == 3


async def test_a_name_is_reached_where_its_address_is_listed(image: Path, runtime: Runtime) -> None:
    async with origin("127.0.0.1") as server, await start(image, runtime, ["localhost", "127.0.0.0/8"]) as container:
        assert (await ask(container, f"GET http://LOCALHOST.:{server.port}/ HTTP/1.1")).endswith("hello")


FIRST_LINES = st.sampled_from(
    ["GET http://a.b/x HTTP/1.1", "CONNECT a.b:443 HTTP/1.1", "GET http://a.b HTTP/1.0", "GET / "]
)
FIELDS = st.sampled_from(["Host: a", "Connection: x", "x: y", "Content-Length: 5", "Transfer-Encoding: chunked", ""])
ODD = st.sampled_from(
    ["", "", "", "\n", "\r", "\0", " ", ":", "\t", "\x85", "\xe9", "@", "#", "\nHost: b", "\rHost: b", "x: y"]
)
LINES = st.lists(st.tuples(FIELDS, ODD).map("".join), max_size=4).map("\r\n".join)


@given(FIRST_LINES, ODD, LINES)
def test_any_head_is_one_request_or_refused(first: str, odd: str, rest: str) -> None:
    head = f"{first}{odd}\r\n{rest}\r\n\r\n".partition("\r\n\r\n")[0]
    try:
        request = parse_request(f"{head}\r\n\r\n".encode("latin-1"))
    except Refusal:
        return
    passed_on = request.head(to_proxy=False)
    assert passed_on.count(b"\r\n\r\n") == 1
    assert passed_on.endswith(b"\r\n\r\n")
    assert not set(passed_on.replace(b"\r\n", b"")) & set(b"\r\n\0")
    assert passed_on.lower().count(b"\r\nhost:") == passed_on.lower().count(b"\r\nconnection: close\r\n") == 1


def ways_around(allowed: int, other: int) -> dict[str, tuple[str, str | None]]:
    """Requests for a server at :data:`OTHER`, by name; where only :data:`ALLOWED` is allowed."""
    get = "GET http://{}/ HTTP/1.1".format
    return {
        "as it is": (get(f"{OTHER}:{other}"), None),
        "tunnel": (f"CONNECT {OTHER}:{other} HTTP/1.1", f"GET / HTTP/1.1\nHost: {OTHER}"),
        "mapped to IPv6": (get(f"[::ffff:{OTHER}]:{other}"), None),
        "mapped to IPv6, tunnel": (f"CONNECT [::ffff:{OTHER}]:{other} HTTP/1.1", "GET / HTTP/1.1"),
        "any address": (get(f"0.0.0.0:{other}"), None),
        "user of a URL": (get(f"{ALLOWED}:{allowed}@{OTHER}:{other}"), None),
        "fragment": (get(f"{OTHER}:{other}#@{ALLOWED}:{allowed}"), None),
        "backslash": (get(f"{ALLOWED}:{allowed}\\@{OTHER}:{other}"), None),
        "field Host": (f"{get(f'{ALLOWED}:{allowed}')}\nHost: {OTHER}:{other}", None),
        "origin form": (f"GET / HTTP/1.1\nHost: {OTHER}:{other}", None),
        "second request": (f"{get(f'{ALLOWED}:{allowed}')}\n\n{get(f'{OTHER}:{other}')}", None),
        "body with a request": (
            f"POST http://{ALLOWED}:{allowed}/ HTTP/1.1\nContent-Length: 0\n\n{get(f'{OTHER}:{other}')}",
            None,
        ),
        "two lengths": (
            f"POST http://{ALLOWED}:{allowed}/ HTTP/1.1\nContent-Length: 0\nTransfer-Encoding: chunked\n\n"
            + get(f"{OTHER}:{other}"),
            None,
        ),
        "unknown encoding": (
            f"POST http://{ALLOWED}:{allowed}/ HTTP/1.1\nTransfer-Encoding: xchunked\n\n{get(f'{OTHER}:{other}')}",
            None,
        ),
        "folded line": (f"{get(f'{ALLOWED}:{allowed}')}\nX: y\n {get(f'{OTHER}:{other}')}", None),
        "redirect": (get(f"{ALLOWED}:{allowed}/to/{OTHER}:{other}"), None),
    }


async def test_no_way_leads_to_another_host(image: Path, runtime: Runtime) -> None:
    async with (
        origin(ALLOWED) as allowed,
        origin(OTHER) as other,
        await start(image, runtime, [ALLOWED]) as container,
    ):
        for name, texts in ways_around(allowed.port, other.port).items():
            said = await ask(container, *texts)
            assert said.startswith("HTTP/1.1 "), name
            assert len(re.findall(r"HTTP/1.1 \d", said)) == 1, name
            assert other.heads == [], name
        assert all(f"Host: {OTHER}" not in head for head in allowed.heads)
        code, said = await fetch(container, f"http://{ALLOWED}:{allowed.port}/to/{OTHER}:{other.port}")
        assert code
        assert "403" in said
        direct = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"
        for address in (OTHER, "127.0.0.1"):
            assert (await container.run(python(direct, address, other.port))).exit_code
        assert other.connections == 0
        assert (await ask(container, "x" * 70_000)).startswith("HTTP/1.1 431 ")
        assert (await ask(container, f"GET http://{OTHER}/\x7f HTTP/1.1")).startswith("HTTP/1.1 400 ")


HELLO = """
import socket, ssl, sys, time
port, name, pieces = int(sys.argv[1]), sys.argv[2], sys.argv[3]
s = socket.create_connection(("127.0.0.1", 61080), 20)
s.sendall(f"CONNECT localhost:{port} HTTP/1.1\\r\\n\\r\\n".encode())
assert b" 200 " in s.recv(1000)
context = ssl.create_default_context()
context.check_hostname = False
incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
try:
    context.wrap_bio(incoming, outgoing, server_hostname=name or None).do_handshake()
except ssl.SSLWantReadError:
    pass
hello = outgoing.read()
if pieces == "two records":
    hello = hello[:3] + (20).to_bytes(2) + hello[5:25] + hello[:3] + (len(hello) - 25).to_bytes(2) + hello[25:]
for piece in [hello[:1], hello[1:7], hello[7:]] if pieces == "slowly" else [hello]:
    s.sendall(piece)
    time.sleep(0.2)
s.shutdown(socket.SHUT_WR)
print(s.recv(1000))
"""


@pytest.mark.parametrize(
    ("name", "pieces", "passed"),
    [
        ("localhost", "", True),
        ("LocalHost", "slowly", True),
        ("elsewhere.example", "", False),
        ("elsewhere.example", "slowly", False),
        ("localhost", "two records", False),
        ("", "", False),
    ],
)
async def test_a_tunnel_carries_no_tls_for_another_host(
    image: Path, runtime: Runtime, name: str, pieces: str, passed: bool
) -> None:
    """A content network's machine serves any of its hosts to a client that asks for it."""
    async with origin("127.0.0.1") as server, await start(image, runtime, ["localhost", "127.0.0.1"]) as container:
        said = await container.run(python(HELLO, server.port, name, pieces), timeout_s=30)
        found = await uses(container)
    assert (said.stdout == "b''\n") is passed, said
    assert ("localhost", True) in found
    assert (found["localhost", True]["bytes_out"] > 100) is passed
    assert ((name or "localhost").lower(), False) in found or passed


PRIVATE = ["127.0.0.1", "169.254.169.254", "localhost", "[::1]", "10.0.0.1", "0x7f.1", "metadata.google.internal"]


async def test_public_is_no_private_host_and_two_ports(image: Path, runtime: Runtime) -> None:
    async with await start(image, runtime, "public") as container:
        for host in PRIVATE:
            for request in (f"GET http://{host}/ HTTP/1.1", f"CONNECT {host}:443 HTTP/1.1"):
                said = await ask(container, request)
                assert said.startswith("HTTP/1.1 403 "), said
                assert host.strip("[]") in said.splitlines()[0]
                assert "network" in said.splitlines()[0]
        said = await ask(container, "CONNECT example.com:22 HTTP/1.1")
        assert said.startswith("HTTP/1.1 403 port 22 of example.com")


SERVE = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8080, bind='127.0.0.1')"


@pytest.mark.usefixtures("way")
async def test_two_sandboxes_serve_at_one_port_of_their_own(image: Path, runtime: Runtime) -> None:
    async with await start(image, runtime, "public") as one, await start(image, runtime, "public") as two:
        for box, name in ((one, "one"), (two, "two")):
            await box.run(f"mkdir /srv/www && cd /srv/www && echo {name} > name && {python(SERVE)} >/dev/null 2>&1 &")
        for box, name in ((one, "one"), (two, "two")):
            reach = python("import socket; socket.create_connection(('localhost', 8080))")
            await box.run(f"until {reach} 2>/dev/null; do sleep 0.1; done", timeout_s=30)
            for own in ("localhost", "127.0.0.1", "0.0.0.0", "sandbox"):
                assert await fetch(box, f"http://{own}:8080/name") == (0, f"{name}\n\n"), own
            assert (await ask(box, "GET http://localhost:8080/name HTTP/1.1")).startswith("HTTP/1.1 403 ")
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", 8080), 3)


MANY = """
import sys, threading, urllib.request as u
found = []
def one():
    found.append(u.urlopen(sys.argv[1], timeout=60).read())
threads = [threading.Thread(target=one) for _ in range(int(sys.argv[2]))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(found), set(found))
"""


async def test_a_hundred_connections_at_once_and_more_than_the_limit_in_turn(image: Path, runtime: Runtime) -> None:
    async with origin() as server, await start(image, runtime, [ALLOWED]) as container:
        for count in (100, 200):
            begin = time.monotonic()
            done = await container.run(python(MANY, f"http://{ALLOWED}:{server.port}/sleep/1", count), timeout_s=120)
            assert done.stdout == f"{count} {{b'hello'}}\n", done.stderr
            assert time.monotonic() - begin < 90, "one after the other, they would take a second each"
        assert server.connections == 300


SLOW = """
import socket, sys, time
s = socket.create_connection(("127.0.0.1", 61080))
s.sendall(f"GET {sys.argv[1]} HTTP/1.1\\r\\n\\r\\n".encode())
got = len(s.recv(1000))
time.sleep(3)
while chunk := s.recv(65536):
    got += len(chunk)
    time.sleep(0.005)
print(got)
"""


async def test_a_slow_reader_gets_everything_and_takes_no_memory(image: Path, runtime: Runtime) -> None:
    size = 60_000_000
    async with origin() as server, await start(image, runtime, [ALLOWED]) as container:
        url = f"http://{ALLOWED}:{server.port}"
        assert await fetch(container, url) == (0, "hello\n")
        (proxy,) = proxies()
        before = resident_bytes(proxy)
        slow = asyncio.create_task(container.run(python(SLOW, f"{url}/bytes/{size}"), timeout_s=120))
        await until(lambda: server.connections == 2)
        await asyncio.sleep(2)
        assert resident_bytes(proxy) < before + (20 << 20)
        assert await fetch(container, url) == (0, "hello\n"), "another connection waits for the slow one"
        assert int((await slow).stdout) > size


async def test_a_proxy_ends_with_its_sandbox(image: Path, runtime: Runtime) -> None:
    async with origin() as server, await start(image, runtime, [ALLOWED]) as other:
        assert await fetch(other, f"http://{ALLOWED}:{server.port}") == (0, "hello\n")
        (proxy,) = proxies()
        before = open_files(proxy)
        for _ in range(3):
            container = await start(image, runtime, [ALLOWED])
            holding = container.run(python(MANY, f"http://{ALLOWED}:{server.port}/hold", 5), timeout_s=60)
            held = asyncio.create_task(holding)
            await until(lambda: server.open == 5)
            await container.close()
            await until(lambda: server.open == 0)
            with contextlib.suppress(Exception):
                await held
        await until(lambda: open_files(proxy) == before)
        assert await fetch(other, f"http://{ALLOWED}:{server.port}") == (0, "hello\n")
    assert proxies() == [proxy]


async def test_a_killed_proxy_is_replaced(image: Path, runtime: Runtime) -> None:
    async with origin() as server, await start(image, runtime, [ALLOWED]) as container:
        for _ in range(3):
            (proxy,) = proxies()
            os.kill(proxy, signal.SIGKILL)
            assert await fetch(container, f"http://{ALLOWED}:{server.port}") == (0, "hello\n")
            assert proxies() != [proxy]


async def test_a_killed_supervisor_leaves_no_proxy(image: Path, runtime: Runtime, without: Without) -> None:
    without()
    async with origin() as server:
        container = await start(image, runtime, [ALLOWED])
        assert await fetch(container, f"http://{ALLOWED}:{server.port}") == (0, "hello\n")
        assert client.own_supervisor
        supervisor = client.own_supervisor.popen
        (proxy,) = proxies(supervisor.pid)
        supervisor.kill()
        supervisor.wait(10)
        await until(lambda: not command_line(proxy))
        with contextlib.suppress(Exception):
            await container.close()


class HostProxy(Origin):
    """The proxy through which a machine reaches the world."""

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        if head.startswith("CONNECT no."):
            writer.write(b"HTTP/1.1 407 Who are you\r\n\r\n")
        elif head.startswith("CONNECT"):
            writer.write(b"HTTP/1.1 200 OK\r\nVia: me\r\n\r\n")
            self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(b"through")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nfrom the proxy")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        await writer.drain()


async def test_a_machine_behind_a_proxy(
    image: Path, runtime: Runtime, without: Without, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostProxy()
    server = await asyncio.start_server(host.handle, "127.0.0.1", 0)
    url = f"http://me:s%40cret@127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for name, value in (("http_proxy", url), ("HTTPS_PROXY", url), ("no_proxy", f"{ALLOWED},direct.example")):
        monkeypatch.setenv(name, value)
    without(Off("behind_a_proxy = True"))
    networks = (["*.example", ALLOWED], "public")
    async with (
        origin() as direct,
        await start(image, runtime, networks[0]) as container,
        await start(image, runtime, networks[1]) as public,
    ):
        credentials = "Proxy-Authorization: Basic bWU6c0BjcmV0\r\n"
        said = await ask(container, "GET http://a.example/x HTTP/1.1\nProxy-Authorization: own")
        assert said.endswith("from the proxy")
        assert host.heads.pop() == (
            f"GET http://a.example/x HTTP/1.1\r\nHost: a.example\r\n{credentials}Connection: close\r\n\r\n"
        )
        assert (await ask(container, "CONNECT a.example:443 HTTP/1.1", "hello")).endswith("\r\n\r\nthrough")
        assert host.heads.pop() == "hello\r\n\r\n"
        assert host.heads.pop() == f"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:443\r\n{credentials}\r\n"
        refused = await ask(container, "CONNECT no.example:443 HTTP/1.1")
        assert refused.startswith("HTTP/1.1 502 the server's own proxy refused no.example with 407\r\n")
        chunked = "POST http://a.example/ HTTP/1.1\nTransfer-Encoding: chunked\n\n0\n\nGET http://evil.com/ HTTP/1.1"
        assert (await ask(container, chunked)).startswith("HTTP/1.1 411 ")
        measured = "POST http://a.example/ HTTP/1.1\nContent-Length: 0\n\nGET http://evil.com/ HTTP/1.1"
        assert (await ask(container, measured)).endswith("from the proxy")
        assert not any("evil" in head for head in host.heads)
        host.heads.clear()
        assert await fetch(container, f"http://{ALLOWED}:{direct.port}") == (0, "hello\n")
        assert (await ask(container, "CONNECT direct.example:443 HTTP/1.1")).startswith("HTTP/1.1 502 ")
        for name in ("127.0.0.1", "169.254.169.254", "2130706433", "[::1]", "localhost", "x.internal"):
            assert (await ask(public, f"CONNECT {name}:443 HTTP/1.1")).startswith("HTTP/1.1 403 "), name
        assert host.heads == []
        assert "s%40cret" not in (await container.run("env; cat /proc/*/environ")).stdout
    server.close()
