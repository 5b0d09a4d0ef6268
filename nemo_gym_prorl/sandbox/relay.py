# SPDX-License-Identifier: Apache-2.0
"""A port of a sandbox that has no network, as a port of this machine's loopback device.

Each connection that comes here is joined with one that the supervisor made from inside the sandbox to its own loopback
device. So nothing runs in the sandbox for it, nothing else gets in, and nothing at all gets out: the sandbox can only
answer. Every local user of the machine can connect, as to anything on loopback.
"""

from __future__ import annotations

import asyncio
import socket
import weakref

from nemo_gym_prorl.failures import RolloutError
from nemo_gym_prorl.sandbox.container import Container


HOST = "127.0.0.1"

MOST_CONNECTIONS = 256
"""At a time; more wait to be accepted."""

_CHUNK = 1 << 16


class Relay:
    """Listens until it is closed, which ends its connections too."""

    def __init__(self, container: Container, port: int) -> None:
        self._container = container
        self._port = port
        self._listener = socket.create_server((HOST, 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        """Where it listens."""
        self._slots = asyncio.Semaphore(MOST_CONNECTIONS)
        self._connections: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Stop listening and cut every connection."""
        for task in (self._accepting, *self._connections):
            task.cancel()
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            outside, _address = await loop.sock_accept(self._listener)
            task = asyncio.create_task(self._join(outside))
            self._connections.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._slots.release()

    async def _join(self, outside: socket.socket) -> None:
        with outside:
            try:
                inside = await self._container.connect(self._port)
            except RolloutError:
                # Nothing listens, or the sandbox has ended: the caller sees its connection end.
                return
            with inside:
                try:
                    async with asyncio.TaskGroup() as both:
                        both.create_task(_copy(outside, inside))
                        both.create_task(_copy(inside, outside))
                except* OSError:
                    # Broken off on one side; leaving closes both.
                    pass


async def _copy(source: socket.socket, target: socket.socket) -> None:
    """Hand on what comes, and its end."""
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, _CHUNK):
        await loop.sock_sendall(target, data)
    target.shutdown(socket.SHUT_WR)


_relays: weakref.WeakKeyDictionary[Container, dict[int, Relay]] = weakref.WeakKeyDictionary()


def expose(container: Container, port: int) -> int:
    """The port of ``127.0.0.1`` at which a port of the sandbox can be reached, until the sandbox ends."""
    if container.spec.network:
        # It shares the host's loopback device.
        return port
    relays = _relays.setdefault(container, {})
    if port not in relays:
        relays[port] = Relay(container, port)
        container.on_end(relays[port].close)
    return relays[port].port
