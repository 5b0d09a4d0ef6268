# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Serve ports on sandboxes' loopback devices from the host, and parse header sections of HTTP messages.

A socket belongs to the network namespace in which it was created. Each port's listening socket is created in its
sandbox's namespace, and this process on the host accepts the connections. So only programs in that sandbox can
connect, the socket identifies the sandbox's rules, and no proxy runs in the sandbox.

:class:`PolicyAccess` gives programs access to the policy of their rollout only. A request is forwarded to one origin,
below ``/v1/``, with the rollout's key in place of the program's own credentials. The key never enters the sandbox.
Each request has its own connections, to the port and to the policy, so bytes after the body cannot be read as another
request. The response passes as the policy sends it.

Bodies are streamed. A call has no time limit, since a generation has none. If a program closes its connection, the
connection to the policy is closed, which cancels the turn. Closing the port does not cancel calls in flight of
processes that outlive the agent program; the policy decides by the expiry of the key whether such calls count.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import cache
from urllib.parse import unquote, urlsplit

from nemo_gym_prorl.async_tasks import log_exceptions
from nemo_gym_prorl.network_access import HOST_NAME, POLICY_PORT
from nemo_gym_prorl.sandbox.supervisor.connection import PAUSE_S


MAX_CONNECTIONS = 128
"""Concurrent connections of one port; package managers use up to 50. Further connections wait in the kernel."""

CONNECT_TIMEOUT_S = 15.0
"""Time limit for resolving a name, and again for connecting to each address."""

IDLE_S = 600.0
"""Time without a byte in either direction after which a connection is closed; a model's response may take minutes."""

CLOSE_S = 5.0
"""Time for a program to read the end of a response before its connection is aborted."""

MAX_HEAD_BYTES = 64 << 10
"""Maximum bytes of a message's header section, and of the read buffer of each direction of a connection."""

HOP_BY_HOP = frozenset(
    {"connection", "proxy-connection", "keep-alive", "proxy-authorization", "te", "upgrade", "host"}
)
"""Header fields that concern one connection and are not forwarded; ``Host`` is set from the checked URL."""

_FRAMING = frozenset({"content-length", "transfer-encoding", "trailer", "host", "expect"})
"""Header fields that decide a message's length and target, so ``Connection`` must not remove them."""

_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")
_LENGTH = re.compile(r"[0-9]{1,18}")
_VERSIONS = ("HTTP/1.0", "HTTP/1.1")

Fields = tuple[tuple[str, str], ...]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Refusal(Exception):
    """Refused request of a program; :meth:`response` is sent to the program."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status

    def response(self) -> bytes:
        """Return an HTTP error response, whose JSON body has the form that clients of model APIs read."""
        # Many programs show only the reason phrase of a refused tunnel, so it has the same text as the body.
        reason = str(self).encode("ascii", "replace").decode()
        text = json.dumps({"type": "error", "error": {"type": "sandbox_proxy_error", "message": reason}})
        return (
            f"HTTP/1.1 {self.status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
            f"Connection: close\r\n\r\n{text}"
        ).encode()


@dataclass(frozen=True, slots=True)
class Head:
    """Start line and header fields of an HTTP request.

    Attributes:
        first: method, target and version.
        fields: all header fields.
        named: header fields that ``Connection`` lists, in lower case.
        size: bytes of the body; ``None`` for chunked encoding.
    """

    first: tuple[str, ...]
    fields: Fields
    named: frozenset[str]
    size: int | None

    def values(self, name: str) -> list[str]:
        return [value.lower() for key, value in self.fields if key.lower() == name]

    @property
    def passed_on(self) -> Fields:
        """Header fields to forward: all but those that concern one connection."""
        return tuple(field for field in self.fields if field[0].lower() not in HOP_BY_HOP | self.named)


def parse_head(data: bytes) -> Head:
    """Parse the header section of a request, which ends with a blank line; a request without a length has no body.

    Raises:
        Refusal: the bytes are not the header section of a request, or the length of the body is ambiguous.
    """
    first, *lines = data.removesuffix(b"\r\n\r\n").decode("latin-1").split("\r\n")
    fields = tuple((found[1], found[2]) for line in lines if (found := _FIELD.fullmatch(line)))
    words = tuple(first.split(" "))
    if len(fields) != len(lines) or not first.isprintable() or len(words) != 3 or not words[0].isalpha():
        raise Refusal(400, "this is not a request of HTTP/1.1")
    head = Head(words, fields, frozenset(), 0)
    named = {name.strip() for value in head.values("connection") for name in value.split(",")}
    if taken := sorted(named & _FRAMING):
        raise Refusal(400, f"Connection must not name {taken[0]}")
    lengths, encodings = head.values("content-length"), head.values("transfer-encoding")
    if encodings not in ([], ["chunked"]) or len(lengths + encodings) > 1 or not all(map(_LENGTH.fullmatch, lengths)):
        raise Refusal(400, "the length of the body is ambiguous")
    if words[2] not in _VERSIONS or (encodings and words[2] < "HTTP/1.1"):
        raise Refusal(400, "this is not a request of HTTP/1.1")
    return replace(head, named=frozenset(named), size=None if encodings else int(lengths[0]) if lengths else 0)


class ProgramReader(asyncio.StreamReader):
    """Stream of the bytes that a program sends. ``on_end`` is called as soon as the program closes or breaks the
    connection, even if bytes are unread."""

    on_end: Callable[[], object] | None = None

    def feed_eof(self) -> None:
        super().feed_eof()
        if self.on_end:
            self.on_end()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self.feed_eof()


class SandboxPort(ABC):
    """Server of one port on one sandbox's loopback device; owns the listening socket."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = self._add(self._accept())
        # The supervisor has a copy of the socket, so closing would not remove the descriptor from epoll; asyncio must
        # remove it before.
        self._accepting.add_done_callback(lambda _task: listener.close())

    @abstractmethod
    async def _serve_requests(self, reader: ProgramReader, writer: asyncio.StreamWriter) -> None:
        """Serve the requests of a connection; the caller sends a raised :class:`Refusal` as the last response."""

    def stop_accepting(self) -> None:
        if self._listener.fileno() >= 0:
            # If the supervisor shuts the socket down, asyncio would wake the cancelled accept and log an error.
            asyncio.get_running_loop().remove_reader(self._listener)
        self._accepting.cancel()

    async def close(self) -> None:
        """Stop accepting connections, and abort all open ones."""
        self.stop_accepting()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

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
            except OSError:  # this process has no file descriptor left
                self._slots.release()
                await asyncio.sleep(PAUSE_S)
                continue
            self._add(self._serve(accepted)).add_done_callback(lambda _task: self._slots.release())

    async def _serve(self, accepted: socket.socket) -> None:
        loop, reader = asyncio.get_running_loop(), ProgramReader(limit=MAX_HEAD_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _protocol = await loop.connect_accepted_socket(lambda: protocol, accepted)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            # suppress() also covers errors in exception groups. The transport is aborted and not closed, so that a
            # program does not mistake a truncated response for a complete one.
            with log_exceptions(), contextlib.suppress(OSError, asyncio.IncompleteReadError):
                try:
                    await self._serve_requests(reader, writer)
                except Refusal as refusal:
                    writer.write(refusal.response())
                await _finish(reader, writer)
        finally:
            transport.abort()


async def read_head(reader: ProgramReader, timeout_s: float) -> bytes:
    """Return the bytes of the next request's header section, with the blank line at its end.

    Raises:
        Refusal: the header section has more than :data:`MAX_HEAD_BYTES`.
        TimeoutError: the header section is incomplete after ``timeout_s`` seconds.
        asyncio.IncompleteReadError: the program has closed the connection.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise Refusal(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes") from None


async def _finish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Wait until the program has read all output: closing a socket with unread input discards output in flight."""
    writer.transport.set_write_buffer_limits(0)
    async with asyncio.timeout(IDLE_S):
        await writer.drain()
    writer.write_eof()
    async with asyncio.timeout(CLOSE_S):
        while await reader.read(MAX_HEAD_BYTES):
            pass


KEEPALIVE_S = 60
"""Seconds without data from the policy's machine after which TCP keep-alive probes the machine."""

MAX_BODY_BYTES = 8 << 20
"""Maximum bytes of a request's body; the model server has the same limit."""

_HOSTS = {f"{name}{port}" for name in ("127.0.0.1", "localhost", HOST_NAME) for port in ("", f":{POLICY_PORT}")}
_CALLER_FIELDS = re.compile(r"authorization|(x-)?api-key|cookie|forwarded|x-(real-ip|(forwarded|rollout|prorl)-.*)")
"""Header fields by which a server may identify the caller; ``_`` in a field's name counts as ``-``."""

_LENGTH_FIELDS = ("content-length", "transfer-encoding", "trailer", "expect")
_BEGIN = b"HTTP/1."
"""First bytes of every response."""

_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_tls = cache(ssl.create_default_context)  # loads all CA certificates, so the context is created once


class BadBody(OSError):
    """Body in chunked encoding with invalid chunks."""


class PolicyAccess(SandboxPort):
    """Port through which programs in a sandbox reach one policy.

    Args:
        url: origin of the policy: scheme, host and port.
        key: bearer key of the rollout.
    """

    def __init__(self, listener: socket.socket, url: str, key: str) -> None:
        super().__init__(listener)
        self._origin = urlsplit(url)
        self._own_fields = [f"Host: {self._origin.netloc}", f"Authorization: Bearer {key}", "Connection: close"]
        self._is_closed = False

    async def close(self) -> None:
        """Refuse new calls, and wait for calls whose programs have closed the connection. Other calls continue."""
        self._is_closed = True
        self.stop_accepting()
        await asyncio.gather(*(task for task in self._tasks if task.cancelling()), return_exceptions=True)

    async def _serve_requests(self, reader: ProgramReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        reader.on_end = task.cancel if task else None
        request = parse_head(await read_head(reader, IDLE_S))
        if self._is_closed:
            raise Refusal(403, "the rollout's program has ended")
        head, tls = self._request_head(request), self._origin.scheme == "https"
        address = self._origin.hostname, self._origin.port or (443 if tls else 80)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                upstream = await asyncio.open_connection(*address, ssl=_tls() if tls else None, limit=MAX_HEAD_BYTES)
        except (OSError, ValueError) as error:
            raise _unreachable(error) from error
        upstream[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        upstream[1].get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        if "100-continue" in request.values("expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        upstream[1].write(head)
        sending = asyncio.create_task(_send_body(reader, request.size, upstream[1]))
        try:
            try:
                begin = await upstream[0].readexactly(len(_BEGIN))
                if begin != _BEGIN:
                    raise ValueError("this is no response of HTTP/1")
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                raise (sending.result() if sending.done() else None) or _unreachable(error) from error
            writer.write(begin)
            while data := await upstream[0].read(MAX_HEAD_BYTES):
                writer.write(data)
                await writer.drain()
        finally:
            sending.cancel()
            upstream[1].transport.abort()
            await asyncio.wait({sending})

    def _request_head(self, request: Head) -> bytes:
        """Return the header section of the forwarded request; refuse paths outside of ``/v1/`` and other hosts."""
        method, target, version = request.first
        segments = unquote(target.partition("?")[0]).replace("\\", "/").split("/")
        if not target.startswith("/v1/") or not target.isascii() or "#" in target or {".", ".."} & {*segments}:
            raise Refusal(404, "only /v1/ of the policy can be reached here")
        if not _HOSTS.issuperset(hosts := request.values("host")) or len(hosts) > 1:
            raise Refusal(421, f"this is 127.0.0.1:{POLICY_PORT}, and no other host")
        fields = [
            f"{name}: {value}"
            for name, value in request.passed_on
            if (key := name.lower().replace("_", "-")) not in _LENGTH_FIELDS and not _CALLER_FIELDS.fullmatch(key)
        ]
        if (request.size or 0) > MAX_BODY_BYTES:
            raise _too_long()
        if request.size != 0:
            fields.append("Transfer-Encoding: chunked" if request.size is None else f"Content-Length: {request.size}")
        return "\r\n".join([f"{method} {target} {version}", *self._own_fields, *fields, "", ""]).encode("latin-1")


def _too_long() -> Refusal:
    return Refusal(413, f"the request's body has more than {MAX_BODY_BYTES} bytes")


def _unreachable(error: Exception) -> Refusal:
    reason = getattr(error, "strerror", None) or "it gave no response"
    return Refusal(502, f"the policy can't be reached: {reason}")


async def _send_body(reader: asyncio.StreamReader, size: int | None, writer: asyncio.StreamWriter) -> Refusal | None:
    """Forward a request's body. If the body is invalid, abort the connection to the policy and return the refusal."""
    try:
        async for data in _pieces(reader, size, MAX_BODY_BYTES):
            writer.write(b"%x\r\n%b\r\n" % (len(data), data) if size is None else data)
            await writer.drain()
        writer.write(b"0\r\n\r\n" if size is None else b"")
    except Refusal as refusal:
        writer.transport.abort()
        return refusal
    except BadBody as error:
        writer.transport.abort()
        return Refusal(400, f"the request's body {error}")
    except (OSError, asyncio.IncompleteReadError):
        pass  # a missing response is noticed, and the end of the program cancels the call
    return None


async def _pieces(reader: asyncio.StreamReader, size: int | None, limit: int) -> AsyncIterator[bytes]:
    """Yield a body as it arrives: ``size`` bytes; if ``None``, decoded chunks of at most ``limit`` bytes together."""
    while size is None:
        try:
            found = _CHUNK.fullmatch(await reader.readuntil(b"\r\n"))
        except asyncio.LimitOverrunError:
            found = None
        if not found:
            raise BadBody("has a chunk of unclear size")
        limit -= (length := int(found[1], 16))
        if limit < 0:
            raise _too_long()
        async for data in _pieces(reader, length, limit):
            yield data
        if await reader.readexactly(2) != b"\r\n":
            raise BadBody("has a chunk of unclear end")
        size = None if length else 0
    while size and (data := await reader.read(min(size, MAX_HEAD_BYTES))):
        size -= len(data)
        yield data
    if size:
        raise asyncio.IncompleteReadError(b"", size)
