# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Jupyter's messages to and from a kernel in a sandbox: requests are signed, answers are picked out of frames.

Everything that arrives is the sandbox's word. Whoever can forge it can read the kernel's key as well, so signatures of
incoming messages prove nothing and are not looked at; what is not a message of the protocol is left out. Of a message
its content alone can be large: it is kept if somebody waits for it, and up to :data:`LARGEST_CONTENT`. Reading JSON
holds up all other sandboxes of the server, so what is read has at most :data:`MOST_VALUES`.

The format: https://jupyter-client.readthedocs.io/en/stable/messaging.html.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson


LARGEST_HEADER = 64 << 10
"""Bytes; some hundred of an honest one."""

LARGEST_CONTENT = 17 << 20
"""Bytes; all that may be kept of a cell's rich results has room in it."""

MOST_VALUES = 100_000
"""In one message; one with more takes longest to read, and is only counted. Text of any length is a single value."""

SIGNED_WITH = "hmac-sha256"
DELIMITER = b"<IDS|MSG>"
PROTOCOL = "5.3"

_DELIMITER, _HEADER, _PARENT, _CONTENT = 0, 2, 3, 5
"""Frames of a message; the others are the signature, what is said about the content, and binary buffers."""

# Matches at every quotation mark, also where the text is cut, and never looks at a byte twice.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)

_FIRST_LOOK = 1 << 20


@dataclass(frozen=True, slots=True)
class Message:
    """What a kernel says.

    Attributes:
        kind: as ``stream`` or ``status``.
        request: the id of the request that it is about.
        content: as the protocol says, if the kernel is honest; empty if nobody wanted it.
        unread: bytes of a content that was wanted and left out: no JSON object, too large, or of too many values.
    """

    kind: str
    request: str
    content: dict[str, Any]
    unread: int = 0


class Requests:
    """The requests of one client to one kernel."""

    def __init__(self) -> None:
        self.key = secrets.token_hex(32)
        self._session = secrets.token_hex(16)
        self._count = 0

    def made(self, request: str) -> bool:
        """Whether the id is of one of these requests."""
        return request.startswith(f"{self._session}_")

    def make(self, kind: str, **content: Any) -> tuple[str, list[bytes]]:
        """A request: its id, and its frames."""
        self._count += 1
        request = f"{self._session}_{self._count}"
        header = {
            "msg_id": request,
            "msg_type": kind,
            "session": self._session,
            "username": "",
            "date": datetime.now(UTC),
            "version": PROTOCOL,
        }
        # Not orjson: code may hold half a surrogate pair.
        parts = [orjson.dumps(header), b"{}", b"{}", json.dumps(content).encode()]
        signature = hmac.digest(self.key.encode(), b"".join(parts), "sha256").hex().encode()
        return request, [DELIMITER, signature, *parts]


class MessageReader:
    """Picks the messages out of the frames of a connection: a :class:`.zmtp.Receiver`.

    Args:
        wants: whether the content of a message of this kind, about this request, is to be kept.
        listener: gets every message.
    """

    def __init__(self, wants: Callable[[str, str], bool], listener: Callable[[Message], None]) -> None:
        self._wants = wants
        self._listener = listener
        self._next = _DELIMITER
        self._kind: str | None = None
        self._request: str | None = None
        self._message: Message | None = None

    def room(self, size: int) -> bool:
        """Whether a frame that begins is to be kept."""
        if self._next == _DELIMITER:
            return size == len(DELIMITER)
        if self._next == _CONTENT:
            return self._wanted() and size <= LARGEST_CONTENT
        return self._next in (_HEADER, _PARENT) and size <= LARGEST_HEADER

    def frame(self, body: bytes | bytearray | None, size: int, more: bool) -> None:
        """A frame of a message."""
        if self._next == _HEADER:
            self._kind = _text_in(body, "msg_type")
        elif self._next == _PARENT:
            self._request = _text_in(body, "msg_id")
        elif self._next == _CONTENT:
            self._message = self._read(body, size)
        # Before the delimiter come the names of who is on the way, of whatever number.
        if self._next != _DELIMITER or body == DELIMITER:
            self._next += 1
        if not more:
            message = self._message
            self._forget()
            if message:
                self._listener(message)

    def _forget(self) -> None:
        self._next = _DELIMITER
        self._kind = self._request = self._message = None

    def _wanted(self) -> bool:
        return self._kind is not None and self._request is not None and self._wants(self._kind, self._request)

    def _read(self, body: bytes | bytearray | None, size: int) -> Message | None:
        if self._kind is None or self._request is None:
            return None
        if body is None:
            return Message(self._kind, self._request, {}, size if self._wanted() else 0)
        content = None if _is_costly(body) else _json(body)
        if not isinstance(content, dict):
            return Message(self._kind, self._request, {}, size)
        return Message(self._kind, self._request, content)


def _text_in(body: bytes | bytearray | None, name: str) -> str | None:
    """A text of an object in JSON."""
    if body is None or _is_costly(body):
        return None
    value = _json(body)
    text = value.get(name) if isinstance(value, dict) else None
    return text if isinstance(text, str) else None


def _json(body: bytes | bytearray) -> Any:
    """The value of JSON; bytes that are no UTF-8, which ipykernel sends as they are, become surrogates."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            return json.loads(body.decode("utf-8", "surrogateescape"))
        except (ValueError, RecursionError):
            return None


def _is_costly(frame: bytes | bytearray) -> bool:
    """Whether there are too many values in it; one that begins with so many is not looked at to its end."""
    return _has_many(frame[:_FIRST_LOOK]) or (len(frame) > _FIRST_LOOK and _has_many(frame))


def _has_many(frame: bytes | bytearray) -> bool:
    if len(frame) <= MOST_VALUES or _values(frame) <= MOST_VALUES:
        return False
    if frame.count(b'"') - frame.count(b'\\"') > MOST_VALUES:
        return True
    return _values(_STRING.sub(b"", frame)) > MOST_VALUES


def _values(text: bytes | bytearray) -> int:
    return sum(text.count(sign) for sign in (b",", b"[", b"{"))
