# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The supervisor: a process that owns the sandboxes of one server and cleans up after it.

The supervisor is a separate process because a server may be killed with SIGKILL, and because joining a sandbox needs
a forked child of a small single-threaded process. :mod:`.client` starts the supervisor with one socket, which bounds
the supervisor's life:

- The *server* dies: the socket closes. The supervisor kills every sandbox, removes its files, and exits.
- The *supervisor* dies: PID 1 of each sandbox sees its socket close and exits, and the kernel kills the runtime's
  process. The server's :mod:`.client` removes the files.
- *Both* die at once: the same, and the next start of any supervisor removes the files (:func:`.state_dir.sweep`).

The supervisor has one event loop and no threads. Work that may block (joining, copying, deleting) runs in children.
Every request gets a reply. No request, and no failure of one sandbox, ends another sandbox. The life cycle of a
sandbox is in :mod:`.lifecycle`.

A client of the supervisor can run any program as the supervisor's user. So the socket lies in a folder that no sandbox
is shown (:mod:`..binds`). In addition, the supervisor accepts only processes of its own user in its own namespaces,
which sandboxed processes are not in.
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
    PauseRequest,
    PolicyRequest,
    PutRequest,
    Refused,
    ResumeRequest,
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
        folder: the supervisor's state folder; this process holds its lock.
        owner: socket to the server; the supervisor ends when it closes.
        listener: socket for further connections of the server.
    """

    def __init__(self, folder: Path, owner: socket.socket, listener: socket.socket) -> None:
        self.folder = folder
        self._children = Children(self._orphan_ended)
        self._launcher = Launcher(self._children, folder)
        self._sandboxes = Sandboxes(folder, self._children, _groups(), self._launcher)
        self._programs = Programs(self._children, self._launcher, self._sandboxes)
        self._ending = asyncio.Event()
        self._owner = owner
        self._listener = listener

    async def run(self) -> None:
        """Serve until the owner is gone and all sandboxes are removed."""
        loop = asyncio.get_running_loop()
        signal.signal(signal.SIGTERM, lambda _number, _frame: loop.call_soon_threadsafe(self._ending.set))
        spawn_task(self._children.run(partial(_sweep, self.folder.parent)), expected=Refused)
        self._add_client(self._owner, self._ending.set)
        self._listener.setblocking(False)
        PROCESS_LOOPS.start("accept", partial(self._accept, peer(self._owner)[0]))
        # Frozen objects are not scanned, so their pages stay shared with forked children.
        gc.collect()
        gc.freeze()
        await self._ending.wait()
        await self._sandboxes.close_all()
        state_dir.clear(self.folder)

    def _orphan_ended(self, pid: int) -> None:
        self._sandboxes.orphan_ended(pid)

    # Clients

    def _add_client(self, connection: socket.socket, on_gone: Callable[[], None]) -> None:
        def on_message(message: Message, files: list[int]) -> None:
            spawn_task(self._reply(client, message, files))

        client: Client = Connection(connection, on_message, on_gone, bounded=True)

    async def _accept(self, owner: int) -> float:
        """Accept one client; return the pause before the next one, which is not 0 at the limit of open files."""
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
        """Carry out a request and reply in every case; a request without an id gets no reply."""
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
                put = requests.put(self._place(request.sandbox), request.path, request.mode)
                return await self._launcher.run(put, files[:1])
            case GetRequest() as request:
                get = requests.get(self._place(request.sandbox), request.path, request.limit)
                return await self._launcher.run(get, files[:1])
            case PauseRequest() as request:
                return await self._pause(self._sandboxes.up(request.sandbox))
            case ResumeRequest() as request:
                return await self._resume(self._sandboxes.up(request.sandbox))
            case EgressRequest() as request:
                return await self._sandboxes.egress_of(request.sandbox)
            case PolicyRequest() as request:
                return await self._sandboxes.serve_policy(request)
            case SnapshotRequest() as request:
                return await self._snapshot(self._sandboxes.up(request.sandbox), request, files[0])

    async def _spawn(self, client: Client, request: SpawnRequest, files: list[int]) -> Reply:
        """Start a program and return its pid; its end is an ``exit`` event with the program's name."""

        def on_exit(code: int) -> None:
            client.post({"event": "exit", "spawn": request.spawn, "status": code})

        pid, terminal = await self._programs.start(self._sandboxes.up(request.sandbox), request, files, on_exit)
        return {"pid": pid}, terminal

    def _place(self, sandbox: str) -> SandboxNamespaces:
        return self._sandboxes.up(sandbox).place_to_join()

    async def _pause(self, sandbox: Sandbox) -> Reply:
        assert sandbox.pid_namespace
        assert sandbox.place
        async with sandbox.pausing:
            # Set first: a program that starts during the pause would keep running.
            sandbox.paused = True
            try:
                return await programs.pause(self._children, self._launcher, sandbox.pid_namespace, sandbox.place)
            except BaseException:
                sandbox.paused = False
                raise

    async def _resume(self, sandbox: Sandbox) -> Reply:
        assert sandbox.pid_namespace
        async with sandbox.pausing:
            sandbox.paused = False
            return await self._children.run(partial(programs.resume, sandbox.pid_namespace))

    async def _snapshot(self, sandbox: Sandbox, request: SnapshotRequest, file: int) -> Reply:
        """Pack the writable layer of a sandbox that cannot change meanwhile: paused, or without busy programs."""
        quiescent = not sandbox.paused and request.quiescent
        if not (sandbox.paused or quiescent) or sandbox.place is None or sandbox.pid_namespace is None:
            raise OSError("only a paused sandbox can be copied")
        layer = sandbox.folder / "overlay" / "upper"
        ours, namespace = os.getpid(), sandbox.pid_namespace
        pack = partial(layer_archive.pack, sandbox.place, layer, sandbox.request, request.header, file)

        def action() -> Reply:
            others, busy = programs.programs_not_of(namespace, ours)
            if quiescent and (others or busy):
                return {"busy": True}, []
            reply, none = pack()
            return {**reply, "programs": others}, none

        return await self._children.run(action, [file, sandbox.place.process.fd])


async def _send(client: Client, reply: Message, files: list[int]) -> None:
    try:
        await client.send(reply, files)
    except PeerGone:
        # The client disconnected: drop the reply.
        pass
    except OSError as error:
        client.post({"id": reply["id"], "error": str(error), "errno": error.errno})


def _groups() -> Path | None:
    """Return the parent of the sandboxes' control groups; ``None`` without delegated control groups."""
    granted = cgroups.probe_delegation()
    if granted is None:
        return None
    cgroups.enable_controllers(granted)
    return granted.base


def _sweep(root: Path) -> Reply:
    state_dir.sweep(root)
    return {}, []


_CREDENTIALS = struct.Struct("3i")
NAMESPACES = ("pid", "user")


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return pid and user id of the process at the other end, as the kernel recorded them on ``connect``."""
    pid, uid, _gid = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid


def trusted(connection: socket.socket, owner: int) -> bool:
    """Return whether the process at the other end may send requests.

    The owner is trusted by pid: a change of its user may have made its ``/proc`` folder unreadable.
    """
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
    """Run ``supervisor FOLDER OWNER LISTENER``, the last two being descriptors of open sockets."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    # The runtime must not inherit the lock: its left-over processes would make the folder look owned.
    rlimits.raise_supervisor_file_limit()
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
