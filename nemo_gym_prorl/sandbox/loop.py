# SPDX-License-Identifier: Apache-2.0
"""The supervisor's event loop: files that are watched, and the two signals that matter.

Not asyncio: the supervisor forks all the time, and a forked child of a loop that holds no thread, no task and no
half-run callback is nothing but a copy of a few tables.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Callable
from io import FileIO


Callback = Callable[[], None]

File = socket.socket | FileIO


class Loop:
    """Calls back when a file can be read, or written where that was asked for, and when a child has ended."""

    def __init__(self, child_ended: Callback, terminated: Callback) -> None:
        self._selector = selectors.DefaultSelector()
        self._child_ended = child_ended
        self._terminated = terminated
        # Handlers run between any two lines of Python; the socket brings what they mean into the loop.
        self._signals, self._wakeup = socket.socketpair()
        for end in (self._signals, self._wakeup):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._told_to_end = False
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.watch(self._signals, self._drain_signals)

    def watch(self, connection: socket.socket, readable: Callback) -> None:
        """Call ``readable`` whenever there is something to read, until :meth:`drop`."""
        self._selector.register(connection, selectors.EVENT_READ, readable)

    def want_to_write(self, connection: socket.socket, wanted: bool) -> None:
        """Have a watched connection's callback called, too, when it takes more."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        key = self._selector.get_key(connection)
        if key.events != events:
            self._selector.modify(connection, events, key.data)

    def attend(self, file: File, callback: Callback, *, read: bool, write: bool) -> None:
        """Call ``callback`` when ``file`` can be read, or written, as wanted, whatever was wanted before."""
        events = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if write else 0)
        if not events:
            self.ignore(file)
        elif file.fileno() not in self._selector.get_map():
            self._selector.register(file, events, callback)
        elif self._selector.get_key(file).events != events:
            self._selector.modify(file, events, callback)

    def ignore(self, connection: File) -> None:
        """Watch no longer; harmless if it was not watched."""
        if connection.fileno() >= 0 and connection.fileno() in self._selector.get_map():
            self._selector.unregister(connection)

    def drop(self, connection: File) -> None:
        """Watch no longer, and close."""
        self.ignore(connection)
        connection.close()

    def turn(self, until: float) -> None:
        """Wait for something to happen, at most until a time of the monotonic clock, and have it dealt with."""
        for key, _events in self._selector.select(max(0.0, until - time.monotonic())):
            # One of those that were ready at the same time may have led to this one's end.
            if key.fd in self._selector.get_map():
                key.data()

    def _on_signal(self, number: int, _frame: object) -> None:
        self._told_to_end |= number == signal.SIGTERM

    def _drain_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._signals.recv(4096):
                pass
        self._child_ended()
        if self._told_to_end:
            self._terminated()
