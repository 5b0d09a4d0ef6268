# SPDX-License-Identifier: Apache-2.0
"""A forked child that serves the supervisor for as long as that lives, so that what takes time holds up nobody.

It is forked again when it was killed, and then told anew what it had not done.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import socket
from collections.abc import Callable

from nemo_gym_prorl.sandbox.supervisor.processes.background import guarded
from nemo_gym_prorl.sandbox.supervisor.processes.children import Children
from nemo_gym_prorl.sandbox.supervisor.rpc.answers import Refused
from nemo_gym_prorl.sandbox.supervisor.rpc.connection import Connection
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message, socket_pair


RETRY_S = 0.5
"""Pause before a killed one is started again."""


class Worker:
    """One such child.

    Args:
        children: the supervisor's.
        program: what it does with its end of the channel, which blocks, until that is closed.
        heard: gets what it says.
        orders: what it must be told again when it starts.
    """

    def __init__(
        self,
        children: Children,
        program: Callable[[socket.socket], None],
        heard: Callable[[Message], None],
        orders: Callable[[], list[Message]],
    ) -> None:
        self._children = children
        self._program = program
        self._heard = heard
        self._orders = orders
        self._connection: Connection[Message, list[int]] | None = None

    def tell(self, message: Message) -> None:
        """Tell it something that is among its ``orders``; while it is not there, it will be told those."""
        if self._connection:
            self._connection.post(message)

    async def run(self) -> None:
        """Have it there, for ever."""
        while True:
            with guarded(), contextlib.suppress(OSError, Refused):
                await self._run_once()
            await asyncio.sleep(RETRY_S)

    async def _run_once(self) -> None:
        ours, theirs = socket_pair()
        connection = Connection(ours, lambda message, _files: self._heard(message), lambda: None)
        try:
            with theirs:
                child = self._children.fork(lambda: _serve(self._program, theirs), [theirs.fileno()])
            self._connection = connection
            for message in self._orders():
                connection.post(message)
            await child.wait()
        finally:
            self._connection = None
            connection.close()


def wait_for(channel: socket.socket, seconds: float | None) -> bool:
    """In the child: wait for something to come, at most so long; returns whether it has."""
    # Not select, which knows no file beyond number 1023.
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(None if seconds is None else math.ceil(seconds * 1000)))


def _serve(program: Callable[[socket.socket], None], channel: socket.socket) -> None:
    # A supervisor of thousands gives it a number that select() does not take.
    low = channel.dup()
    channel.close()
    low.setblocking(True)
    program(low)
