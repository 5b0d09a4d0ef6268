# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Supervisor's side of the egress process (:mod:`..egress.proxy`): opens ports in sandboxes, restarts the process.

The launcher opens the listening socket of a port in the sandbox's network namespace. The supervisor keeps the socket
open until the port is closed. So new connections wait in the socket's backlog while a killed egress process is
replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path

import nemo_gym_prorl
from nemo_gym_prorl.async_tasks import PROCESS_LOOPS
from nemo_gym_prorl.network_access import POLICY_PORT, PROXY_PORT
from nemo_gym_prorl.sandbox.launcher import requests
from nemo_gym_prorl.sandbox.supervisor.children import Child, Children, Launcher
from nemo_gym_prorl.sandbox.supervisor.connection import PAUSE_S, Connection, Message, PeerGone, socket_pair
from nemo_gym_prorl.sandbox.supervisor.sandbox import Sandbox


CHANNEL = 3
"""Descriptor, in the egress process, of the socket to the supervisor; passed as the last argument."""

_IMPORT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from nemo_gym_prorl.sandbox.egress.proxy import main"

REPLY_TIMEOUT_S = 5.0
"""Time limit in seconds for a reply of the egress process, which usually takes milliseconds."""


class Egress:
    """Owner of the sandboxes' listening sockets and of the egress process, which starts with the first open port."""

    def __init__(self, children: Children, launcher: Launcher) -> None:
        self._children = children
        self._launcher = launcher
        self._serving: dict[tuple[str, int], tuple[Message, int]] = {}
        """By sandbox name and port: message to the egress process, and descriptor of the listening socket."""
        self._connection: Connection[Message, list[int]] | None = None
        self._started = False
        self._replies: dict[int, asyncio.Future[Message]] = {}
        self._number = 0

    async def open(self, sandbox: Sandbox, port: int, access: Message) -> None:
        """Open a port on the loopback device of a sandbox whose first process is recorded.

        ``access`` is ``network`` (allowed hosts) for a proxy, or ``url`` and ``key`` of a policy.

        Raises:
            Refused: the socket cannot be opened, or the sandbox is paused.
        """
        _reply, files = await self._launcher.run(requests.listen(sandbox.namespaces_to_join(), port))
        self._serving[sandbox.name, port] = {"serve": sandbox.name, "port": port, **access}, files[0]
        if not self._started:
            self._started = True
            PROCESS_LOOPS.start("egress-process", self._run)
        elif self._connection:
            await self._serve(self._connection, sandbox.name, port)

    async def close(self, name: str, *ports: int) -> None:
        """Close ``ports`` of a sandbox, or both if none is given, and wait until the egress process has cut their
        connections. Idempotent."""
        served = [port for port in ports or (PROXY_PORT, POLICY_PORT) if (name, port) in self._serving]
        for port in served:
            with socket.socket(fileno=self._serving.pop((name, port))[1]) as listener:
                # The egress process has a copy of the socket, so closing alone would not refuse connections.
                listener.shutdown(socket.SHUT_RDWR)
        for port in served:
            await self._ask({"forget": name, "port": port})

    async def report(self, name: str) -> list[Message]:
        """Return the fields of :class:`..egress.proxy.HostUse` for each host that a sandbox requested from its proxy.
        Empty without a proxy, or if the egress process does not reply. Counts restart at 0 with each egress
        process."""
        served = (name, PROXY_PORT) in self._serving
        return list((await self._ask({"report": name})).get("hosts", ())) if served else []

    async def _ask(self, message: Message) -> Message:
        """Send a message and return the egress process's reply; empty without a reply in :data:`REPLY_TIMEOUT_S`."""
        if self._connection is None:
            return {}
        self._number += 1
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        number, self._replies[self._number] = self._number, reply
        try:
            self._connection.post({**message, "number": number})
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                return await reply
        except TimeoutError:
            return {}
        finally:
            del self._replies[number]

    async def _serve(self, connection: Connection[Message, list[int]], name: str, port: int) -> None:
        message, listener = self._serving[name, port]
        with contextlib.suppress(PeerGone):  # the next process gets the message
            await connection.send(message, [listener])

    def _on_message(self, message: Message, _files: list[int]) -> None:
        reply = self._replies.get(message["number"])
        if reply and not reply.done():
            reply.set_result(message)

    async def _run(self) -> float:
        """Run one egress process until it ends; return the seconds to wait before the next start."""
        ours, theirs = socket_pair()
        connection = Connection(ours, self._on_message, lambda: None)
        try:
            with theirs:
                child = self._spawn(theirs)
            self._connection = connection
            for name, port in list(self._serving):
                if (name, port) in self._serving:
                    await self._serve(connection, name, port)
            await child.wait()
        finally:
            self._connection = None
            connection.close()
            for number in self._replies:
                self._on_message({"number": number}, [])
        return PAUSE_S

    def _spawn(self, channel: socket.socket) -> Child:
        package = str(Path(nemo_gym_prorl.__file__).parents[1])
        command = [sys.executable, "-ISc", f"{_IMPORT}; main()", package, str(os.getpid()), str(CHANNEL)]
        duplicate = (os.POSIX_SPAWN_DUP2, channel.fileno(), CHANNEL)
        with self._children.starting() as register:
            # The environment names the proxy and certificates by which this machine reaches other hosts.
            return register(os.posix_spawn(sys.executable, command, os.environ, file_actions=[duplicate]))
