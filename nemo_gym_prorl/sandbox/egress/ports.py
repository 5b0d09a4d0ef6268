# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Ports on a sandbox's loopback device that this process on the host serves, and heads of HTTP messages.

A socket belongs to the network namespace in which it was created. Each port's listening socket is in the namespace of
its sandbox, and this process accepts from it. So only programs of that sandbox can connect, the socket identifies the
sandbox's rules, and no process runs inside.

:class:`PolicyAccess` gives programs access to the policy of their rollout, and to nothing else. A request to its port
is sent to one origin, below ``/v1/``, with the rollout's key in place of the program's own credentials. The key never
enters the sandbox. Each request has a connection to the policy of its own, so no byte behind its body is read as
another request.

Bodies are passed on as they arrive. A call has no time limit, as a generation has none. A program that closes its
connection closes the connection to the policy, which cancels the turn. Closing the port ends no call: its caller has
outlived the program, and the end of the key decides what the call counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
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
"""Connections of one port that are served at a time; package managers use up to 50. Further connections wait in the
kernel.
"""

CONNECT_TIMEOUT_S = 15.0
"""Time to resolve a name, and to connect to one of its addresses."""

IDLE_S = 600.0
"""Time without a byte in either direction after which a connection is closed; a model's answer may take minutes."""

CLOSE_S = 5.0
"""Time for a program to read the end of a response."""

MAX_HEAD_BYTES = 64 << 10
"""Bytes of a message's head, and of the buffer of each direction of a connection."""

HOP_BY_HOP = frozenset(
    {"connection", "proxy-connection", "keep-alive", "proxy-authorization", "te", "upgrade", "host"}
)
"""Fields of one connection, which are not passed on; ``Host`` is rewritten from the URL that was checked."""

_FRAMING = frozenset({"content-length", "transfer-encoding", "trailer", "host", "expect"})
"""Fields that decide where a message ends and whom it is for, which ``Connection`` must not take away."""

_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")
_LENGTH = re.compile(r"[0-9]{1,18}")
_VERSIONS = ("HTTP/1.0", "HTTP/1.1")

Fields = tuple[tuple[str, str], ...]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Refusal(Exception):
    """A request that is answered with an HTTP error."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status

    def response(self) -> bytes:
        """Return the response, whose body has the shape that clients of policies read."""
        # Many programs show the reason of a refused tunnel, and not its body.
        reason = str(self).encode("ascii", "replace").decode()
        text = json.dumps({"type": "error", "error": {"type": "sandbox_proxy_error", "message": reason}})
        return (
            f"HTTP/1.1 {self.status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
            f"Connection: close\r\n\r\n{text}"
        ).encode()


@dataclass(frozen=True, slots=True)
class Head:
    """Head of a message.

    Attributes:
        first: words of the first line, three of a request.
        fields: all header fields.
        named: names that ``Connection`` lists, in lower case.
        size: bytes of the body; ``None`` for chunks, infinite if the head does not say.
    """

    first: tuple[str, ...]
    fields: Fields
    named: frozenset[str]
    size: float | None

    def values(self, name: str) -> list[str]:
        return [value.lower() for key, value in self.fields if key.lower() == name]

    @property
    def passed_on(self) -> Fields:
        """Header fields that concern more than one connection."""
        return tuple(field for field in self.fields if field[0].lower() not in HOP_BY_HOP | self.named)


def parse_head(data: bytes) -> Head:
    """Return the head of a message.

    Raises:
        Refusal: the bytes are no head, or two readers may differ in where the message ends.
    """
    first, *lines = data.removesuffix(b"\r\n\r\n").decode("latin-1").split("\r\n")
    fields = tuple((found[1], found[2]) for line in lines if (found := _FIELD.fullmatch(line)))
    if len(fields) != len(lines) or not first.isprintable():
        raise Refusal(400, "this is not HTTP/1.1")
    head = Head(tuple(first.split(" ")), fields, frozenset(), math.inf)
    named = {name.strip() for value in head.values("connection") for name in value.split(",")}
    if taken := sorted(named & _FRAMING):
        raise Refusal(400, f"Connection must not name {taken[0]}")
    lengths, encodings = head.values("content-length"), head.values("transfer-encoding")
    if encodings not in ([], ["chunked"]) or len(lengths + encodings) > 1 or not all(map(_LENGTH.fullmatch, lengths)):
        raise Refusal(400, "the length of the body is ambiguous")
    size = None if encodings else int(lengths[0]) if lengths else math.inf
    return replace(head, named=frozenset(named), size=size)


def parse_request_head(data: bytes) -> Head:
    """Return the head of a request; it has no body if it does not say so.

    Raises:
        Refusal: the bytes are no such head.
    """
    head = parse_head(data)
    method, version, chunked = head.first[0], head.first[-1], head.size is None
    if len(head.first) != 3 or version not in _VERSIONS or not method.isalpha() or (chunked and version < "HTTP/1.1"):
        raise Refusal(400, "this is not a request of HTTP/1.1")
    return replace(head, size=0) if head.size == math.inf else head


class ProgramReader(asyncio.StreamReader):
    """Stream of a program's bytes. ``on_end`` is called when the program closes its end, also before all is read."""

    on_end: Callable[[], object] | None = None

    def feed_eof(self) -> None:
        super().feed_eof()
        if self.on_end:
            self.on_end()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self.feed_eof()


class SandboxPort(ABC):
    """Server of one port of one sandbox."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = self._add(self._accept())
        # Only after the event loop has forgotten the descriptor, whose socket the supervisor also holds.
        self._accepting.add_done_callback(lambda _task: listener.close())

    @abstractmethod
    async def _carry_out(self, reader: ProgramReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection; a :class:`Refusal` is sent as the last response."""

    def stop_accepting(self) -> None:
        if self._listener.fileno() >= 0:
            # The supervisor's shutdown of the socket would wake a cancelled accept, which asyncio reports as a defect.
            asyncio.get_running_loop().remove_reader(self._listener)
        self._accepting.cancel()

    async def close(self) -> None:
        """Stop accepting, and cut all connections."""
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
            except OSError:  # no descriptor is left
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
            # Errors of a group, too. The connection is cut, so that no program takes part of a response for all of it.
            with log_exceptions(), contextlib.suppress(OSError, asyncio.IncompleteReadError):
                try:
                    await self._carry_out(reader, writer)
                except Refusal as refusal:
                    writer.write(refusal.response())
                await _finish(reader, writer)
        finally:
            transport.abort()


async def read_head(reader: ProgramReader, timeout_s: float) -> bytes:
    """Read the head of the next request.

    Raises:
        Refusal: the head is too long.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise Refusal(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes") from None


async def _finish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Let the program read all output: closing a socket with unread input would discard output on its way."""
    writer.transport.set_write_buffer_limits(0)
    async with asyncio.timeout(IDLE_S):
        await writer.drain()
    writer.write_eof()
    async with asyncio.timeout(CLOSE_S):
        while await reader.read(MAX_HEAD_BYTES):
            pass


KEEPALIVE_S = 60
"""Idle time after which the kernel probes whether the policy's machine is still there."""

MAX_BODY_BYTES = 8 << 20
"""Bytes of a request's body, as at the model server."""

_HOSTS = {f"{name}{port}" for name in ("127.0.0.1", "localhost", HOST_NAME) for port in ("", f":{POLICY_PORT}")}
_CALLER = re.compile(r"authorization|(x-)?api-key|cookie|forwarded|x-(real-ip|(forwarded|rollout|prorl)-.*)")
"""Fields by which a server may identify the caller; ``_`` counts as ``-``."""

_LENGTH_FIELDS = ("content-length", "transfer-encoding", "trailer", "expect")
_STATUS = re.compile(r"HTTP/1\.[01] ([2-5]\d\d)( .*)?")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_tls = cache(ssl.create_default_context)  # reads all authorities, which takes long


class BadBody(OSError):
    """A body whose chunks have no clear end."""


class PolicyAccess(SandboxPort):
    """Route from a sandbox to one policy.

    Args:
        url: origin of the policy.
        key: bearer token of the rollout.
    """

    def __init__(self, listener: socket.socket, url: str, key: str) -> None:
        super().__init__(listener)
        self._origin = urlsplit(url)
        self._own_fields = [f"Host: {self._origin.netloc}", f"Authorization: Bearer {key}", "Connection: close"]
        self._is_closed = False

    async def close(self) -> None:
        """Take no more calls; return when those of ended programs are cut. Other calls end with their programs."""
        self._is_closed = True
        self.stop_accepting()
        await asyncio.gather(*(task for task in self._tasks if task.cancelling()), return_exceptions=True)

    async def _carry_out(self, reader: ProgramReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        reader.on_end = task.cancel if task else None
        while await self._call(reader, writer):
            pass

    async def _call(self, reader: ProgramReader, writer: asyncio.StreamWriter) -> bool:
        """Answer the next request of a connection; return whether another one may follow."""
        request = parse_request_head(await read_head(reader, IDLE_S))
        if self._is_closed:
            raise Refusal(403, "the rollout's program has ended")
        head, modern = self._request_head(request), request.first[2] == "HTTP/1.1"
        tls = self._origin.scheme == "https"
        address = self._origin.hostname, self._origin.port or (443 if tls else 80)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                far = await asyncio.open_connection(*address, ssl=_tls() if tls else None, limit=MAX_HEAD_BYTES)
        except (OSError, ValueError) as error:
            raise _unreachable(error) from error
        far[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        far[1].get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        if modern and "100-continue" in request.values("expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        far[1].write(head)
        sending = asyncio.create_task(_send_body(reader, request.size, far[1]))
        try:
            try:
                status, fields, size = await _read_response(far[0], request.first[0])
            except (OSError, ValueError, Refusal, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
                raise (sending.result() if sending.done() else None) or _unreachable(error) from error
            chunked = modern and size in (None, math.inf)
            keep = modern and sending.done() and "close" not in request.named
            framing = ["Transfer-Encoding: chunked"] * chunked + ["Connection: close"] * (not keep)
            writer.write("\r\n".join([f"HTTP/1.1 {status}", *fields, *framing, "", ""]).encode("latin-1"))
            await _copy(far[0], size, writer, chunked=chunked)
            return keep
        finally:
            sending.cancel()
            far[1].transport.abort()
            await asyncio.wait({sending})

    def _request_head(self, request: Head) -> bytes:
        """Return the head of a request to the policy."""
        method, target, _version = request.first
        segments = unquote(target.partition("?")[0]).replace("\\", "/").split("/")
        if not target.startswith("/v1/") or not target.isascii() or "#" in target or {".", ".."} & {*segments}:
            raise Refusal(404, "only /v1/ of the policy can be reached here")
        if not _HOSTS.issuperset(hosts := request.values("host")) or len(hosts) > 1:
            raise Refusal(421, f"this is 127.0.0.1:{POLICY_PORT}, and no other host")
        fields = [
            f"{name}: {value}"
            for name, value in request.passed_on
            if (key := name.lower().replace("_", "-")) not in _LENGTH_FIELDS and not _CALLER.fullmatch(key)
        ]
        if (request.size or 0) > MAX_BODY_BYTES:
            raise _too_long()
        if request.size != 0:
            fields.append("Transfer-Encoding: chunked" if request.size is None else f"Content-Length: {request.size}")
        return "\r\n".join([f"{method} {target} HTTP/1.1", *self._own_fields, *fields, "", ""]).encode("latin-1")


def _too_long() -> Refusal:
    return Refusal(413, f"the request's body has more than {MAX_BODY_BYTES} bytes")


def _unreachable(error: Exception) -> Refusal:
    reason = getattr(error, "strerror", None) or "it gave no response"
    return Refusal(502, f"the policy can't be reached: {reason}")


async def _send_body(reader: asyncio.StreamReader, size: float | None, writer: asyncio.StreamWriter) -> Refusal | None:
    """Pass a request's body on; return why it is wrong, which cuts the connection to the policy."""
    try:
        await _copy(reader, size, writer, chunked=size is None, limit=MAX_BODY_BYTES)
    except Refusal as refusal:
        writer.transport.abort()
        return refusal
    except BadBody as error:
        writer.transport.abort()
        return Refusal(400, f"the request's body {error}")
    except (OSError, asyncio.IncompleteReadError):
        pass  # the policy's response or end decides; a program that has ended has cancelled the call
    return None


async def _read_response(reader: asyncio.StreamReader, method: str) -> tuple[str, list[str], float | None]:
    """Return status, fields to pass on, and size of the body as in :class:`.Head`."""
    head = parse_head(await reader.readuntil(b"\r\n\r\n"))
    while "".join(head.first[1:2]).startswith("1"):
        head = parse_head(await reader.readuntil(b"\r\n\r\n"))
    if not (found := _STATUS.fullmatch(" ".join(head.first))):
        raise Refusal(502, "this is no response of HTTP/1.1")
    empty = method == "HEAD" or found[1] in ("204", "304")
    fields = [f"{name}: {value}" for name, value in head.passed_on if name.lower() not in _LENGTH_FIELDS[1:]]
    return f"{found[1]}{found[2] or ' '}", fields, 0 if empty else head.size


async def _copy(
    reader: asyncio.StreamReader,
    size: float | None,
    writer: asyncio.StreamWriter,
    *,
    chunked: bool,
    limit: float = math.inf,
) -> None:
    """Copy a body as it arrives, in chunks if ``chunked``."""
    async for data in _pieces(reader, size, limit):
        writer.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
        await writer.drain()
    writer.write(b"0\r\n\r\n" if chunked else b"")


async def _pieces(reader: asyncio.StreamReader, size: float | None, limit: float = math.inf) -> AsyncIterator[bytes]:
    """Yield a body as it arrives: ``size`` bytes, all up to the connection's end if infinite, chunks if ``None``."""
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
        async for data in _pieces(reader, length):
            yield data
        if await reader.readexactly(2) != b"\r\n":
            raise BadBody("has a chunk of unclear end")
        size = None if length else 0
    while size and (data := await reader.read(int(min(size, MAX_HEAD_BYTES)))):
        size -= len(data)
        yield data
    if 0 < size < math.inf:
        raise asyncio.IncompleteReadError(b"", int(size))
