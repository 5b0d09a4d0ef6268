# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""HTTP proxy process: connects sandboxes to the hosts that their ``network`` field allows.

A socket belongs to the network namespace in which it was created. Each sandbox has a listening socket in its own
namespace, which this process on the host accepts from. So only programs of that sandbox can connect, the socket tells
whose rules apply, and nothing runs inside. Connections to other hosts use the host's network.

Programs ask for a tunnel (``CONNECT``) or for one plain HTTP request. A plain request ends its connection, so no
second request can follow to a host that was not checked. The address that is checked is the one that is connected to.
Machines of content networks serve many hosts. So TLS in a tunnel to a listed name must ask for a listed name, too.

If the server's environment names a proxy (``http_proxy``, ``https_proxy``, ``no_proxy``), connections go through that
proxy. That proxy resolves names, so only names and spelled-out addresses are checked here.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import os
import re
import socket
import ssl
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from urllib.parse import SplitResult, unquote, urlsplit

from nemo_gym_prorl.background import log_exceptions
from nemo_gym_prorl.network_access import Address, EgressRules, literal_address
from nemo_gym_prorl.sandbox import tls_hello
from nemo_gym_prorl.sandbox.isolation import syscalls
from nemo_gym_prorl.sandbox.supervisor.connection import PAUSE_S, Connection, Message, close_all


MAX_CONNECTIONS = 128
"""Connections of one sandbox that are served at a time; package managers use up to 50. Others wait in the kernel."""

MAX_LOOKUPS = 4
"""Names of one sandbox that are resolved at a time, so that slow names of one sandbox do not delay others."""

LOOKUP_THREADS = 64

HEAD_TIMEOUT_S = 30.0
"""Time to send a request's head; a program sends it at once."""

CONNECT_TIMEOUT_S = 15.0
"""Time to resolve a name, and to connect to one of its addresses."""

IDLE_S = 600.0
"""Time without a byte in either direction after which a connection is closed; a model's answer may take minutes."""

CLOSE_S = 5.0
"""Time for a program to read the end of a response."""

MAX_HEAD_BYTES = 64 << 10
"""Bytes of a request's head, and of what is buffered in each direction of a connection."""

MAX_LOGGED_HOSTS = 256
"""Hosts of one sandbox that are counted one by one; all others are counted as ``*``."""

MAX_TRIED_ADDRESSES = 4

_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#@]+):(\d{1,5})")
_URL = re.compile(r"http://(\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#@]+)(?::(\d{1,5}))?([/?][^#]*)?", re.IGNORECASE)
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")
_LENGTH = re.compile(r"[0-9]{1,18}")
_VERSIONS = ("HTTP/1.0", "HTTP/1.1")

_HOP_BY_HOP = frozenset(
    {"connection", "proxy-connection", "keep-alive", "proxy-authorization", "te", "upgrade", "host"}
)
"""Fields of one connection, which are not passed on; ``Host`` is written anew from the URL that was checked."""

_FRAMING = frozenset({"content-length", "transfer-encoding", "trailer", "host", "expect"})
"""Fields that decide where a request ends and whom it is for, which ``Connection`` must not take away."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Refusal(Exception):
    """A request that is answered with an HTTP error."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """A program's request to the proxy.

    Attributes:
        method: ``CONNECT`` for a tunnel.
        host: name or address of the target, in lower case without brackets.
        port: port of the target.
        path: path and query of a plain request.
        version: HTTP version.
        fields: header fields of a plain request that are passed on.
        body: bytes of the body; ``None`` if its own encoding ends it.
    """

    method: str
    host: str
    port: int
    path: str
    version: str
    fields: tuple[tuple[str, str], ...]
    body: int | None

    @property
    def authority(self) -> str:
        """Host and port as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def head(self, *, to_proxy: bool, authorization: str = "") -> bytes:
        """Return the head of a plain request to the target, or to a proxy."""
        host = self.authority.removesuffix(":80")
        lines = [f"{self.method} {f'http://{host}' if to_proxy else ''}{self.path} {self.version}", f"Host: {host}"]
        lines += [f"{name}: {value}" for name, value in self.fields]
        return "\r\n".join([*lines, *filter(None, [authorization]), "Connection: close", "", ""]).encode("latin-1")


def parse_request(head: bytes) -> Request:
    """Return the request of a head.

    Raises:
        Refusal: the head is not one of a request to a proxy.
    """
    first, *lines = head.removesuffix(b"\r\n\r\n").decode("latin-1").split("\r\n")
    method, target, version = parts if len(parts := first.split(" ")) == 3 else ("", "", "")
    fields = [found.groups() for line in lines if (found := _FIELD.fullmatch(line))]
    if version not in _VERSIONS or len(fields) != len(lines) or not method.isalpha() or not target.isprintable():
        raise Refusal(400, "this is not a request of HTTP/1.1")
    tunnel = method == "CONNECT"
    found = (_HOST_AND_PORT if tunnel else _URL).fullmatch(target)
    port = int(found[2] or 80) if found else 0
    if not found or not 0 < port < 1 << 16:
        raise Refusal(400, f"{method} needs a target HOST:PORT with CONNECT, and a URL with http:// otherwise")
    path = "/" if tunnel or not found[3] else found[3] if found[3].startswith("/") else f"/{found[3]}"
    given = [(name.lower(), value) for name, value in fields]
    named = {name.strip().lower() for key, value in given if key == "connection" for name in value.split(",")}
    if taken := sorted(named & _FRAMING):
        raise Refusal(400, f"Connection must not name {taken[0]}")
    lengths = {value for name, value in given if name == "content-length"}
    encodings = [value.lower() for name, value in given if name == "transfer-encoding"]
    if (
        encodings not in ([], ["chunked"])
        or (lengths and encodings)
        or len(lengths) > 1
        or not all(map(_LENGTH.fullmatch, lengths))
    ):
        raise Refusal(400, "the length of the request's body is ambiguous")
    return Request(
        method,
        found[1].strip("[]").lower().rstrip("."),
        port,
        path,
        version,
        tuple((name, value) for name, value in fields if name.lower() not in _HOP_BY_HOP | named),
        None if encodings else int(next(iter(lengths), "0")),
    )


@dataclass(slots=True)
class HostUse:
    """A sandbox's use of one host and port.

    Attributes:
        host: name or address as requested; ``*`` for all hosts beyond :data:`MAX_LOGGED_HOSTS`.
        port: the port; 0 for several.
        allowed: whether the rules allow the host.
        connections: number of requests.
        bytes_out: bytes from the sandbox.
        bytes_in: bytes to the sandbox.
        seconds: duration of the connections that have ended.
    """

    host: str
    port: int
    allowed: bool
    connections: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    seconds: float = 0.0


class SandboxEgress:
    """The proxy of one sandbox.

    Args:
        listener: listening socket in the sandbox's network namespace.
        rules: what the sandbox may reach.
    """

    def __init__(self, listener: socket.socket, rules: EgressRules) -> None:
        self._listener = listener
        self._rules = rules
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._uses: dict[tuple[str, int, bool], HostUse] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Only after the event loop has forgotten the descriptor, whose socket the supervisor also holds.
        self._add(self._accept()).add_done_callback(lambda _task: listener.close())

    def close(self) -> None:
        """Stop accepting, and cut all connections."""
        for task in self._tasks:
            task.cancel()

    def uses(self) -> list[HostUse]:
        """Return the use of each host."""
        return [*self._uses.values()]

    def _add(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                accepted, _address = await loop.sock_accept(self._listener)
            except OSError:  # no descriptor is left
                self._slots.release()
                await asyncio.sleep(PAUSE_S)
                continue
            self._add(self._serve(accepted)).add_done_callback(lambda _task: self._slots.release())

    async def _serve(self, accepted: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=accepted, limit=MAX_HEAD_BYTES)
        try:
            # Errors of a group, too. The connection is cut, so that no program takes part of a response for all of it.
            with log_exceptions(), contextlib.suppress(OSError, asyncio.IncompleteReadError):
                try:
                    await self._carry_out(reader, writer)
                except Refusal as refusal:
                    writer.write(_error_response(refusal))
                await _finish(reader, writer)
        finally:
            writer.transport.abort()

    async def _carry_out(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                request = parse_request(await reader.readuntil(b"\r\n\r\n"))
        except asyncio.LimitOverrunError:
            raise Refusal(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes") from None
        try:
            if refusal := self._rules.refusal(request.host, request.port):
                raise Refusal(403, refusal)
            far, head = await self._connect(request)
        except Refusal as refused:
            self._use(request, allowed=refused.status != 403)
            raise
        use, begin = self._use(request, allowed=True), asyncio.get_running_loop().time()
        try:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n" if request.method == "CONNECT" else b"")
            far[1].write(head)
            use.bytes_out += len(head)
            await _relay((reader, writer), far, request, use, partial(self._check_first, request, writer))
        finally:
            far[1].transport.abort()
            use.seconds += asyncio.get_running_loop().time() - begin

    def _check_first(self, request: Request, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Check what a program sends first in a tunnel.

        Raises:
            ConnectionAbortedError: TLS that asks for a host that is not allowed.
        """
        named = not self._rules.public and literal_address(request.host) is None
        if request.method != "CONNECT" or data[0] != tls_hello.HANDSHAKE or not named:
            return
        name = ""
        with contextlib.suppress(ValueError):
            name = tls_hello.server_name(data)
        if not name or self._rules.refusal(name, request.port):
            self._use(replace(request, host=name or request.host), allowed=False)
            writer.write(tls_hello.UNRECOGNIZED_NAME)
            raise ConnectionAbortedError

    def _use(self, request: Request, *, allowed: bool) -> HostUse:
        """Count a request; hosts beyond the limit are counted together."""
        key = (request.host[:255], request.port, allowed)
        if key not in self._uses and len(self._uses) >= MAX_LOGGED_HOSTS:
            key = ("*", 0, allowed)
        use = self._uses.setdefault(key, HostUse(*key))
        use.connections += 1
        return use

    async def _connect(self, request: Request) -> tuple[Streams, bytes]:
        """Return a connection to the target, and the bytes to send first.

        Raises:
            Refusal: the target has no address that is allowed, or cannot be reached.
        """
        try:
            if proxy := _proxy_of_host(request):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    return await self._connect_by_proxy(request, proxy)
            async with asyncio.timeout(CONNECT_TIMEOUT_S), self._lookups:
                addresses = await self._addresses(request)
            return await _first_reached(addresses, request.port), (
                b"" if request.method == "CONNECT" else request.head(to_proxy=False)
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
        if request.body is None:
            # Bytes after the body could be another request to the proxy.
            raise Refusal(411, "the server's own proxy needs a request whose length is given")
        if proxy.scheme not in ("http", "https") or not proxy.hostname:
            raise Refusal(502, "the server's http_proxy and https_proxy must be URLs of HTTP proxies")
        secure = ssl.create_default_context() if proxy.scheme == "https" else None
        port = proxy.port or (443 if secure else 80)
        authorization = ""
        if proxy.username:
            user = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
            authorization = f"Proxy-Authorization: Basic {base64.b64encode(user).decode()}"
        far = await asyncio.open_connection(proxy.hostname, port, ssl=secure, limit=MAX_HEAD_BYTES)
        if request.method != "CONNECT":
            return far, request.head(to_proxy=True, authorization=authorization)
        reader, writer = far
        try:
            lines = [f"CONNECT {request.authority} HTTP/1.1", f"Host: {request.authority}", authorization]
            writer.write("\r\n".join([*filter(None, lines), "", ""]).encode())
            _version, status, *_reason = (await reader.readuntil(b"\r\n\r\n")).split(None, 2)
            if not status.startswith(b"2"):
                raise Refusal(502, f"the server's own proxy refused {request.host} with {status.decode('latin-1'):.3}")
        except BaseException:
            writer.transport.abort()
            raise
        return far, b""


def _proxy_of_host(request: Request) -> SplitResult | None:
    """Return the proxy through which the host reaches a target, if its environment names one."""
    proxies = urllib.request.getproxies_environment()
    url = proxies.get("https" if request.method == "CONNECT" else "http") or proxies.get("all")
    if not url or urllib.request.proxy_bypass(request.host, proxies):
        return None
    return urlsplit(url if "://" in url else f"http://{url}")


def _is_own(address: Address) -> bool:
    """Return whether an address is one of this machine's: the kernel would connect to it from itself."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((str(address), 9))  # looks up the route, and sends nothing
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
    near: Streams, far: Streams, request: Request, use: HostUse, check_first: Callable[[bytes], None]
) -> None:
    """Copy both directions until the target's end, or until no byte has moved for :data:`IDLE_S`."""
    loop = asyncio.get_running_loop()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counter: str, most: int | None) -> None:
        moved = 0
        while most is None or moved < most:
            data = await reader.read(MAX_HEAD_BYTES if most is None else min(MAX_HEAD_BYTES, most - moved))
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
        limit = None if request.method == "CONNECT" else request.body
        sending = both.create_task(copy(near[0], far[1], "bytes_out", limit))
        await copy(far[0], near[1], "bytes_in", None)
        sending.cancel()


async def _whole_record(reader: asyncio.StreamReader, data: bytes) -> bytes:
    """Return what a program has sent first, with the rest of its TLS record."""
    while data[0] == tls_hello.HANDSHAKE:
        size = int.from_bytes(data[tls_hello.RECORD_HEAD - 2 : tls_hello.RECORD_HEAD])
        missing = tls_hello.RECORD_HEAD + (size if len(data) >= tls_hello.RECORD_HEAD else 0) - len(data)
        if missing <= 0 or not (more := await reader.read(missing)):
            break
        data += more
    return data


async def _finish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Let the program read everything: closing a socket with unread input would discard output on its way."""
    writer.transport.set_write_buffer_limits(0)
    async with asyncio.timeout(IDLE_S):
        await writer.drain()
    writer.write_eof()
    async with asyncio.timeout(CLOSE_S):
        while await reader.read(MAX_HEAD_BYTES):
            pass


def _error_response(refusal: Refusal) -> bytes:
    # Many programs show the reason of a refused tunnel, and not its body.
    reason = str(refusal).encode("ascii", "replace").decode()
    text = f"{reason}\n"
    return (
        f"HTTP/1.1 {refusal.status} {reason}\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n"
        f"Connection: close\r\n\r\n{text}"
    ).encode()


class EgressProcess:
    """Server of the supervisor's messages: ``serve``, ``forget`` and ``report`` with the name of a sandbox."""

    def __init__(self, channel: socket.socket, on_gone: Callable[[], None]) -> None:
        self._sandboxes: dict[str, SandboxEgress] = {}
        self._connection = Connection(channel, self._handle, on_gone)

    def _handle(self, message: Message, files: list[int]) -> None:
        if (name := message.get("serve")) and name not in self._sandboxes:
            listener = socket.socket(fileno=files.pop())
            listener.setblocking(False)
            self._sandboxes[name] = SandboxEgress(listener, EgressRules.of(message["network"]))
        elif (name := message.get("forget")) in self._sandboxes:
            self._sandboxes.pop(name).close()
        elif name := message.get("report"):
            uses = self._sandboxes[name].uses() if name in self._sandboxes else []
            self._connection.post({"number": message["number"], "hosts": [asdict(use) for use in uses]})
        close_all(files)


def main() -> None:
    """Run ``egress_proxy PARENT CHANNEL``, the last being the descriptor of the supervisor's socket."""
    parent, channel = map(int, sys.argv[1:])
    syscalls.die_with_parent(parent)

    async def serve() -> None:
        gone = asyncio.Event()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(LOOKUP_THREADS))
        process = EgressProcess(socket.socket(fileno=channel), gone.set)
        await gone.wait()
        del process
        # Threads may still resolve names.
        os._exit(0)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
