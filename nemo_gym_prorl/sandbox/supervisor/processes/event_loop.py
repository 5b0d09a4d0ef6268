# SPDX-License-Identifier: Apache-2.0
"""The supervisor's event loop: files that are watched, times that come, and the two signals that matter.

Not asyncio: the supervisor forks all the time, and a forked child of a loop that holds no thread, no task and no
half-run callback is nothing but a copy of a few tables.

No callback's exception gets out of it: whatever goes wrong for one sandbox or client, the others' live on.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable
from io import FileIO


Callback = Callable[[], None]

File = socket.socket | FileIO

PAUSE_S = 0.5
"""For so long a file whose callback failed is not looked at: it would be ready again at once, and fail again."""


class Loop:
    """Calls back when a file can be read, or written where that was asked for, at set times, and when a child has
    ended."""

    def __init__(self, child_ended: Callback, terminated: Callback) -> None:
        self._selector = selectors.DefaultSelector()
        self._child_ended = child_ended
        self._terminated = terminated
        self._times: list[tuple[float, int, Callback]] = []
        self._counter = itertools.count()
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

    def expect(self, connection: socket.socket, *, write: bool, read: bool = True) -> None:
        """Have a watched connection's callback called when it takes more, too, or only then."""
        if connection.fileno() not in self._selector.get_map():
            return
        key = self._selector.get_key(connection)
        events = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if write else 0)
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

    @staticmethod
    def now() -> float:
        """The time, by the loop's clock."""
        return time.monotonic()

    def call_in(self, seconds: float, callback: Callback) -> None:
        """Call back once, after some time."""
        heapq.heappush(self._times, (self.now() + seconds, next(self._counter), callback))

    def turn(self) -> None:
        """Wait for something to happen, and have it dealt with."""
        wait = max(0.0, self._times[0][0] - self.now()) if self._times else None
        for key, _events in self._selector.select(wait):
            # One of those that were ready at the same time may have led to this one's end.
            if self._watches(key) and not guarded(key.data):
                self._pause(key)
        now = self.now()
        while self._times and self._times[0][0] <= now:
            guarded(heapq.heappop(self._times)[2])

    def _watches(self, key: selectors.SelectorKey) -> bool:
        current = self._selector.get_map().get(key.fd)
        return current is not None and current.data is key.data

    def _pause(self, key: selectors.SelectorKey) -> None:
        if not self._watches(key):
            return
        self._selector.unregister(key.fileobj)

        def again() -> None:
            file = key.fileobj
            if not isinstance(file, int) and file.fileno() == key.fd and key.fd not in self._selector.get_map():
                self._selector.register(file, key.events, key.data)

        self.call_in(PAUSE_S, again)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._told_to_end |= number == signal.SIGTERM

    def _drain_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._signals.recv(4096):
                pass
        self._child_ended()
        if self._told_to_end:
            self._terminated()


def guarded(callback: Callback) -> bool:
    """Call back; an exception is told to whoever reads our errors. Returns whether there was none."""
    try:
        callback()
    except Exception:
        traceback.print_exc()
        return False
    return True
