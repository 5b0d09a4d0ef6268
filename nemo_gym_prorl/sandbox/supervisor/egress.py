# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Supervisor's side of the proxy process (:mod:`..egress_proxy`), which starts with the first sandbox that needs it.

The launcher opens a sandbox's listening socket in the sandbox's network namespace. The supervisor holds the socket
until the sandbox is closed. So a proxy process that was killed is replaced without a sandbox noticing: connections
wait in the kernel meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path

import nemo_gym_prorl
from nemo_gym_prorl.background import PROCESS_LOOPS
from nemo_gym_prorl.network_access import PROXY_PORT
from nemo_gym_prorl.sandbox.launcher import requests
from nemo_gym_prorl.sandbox.supervisor.children import Child, Children, Launcher
from nemo_gym_prorl.sandbox.supervisor.connection import PAUSE_S, Connection, Message, PeerGone, socket_pair
from nemo_gym_prorl.sandbox.supervisor.sandbox import Sandbox


CHANNEL = 3
"""Descriptor of the proxy process's socket."""

_IMPORT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from nemo_gym_prorl.sandbox.egress_proxy import main"

REPORT_TIMEOUT_S = 5.0
"""Time for the proxy process to report; it takes milliseconds."""


class Egress:
    """The listening sockets of sandboxes, and the process that serves them.

    Args:
        children: the supervisor's children.
        launcher: opens listening sockets.
    """

    def __init__(self, children: Children, launcher: Launcher) -> None:
        self._children = children
        self._launcher = launcher
        self._serving: dict[str, tuple[Message, int]] = {}
        """Message and listening socket of each sandbox by its name."""
        self._connection: Connection[Message, list[int]] | None = None
        self._started = False
        self._reports: dict[int, asyncio.Future[Message]] = {}
        self._number = 0

    async def open(self, sandbox: Sandbox) -> None:
        """Serve a sandbox whose first process is recorded.

        Raises:
            Refused: the socket cannot be opened.
        """
        assert sandbox.place
        _reply, files = await self._launcher.run(requests.listen(sandbox.place, PROXY_PORT))
        self._serving[sandbox.name] = {"serve": sandbox.name, "network": sandbox.request.network}, files[0]
        if not self._started:
            self._started = True
            PROCESS_LOOPS.start("egress-proxy", self._run)
        elif self._connection:
            await self._serve(self._connection, sandbox.name)

    def close(self, name: str) -> None:
        """Cut the connections of a sandbox, and close its listening socket. Idempotent."""
        if serving := self._serving.pop(name, None):
            os.close(serving[1])
            if self._connection:
                self._connection.post({"forget": name})

    async def report(self, name: str) -> list[Message]:
        """Return the fields of :class:`..egress_proxy.HostUse` for each host that a sandbox asked for.

        The counts begin anew with each proxy process.
        """
        if self._connection is None or name not in self._serving:
            return []
        self._number += 1
        number, report = self._number, asyncio.get_running_loop().create_future()
        self._reports[number] = report
        try:
            self._connection.post({"report": name, "number": number})
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                return list((await report)["hosts"])
        except TimeoutError:
            return []
        finally:
            del self._reports[number]

    async def _serve(self, connection: Connection[Message, list[int]], name: str) -> None:
        message, listener = self._serving[name]
        with contextlib.suppress(PeerGone):  # the next process gets the message
            await connection.send(message, [listener])

    def _on_message(self, message: Message, _files: list[int]) -> None:
        report = self._reports.get(message["number"])
        if report and not report.done():
            report.set_result(message)

    async def _run(self) -> float:
        """Run the process until it ends; return the pause before the next one."""
        ours, theirs = socket_pair()
        connection = Connection(ours, self._on_message, lambda: None)
        try:
            with theirs:
                child = self._spawn(theirs)
            self._connection = connection
            for name in list(self._serving):
                if name in self._serving:
                    await self._serve(connection, name)
            await child.wait()
        finally:
            self._connection = None
            connection.close()
        return PAUSE_S

    def _spawn(self, channel: socket.socket) -> Child:
        package = str(Path(nemo_gym_prorl.__file__).parents[1])
        command = [sys.executable, "-ISc", f"{_IMPORT}; main()", package, str(os.getpid()), str(CHANNEL)]
        duplicate = (os.POSIX_SPAWN_DUP2, channel.fileno(), CHANNEL)
        with self._children.starting() as adopt:
            # The variables name the proxy through which this machine reaches other hosts.
            return adopt(os.posix_spawn(sys.executable, command, os.environ, file_actions=[duplicate]))
