# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Ports of sandboxes that appear elsewhere: on this machine's loopback device, or on that of another sandbox.

Each connection that comes to such a port is joined with one that the supervisor made from inside the sandbox to its
own loopback device. So nothing runs in the sandbox for it, nothing else gets in, and nothing at all gets out: the
sandbox can only answer. Every local user of the machine can connect to what appears there, as to anything on loopback.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NoReturn

from nemo_gym_prorl.failures import RolloutError
from nemo_gym_prorl.sandbox.arguments import check_port
from nemo_gym_prorl.sandbox.container import Container
from nemo_gym_prorl.sandbox.supervisor.rpc.client import SandboxLost


HOST = "127.0.0.1"

MOST_CONNECTIONS = 256
"""At a time; more wait to be accepted."""

MOST_JOINED_AT_ONCE = 4
JOINED_PER_S = 100.0
BURST = 64
"""Each new connection costs the supervisor a process, and it has other sandboxes: so many at once, and so many a
second after the first ones."""

PAUSE_S = 0.1
"""After a connection that could not be taken, as where no more files may be open: it waits meanwhile."""

_CHUNK = 1 << 16


class Relay:
    """Listens until it is closed, which ends its connections too.

    Args:
        listener: takes connections; closed with this.
        dial: makes the connection that one is joined with.
    """

    def __init__(self, listener: socket.socket, dial: Callable[[], Awaitable[socket.socket]]) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._dial = dial
        self._slots = asyncio.Semaphore(MOST_CONNECTIONS)
        self._joining = asyncio.Semaphore(MOST_JOINED_AT_ONCE)
        self._connections: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Stop listening and cut every connection."""
        for task in (self._accepting, *self._connections):
            task.cancel()
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        free_at = 0.0
        while True:
            await self._slots.acquire()
            try:
                outside, _address = await loop.sock_accept(self._listener)
            except OSError:
                self._slots.release()
                await asyncio.sleep(PAUSE_S)
                continue
            free_at = max(free_at, loop.time() - BURST / JOINED_PER_S) + 1 / JOINED_PER_S
            await asyncio.sleep(free_at - loop.time())
            task = asyncio.create_task(self._join(outside))
            self._connections.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._slots.release()

    async def _join(self, outside: socket.socket) -> None:
        with outside:
            try:
                async with self._joining:
                    inside = await self._dial()
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


_exposed: weakref.WeakKeyDictionary[Container, dict[int, int]] = weakref.WeakKeyDictionary()


def expose(container: Container, port: int) -> int:
    """The port of ``127.0.0.1`` at which a port of the sandbox can be reached, until the sandbox ends.

    Raises:
        CallerError: it is no number of a port.
    """
    check_port(port)
    if container.spec.network:
        # It shares the host's loopback device.
        return port
    exposed = _exposed.setdefault(container, {})
    if port not in exposed:
        listener = socket.create_server((HOST, 0))
        exposed[port] = listener.getsockname()[1]
        container.on_end(Relay(listener, partial(container.connect, port)).close)
    return exposed[port]


async def forward(container: Container, target: str, ports: Sequence[int], ready_file: str) -> NoReturn:
    """Have ports of another sandbox appear on the loopback device of this one, for as long as this is awaited.

    Args:
        container: where they appear.
        target: the other's address in their common network.
        ports: of its loopback device.
        ready_file: made in this sandbox when all are there.

    Raises:
        SandboxRefused: the two are in no common network, or a port is in use.
        SandboxLost: this sandbox has ended.
    """
    ended = asyncio.Event()
    with ExitStack() as relays:
        for port in ports:
            _answer, listeners = await container.ask("listen", address=target, port=port)
            for listener in listeners:
                dial = partial(_reach, container, target, port)
                relays.callback(Relay(socket.socket(fileno=listener), dial).close)
        container.on_end(ended.set)
        await container.execute(["sh", "-c", 'echo ready > "$1"', "sh", ready_file])
        await ended.wait()
    raise SandboxLost(f"sandbox {container.name} has ended")


async def _reach(container: Container, target: str, port: int) -> socket.socket:
    _answer, files = await container.ask("reach", address=target, port=port)
    connection = socket.socket(fileno=files[0])
    connection.setblocking(False)
    return connection
