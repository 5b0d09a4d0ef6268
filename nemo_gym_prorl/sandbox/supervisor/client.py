# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A server's end of its supervisor: asks it, is told of ends, and notices when it dies.

Each event loop has a connection of its own to the one supervisor that a process has (:mod:`.own_supervisor`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_gym_prorl.failures import CallerError, FailureKind, RolloutError
from nemo_gym_prorl.sandbox.supervisor import own_supervisor
from nemo_gym_prorl.sandbox.supervisor.connection import Connection, Message, PeerGone, close_all, pack
from nemo_gym_prorl.sandbox.supervisor.errors import (
    SHORTAGES,
    SandboxExhausted,
    SandboxLost,
    SandboxRefused,
)
from nemo_gym_prorl.sandbox.supervisor.messages import Request, SignalRequest, SpawnRequest, encode


__all__ = ["Link", "Process", "SandboxExhausted", "SandboxLost", "SandboxRefused"]


RETRY_S = 0.05
"""Pause before a message is sent again that the kernel did not take for now."""

RETRIES = 20


@dataclass(frozen=True, slots=True)
class Process:
    """A process that was started inside a sandbox.

    Attributes:
        name: what the supervisor knows it by.
        pid: its number on the host, which is also that of its process group.
        ended: its exit code once it has ended, negative for a signal. Shared: shield it when waiting.
        terminal: the controlling end of its terminal, the caller's to close; ``None`` if it has none.
    """

    name: str
    pid: int
    ended: asyncio.Future[int]
    terminal: int | None


_links: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Path, Link]] = weakref.WeakKeyDictionary()
# A forked copy of the server has none of the original's connections.
os.register_at_fork(after_in_child=_links.clear)


class Link:
    """One event loop's connection. Everything here belongs to that loop."""

    def __init__(self, connection: socket.socket, folder: Path) -> None:
        self.folder = folder
        self._connection = Connection(connection, self._heard, self._lose)
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._name = secrets.token_hex(6)
        self._answers: dict[int, asyncio.Future[tuple[Message, list[int]]]] = {}
        self._exits: dict[str, asyncio.Future[int]] = {}
        self._watchers: dict[str, Callable[[Message], None]] = {}

    @property
    def lost(self) -> bool:
        """Whether the supervisor is gone."""
        return self._connection.closed

    @classmethod
    async def get(cls) -> Link:
        """The running loop's connection to this process's own supervisor.

        Raises:
            InfrastructureError: no supervisor can be started here; the message says why.
        """
        return await cls.to(await asyncio.to_thread(own_supervisor.running_supervisor))

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
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, str(folder / "socket"))
        except OSError as error:
            connection.close()
            raise SandboxLost(f"the sandbox supervisor of {folder} is gone") from error
        return connection

    async def ask(self, request: Request, files: Sequence[int] = ()) -> tuple[Message, list[int]]:
        """Send a request and wait for its answer, with the files that came with it, which are the caller's to close.

        Who is cancelled leaves nothing that others notice: what was not sent is not sent any more.

        Raises:
            SandboxRefused: it could not be done.
            SandboxExhausted: not with what the sandbox may use.
            SandboxLost: the supervisor is gone.
        """
        for _ in range(RETRIES):
            with contextlib.suppress(_TooManyOnTheWay):
                return await self._ask(request, files)
            await asyncio.sleep(RETRY_S)
        return await self._ask(request, files)

    async def _ask(self, request: Request, files: Sequence[int]) -> tuple[Message, list[int]]:
        self._number += 1
        number = self._number
        future = self._answers[number] = self._loop.create_future()
        try:
            await self._connection.send_packet(pack({**encode(request), "id": number}, files))
            answer, received = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                # It was heard in the very turn of the loop.
                close_all(future.result()[1])
            raise
        except PeerGone as error:
            raise SandboxLost("the sandbox supervisor is gone, and its sandboxes with it") from error
        except OSError as error:
            raise _not_asked(error) from error
        finally:
            self._answers.pop(number, None)
        if "error" in answer:
            raise _refusal(answer)
        del answer["id"]
        return answer, received

    def post(self, request: Request) -> None:
        """Have something done, and wait for nothing; if the supervisor is gone, so is what it was to be done to."""
        self._connection.post(encode(request))

    def new_name(self) -> str:
        """Return a name for a program that no other has."""
        self._number += 1
        return f"{self._name}-{self._number}"

    async def spawn(self, request: SpawnRequest, files: Sequence[int]) -> Process:
        """As :meth:`ask`, for what starts a process. If this is cancelled, it will not run."""
        name = request.spawn
        ended = self._exits[name] = self._loop.create_future()
        try:
            answer, received = await self.ask(request, files)
        except BaseException as error:
            # Losing the supervisor has cleared them already.
            self._exits.pop(name, None)
            if isinstance(error, asyncio.CancelledError):
                self.kill(name)
            raise
        return Process(name, answer["pid"], ended, received[0] if received else None)

    def kill(self, name: str) -> None:
        """End a process, with its group, wherever it is on its way."""
        self.post(SignalRequest(name, int(signal.SIGKILL)))

    def watch(self, sandbox: str, watcher: Callable[[Message], None] | None) -> None:
        """Have the events of a sandbox told to ``watcher``."""
        if watcher:
            self._watchers[sandbox] = watcher
        else:
            self._watchers.pop(sandbox, None)

    def _heard(self, message: Message, files: list[int]) -> None:
        if message.get("event") == "exit":
            future = self._exits.pop(message["spawn"], None)
            if future and not future.done():
                future.set_result(message["status"])
        elif "event" in message:
            if watcher := self._watchers.get(message["sandbox"]):
                watcher(message)
        else:
            self._settle(message, files)

    def _settle(self, message: Message, files: list[int]) -> None:
        if message.get("torn"):
            message["error"] = "this process may open no more files; raise its limit (ulimit -n)"
            message["errno"] = errno.EMFILE
        future = self._answers.get(message["id"])
        if future and not future.done():
            future.set_result((message, files))
            return
        close_all(files)

    def _lose(self) -> None:
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
        self._loop.run_in_executor(None, own_supervisor.bury, self.folder)


class _TooManyOnTheWay(SandboxRefused):
    """The kernel takes no more open files now, on behalf of anybody of this user."""


def _not_asked(error: OSError) -> SandboxRefused:
    """What did not even get as far as the supervisor."""
    if error.errno == errno.ETOOMANYREFS:
        return _TooManyOnTheWay(SHORTAGES[errno.ETOOMANYREFS], kind=FailureKind.PROVIDER_UNAVAILABLE)
    return SandboxRefused(f"it can't be asked for: {error.strerror}", error.errno or 0)


def _refusal(answer: Message) -> RolloutError:
    """The error that an answer stands for."""
    if answer.get("lost"):
        return SandboxLost(answer["error"])
    if answer.get("exhausted"):
        return SandboxExhausted(answer["error"], answer["exhausted"])
    if answer.get("field"):
        return CallerError(answer["error"], field=answer["field"])
    # Nothing of the agent's kills the helper, which is the machine's.
    kind = FailureKind.PROVIDER_UNAVAILABLE if answer.get("killed") else None
    if answer.get("quota"):
        kind = FailureKind.PROVIDER_QUOTA_EXHAUSTED
    if shortage := SHORTAGES.get(answer.get("errno") or 0):
        if answer["errno"] in (errno.EMFILE, errno.ENFILE):
            kind = FailureKind.PROVIDER_QUOTA_EXHAUSTED
        # No number: that would be the request's fault.
        return SandboxRefused(f"{answer['error']}: {shortage}", kind=kind or FailureKind.PROVIDER_UNAVAILABLE)
    return SandboxRefused(answer["error"], answer.get("errno") or 0, answer.get("log", ""), kind=kind)
