# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The process that owns the containers of one server, and outlives it just long enough to leave nothing behind.

It is a process of its own because a server may be killed with SIGKILL, and because joining a container needs a forked
child of a small single-threaded process. It is started by :mod:`.own_supervisor`, with one socket, and ends with it:

- the *server* dies: the socket closes; every container is killed, proven gone, its files removed; then this ends too;
- this process dies: each container's PID 1 sees its end of a socket close and exits, and the runtime's starter is
  killed by the kernel; the server's :mod:`.client` removes the files;
- both die at once: the same, and the files go with the next start of any supervisor (:func:`.state_dir.sweep`).

One loop, no threads, no blocking call: what may take long (joining, copying, deleting) happens in children.
This module takes requests and answers each, with an error if need be. No request, and no failure of one sandbox, ends
the others. The life of a sandbox is in :mod:`.lifecycle`.

Requests are accepted only from processes of the supervisor's own user in its own namespaces, since whoever can speak
to a supervisor can have anything done as its user. Its socket lies in a folder that no sandbox is shown
(:mod:`..binds`); this check is the second wall: a process inside a sandbox is in other namespaces.
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

from nemo_gym_prorl.background import PROCESS_LOOPS, log_exceptions, spawn_task
from nemo_gym_prorl.sandbox.isolation import layer_archive, syscalls
from nemo_gym_prorl.sandbox.isolation.namespaces import SandboxNamespaces
from nemo_gym_prorl.sandbox.launcher import requests
from nemo_gym_prorl.sandbox.limits import cgroups, rlimits
from nemo_gym_prorl.sandbox.supervisor import programs, state_dir
from nemo_gym_prorl.sandbox.supervisor.connection import PAUSE_S, Connection, Message, PeerGone, close_all, ready
from nemo_gym_prorl.sandbox.supervisor.errors import Refused, failure
from nemo_gym_prorl.sandbox.supervisor.lifecycle import Sandboxes
from nemo_gym_prorl.sandbox.supervisor.messages import (
    CheckRequest,
    CreateRequest,
    DestroyRequest,
    GetRequest,
    PauseRequest,
    PutRequest,
    ResumeRequest,
    SignalRequest,
    SnapshotRequest,
    SpawnRequest,
    decode,
)
from nemo_gym_prorl.sandbox.supervisor.processes import Answer, Children, Launcher
from nemo_gym_prorl.sandbox.supervisor.programs import Programs
from nemo_gym_prorl.sandbox.supervisor.sandbox import Client, Sandbox


class Supervisor:
    """See the module. ``folder`` is the owner's folder, which exists, and whose lock this process holds."""

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
        """Serve until the owner is gone and everything is cleaned up."""
        loop = asyncio.get_running_loop()
        signal.signal(signal.SIGTERM, lambda _number, _frame: loop.call_soon_threadsafe(self._ending.set))
        spawn_task(self._children.run(partial(_sweep, self.folder.parent)), expected=Refused)
        self._add_client(self._owner, self._ending.set)
        self._listener.setblocking(False)
        PROCESS_LOOPS.start("accept", partial(self._accept, peer(self._owner)[0]))
        # What is there by now stays as it is: a forked child is to copy none of it for want of counting it.
        gc.collect()
        gc.freeze()
        await self._ending.wait()
        await self._sandboxes.close_all()
        state_dir.clear(self.folder)

    def _orphan_ended(self, pid: int) -> None:
        self._sandboxes.orphan_ended(pid)

    # Clients

    def _add_client(self, connection: socket.socket, gone: Callable[[], None]) -> None:
        def heard(message: Message, files: list[int]) -> None:
            spawn_task(self._answer(client, message, files))

        client: Client = Connection(connection, heard, gone, bounded=True)

    async def _accept(self, owner: int) -> float:
        """Take one client; returns the pause before the next one, where no more files may be open."""
        await ready(self._listener)
        try:
            connection, _address = self._listener.accept()
        except OSError:
            return PAUSE_S
        with log_exceptions():  # a client's error must not slow the loop down for the others
            if trusted(connection, owner):
                self._add_client(connection, lambda: None)
            else:
                connection.close()
        return 0.0

    async def _answer(self, client: Client, message: Message, files: list[int]) -> None:
        """Answer one question of a client's, whatever happens; one without a number wants no answer."""
        answer: Message
        returned: list[int] = []
        try:
            try:
                answer, returned = await self._do(client, message, files)
            except Exception as error:
                answer = failure(error)
            finally:
                close_all(files)
            if isinstance(message.get("id"), int):
                await _send(client, {**answer, "id": message["id"]}, returned)
        finally:
            close_all(returned)

    async def _do(self, client: Client, message: Message, files: list[int]) -> Answer:
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
            case SnapshotRequest() as request:
                return await self._snapshot(self._sandboxes.up(request.sandbox), request, files[0])

    async def _spawn(self, client: Client, request: SpawnRequest, files: list[int]) -> Answer:
        """Answered with the process's number; its end is told by an ``exit`` event under the name that was chosen."""

        def ended(code: int) -> None:
            client.post({"event": "exit", "spawn": request.spawn, "status": code})

        pid, terminal = await self._programs.start(self._sandboxes.up(request.sandbox), request, files, ended)
        return {"pid": pid}, terminal

    def _place(self, sandbox: str) -> SandboxNamespaces:
        return self._sandboxes.up(sandbox).place_to_join()

    async def _pause(self, sandbox: Sandbox) -> Answer:
        assert sandbox.space
        assert sandbox.place
        async with sandbox.pausing:
            # From now on, or what is started meanwhile would run on.
            sandbox.paused = True
            try:
                return await programs.pause(self._children, self._launcher, sandbox.space, sandbox.place)
            except BaseException:
                sandbox.paused = False
                raise

    async def _resume(self, sandbox: Sandbox) -> Answer:
        assert sandbox.space
        async with sandbox.pausing:
            sandbox.paused = False
            return await self._children.run(partial(programs.resume, sandbox.space))

    async def _snapshot(self, sandbox: Sandbox, request: SnapshotRequest, file: int) -> Answer:
        """Of a paused sandbox, or it would change meanwhile; or of one in which nothing runs but what was started from
        here and waits. Where something else does, that is the answer."""
        at_rest = not sandbox.paused and request.at_rest
        if not (sandbox.paused or at_rest) or sandbox.place is None or sandbox.space is None:
            raise OSError("only a sandbox that is paused can be copied")
        layer = sandbox.folder / "overlay" / "upper"
        ours, space = os.getpid(), sandbox.space
        pack = partial(layer_archive.pack, sandbox.place, layer, sandbox.order, request.header, file)

        def action() -> Answer:
            others, busy = programs.not_started_by(space, ours)
            if at_rest and (others or busy):
                return {"busy": True}, []
            answer, none = pack()
            return {**answer, "programs": others}, none

        return await self._children.run(action, [file, sandbox.place.process.fd])


async def _send(client: Client, answer: Message, files: list[int]) -> None:
    try:
        await client.send(answer, files)
    except PeerGone:
        # Nobody wants to know any more.
        pass
    except OSError as error:
        client.post({"id": answer["id"], "error": str(error), "errno": error.errno})


def _groups() -> Path | None:
    """Where sandboxes get their control groups; ``None`` if they can't have any."""
    granted = cgroups.probe_delegation()
    if granted is None:
        return None
    cgroups.enable_controllers(granted)
    return granted.base


def _sweep(root: Path) -> Answer:
    state_dir.sweep(root)
    return {}, []


def main() -> None:
    """``supervisor FOLDER OWNER LISTENER``: the numbers of the open socket to the owner, and of the one for others."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    # Nothing of ours is for the runtime: with the lock, what it leaves behind would seem to have a live owner.
    rlimits.raise_open_files_limit()
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


_CREDENTIALS = struct.Struct("3i")
NAMESPACES = ("pid", "user")


def peer(connection: socket.socket) -> tuple[int, int]:
    """Number and user of the process at the other end, as the kernel noted them down when it connected."""
    pid, uid, _gid = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid


def trusted(connection: socket.socket, owner: int) -> bool:
    """Whether the process that connected is a trusted one.

    The owner may have changed its user in a way that closes its part of /proc to us.
    """
    pid, uid = peer(connection)
    if pid == owner:
        return True
    if uid not in (os.geteuid(), 0) or pid <= 0:
        return False
    try:
        same = all(os.stat(f"/proc/{pid}/ns/{name}") == _own(name) for name in NAMESPACES)
    except OSError:
        return False
    return same


def _own(name: str) -> os.stat_result:
    return os.stat(f"/proc/self/ns/{name}")
