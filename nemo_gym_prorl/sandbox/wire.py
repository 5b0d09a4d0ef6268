# SPDX-License-Identifier: Apache-2.0
"""Messages between a server and its supervisor: a length, then JSON, with open files beside it.

Open files travel with the first byte of their message, so a reader that has a whole message has its files too.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any


Message = dict[str, Any]

MAX_FILES = 8
"""Most open files beside one message."""

_LENGTH = struct.Struct("!I")
_CHUNK = 1 << 16


def pack(message: Message) -> bytes:
    """The bytes of one message."""
    body = json.dumps(message, separators=(",", ":")).encode("utf-8", "surrogateescape")
    return _LENGTH.pack(len(body)) + body


def send_files(connection: socket.socket, data: bytes, files: Sequence[int]) -> int:
    """Send what fits of ``data``, with ``files``; returns the number of bytes sent, as ``send`` does."""
    if not files:
        return connection.send(data)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    return connection.sendmsg([data], ancillary)


class Inbox:
    """Takes messages off one non-blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self._files: deque[int] = deque()

    def receive(self) -> list[tuple[Message, list[int]]] | None:
        """The messages that are complete by now, each with its files; ``None`` when the peer is gone."""
        try:
            data, ancillary, _flags, _address = self._connection.recvmsg(
                _CHUNK, socket.CMSG_SPACE(MAX_FILES * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return []
        except ConnectionError:
            data, ancillary = b"", []
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                self._files.extend(numbers)
        if not data:
            self.close()
            return None
        self._buffer += data
        messages = []
        while (message := self._next()) is not None:
            # The sender says how many files are its own, so that files of two messages never mix.
            files = [self._files.popleft() for _ in range(min(message.pop("files", 0), len(self._files)))]
            messages.append((message, files))
        return messages

    def close(self) -> None:
        """Close the files that nobody took."""
        while self._files:
            os.close(self._files.popleft())

    def _next(self) -> Message | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        message: Message = json.loads(self._buffer[_LENGTH.size : end].decode("utf-8", "surrogateescape"))
        del self._buffer[:end]
        return message
