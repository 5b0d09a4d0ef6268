# SPDX-License-Identifier: Apache-2.0
"""A server's end of its supervisor: starts it, asks it, and notices when it dies.

A process has one supervisor, however many event loops and provider objects it has; each loop has a connection of its
own. The supervisor lives exactly as long as the process: it ends when the one socket that this module keeps closes.
"""

from __future__ import annotations

import asyncio
import os
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

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox import lease
from nemo_gym_prorl.sandbox.linux import walled_in
from nemo_gym_prorl.sandbox.wire import Inbox, Message, pack, send_files


MAX_SOCKET_PATH = 107
"""Bytes in the path of a Unix socket, by the kernel."""

BURY_S = 5.0
"""For so long a dead supervisor's remains are tried to remove; what is left then is the next supervisor's to sweep."""


class SandboxRefused(InfrastructureError):
    """The supervisor could not do what it was asked to.

    Attributes:
        number: the ``errno`` of a failed system call, or 0.
        log: what the container runtime said, if it was the one to fail.
    """

    default_kind = FailureKind.AGENT_RUN_ERROR

    def __init__(self, reason: str, number: int = 0, log: str = "", *, kind: FailureKind | None = None) -> None:
        super().__init__(reason, kind=kind)
        self.number = number
        self.log = log


class SandboxLost(InfrastructureError):
    """The sandbox, or the supervisor that owned it, is gone."""

    default_kind = FailureKind.SESSION_LOST


@dataclass(frozen=True, slots=True)
class Process:
    """A process that was started inside a sandbox.

    Attributes:
        pid: its number on the host, which is also that of its process group.
        ended: its exit code once it has ended, negative for a signal. Shared: shield it when waiting.
        terminal: the controlling end of its terminal, the caller's to close; ``None`` if it has none.
    """

    pid: int
    ended: asyncio.Future[int]
    terminal: int | None


@dataclass(slots=True)
class _Supervisor:
    """The supervisor process of this process, with the socket whose end is its end."""

    popen: subprocess.Popen[bytes]
    folder: Path
    owner: socket.socket


_lock = threading.Lock()
_current: _Supervisor | None = None
_links: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Path, Link]] = weakref.WeakKeyDictionary()


def _forget_after_fork() -> None:
    """A forked copy of the server must not keep the supervisor of the original alive."""
    global _current, _lock
    _lock = threading.Lock()
    if _current:
        _current.owner.close()
        _current = None
    _links.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def _running_supervisor() -> Path:
    """The folder of this process's supervisor, started if need be. Blocks, some 100 ms when it has to start one."""
    global _current
    with _lock:
        if _current and _current.popen.poll() is None:
            return _current.folder
        if _current:
            _current.owner.close()
            _bury(_current.folder)
        folder, lock, listener = _take_folder()
        owner, theirs = socket.socketpair()
        package = str(Path(__file__).parents[2])
        program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from nemo_gym_prorl.sandbox import supervisor; "
        popen = subprocess.Popen(
            [
                *(sys.executable, "-ISc", program + "supervisor.main()", package),
                *(str(folder), str(theirs.fileno()), str(listener.fileno())),
            ],
            pass_fds=[theirs.fileno(), listener.fileno(), lock],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # In a session of its own, so that Ctrl-C at a terminal does not reach it before the server has ended.
            start_new_session=True,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )
        theirs.close()
        listener.close()
        os.close(lock)
        _current = _Supervisor(popen, folder, owner)
        return folder


def _take_folder() -> tuple[Path, int, socket.socket]:
    """A folder for a new supervisor, its lock, and the socket in it that listens.

    Made here and not by the supervisor, so that what is wrong with it is this process's error.

    Raises:
        InfrastructureError: it can't be made; names the setting.
    """
    folder: Path | None = None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        root = lease.state_root()
        if (excess := len(os.fsencode(root / lease.LONGEST_SOCKET)) - MAX_SOCKET_PATH) > 0:
            raise OSError(f"its path is {excess} bytes too long for a Unix socket in it ({MAX_SOCKET_PATH} at most)")
        if os.geteuid() == 0 and (wall := walled_in(root)):
            raise OSError(f"sandboxes of root run under unprivileged user ids, which can't enter {wall}")
        folder, lock = lease.take(root)
        listener.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o600)
        listener.listen(128)
        return folder, lock, listener
    except OSError as error:
        listener.close()
        if folder:
            os.close(lock)
            lease.remove_tree(folder)
        raise InfrastructureError(
            f"sandboxes can't be kept in {os.environ.get('PRORL_STATE') or 'the folder for temporary files'}: "
            f"{error.strerror or error}; set PRORL_STATE to a folder of yours with a short path, on a local disk "
            "that has room"
        ) from error


def _bury(folder: Path) -> None:
    """Remove what a dead supervisor left. It may take a moment until the last child it forked lets go of the lock."""
    deadline = time.monotonic() + BURY_S
    while not lease.bury(folder, patience_s=1.0) and time.monotonic() < deadline:
        time.sleep(0.1)


class Link:
    """One event loop's connection. Everything here belongs to that loop."""

    def __init__(self, connection: socket.socket, folder: Path) -> None:
        self.folder = folder
        self.lost = False
        self._connection = connection
        self._inbox = Inbox(connection)
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._answers: dict[int, asyncio.Future[tuple[Message, list[int]]]] = {}
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._watchers: dict[str, Callable[[Message], None]] = {}
        self._sending = asyncio.Lock()
        self._loop.add_reader(connection, self._receive)

    @classmethod
    async def get(cls) -> Link:
        """The running loop's connection to this process's own supervisor.

        Raises:
            InfrastructureError: no supervisor can be started here; the message says why.
        """
        return await cls.to(await asyncio.to_thread(_running_supervisor))

    @classmethod
    async def to(cls, folder: Path) -> Link:
        """The running loop's connection to the supervisor of ``folder``, which may be another process's."""
        links = _links.setdefault(asyncio.get_running_loop(), {})
        if folder not in links or links[folder].lost:
            connection = await cls._connect(folder)
            if folder in links and not links[folder].lost:
                connection.close()
            else:
                links[folder] = cls(connection, folder)
        return links[folder]

    @staticmethod
    async def _connect(folder: Path) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, str(folder / "socket"))
        except OSError as error:
            connection.close()
            raise SandboxLost(f"the sandbox supervisor of {folder} is gone") from error
        return connection

    async def ask(self, message: Message, files: Sequence[int] = ()) -> tuple[Message, list[int]]:
        """Send a request and wait for its answer, with the files that came with it, which are the caller's to close.

        Raises:
            SandboxRefused: it could not be done.
            SandboxLost: the supervisor is gone.
        """
        if self.lost:
            raise SandboxLost("the sandbox supervisor is gone, and its sandboxes with it")
        self._number += 1
        number = self._number
        future = self._answers[number] = self._loop.create_future()
        try:
            await self._send(pack({**message, "id": number, "files": len(files)}), files)
            answer, received = await future
        finally:
            self._answers.pop(number, None)
        if answer.get("lost"):
            raise SandboxLost(answer["error"])
        if "error" in answer:
            # Nothing of the agent's kills the helper, which is the machine's.
            kind = FailureKind.PROVIDER_UNAVAILABLE if answer.get("killed") else None
            raise SandboxRefused(answer["error"], answer.get("errno") or 0, answer.get("log", ""), kind=kind)
        return answer, received

    async def spawn(self, message: Message, files: Sequence[int]) -> Process:
        """As :meth:`ask`, for what starts a process."""
        answer, received = await self.ask(message, files)
        return Process(answer["pid"], answer["ended"], received[0] if received else None)

    def watch(self, sandbox: str, watcher: Callable[[Message], None] | None) -> None:
        """Have the events of a sandbox told to ``watcher``."""
        if watcher:
            self._watchers[sandbox] = watcher
        else:
            self._watchers.pop(sandbox, None)

    async def _send(self, data: bytes, files: Sequence[int]) -> None:
        async with self._sending:
            while data:
                try:
                    data, files = data[send_files(self._connection, data, files) :], ()
                except BlockingIOError:
                    await writable(self._connection)
                except OSError:
                    self._lose()
                    raise SandboxLost("the sandbox supervisor is gone, and its sandboxes with it") from None

    def _receive(self) -> None:
        messages = self._inbox.receive()
        if messages is None:
            self._lose()
            return
        for message, files in messages:
            if message.get("event") == "exit":
                future = self._exits.pop(message["pid"])
                if not future.done():
                    future.set_result(message["status"])
            elif "event" in message:
                if watcher := self._watchers.get(message["sandbox"]):
                    watcher(message)
            else:
                self._settle(message, files)

    def _settle(self, message: Message, files: list[int]) -> None:
        if "pid" in message:
            # Here and not where it is waited for: its end may be told by the very next message.
            message["ended"] = self._exits[message["pid"]] = self._loop.create_future()
        future = self._answers.get(message["id"])
        if future and not future.done():
            future.set_result((message, files))
            return
        for descriptor in files:
            os.close(descriptor)

    def _lose(self) -> None:
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._connection)
        self._connection.close()
        reason = SandboxLost("the sandbox supervisor died, and its sandboxes with it")
        futures: list[asyncio.Future[Any]] = [*self._answers.values(), *self._exits.values()]
        for future in futures:
            if not future.done():
                future.set_exception(reason)
                # Nobody may be waiting for the end of a process.
                future.exception()
        self._exits.clear()
        for watcher in list(self._watchers.values()):
            watcher({"event": "gone"})
        self._loop.run_in_executor(None, _bury, self.folder)


async def writable(descriptor: socket.socket | int) -> None:
    """Wait until a non-blocking file takes more."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(descriptor)
