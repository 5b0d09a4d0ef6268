# SPDX-License-Identifier: Apache-2.0
"""A forked child that serves the supervisor for as long as that lives, so that what takes time holds up nobody.

It is forked again when it was killed, and then told anew what it had not done.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from nemo_gym_prorl.sandbox.limits import descriptors
from nemo_gym_prorl.sandbox.supervisor.processes.children import Children
from nemo_gym_prorl.sandbox.supervisor.processes.event_loop import Loop
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import (
    Message,
    Outbox,
    PeerGone,
    close_all,
    pack,
    receive,
    socket_pair,
)


RETRY_S = 0.5
"""Pause before a killed one is started again."""


class Servant:
    """One such child.

    Args:
        loop: the supervisor's.
        children: the supervisor's.
        program: what it does with its end of the channel, which blocks, until that is closed.
        heard: gets what it says.
        orders: what it must be told again when it starts.
    """

    def __init__(
        self,
        loop: Loop,
        children: Children,
        program: Callable[[socket.socket], None],
        heard: Callable[[Message], None],
        orders: Callable[[], list[Message]],
    ) -> None:
        self._loop = loop
        self._children = children
        self._program = program
        self._heard = heard
        self._orders = orders
        self._channel: socket.socket | None = None
        self._outbox: Outbox | None = None
        self._resting = False

    def tell(self, message: Message) -> None:
        """Tell it something that is among its ``orders``; while it is not there, it will be told those."""
        if self._outbox is None:
            self.start()
        elif self._outbox is not None:
            self._outbox.put(pack(message))
            self._turn(read=False)

    def start(self) -> None:
        """Have it there before it is needed; later there may be no process to be had."""
        if self._resting:
            return
        try:
            ours, theirs = socket_pair()
            with theirs:
                self._children.start(partial(_serve, self._program, theirs), self._ended)
        except OSError:
            self._rest()
            return
        self._channel, self._outbox = ours, Outbox(ours)
        self._loop.watch(ours, self._turn)
        for message in self._orders():
            self._outbox.put(pack(message))
        self._turn(read=False)

    def _rest(self) -> None:
        self._resting = True
        self._loop.call_in(RETRY_S, self._again)

    def _again(self) -> None:
        self._resting = False
        if self._orders():
            self.start()

    def _ended(self, _status: int) -> None:
        if self._channel is not None and self._outbox is not None:
            self._outbox.close()
            self._loop.drop(self._channel)
        self._channel = self._outbox = None
        self._rest()

    def _turn(self, *, read: bool = True) -> None:
        if self._channel is None or self._outbox is None:
            return
        try:
            self._loop.expect(self._channel, write=not self._outbox.flush())
            while read:
                message, files = receive(self._channel)
                close_all(files)
                self._heard(message)
        except BlockingIOError:
            return
        except PeerGone:
            # Its end, of which we are told, says the rest.
            self._loop.ignore(self._channel)


def wait_for(channel: socket.socket, seconds: float | None) -> bool:
    """In the child: wait for something to come, at most so long; returns whether it has."""
    # Not select, which knows no file beyond number 1023.
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(None if seconds is None else math.ceil(seconds * 1000)))


def _serve(program: Callable[[socket.socket], None], channel: socket.socket) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # With the supervisor's lock it would seem to live, with its sockets its clients would not see its end.
    descriptors.close_all_but([0, 1, 2, channel.fileno()])
    # A supervisor of thousands gives it a number that select() does not take.
    low = channel.dup()
    channel.close()
    low.setblocking(True)
    program(low)
    os._exit(0)
