# SPDX-License-Identifier: Apache-2.0
"""The supervisor's clients: connections of servers, each with messages that wait while it does not read."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from nemo_gym_prorl.sandbox.supervisor.processes.event_loop import Loop
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message, Outbox, PeerGone, close_all, pack


MOST_WAITING = 256
"""Messages that wait for a client. One that takes no answers is asked for no more requests meanwhile."""


class Client:
    """One connection."""

    def __init__(self, connection: socket.socket, loop: Loop) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._loop = loop
        self._outbox = Outbox(connection)
        self.gone = False

    @property
    def behind(self) -> bool:
        """Whether it must take what waits before it may ask for more."""
        return len(self._outbox) > MOST_WAITING

    def send(self, message: Message, files: list[int]) -> None:
        """Send a message as soon as there is room; ``files`` are closed here once they are sent."""
        if self.gone:
            close_all(files)
            return
        try:
            packet = pack(message, files, own=True)
        except OSError as error:
            packet = pack({"id": message.get("id"), "error": str(error), "errno": error.errno})
        if "id" in message:

            def failed(error: OSError) -> None:
                self.send({"id": message["id"], "error": str(error), "errno": error.errno}, [])

            packet.failed = failed if packet.files else None
        self._outbox.put(packet)
        self.flush()

    def flush(self) -> None:
        """Send what the connection takes."""
        try:
            done = self._outbox.flush()
        except PeerGone:
            self.gone = True
            return
        if not self.gone:
            self._loop.expect(self.connection, write=not done, read=not self.behind)

    def close(self) -> None:
        """Forget it."""
        self.gone = True
        self._outbox.close()
        self._loop.drop(self.connection)


@dataclass(slots=True)
class Request:
    """One question of a client; answered exactly once. One without a number wants no answer."""

    client: Client
    number: int | None

    def answer(self, message: Message, files: list[int] | None = None) -> None:
        """Answer it; ``files`` are closed here once they are sent."""
        if self.number is None:
            close_all(files or [])
        else:
            self.client.send({**message, "id": self.number}, files or [])
