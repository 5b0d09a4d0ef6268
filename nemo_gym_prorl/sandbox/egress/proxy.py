# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""HTTP proxy process: connects sandboxes to the hosts that their ``network`` fields allow, from this machine.

The same process serves the ports of policies (:mod:`.ports`).

Programs request a tunnel (``CONNECT``), or send one plain HTTP request, after which the connection is closed. So no
second request can follow to an unchecked host. The proxy connects to exactly the address that was checked. A content
delivery network serves many hosts at one address, so TLS in a tunnel to a listed name must name a listed host too.

If the server's environment names an upstream proxy (``http_proxy``, ``https_proxy``, ``no_proxy``), connections go
through that proxy. The upstream proxy resolves names, so only names and literal addresses are checked here.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import math
import os
import re
import socket
import ssl
import sys
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from urllib.parse import SplitResult, unquote, urlsplit

from nemo_gym_prorl.async_tasks import spawn_task
from nemo_gym_prorl.network_access import PROXY_PORT, Address, EgressRules, literal_address
from nemo_gym_prorl.sandbox.egress.ports import (
    CONNECT_TIMEOUT_S,
    IDLE_S,
    MAX_HEAD_BYTES,
    Head,
    PolicyAccess,
    ProgramReader,
    Refusal,
    SandboxPort,
    Streams,
    parse_head,
    read_head,
)
from nemo_gym_prorl.sandbox.isolation import syscalls
from nemo_gym_prorl.sandbox.supervisor.connection import Connection, Message, close_all


HANDSHAKE = 22
"""Type of a TLS handshake record, the first byte of a TLS connection."""

RECORD_HEAD = 5
"""Bytes of a TLS record's header; the last two are the length of the record's content."""

UNRECOGNIZED_NAME = bytes((21, 3, 1, 0, 2, 2, 112))
"""TLS record with the fatal alert ``unrecognized_name``."""

_CLIENT_HELLO = 1
_VERSION_AND_RANDOM = 34  # bytes of these fields of a ClientHello
_SERVER_NAME, _HOST_NAME = 0, 0


class _Fields:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, size: int) -> bytes:
        self._at += size
        if self._at > len(self._data):
            raise ValueError("the message is cut off")
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def content(self, size: int) -> bytes:
        """Return the content of a field that has a length prefix of ``size`` bytes."""
        return self.take(self.number(size))


def server_name(record: bytes) -> str:
    """Return the host name (SNI) in a TLS record with a complete ClientHello, in lower case; empty without SNI.

    Raises:
        ValueError: the record has no complete ClientHello.
    """
    fields = _Fields(record)
    fields.take(RECORD_HEAD - 2)
    message = _Fields(fields.content(2))
    if message.number(1) != _CLIENT_HELLO:
        raise ValueError("not a ClientHello")
    hello = _Fields(message.content(3))
    hello.take(_VERSION_AND_RANDOM)
    for size in (1, 2, 1):  # session id, cipher suites, compression methods
        hello.content(size)
    extensions = _Fields(hello.content(2) if hello else b"")
    while extensions:
        kind, extension = extensions.number(2), _Fields(extensions.content(2))
        if kind == _SERVER_NAME:
            names = _Fields(extension.content(2))
            if names.number(1) == _HOST_NAME:
                return names.content(2).decode("ascii").lower()
    return ""


MAX_LOOKUPS = 4
"""Concurrent name lookups of one sandbox, so that one sandbox's slow lookups do not delay other sandboxes."""

LOOKUP_THREADS = 64  # for all sandboxes; each concurrent lookup blocks a thread

HEAD_TIMEOUT_S = 30.0
"""Time limit for a program's header section, so that idle connections do not use up the port's connections."""

MAX_LOGGED_HOSTS = 256
"""Number of hosts of one sandbox that are counted separately; further hosts are counted together as ``*``."""

MAX_TRIED_ADDRESSES = 4  # of one name; bounds the wait to as many CONNECT_TIMEOUT_S

_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#@]+):(\d{1,5})")
_URL = re.compile(r"http://(\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#@]+)(?::(\d{1,5}))?([/?][^#]*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Request:
    """A program's request to the proxy.

    Attributes:
        message: start line and header fields.
        tunnel: whether the program requests a tunnel (``CONNECT``), and not a plain HTTP request.
        host: name or address of the target, in lower case without brackets.
        port: TCP port of the target.
        path: path and query of a plain request.
    """

    message: Head
    tunnel: bool
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def head(self, *, to_proxy: bool, authorization: str = "") -> bytes:
        """Return the header section of a plain request to send to the target, or with ``to_proxy`` to a proxy."""
        host, (method, _target, version) = self.authority.removesuffix(":80"), self.message.first
        lines = [f"{method} {f'http://{host}' if to_proxy else ''}{self.path} {version}", f"Host: {host}"]
        lines += [f"{name}: {value}" for name, value in self.message.passed_on]
        return "\r\n".join([*lines, *filter(None, [authorization]), "Connection: close", "", ""]).encode("latin-1")


def parse_request(head: bytes) -> Request:
    """Parse the header section of a request to a proxy.

    Raises:
        Refusal: the header section is invalid, or has no target host and port.
    """
    message = parse_head(head)
    method, target, _version = message.first
    tunnel = method == "CONNECT"
    found = (_HOST_AND_PORT if tunnel else _URL).fullmatch(target)
    port = int(found[2] or 80) if found else 0
    if not found or not 0 < port < 1 << 16:
        raise Refusal(400, f"{method} needs a target HOST:PORT with CONNECT, and a URL with http:// otherwise")
    path = "/" if tunnel or not found[3] else found[3] if found[3].startswith("/") else f"/{found[3]}"
    return Request(message, tunnel, found[1].strip("[]").lower().rstrip("."), port, path)


@dataclass(slots=True)
class HostUse:
    """A sandbox's use of one host and port.

    Attributes:
        host: name or address as requested; ``*`` for all hosts beyond :data:`MAX_LOGGED_HOSTS`.
        port: TCP port; 0 for hosts that are counted together.
        connections: number of requests, also refused ones.
        bytes_out: bytes from the sandbox.
        bytes_in: bytes to the sandbox.
    """

    host: str
    port: int
    allowed: bool
    connections: int = 0
    bytes_out: int = 0
    bytes_in: int = 0


class SandboxEgress(SandboxPort):
    """Egress proxy of one sandbox: connects programs to the hosts that ``rules`` allow."""

    def __init__(self, listener: socket.socket, rules: EgressRules) -> None:
        super().__init__(listener)
        self._rules = rules
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._uses: dict[tuple[str, int, bool], HostUse] = {}

    def uses(self) -> list[HostUse]:
        return [*self._uses.values()]

    async def _serve_requests(self, reader: ProgramReader, writer: asyncio.StreamWriter) -> None:
        request = parse_request(await read_head(reader, HEAD_TIMEOUT_S))
        try:
            if refusal := self._rules.refusal(request.host, request.port):
                raise Refusal(403, refusal)
            upstream, head = await self._connect(request)
        except Refusal as refused:
            self._count(request, allowed=refused.status != 403)
            raise
        use = self._count(request, allowed=True)
        try:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n" if request.tunnel else b"")
            upstream[1].write(head)
            use.bytes_out += len(head)
            await _relay((reader, writer), upstream, request, use, partial(self._check_first, request, writer))
        finally:
            upstream[1].transport.abort()

    def _check_first(self, request: Request, writer: asyncio.StreamWriter, data: bytes) -> None:
        """In a tunnel to a listed name, refuse TLS whose first record ``data`` names no allowed host."""
        named = not self._rules.public and literal_address(request.host) is None
        if not request.tunnel or data[0] != HANDSHAKE or not named:
            return
        name = ""
        with contextlib.suppress(ValueError):
            name = server_name(data)
        if not name or self._rules.refusal(name, request.port):
            self._count(replace(request, host=name or request.host), allowed=False)
            writer.write(UNRECOGNIZED_NAME)
            raise ConnectionAbortedError

    def _count(self, request: Request, *, allowed: bool) -> HostUse:
        key = (request.host[:255], request.port, allowed)
        if key not in self._uses and len(self._uses) >= MAX_LOGGED_HOSTS:
            key = ("*", 0, allowed)
        use = self._uses.setdefault(key, HostUse(*key))
        use.connections += 1
        return use

    async def _connect(self, request: Request) -> tuple[Streams, bytes]:
        try:
            if proxy := _upstream_proxy(request):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    return await self._connect_by_proxy(request, proxy)
            async with asyncio.timeout(CONNECT_TIMEOUT_S), self._lookups:
                addresses = await self._addresses(request)
            return await _first_reached(addresses, request.port), (
                b"" if request.tunnel else request.head(to_proxy=False)
            )
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise Refusal(502, f"{request.host} can't be reached: {reason}") from error

    async def _addresses(self, request: Request) -> list[Address]:
        loop = asyncio.get_running_loop()
        if (literal := literal_address(request.host)) is not None:
            found: list[Address] = [literal]
        else:
            infos = await loop.getaddrinfo(request.host, request.port, type=socket.SOCK_STREAM)
            found = [ipaddress.ip_address(info[4][0]) for info in infos]
        allowed = [each for each in found if self._allow(request.host, each)]
        if not allowed:
            raise Refusal(403, f"{request.host} has no address that this sandbox's network allows")
        return allowed

    def _allow(self, host: str, address: Address) -> bool:
        return self._rules.allow_address(host, address, own=_is_own(address))

    async def _connect_by_proxy(self, request: Request, proxy: SplitResult) -> tuple[Streams, bytes]:
        if (literal := literal_address(request.host)) is not None and not self._allow(request.host, literal):
            raise Refusal(403, f"{request.host} is not allowed by this sandbox's network")
        if request.message.size is None:
            # The upstream proxy could read bytes after a chunked body as another request.
            raise Refusal(411, "the server's own proxy needs a request whose length is given")
        if proxy.scheme not in ("http", "https") or not proxy.hostname:
            raise Refusal(502, "the server's http_proxy and https_proxy must be URLs of HTTP proxies")
        secure = ssl.create_default_context() if proxy.scheme == "https" else None
        port = proxy.port or (443 if secure else 80)
        authorization = ""
        if proxy.username:
            user = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
            authorization = f"Proxy-Authorization: Basic {base64.b64encode(user).decode()}"
        upstream = await asyncio.open_connection(proxy.hostname, port, ssl=secure, limit=MAX_HEAD_BYTES)
        if not request.tunnel:
            return upstream, request.head(to_proxy=True, authorization=authorization)
        reader, writer = upstream
        try:
            lines = [f"CONNECT {request.authority} HTTP/1.1", f"Host: {request.authority}", authorization]
            writer.write("\r\n".join([*filter(None, lines), "", ""]).encode())
            _version, status, *_reason = (await reader.readuntil(b"\r\n\r\n")).split(None, 2)
            if not status.startswith(b"2"):
                raise Refusal(502, f"the server's own proxy refused {request.host} with {status.decode('latin-1'):.3}")
        except BaseException:
            writer.transport.abort()
            raise
        return upstream, b""


def _upstream_proxy(request: Request) -> SplitResult | None:
    """Return the upstream proxy for a target by this process's environment variables; ``None`` to connect directly."""
    proxies = urllib.request.getproxies_environment()
    url = proxies.get("https" if request.tunnel else "http") or proxies.get("all")
    if not url or urllib.request.proxy_bypass(request.host, proxies):
        return None
    return urlsplit(url if "://" in url else f"http://{url}")


def _is_own(address: Address) -> bool:
    """Return whether an address is this machine's: the kernel then connects to the address from the same address."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((str(address), 9))  # for UDP, connect only looks up the route and sends no packet
        return ipaddress.ip_address(probe.getsockname()[0]) == address
    return False


async def _first_reached(addresses: list[Address], port: int) -> Streams:
    error: Exception = OSError("no address")
    for address in addresses[:MAX_TRIED_ADDRESSES]:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await asyncio.open_connection(str(address), port, limit=MAX_HEAD_BYTES)
        except OSError as failed:
            error = failed
    raise error


async def _relay(
    program: Streams, upstream: Streams, request: Request, use: HostUse, check_first: Callable[[bytes], None]
) -> None:
    """Copy bytes in both directions until the target closes the connection; raise ``TimeoutError`` if no byte is
    copied for :data:`.IDLE_S` seconds."""
    loop = asyncio.get_running_loop()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counter: str, limit: float) -> None:
        moved = 0
        while moved < limit:
            data = await reader.read(int(min(MAX_HEAD_BYTES, limit - moved)))
            if not data:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            if not moved and counter == "bytes_out":
                data = await _whole_record(reader, data)
                check_first(data)
            writer.write(data)
            moved += len(data)
            setattr(use, counter, getattr(use, counter) + len(data))
            await writer.drain()
            idle.reschedule(loop.time() + IDLE_S)

    async with asyncio.timeout(IDLE_S) as idle, asyncio.TaskGroup() as both:
        size = math.inf if request.tunnel or request.message.size is None else request.message.size
        sending = both.create_task(copy(program[0], upstream[1], "bytes_out", size))
        await copy(upstream[0], program[1], "bytes_in", math.inf)
        sending.cancel()


async def _whole_record(reader: asyncio.StreamReader, data: bytes) -> bytes:
    """Read the rest of a program's first TLS record, and return the record; return ``data`` if it is not TLS."""
    while data[0] == HANDSHAKE:
        size = int.from_bytes(data[RECORD_HEAD - 2 : RECORD_HEAD])
        missing = RECORD_HEAD + (size if len(data) >= RECORD_HEAD else 0) - len(data)
        if missing <= 0 or not (more := await reader.read(missing)):
            break
        data += more
    return data


class EgressProcess:
    """Handler of the supervisor's messages: ``serve`` or ``forget`` a sandbox's port, ``report`` requested hosts."""

    def __init__(self, channel: socket.socket, on_gone: Callable[[], None]) -> None:
        self._ports: dict[tuple[str, int], SandboxPort] = {}
        self._connection = Connection(channel, self._handle, on_gone)

    def _handle(self, message: Message, files: list[int]) -> None:
        if (name := message.get("serve")) and (name, message["port"]) not in self._ports:
            listener = socket.socket(fileno=files.pop())
            listener.setblocking(False)
            self._ports[name, message["port"]] = (
                PolicyAccess(listener, message["url"], message["key"])
                if "key" in message
                else SandboxEgress(listener, EgressRules.of(message["network"]))
            )
        elif name := message.get("forget"):
            spawn_task(self._forget(message["number"], self._ports.pop((name, message["port"]), None)))
        elif name := message.get("report"):
            port = self._ports.get((name, PROXY_PORT))
            uses = port.uses() if isinstance(port, SandboxEgress) else []
            self._connection.post({"number": message["number"], "hosts": [asdict(use) for use in uses]})
        close_all(files)

    async def _forget(self, number: int, port: SandboxPort | None) -> None:
        if port:
            await port.close()
        self._connection.post({"number": number})


def main() -> None:
    """Run the proxy process; arguments: pid of the supervisor, and descriptor of the socket to the supervisor."""
    parent, channel = map(int, sys.argv[1:])
    syscalls.die_with_parent(parent)

    async def serve() -> None:
        gone = asyncio.Event()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(LOOKUP_THREADS))
        process = EgressProcess(socket.socket(fileno=channel), gone.set)
        await gone.wait()
        del process
        # Exit without waiting for threads that still resolve names.
        os._exit(0)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
