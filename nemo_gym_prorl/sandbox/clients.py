# SPDX-License-Identifier: Apache-2.0
"""The supervisor's clients: connections of servers, each with messages that wait while it does not read."""

from __future__ import annotations

import os
import socket
from collections import deque
from dataclasses import dataclass

from nemo_gym_prorl.sandbox.loop import Loop
from nemo_gym_prorl.sandbox.wire import Inbox, Message, pack, send_files


class Client:
    """One connection."""

    def __init__(self, connection: socket.socket, loop: Loop) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.inbox = Inbox(connection)
        self._loop = loop
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self.gone = False

    def send(self, message: Message, files: list[int]) -> None:
        """Queue a message; ``files`` are closed here once they are sent."""
        self._outbox.append((pack({**message, "files": len(files)}), files))
        self.flush()

    def flush(self) -> None:
        """Send what the connection takes."""
        while self._outbox and not self.gone:
            data, files = self._outbox[0]
            try:
                sent = send_files(self.connection, data, files)
            except BlockingIOError:
                break
            except OSError:
                self.gone = True
                break
            close_all(files)
            self._outbox[0] = (data[sent:], [])
            if sent == len(data):
                self._outbox.popleft()
        if self.gone:
            while self._outbox:
                close_all(self._outbox.popleft()[1])
        else:
            self._loop.want_to_write(self.connection, bool(self._outbox))


@dataclass(slots=True)
class Request:
    """One question of a client; answered exactly once."""

    client: Client
    number: int

    def answer(self, message: Message, files: list[int] | None = None) -> None:
        """Answer it; ``files`` are closed here once they are sent."""
        self.client.send({**message, "id": self.number}, files or [])


def close_all(files: list[int]) -> None:
    """Close open files, and forget them."""
    while files:
        os.close(files.pop())
