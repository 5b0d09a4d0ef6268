# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The supervisor: a process that owns the sandboxes of one server process and removes them when the server ends.

The supervisor is a separate process because a server may be killed with SIGKILL, and because joining a sandbox needs
a forked child of a small single-threaded process. :mod:`.client` starts the supervisor with one end of the owner
socket, and keeps the other end:

- If the *server* dies, the owner socket closes. The supervisor kills all sandboxes, removes their files, and exits.
- If the *supervisor* dies, the first process of each sandbox ends: killed by the kernel after a direct start, else
  when its socket closes. The kernel also kills the runtime's processes. The server's :mod:`.client` removes the files.
- If *both* die, the processes end likewise. The user's next supervisor removes the files (:func:`.state_dir.sweep`).

The supervisor has one event loop and no threads. Work that may block (joining, copying, deleting) runs in children.
Every request gets a reply. No request, and no failure of one sandbox, ends another sandbox. :mod:`.lifecycle`
describes the stages of a sandbox.

A client of the supervisor can run any program as the supervisor's user. So the supervisor's socket lies in a folder
that cannot be bound into a sandbox (:mod:`..binds`). In addition, the supervisor accepts only processes of its own
user in its own PID and user namespaces; sandboxed processes are in other namespaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nemo_gym_prorl.async_tasks import PROCESS_LOOPS, log_exceptions, spawn_task
from nemo_gym_prorl.sandbox.isolation import layer_archive, syscalls
from nemo_gym_prorl.sandbox.launcher import requests
from nemo_gym_prorl.sandbox.launcher.requests import SandboxNamespaces
from nemo_gym_prorl.sandbox.limits import cgroups, rlimits
from nemo_gym_prorl.sandbox.supervisor import programs, state_dir
from nemo_gym_prorl.sandbox.supervisor.children import Children, Launcher, Reply
from nemo_gym_prorl.sandbox.supervisor.connection import PAUSE_S, Connection, Message, PeerGone, close_all, ready
from nemo_gym_prorl.sandbox.supervisor.lifecycle import Sandboxes
from nemo_gym_prorl.sandbox.supervisor.programs import Programs
from nemo_gym_prorl.sandbox.supervisor.protocol import (
    CheckRequest,
    CreateRequest,
    DestroyRequest,
    EgressRequest,
    GetRequest,
    PolicyRequest,
    PutRequest,
    Refused,
    SignalRequest,
    SnapshotRequest,
    SpawnRequest,
    decode,
    failure,
)
from nemo_gym_prorl.sandbox.supervisor.sandbox import Client, Sandbox


class Supervisor:
    """Supervisor of the sandboxes of one server.

    Args:
        folder: the supervisor's state folder, whose lock this process holds.
        owner: connected socket to the server that owns the supervisor; when the socket closes, the supervisor ends.
        listener: listening socket for further connections, of the owner or of other processes of the user.
    """

    def __init__(self, folder: Path, owner: socket.socket, listener: socket.socket) -> None:
        self.folder = folder
        self._children = Children(lambda pid: self._sandboxes.orphan_ended(pid))
        self._launcher = Launcher(self._children, folder)
        self._sandboxes = Sandboxes(folder, self._children, _groups(), self._launcher)
        self._programs = Programs(self._children, self._launcher, self._sandboxes)
        self._ending = asyncio.Event()
        self._owner = owner
        self._listener = listener

    async def run(self) -> None:
        """Serve until the owner is gone or SIGTERM arrives; then end all sandboxes and remove the state folder."""
        loop = asyncio.get_running_loop()
        signal.signal(signal.SIGTERM, lambda _number, _frame: loop.call_soon_threadsafe(self._ending.set))
        spawn_task(self._children.run(partial(_sweep, self.folder.parent)), expected=Refused)
        self._add_client(self._owner, self._ending.set)
        self._listener.setblocking(False)
        PROCESS_LOOPS.start("accept", partial(self._accept, peer(self._owner)[0]))
        # The garbage collector skips frozen objects, so their memory pages stay shared with forked children.
        gc.collect()
        gc.freeze()
        await self._ending.wait()
        await self._sandboxes.close_all()
        state_dir.clear(self.folder)

    def _add_client(self, connection: socket.socket, on_gone: Callable[[], None]) -> None:
        def on_message(message: Message, files: list[int]) -> None:
            spawn_task(self._reply(client, message, files))

        client: Client = Connection(connection, on_message, on_gone, bounded=True)

    async def _accept(self, owner: int) -> float:
        """Accept one client whose process is trusted; return the seconds to wait before the next call."""
        await ready(self._listener)
        try:
            connection, _address = self._listener.accept()
        except OSError:
            return PAUSE_S
        with log_exceptions():  # an exception would pause the loop, and so delay other clients
            if trusted(connection, owner):
                self._add_client(connection, lambda: None)
            else:
                connection.close()
        return 0.0

    async def _reply(self, client: Client, message: Message, files: list[int]) -> None:
        """Carry out a request and send the reply or error reply; a request without an ``id`` gets no reply."""
        reply: Message
        returned: list[int] = []
        try:
            try:
                reply, returned = await self._do(client, message, files)
            except Exception as error:
                reply = failure(error)
            finally:
                close_all(files)
            if isinstance(message.get("id"), int):
                await _send(client, {**reply, "id": message["id"]}, returned)
        finally:
            close_all(returned)

    async def _do(self, client: Client, message: Message, files: list[int]) -> Reply:
        if message.get("torn"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        match decode(message):
            case CreateRequest() as request:
                if self._ending.is_set():
                    raise OSError("the supervisor is ending")
                return await self._sandboxes.create(client, request, files)
            case CheckRequest() as request:
                return await self._sandboxes.check(client, request.sandbox, memory=request.memory)
            case DestroyRequest() as request:
                return await self._sandboxes.destroy(request.sandbox)
            case SpawnRequest() as request:
                return await self._spawn(client, request, files)
            case SignalRequest() as request:
                self._programs.signal(request.spawn, request.signal)
                return {}, []
            case PutRequest() as request:
                put = requests.put(self._namespaces(request.sandbox), request.path, request.mode)
                return await self._launcher.run(put, files[:1])
            case GetRequest() as request:
                get = requests.get(self._namespaces(request.sandbox), request.path, request.limit)
                return await self._launcher.run(get, files[:1])
            case EgressRequest() as request:
                return await self._sandboxes.egress_of(request.sandbox)
            case PolicyRequest() as request:
                return await self._sandboxes.serve_policy(request)
            case SnapshotRequest() as request:
                return await self._snapshot(self._sandboxes.up(request.sandbox), request, files[0])

    async def _spawn(self, client: Client, request: SpawnRequest, files: list[int]) -> Reply:
        """Start a program and return its pid. The program's exit is sent to the client as an ``exit`` event."""

        def on_exit(code: int) -> None:
            client.post({"event": "exit", "spawn": request.spawn, "status": code})

        pid, terminal = await self._programs.start(self._sandboxes.up(request.sandbox), request, files, on_exit)
        return {"pid": pid}, terminal

    def _namespaces(self, sandbox: str) -> SandboxNamespaces:
        return self._sandboxes.up(sandbox).namespaces_to_join()

    async def _snapshot(self, sandbox: Sandbox, request: SnapshotRequest, file: int) -> Reply:
        """Archive the writable layer of a sandbox; see :class:`.protocol.SnapshotRequest`."""
        namespace, namespaces = sandbox.pid_namespace, sandbox.namespaces
        assert namespace
        assert namespaces
        ours, layer = os.getpid(), sandbox.folder / "overlay" / "upper"
        pack = partial(layer_archive.pack, namespaces, layer, sandbox.request, request.header, file)

        def archive(*, paused: bool) -> Reply:
            others, busy = programs.programs_not_of(namespace, ours)
            if not paused and (others or busy):
                return {"busy": True}, []
            reply, none = pack()
            return {**reply, "programs": others}, none

        files = [file, namespaces.process.fd]
        async with sandbox.pausing:
            if request.quiescent:
                reply, none = await self._children.run(partial(archive, paused=False), files)
                if "busy" not in reply:
                    return reply, none
            # Set before SIGSTOP is sent: a program that started in between would keep running.
            sandbox.paused = True
            try:
                try:
                    await programs.pause(self._children, self._launcher, namespace, namespaces)
                    return await self._children.run(partial(archive, paused=True), files)
                finally:  # a pause that fails has stopped some programs
                    await self._children.run(partial(programs.resume, namespace))
            finally:
                sandbox.paused = False


async def _send(client: Client, reply: Message, files: list[int]) -> None:
    try:
        await client.send(reply, files)
    except PeerGone:
        # The client disconnected: drop the reply.
        pass
    except OSError as error:
        client.post({"id": reply["id"], "error": str(error), "errno": error.errno})


def _groups() -> Path | None:
    """Return the folder of the control group below which sandboxes get theirs; ``None`` without delegation."""
    granted = cgroups.probe_delegation()
    if granted is None:
        return None
    cgroups.enable_controllers(granted)
    return granted.base


def _sweep(root: Path) -> Reply:
    state_dir.sweep(root)
    return {}, []


_CREDENTIALS = struct.Struct("3i")  # the kernel's struct ucred: pid, uid, gid
NAMESPACES = ("pid", "user")
"""Namespaces that a trusted client shares with the supervisor; every sandbox has its own."""


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return pid and user id of the process that created or connected the other end of a Unix socket."""
    pid, uid, _gid = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid


def trusted(connection: socket.socket, owner: int) -> bool:
    """Return whether the process at the other end of ``connection`` may send requests. A trusted process has the
    supervisor's user, or root, and the supervisor's namespaces. The owner, with the pid ``owner``, is always trusted:
    a change of its user id may have made its ``/proc`` folder unreadable."""
    pid, uid = peer(connection)
    if pid == owner:
        return True
    if uid not in (os.geteuid(), 0) or pid <= 0:
        return False
    try:
        same = all(os.stat(f"/proc/{pid}/ns/{name}") == os.stat(f"/proc/self/ns/{name}") for name in NAMESPACES)
    except OSError:
        return False
    return same


def main() -> None:
    """Run the supervisor with the arguments FOLDER OWNER LISTENER; OWNER and LISTENER are descriptors of sockets."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    rlimits.raise_supervisor_file_limit()
    # Orphans of the runtime must not inherit the lock's descriptor: a dead supervisor's folder would stay locked.
    for inherited in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.set_inheritable(int(inherited), int(inherited) <= 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner, listener = (socket.socket(fileno=int(number)) for number in sys.argv[2:])

    async def serve() -> None:
        await Supervisor(Path(sys.argv[1]), owner, listener).run()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
