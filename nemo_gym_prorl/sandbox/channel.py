# SPDX-License-Identifier: Apache-2.0
"""The wire to a Jupyter kernel in a sandbox: ZeroMQ sockets that the event loop reads itself.

A cell costs half a dozen messages, so each must be cheap: no task, no future and no date parsing per message.

Everything that arrives is the sandbox's word. Whoever can forge it can read the kernel's key as well, so signatures of
incoming messages prove nothing and are not looked at; what is not a message of the protocol is left out, and none can
be larger than :data:`LARGEST_MESSAGE`.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import zmq
from jupyter_client.session import DELIM, Session


LARGEST_MESSAGE = 64 << 20
"""Bytes; a kernel that sends more is cut off."""

MOST_SOCKETS = 60_000
"""More than there are file descriptors; libzmq's own bound is 1,023, some 500 kernels."""

_READS_A_TURN = 64
"""Messages before other tasks of the loop get a turn while a cell floods."""

_context = zmq.Context()
_context.max_sockets = MOST_SOCKETS


@dataclass(frozen=True, slots=True)
class Message:
    """What a kernel says.

    Attributes:
        kind: as ``stream`` or ``status``.
        request: the id of the request that it is about.
        content: as the protocol says, if the kernel is honest.
    """

    kind: str
    request: str
    content: dict[str, Any]


class Channel:
    """One connection. Belongs to one event loop.

    libzmq's descriptor tells of a change once, not for as long as there is something to read: after every wake-up, and
    after everything sent, the socket is read until it is empty.

    Args:
        kind: ``zmq.DEALER`` or ``zmq.SUB``.
        path: a descriptor of the kernel's Unix socket, as of :func:`open_socket`; the caller's to close.
        listener: gets every message.
    """

    def __init__(self, kind: int, path: int, listener: Callable[[Message], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._socket = _context.socket(kind)
        self._socket.maxmsgsize = LARGEST_MESSAGE
        self._socket.linger = 0
        # Rather an error than a stopped loop, when a kernel takes nothing.
        self._socket.sndtimeo = 0
        if kind == zmq.SUB:
            self._socket.subscribe(b"")
        # Through the descriptor no name is looked up again, so no link can be put in its place meanwhile.
        self._socket.connect(f"ipc:///proc/self/fd/{path}")
        self._descriptor = int(self._socket.fd)
        self._loop.add_reader(self._descriptor, self._read)

    def send(self, session: Session, kind: str, content: dict[str, Any]) -> str:
        """Send a request; returns its id."""
        message = session.send(self._socket, kind, content)
        assert message is not None
        self._loop.call_soon(self._read)
        return str(message["header"]["msg_id"])

    def close(self) -> None:
        """Close it; nothing is told any more."""
        self._loop.remove_reader(self._descriptor)
        self._socket.close()

    def _read(self) -> None:
        for _ in range(_READS_A_TURN):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if message := parse(frames):
                self._listener(message)
        self._loop.call_soon(self._read)


def parse(frames: Sequence[bytes]) -> Message | None:
    """The message in ``frames``, or ``None`` if they hold none."""
    try:
        begin = frames.index(DELIM) + 2
        header, parent, _metadata, content = (orjson.loads(frame) for frame in frames[begin : begin + 4])
        kind, request = header["msg_type"], parent["msg_id"]
    except (ValueError, KeyError, TypeError):
        return None
    if not (isinstance(kind, str) and isinstance(request, str) and isinstance(content, dict)):
        return None
    return Message(kind, request, content)


def open_socket(path: Path) -> int | None:
    """A descriptor of the Unix socket ``path``, not of what a link there leads to; ``None`` if there is none."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None
