# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Client of the sandbox supervisor: start the supervisor, send requests, receive events, clean up after its death.

A server process has one supervisor, shared by all event loops and provider objects. The supervisor starts with the
first sandbox and ends with the server process, when the kernel closes the socket that this module keeps open. Each
event loop has its own :class:`SupervisorConnection`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nemo_gym_prorl
from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, RolloutError
from nemo_gym_prorl.processes import interpreter_environ
from nemo_gym_prorl.sandbox.supervisor import state_dir
from nemo_gym_prorl.sandbox.supervisor.connection import (
    Connection,
    Message,
    PeerGone,
    close_all,
    pack,
    socket_pair,
)
from nemo_gym_prorl.sandbox.supervisor.protocol import (
    SHORTAGES,
    Request,
    SandboxExhausted,
    SandboxLost,
    SandboxRefused,
    SignalRequest,
    SpawnRequest,
    encode,
)


SEND_RETRY_S = 0.05
"""Pause before a message is resent after ``ETOOMANYREFS``; receivers usually take descriptors from sockets sooner."""

SEND_RETRIES = 20
"""Resends, one second in all, before the caller gets the error."""

CLEANUP_S = 5.0
"""Time limit for cleaning up after a dead supervisor; the next supervisor's sweep removes what is left."""

NETWORK_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir")
"""Environment variables, in any case, that the supervisor inherits for its egress process: proxies, certificates."""


@dataclass(frozen=True, slots=True)
class SandboxProcess:
    """A process that was started in a sandbox.

    Attributes:
        name: identifies the process in requests to the supervisor.
        pid: process id on the host, also the id of the process group.
        ended: future of the exit code, -N after signal N. All waiters share the future, so await it with
            ``asyncio.shield``.
        terminal: descriptor of the controlling end of the process's terminal, which the caller closes; ``None`` if the
            process has no terminal.
    """

    name: str
    pid: int
    ended: asyncio.Future[int]
    terminal: int | None


_connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Path, SupervisorConnection]] = (
    weakref.WeakKeyDictionary()
)
# A forked child of the server must not use its parent's connections.
os.register_at_fork(after_in_child=_connections.clear)


class SupervisorConnection:
    """One event loop's connection to a supervisor. Not thread-safe: use it in that loop only."""

    def __init__(self, connection: socket.socket, folder: Path) -> None:
        self.folder = folder
        self._connection = Connection(connection, self._on_message, self._on_lost)
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._name = secrets.token_hex(6)
        self._replies: dict[int, asyncio.Future[tuple[Message, list[int]]]] = {}
        self._exits: dict[str, asyncio.Future[int]] = {}
        self._watchers: dict[str, Callable[[Message], None]] = {}

    @property
    def lost(self) -> bool:
        return self._connection.closed

    @classmethod
    async def get(cls) -> SupervisorConnection:
        """Return the running loop's connection to this process's own supervisor, starting the supervisor if needed.

        Raises:
            InfrastructureError: the supervisor cannot be started; the message says why.
        """
        return await cls.to(await asyncio.to_thread(running_supervisor))

    @classmethod
    async def to(cls, folder: Path) -> SupervisorConnection:
        """Return the running loop's connection to the supervisor of ``folder``, which may be another process's.

        Raises:
            SandboxLost: no supervisor listens in the folder.
        """
        connections = _connections.setdefault(asyncio.get_running_loop(), {})
        if folder not in connections or connections[folder].lost:
            connection = await cls._connect(folder)
            if folder in connections and not connections[folder].lost:
                connection.close()
            else:
                connections[folder] = cls(connection, folder)
        return connections[folder]

    @staticmethod
    async def _connect(folder: Path) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, str(folder / "socket"))
        except OSError as error:
            connection.close()
            raise SandboxLost(f"the sandbox supervisor of {folder} is gone") from error
        return connection

    async def ask(self, request: Request, files: Sequence[int] = ()) -> tuple[Message, list[int]]:
        """Send a request with descriptors; return the reply and its descriptors, which the caller closes.

        A cancelled call drops a request that is not sent yet. A request that is sent is still carried out.

        Raises:
            SandboxRefused: the request could not be carried out.
            SandboxExhausted: the sandbox is at one of its own limits.
            SandboxLost: the sandbox or its supervisor is gone.
            CallerError: a field of the request is wrong.
        """
        for _ in range(SEND_RETRIES):
            with contextlib.suppress(_TooManyFilesInTransit):
                return await self._ask(request, files)
            await asyncio.sleep(SEND_RETRY_S)
        return await self._ask(request, files)

    async def _ask(self, request: Request, files: Sequence[int]) -> tuple[Message, list[int]]:
        self._number += 1
        number = self._number
        future = self._replies[number] = self._loop.create_future()
        try:
            await self._connection.send_packet(pack({**encode(request), "id": number}, files))
            reply, received = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                # The reply arrived in the same iteration of the loop as the cancellation.
                close_all(future.result()[1])
            raise
        except PeerGone as error:
            raise SandboxLost("the sandbox supervisor is gone, and its sandboxes with it") from error
        except OSError as error:
            raise _send_error(error) from error
        finally:
            self._replies.pop(number, None)
        if "error" in reply:
            raise _reply_error(reply)
        del reply["id"]
        return reply, received

    def post(self, request: Request) -> None:
        """Send a request without waiting for a reply; a no-op if the supervisor is gone."""
        self._connection.post(encode(request))

    def new_name(self) -> str:
        self._number += 1
        return f"{self._name}-{self._number}"

    async def spawn(self, request: SpawnRequest, files: Sequence[int]) -> SandboxProcess:
        """Start a process with descriptors ``files``; errors as for :meth:`ask`. Cancellation kills the process."""
        name = request.spawn
        ended = self._exits[name] = self._loop.create_future()
        try:
            reply, received = await self.ask(request, files)
        except BaseException as error:
            # _on_lost may have removed the entry already.
            self._exits.pop(name, None)
            if isinstance(error, asyncio.CancelledError):
                self.kill(name)
            raise
        return SandboxProcess(name, reply["pid"], ended, received[0] if received else None)

    def kill(self, name: str) -> None:
        """Kill a process and its group, also while the process is still starting."""
        self.post(SignalRequest(name, int(signal.SIGKILL)))

    def watch(self, sandbox: str, watcher: Callable[[Message], None] | None) -> None:
        """Call ``watcher`` with each event of a sandbox, instead of an earlier watcher; ``None`` unregisters it."""
        if watcher:
            self._watchers[sandbox] = watcher
        else:
            self._watchers.pop(sandbox, None)

    def _on_message(self, message: Message, files: list[int]) -> None:
        if message.get("event") == "exit":
            future = self._exits.pop(message["spawn"], None)
            if future and not future.done():
                future.set_result(message["status"])
        elif "event" in message:
            if watcher := self._watchers.get(message["sandbox"]):
                watcher(message)
        else:
            self._on_reply(message, files)

    def _on_reply(self, message: Message, files: list[int]) -> None:
        if message.get("torn"):
            message["error"] = "this process may open no more files; raise its limit (ulimit -n)"
            message["errno"] = errno.EMFILE
        future = self._replies.get(message["id"])
        if future and not future.done():
            future.set_result((message, files))
            return
        close_all(files)

    def _on_lost(self) -> None:
        reason = SandboxLost("the sandbox supervisor died, and its sandboxes with it")
        futures: list[asyncio.Future[Any]] = [*self._replies.values(), *self._exits.values()]
        for future in futures:
            if not future.done():
                future.set_exception(reason)
                # Retrieve the exception, or asyncio logs it for a process without a waiter.
                future.exception()
        self._exits.clear()
        for watcher in list(self._watchers.values()):
            watcher({"event": "gone", "reason": "its supervisor has ended"})
        self._loop.run_in_executor(None, cleanup_dead_supervisor, self.folder)


class _TooManyFilesInTransit(SandboxRefused):
    """``ETOOMANYREFS``: this user's processes have too many descriptors in transit over sockets."""


def _send_error(error: OSError) -> SandboxRefused:
    if error.errno == errno.ETOOMANYREFS:
        return _TooManyFilesInTransit(SHORTAGES[errno.ETOOMANYREFS], kind=FailureKind.PROVIDER_UNAVAILABLE)
    return SandboxRefused(f"the request can't be sent: {error.strerror}", error.errno or 0)


def _reply_error(reply: Message) -> RolloutError:
    if reply.get("lost"):
        return SandboxLost(reply["error"])
    if reply.get("exhausted"):
        return SandboxExhausted(reply["error"])
    if reply.get("field"):
        return CallerError(reply["error"], field=reply["field"])
    # Sandboxed processes cannot kill a child of the supervisor, so a killed child is a failure of the machine.
    kind = FailureKind.PROVIDER_UNAVAILABLE if reply.get("killed") else None
    if reply.get("quota"):
        kind = FailureKind.PROVIDER_QUOTA_EXHAUSTED
    if shortage := SHORTAGES.get(reply.get("errno") or 0):
        if reply["errno"] in (errno.EMFILE, errno.ENFILE):
            kind = FailureKind.PROVIDER_QUOTA_EXHAUSTED
        # Without the errno: callers would attribute an error with an errno to the request.
        return SandboxRefused(f"{reply['error']}: {shortage}", kind=kind or FailureKind.PROVIDER_UNAVAILABLE)
    return SandboxRefused(reply["error"], reply.get("errno") or 0, reply.get("log", ""), kind=kind)


@dataclass(slots=True)
class SupervisorProcess:
    """The supervisor of this process, which ends when the socket ``owner`` closes."""

    popen: subprocess.Popen[bytes]
    folder: Path
    owner: socket.socket

    @property
    def alive(self) -> bool:
        """Whether the supervisor runs. A dying process closes its sockets before it can be waited for."""
        try:
            if not self.owner.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return False
        except BlockingIOError:
            pass
        except OSError:
            return False
        return self.popen.poll() is None


_lock = threading.Lock()
own_supervisor: SupervisorProcess | None = None
"""The supervisor of this process, once :func:`running_supervisor` has started it."""


def _forget_after_fork() -> None:
    """In a forked child, close the copy of the owner socket, which would keep the parent's supervisor alive."""
    global own_supervisor, _lock
    _lock = threading.Lock()
    if own_supervisor:
        own_supervisor.owner.close()
        own_supervisor = None


os.register_at_fork(after_in_child=_forget_after_fork)


def running_supervisor() -> Path:
    """Return the state folder of this process's supervisor; start the supervisor unless it runs. Blocks.

    Raises:
        InfrastructureError: the state folder cannot be created.
    """
    global own_supervisor
    with _lock:
        if own_supervisor and own_supervisor.alive:
            return own_supervisor.folder
        if own_supervisor:
            own_supervisor.owner.close()
            cleanup_dead_supervisor(own_supervisor.folder)
        folder, lock, listener = _make_state_folder()
        owner, theirs = socket_pair()
        package = str(Path(nemo_gym_prorl.__file__).parents[1])
        program = (
            "import sys; sys.path.insert(0, sys.argv.pop(1)); from nemo_gym_prorl.sandbox.supervisor import server; "
        )
        popen = subprocess.Popen(
            [
                *(sys.executable, "-ISc", program + "server.main()", package),
                *(str(folder), str(theirs.fileno()), str(listener.fileno())),
            ],
            pass_fds=[theirs.fileno(), listener.fileno(), lock],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # A separate session: Ctrl-C at a terminal must not reach the supervisor before the server has ended.
            start_new_session=True,
            cwd="/",
            env=interpreter_environ()
            | {name: os.environ[name] for name in os.environ if name.lower() in NETWORK_VARIABLES},
        )
        theirs.close()
        listener.close()
        os.close(lock)
        own_supervisor = SupervisorProcess(popen, folder, owner)
        return folder


def _make_state_folder() -> tuple[Path, int, socket.socket]:
    """Create the folder of a new supervisor; return the folder, the lock's descriptor and the listening socket.

    The server creates the folder, so that a wrong ``PRORL_STATE`` raises an exception in the server."""
    folder: Path | None = None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        root = state_dir.state_root()
        folder, lock = state_dir.create_locked_folder(root)
        listener.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o600)
        listener.listen(128)
        return folder, lock, listener
    except OSError as error:
        listener.close()
        if folder:
            os.close(lock)
            state_dir.remove_tree(folder)
        raise InfrastructureError(
            f"sandboxes can't be kept in {os.environ.get('PRORL_STATE') or 'the folder for temporary files'}: "
            f"{error.strerror or error}; set PRORL_STATE to a folder of yours with a short path, on a local disk "
            "that has room"
        ) from error


def cleanup_dead_supervisor(folder: Path) -> None:
    """Kill the processes and remove the files of a dead supervisor; retry for up to :data:`CLEANUP_S`. Blocks.
    Retries are needed because a child that the supervisor forked may hold the folder's lock a little longer."""
    deadline = time.monotonic() + CLEANUP_S
    while not state_dir.remove_if_dead(folder, patience_s=1.0) and time.monotonic() < deadline:
        time.sleep(0.1)
