# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A connection to a Jupyter kernel in a sandbox: ZeroMQ's protocol on a Unix socket that the event loop reads itself.

A cell costs half a dozen messages, so each must be cheap: no thread, task or future per message.

What speaks at the other end may be any program. Of what it sends there is never more here than one read, the one
content that a cell waits for, and what :mod:`.zmtp` needs to tell frames; the rest waits in the kernel's own socket.
What takes time here has a share of it: each connection's own, and one for all that want more (:class:`Share`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_gym_prorl.sandbox.sessions.jupyter import zmtp
from nemo_gym_prorl.sandbox.sessions.jupyter.messages import MessageReader


READ_BYTES = 1 << 16

SHARE = 0.2
"""Of the loop's time, for one connection, and for all together that have more to say."""

FREE_S = 0.005
"""Time that may be taken at once."""


class Share:
    """Keeps work within a share of the time: what it took is paid back by waiting."""

    def __init__(self) -> None:
        self._owed = 0.0
        self._at = time.monotonic()

    def take(self, seconds: float) -> float:
        """So much was taken; returns how much is owed."""
        now = time.monotonic()
        self._owed = max(0.0, self._owed - SHARE * (now - self._at)) + seconds
        self._at = now
        return self._owed


_shares: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Share] = weakref.WeakKeyDictionary()
"""Of each loop, for all connections that have used up their own."""


class Channel:
    """One connection. Belongs to one event loop.

    Args:
        connection: to the kernel's socket, as of :func:`connect`; ours from now on.
        socket_type: what we are: ``DEALER`` or ``SUB``.
        reader: gets every message.
        lost: told once, with the reason if what came is against the protocol, when the connection is of no use any
            more; then it is closed.
    """

    def __init__(
        self,
        connection: socket.socket,
        socket_type: str,
        reader: MessageReader,
        lost: Callable[[zmtp.Violation | None], None],
    ) -> None:
        self.behind = False
        """Whether there is more to read, of which we take a rest."""
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._lost = lost
        self._decoder = zmtp.Decoder(reader)
        self._share = Share()
        self._crowd = _shares.setdefault(self._loop, Share())
        self._closed = False
        self._outgoing = bytearray()
        self._waiting = bytearray(zmtp.message([zmtp.SUBSCRIBE_TO_ALL])) if socket_type == "SUB" else bytearray()
        """Messages for which the other end is not ready."""
        self._loop.add_reader(connection, self._read)
        self._write(zmtp.GREETING + zmtp.ready(socket_type))

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message; one that is not taken while the next is sent ends the connection."""
        if self._closed:
            return
        if self._outgoing or (self._waiting and self._decoder.ready):
            self._end(zmtp.Violation("it does not take what it is sent"))
        elif self._decoder.ready:
            self._write(zmtp.message(frames))
        else:
            self._waiting += zmtp.message(frames)

    def close(self) -> None:
        """Close it; nothing is told any more."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
            self._connection.close()
            self._outgoing.clear()

    def _end(self, violation: zmtp.Violation | None) -> None:
        if not self._closed:
            self.close()
            self._lost(violation)

    def _read(self) -> None:
        """Read until nothing is left, or take a rest: what comes meanwhile waits in the kernel's process."""
        begin = time.thread_time()
        while not self._closed:
            try:
                data = self._connection.recv(READ_BYTES)
                if not data:
                    self._end(None)
                    return
                self._decoder.feed(data)
            except BlockingIOError:
                break
            except OSError:
                self._end(None)
                return
            except zmtp.Violation as violation:
                self._end(violation)
                return
            if self._waiting and self._decoder.ready:
                waiting, self._waiting = self._waiting, bytearray()
                self._write(waiting)
            if len(data) < READ_BYTES:
                break
            if time.thread_time() - begin > FREE_S:
                break
        self._rest_if_due(time.thread_time() - begin)

    def _rest_if_due(self, took: float) -> None:
        owed = self._share.take(took)
        if owed > FREE_S and not self._closed:
            self.behind = True
            self._loop.remove_reader(self._connection)
            # Who wants more than that waits for the others who do.
            self._loop.call_later(max(owed, self._crowd.take(took)) / SHARE, self._go_on)

    def _go_on(self) -> None:
        self.behind = False
        if not self._closed:
            self._loop.add_reader(self._connection, self._read)

    def _write(self, data: bytes | bytearray) -> None:
        self._outgoing += data
        self._flush()

    def _flush(self) -> None:
        if self._closed:
            return
        try:
            while self._outgoing:
                del self._outgoing[: self._connection.send(self._outgoing)]
            self._loop.remove_writer(self._connection)
        except BlockingIOError:
            self._loop.add_writer(self._connection, self._flush)
        except OSError:
            self._end(None)


def connect(path: Path) -> socket.socket | None:
    """A connection to what listens at the Unix socket ``path``; ``None`` if nothing does (yet)."""
    descriptor = open_socket(path)
    if descriptor is None:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        # Through the descriptor no name is looked up again, so no link can be put in its place meanwhile.
        connection.connect(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        connection.close()
        if error.errno in (errno.ECONNREFUSED, errno.EAGAIN, errno.ENOENT, errno.EACCES):
            return None
        if error.errno == errno.EPROTOTYPE:
            raise zmtp.Violation("a socket of another kind is in the kernel's place") from error
        raise
    finally:
        os.close(descriptor)
    return connection


def open_socket(path: Path) -> int | None:
    """A descriptor of the Unix socket ``path``, not of what a link there leads to; ``None`` if there is none."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return None
    if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None
