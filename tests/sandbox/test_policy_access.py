# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Programs in a sandbox without a network call the policy of their rollout, and reach nothing else by that."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.egress.ports import MAX_BODY_BYTES
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxRefused
from tests.agent.test_keys import certificate  # noqa: F401
from tests.sandbox.egress import Origin
from tests.sandbox.policy import KEY, ask, digest, policy, run, sandbox
from tests.sandbox.running import open_files, until
from tests.sandbox.test_egress import proxies
from tests.sandbox.without import Off, Without


pytestmark = pytest.mark.sandbox

CALLS = """
import hashlib, http.client, sys
c = http.client.HTTPConnection("127.0.0.1", 61081, timeout=60)
body = b"y" * int(sys.argv[1])
for path in sys.argv[2:]:
    chunked = path.endswith("?chunked")
    given = (body[at : at + 100_000] for at in range(0, len(body), 100_000)) if chunked else body
    c.request("POST", path, given, {"Authorization": "Bearer dummy", "X-Api-Key": "dummy"}, encode_chunked=chunked)
    answer = c.getresponse()
    print(answer.status, hashlib.sha256(answer.read()).hexdigest())
"""
"""Program that posts one body to several paths."""


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("options", [{}, {"root": False}, {"network": ["127.0.0.9"]}], ids=str)
async def test_a_program_calls_its_policy(image: Path, runtime: Runtime, options: dict[str, Any]) -> None:
    async with policy() as server, sandbox(image, runtime, **options) as box:
        assert await box.open_policy(server.url, KEY) == "http://127.0.0.1:61081"
        paths = ["/v1/responses", "/v1/chunked?chunked", "/v1/chunked", "/v1/messages?beta=true"]
        said = await run(box, CALLS, 1000, *paths)
        sent = digest(b"y" * 1000)
        assert said == f"200 {digest(sent.encode())}\n" * 4
        assert server.bodies == [sent] * 4
        for head, path in zip(server.heads, paths, strict=True):
            assert head.startswith(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n")
            assert "dummy" not in head
            assert head.lower().count("authorization: ") == head.count(f"Authorization: Bearer {KEY}\r\n") == 1


async def test_long_bodies_pass_unchanged(image: Path, runtime: Runtime) -> None:
    size = 20_000_000
    paths = [
        f"/v1/{kind}/{size}{framing}" for kind in ("length", "chunked", "until_close") for framing in ("", "?chunked")
    ]
    async with policy() as server, sandbox(image, runtime) as box:
        await box.open_policy(server.url, KEY)
        said = await run(box, CALLS, MAX_BODY_BYTES, *paths)
        assert said == f"200 {digest(b'x' * size)}\n" * 6
        assert server.bodies == [digest(b"y" * MAX_BODY_BYTES)] * 6


EVENTS = """
import urllib.request as u
base = "http://127.0.0.1:61081/v1"
stream = u.urlopen(f"{base}/events", timeout=20)
for _ in range(3):
    print(stream.readline().decode().strip())
    u.urlopen(f"{base}/go", timeout=20).read()
print(stream.read())
"""
"""Program that lets the policy send the next event of a stream once it has read the last."""


async def test_an_event_passes_before_the_next_is_sent(image: Path, runtime: Runtime) -> None:
    async with policy() as server, sandbox(image, runtime) as box:
        await box.open_policy(server.url, KEY)
        assert await run(box, EVENTS) == "data: 0\ndata: 1\ndata: 2\nb''\n"


HOST = "Host: 127.0.0.1:61081"
OK = r"<end>HTTP/1.1 200 OK\nConnection: close\n"
FORMS = {
    "HTTP/1.0": ("GET /v1/until_close HTTP/1.0", r"<end>HTTP/1.0 200 OK\n\n\w{64}"),
    "no more": (f"GET /v1/x HTTP/1.1\n{HOST}", OK + r"Content-Length: 64\n\n\w{64}"),
    "no body": (f"HEAD /v1/x HTTP/1.1\n{HOST}", OK + r"Content-Length: 64\n\n"),
    "interim response": (
        f"POST /v1/x HTTP/1.1\n{HOST}\nExpect: 100-continue\nContent-Length: 2\n\nhi",
        OK.replace("<end>", r"<end>HTTP/1.1 100 Continue\n\n") + r"Content-Length: 64\n\n\w{64}",
    ),
    "response before the body": (
        f"POST /v1/early HTTP/1.1\n{HOST}\nContent-Length: 2000\n\nhi",
        r"<end>HTTP/1.1 401 No\nContent-Length: 2\n\nno",
    ),
    "torn": (f"GET /v1/torn HTTP/1.1\n{HOST}", OK + r"Content-Length: 64\n\n\w{63}"),
    "torn between chunks": (
        f"GET /v1/torn_chunks HTTP/1.1\n{HOST}",
        OK + r"Transfer-Encoding: chunked\n\n40\n\w{64}\n",
    ),
}


async def test_every_form_of_a_call(image: Path, runtime: Runtime) -> None:
    async with policy() as server, sandbox(image, runtime) as box:
        await box.open_policy(server.url, KEY)
        for name, (request, answer) in FORMS.items():
            said = (await ask(box, request)).replace("\r\n", "\n")
            assert re.fullmatch(answer, said), (name, said)
        assert server.beyond == b""


POST = f"POST /v1/x HTTP/1.1\n{HOST}"
NEXT = "GET /v1/rollouts/b HTTP/1.1\nAuthorization: Bearer rk-b\n\n"
REFUSED = {
    "two lengths": (f"{POST}\nContent-Length: 0\nContent-Length: 5\n\n{NEXT}", 400),
    "two lengths in one": (f"{POST}\nContent-Length: 0, 0\n\n{NEXT}", 400),
    "length and chunks": (f"{POST}\nContent-Length: 5\nTransfer-Encoding: chunked\n\n0\n\n{NEXT}", 400),
    "unknown encoding": (f"{POST}\nTransfer-Encoding: xchunked\n\n0\n\n{NEXT}", 400),
    "chunks of HTTP/1.0": ("POST /v1/x HTTP/1.0\nTransfer-Encoding: chunked\n\n0\n\n", 400),
    "space before the colon": (f"{POST}\nTransfer-Encoding : chunked\n\n0\n\n{NEXT}", 400),
    "folded line": (f"{POST}\nX: y\n Authorization: Bearer rk-b", 400),
    "length taken away": (f"{POST}\nConnection: Content-Length\nContent-Length: 5\n\n{NEXT}", 400),
    "absolute form": (f"GET http://127.0.0.1:61081/v1/x HTTP/1.1\n{HOST}", 404),
    "tunnel": (f"CONNECT 127.0.0.1:80 HTTP/1.1\n{HOST}", 404),
    "other path": (f"GET /ng-rollout/b/v1/models HTTP/1.1\n{HOST}", 404),
    "dots": (f"GET /v1/../ng-rollout/b/v1/models HTTP/1.1\n{HOST}", 404),
    "encoded dots": (f"GET /v1/%2e%2e%5cmetrics HTTP/1.1\n{HOST}", 404),
    "other host": ("GET /v1/x HTTP/1.1\nHost: 10.0.0.1", 421),
    "two hosts": (f"GET /v1/x HTTP/1.1\n{HOST}\n{HOST}", 421),
    "long head": (f"GET /v1/x HTTP/1.1\n{HOST}\nX: {'x' * 70_000}", 431),
    "chunk of unclear size": (f"{POST}\nTransfer-Encoding: chunked\n\n0x5\nhello\n0\n\n{NEXT}", 400),
    "chunk with an extension": (f"{POST}\nTransfer-Encoding: chunked\n\n5;a=b\nhello\n0\n\n{NEXT}", 400),
    "chunk of unclear end": (f"{POST}\nTransfer-Encoding: chunked\n\n5\nhello!\n0\n\n{NEXT}", 400),
    "long body": (f"{POST}\nContent-Length: {MAX_BODY_BYTES + 1}\n\nhi", 413),
    "long chunks": (f"{POST}\nTransfer-Encoding: chunked\n\n2\nhi\n{MAX_BODY_BYTES - 1:x}\nhi", 413),
    "trailer": (f"{POST}\nTransfer-Encoding: chunked\n\n0\nAuthorization: Bearer rk-b\n\n{NEXT}", 400),
}
"""Requests that servers read in different ways or that are for another server, and the status that refuses each."""


async def test_what_two_servers_read_differently_is_refused(image: Path, runtime: Runtime) -> None:
    async with policy() as server, sandbox(image, runtime) as box:
        await box.open_policy(server.url, KEY)
        for name, (request, status) in REFUSED.items():
            said = await ask(box, request)
            assert said.startswith(f"<end>HTTP/1.1 {status} "), (name, said)
            assert json.loads(said.partition("\r\n\r\n")[2])["error"]["message"], name
        assert server.bodies == []
        assert not any("rk-b" in head for head in server.heads)
        await until(lambda: server.open == 0)
        assert server.beyond == b""


async def test_a_policy_that_is_gone_is_said_in_one_line(image: Path, runtime: Runtime) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
    async with policy() as server, sandbox(image, runtime) as box:
        for url, kind in ((closed, "x"), (server.url, "gone"), (server.url, "other")):
            await box.open_policy(url, KEY)
            said = await ask(box, f"POST /v1/{kind} HTTP/1.1\n{HOST}\nContent-Length: 2\n\nhi")
            assert said.startswith("<end>HTTP/1.1 502 the policy can't be reached: "), said
            (line,) = said.partition("\r\n\r\n")[2].splitlines()
            assert json.loads(line)["error"]["message"].startswith("the policy can't be reached: ")
            assert KEY not in said


@pytest.mark.parametrize("call", [f"GET /v1/hold HTTP/1.1\n{HOST}", f"{POST}\nContent-Length: 9\n\nhi"])
async def test_a_program_that_leaves_cancels_its_call(image: Path, runtime: Runtime, call: str) -> None:
    async with policy() as server, sandbox(image, runtime) as box:
        await box.open_policy(server.url, KEY)
        program = asyncio.create_task(ask(box, call))
        await until(lambda: server.open == 1)
        program.cancel()  # kills the program
        await until(lambda: server.open == 0)


LATE = """
import contextlib, http.client, socket, time, urllib.request
early = http.client.HTTPConnection("127.0.0.1", 61081, timeout=60)
early.connect()
print(urllib.request.urlopen("http://127.0.0.1:61081/v1/late", timeout=20).status)
with contextlib.suppress(ConnectionRefusedError):
    while True:
        socket.create_connection(("127.0.0.1", 61081)).close()
        time.sleep(0.1)
early.request("GET", "/v1/late")
print(early.getresponse().status)
"""
"""Program that uses an open connection when the port takes no others."""


async def test_nothing_answers_after_the_end(image: Path, runtime: Runtime) -> None:
    get = f"GET /v1/x HTTP/1.1\n{HOST}"
    async with policy() as server, policy() as other, sandbox(image, runtime) as box:
        await box.open_policy(server.url, KEY)
        assert "200 OK" in await ask(box, get)
        (proxy,) = proxies()
        before = open_files(proxy)
        for used in (server, other, server):
            await box.open_policy(used.url, KEY)
            held = asyncio.create_task(ask(box, f"GET /v1/hold HTTP/1.1\n{HOST}"))
            await until(lambda used=used: used.open == 1)
            await box.close_policy()
            assert "ConnectionRefusedError" in await ask(box, get)
            assert used.open == 1  # a call in flight goes on as long as its program
            held.cancel()
            await until(lambda used=used: used.open == 0)
        await box.open_policy(other.url, KEY)
        late = asyncio.create_task(run(box, LATE))
        await until(lambda: "GET /v1/late " in other.heads[-1])
        await box.close_policy()
        assert (await late).split() == ["200", "403"]
        await box.open_policy(other.url, KEY)
        held = asyncio.create_task(ask(box, f"GET /v1/hold HTTP/1.1\n{HOST}"))
        await until(lambda: other.open == 1)
        await box.stop()
        await until(lambda: other.open == 0)
        with contextlib.suppress(Exception):
            await held
        await box.close_policy()
        await until(lambda: open_files(proxy) < before)


async def test_a_policy_with_tls_needs_a_known_certificate(
    image: Path,
    runtime: Runtime,
    without: Without,
    certificate: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, certificate.with_name("key.pem"))
    for trusted, status in (("/dev/null", "502 "), (str(certificate), "200 OK")):
        monkeypatch.setenv("SSL_CERT_FILE", trusted)
        without(Off(f"trusted = {trusted!r}"))
        async with policy(tls) as server, sandbox(image, runtime) as box:
            await box.open_policy(server.url.replace("http", "https"), KEY)
            said = await ask(box, f"GET /v1/x HTTP/1.1\n{HOST}")
            assert said.startswith(f"<end>HTTP/1.1 {status}"), said


async def test_a_wrong_policy_is_refused_by_name(image: Path, runtime: Runtime) -> None:
    async with sandbox(image, runtime) as box:
        for url in ("127.0.0.1:80", "http://127.0.0.1:80/v1", "ftp://a", "http://", "http://a b", "http://u@a"):
            with pytest.raises(CallerError, match=r"^url: "):
                await box.open_policy(url, KEY)
        listen = "import socket, time; s = socket.create_server(('', 61081)); print(1, flush=True); time.sleep(60)"
        await box.exec(f'python3 -c "{listen}" > /tmp/up & while [ ! -s /tmp/up ]; do sleep 0.1; done', timeout_s=20)
        with pytest.raises(SandboxRefused, match="port of the proxy: Address already in use"):
            await box.open_policy("http://127.0.0.1:80", KEY)
    async with sandbox(image, runtime, network="host") as box:
        with pytest.raises(CallerError, match=r"^network: must not be host"):
            await box.open_policy("http://127.0.0.1:80", KEY)


REACH = """
import socket, sys
for address in sys.argv[2:]:
    for port in (int(sys.argv[1]), 61081):
        try:
            s = socket.create_connection((address, port), 2)
        except OSError:
            continue
        s.sendall(b"GET /v1/rollouts/b HTTP/1.1\\r\\nHost: a\\r\\nAuthorization: Bearer rk-b\\r\\n\\r\\n")
        print(address, port, s.recv(100))
"""
UNIX = """
import socket
for line in open("/proc/net/unix").read().splitlines()[1:]:
    name = line.split()[-1]
    if name.startswith("@"):
        s = socket.socket(socket.AF_UNIX, int(line.split()[4]))
        s.connect("\\0" + name[1:])
        print("connected", name)
"""
TAKE = """
import socket
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
s.bind(("", 61081))
s.listen()
print("taken")
"""
SEARCH = "cat /proc/*/environ /proc/*/cmdline; env; grep -rs rk-own- /tmp /root /etc /run /home /dev/shm /proc/net"


def ways_out(service: int, own_address: str) -> dict[str, Any]:
    """Ways to another rollout's policy, to a service of the host and to the host: requests, or programs."""
    get = f"GET /v1/x HTTP/1.1\n{HOST}\n"
    one = f"{get}Connection: close\n"
    return {
        "another's key": one + "Authorization: Bearer rk-b",
        "another's key, in other fields": one + "X-Api-Key: rk-b\nx_api_key: rk-b\nProxy-Authorization: rk-b",
        "two keys": one + "Authorization: Bearer rk-b\nAUTHORIZATION: Bearer rk-b\nConnection: X-Api-Key",
        "another's rollout": one + "X-Rollout-Id: b\nx_rollout_id: b\nX-Rollout-Run: b\nX-ProRL-Lease: b",
        "another's session": one + "Cookie: session=rk-b",
        "another's address": one + "X-Forwarded-For: rk-b\nForwarded: for=rk-b\nX-Real-IP: rk-b",
        "another's rollout, in the path": f"GET /ng-rollout/b/v1/x HTTP/1.1\n{HOST}",
        "dots in the path": f"DELETE /v1/%2E%2e/v1/rollouts/b HTTP/1.1\n{HOST}",
        "a URL of the service": f"GET http://127.0.0.1:{service}/ HTTP/1.1\nHost: 127.0.0.1:{service}",
        "a tunnel": f"CONNECT 127.0.0.1:{service} HTTP/1.1\nHost: 127.0.0.1:{service}",
        "the service's name": f"GET /v1/x HTTP/1.1\nHost: 127.0.0.1:{service}",
        "a second request": f"{get}\n{NEXT}",
        "a request behind a body": f"{POST}\nContent-Length: 2\n\nhi{NEXT}",
        "a request in a body": f"{POST}\nContent-Length: {len(NEXT) + 4}\nTransfer-Encoding: chunked\n\n0\n\n{NEXT}",
        "another protocol": f"{get}Connection: Upgrade, HTTP2-Settings\nUpgrade: h2c\nHTTP2-Settings: rk-b\n\n{NEXT}",
        "sockets": (REACH, service, "127.0.0.1", "::1", "0.0.0.0", own_address, "10.0.2.2", "169.254.169.254"),
        "sockets with names": (UNIX,),
        "the port itself": (TAKE,),
        "the key": SEARCH,
    }


@pytest.mark.usefixtures("way")
async def test_no_way_leads_to_another_policy_or_to_the_host(image: Path, runtime: Runtime) -> None:
    service = Origin()
    listening = await asyncio.start_server(service.handle, "", 0)
    own_address = "127.0.1.1"
    with contextlib.suppress(OSError):
        own_address = socket.gethostbyname(socket.gethostname())
    async with policy() as server, sandbox(image, runtime) as box, sandbox(image, runtime) as other:
        await box.open_policy(server.url, KEY)
        await other.open_policy(server.url, "rk-b")
        for name, way in ways_out(listening.sockets[0].getsockname()[1], own_address).items():
            if isinstance(way, tuple):
                said = await run(box, *way)
            elif way is SEARCH:
                said = (await box.exec(way, timeout_s=60)).stdout or ""
            else:
                said = await ask(box, way)
                assert said.startswith(("<end>HTTP/1.1 ", "<open>HTTP/1.1 ")), (name, said)
            assert not any(word in said for word in (KEY, "connected", "taken", "hello")), (name, said)
            assert service.connections == 0, name
        assert await ask(other, f"GET /v1/other HTTP/1.1\n{HOST}")
    assert server.beyond == b""
    own, others = server.heads[:-1], server.heads[-1]
    assert "Bearer rk-b" in others
    assert len(own) > 8
    for head in own:
        assert head.lower().count("authorization") == head.count(f"\r\nAuthorization: Bearer {KEY}\r\n") == 1, head
        assert "rk-b" not in head, head
        assert not re.search(r"rollout|cookie|forwarded|upgrade", head.partition("\n")[2], re.IGNORECASE), head
    listening.close()
