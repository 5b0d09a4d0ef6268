# SPDX-License-Identifier: Apache-2.0
"""A policy server of several processes: this one has the address and the pool, its children have the rollouts.

Every rollout lives in one worker, told from its name (:mod:`.shards`). The first process passes requests on as bytes
(:mod:`.front`) and owns the backends (:mod:`.owner`), so that limits, queue and health are those of one pool.

Why a process in between, of the ways to give N processes one address: handing a request of 3 kB and its answer on
costs the first process 0.09 ms of CPU (0.5 ms at 400 kB), where a turn costs a worker several milliseconds, and uvloop
does not make it less. Workers that accept and hand on among themselves would do the same for all but 1/N of the
requests, since connections carry many rollouts, and need N² connections for it. Passing a connection on by its
descriptor is right for its first rollout only.

Invariants: the address answers once all workers do; a worker that dies is started again, and only its rollouts are
lost; no worker outlives this process, be it killed; a worker that cannot start at all ends the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_gym_prorl.policy.config import PolicyConfig
from nemo_gym_prorl.policy.workers.channel import Channel
from nemo_gym_prorl.policy.workers.framing import Head
from nemo_gym_prorl.policy.workers.front import Front
from nemo_gym_prorl.policy.workers.owner import Owner
from nemo_gym_prorl.policy.workers.shards import Shard, rollout_of, shard_of
from nemo_gym_prorl.policy.workers.worker import variable
from nemo_gym_prorl.serving import memory, open_files


_log = logging.getLogger(__name__)

_STOP_S = 4.0
"""How long workers may take to end before they are killed."""
_AGAIN_S = 1.0
"""Pause before a worker that ended is started again and did not get ready the last time."""
_BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Session:
    """How callers without a name of their own are told apart.

    Attributes:
        cookie: name of the cookie that has the session.
        key: under which the session has its id.
    """

    cookie: str
    key: str


class _Child:
    """One worker's process, again and again, and the socket that stays.

    Args:
        shard: its part of the rollouts.
        folder: descriptor of a folder for the socket's name, which is needed no longer after this.
    """

    def __init__(self, shard: Shard, folder: int) -> None:
        self.shard = shard
        self.at = socket.socket(socket.AF_UNIX)
        # By descriptors: no folder is too long for a socket's name, and none has to be left behind.
        name = f"/proc/self/fd/{folder}/{shard.index}"
        self.at.bind(name)
        self.at.listen(_BACKLOG)
        self._node = os.open(name, os.O_PATH | os.O_CLOEXEC)
        self.path = f"/proc/self/fd/{self._node}"
        self.process: asyncio.subprocess.Process | None = None
        self.ready = asyncio.Event()

    def close(self) -> None:
        """Take no further connections."""
        self.at.close()
        os.close(self._node)


class PolicyServer:
    """The first process.

    Args:
        config: of the policy side.
        workers: how many.
        session: see there.
        command: starts a worker, which finds what it needs in its environment.
    """

    def __init__(self, config: PolicyConfig, workers: int, session: Session, command: Sequence[str]) -> None:
        self._count = workers
        self._session = session
        self._command = command
        self._owner = Owner(config, workers)
        self._owner.memory = self._memory
        self._turn = 0
        self._children: list[_Child] = []
        self._failed: int | None = None
        self._stop = asyncio.Event()

    async def serve(self, address: socket.socket) -> int:
        """Serve until SIGINT or SIGTERM.

        Args:
            address: bound to where callers come.

        Returns:
            0, or the status of a worker that could not start.
        """
        open_files.raise_limit()
        memory.recycle_large_blocks()
        memory.collect_rarely()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        keeping: list[asyncio.Task[None]] = []
        try:
            await self._owner.start()
            self._children = _children(self._count)
            front = Front(self._route, [child.path for child in self._children])
            keeping = [asyncio.ensure_future(self._keep(child)) for child in self._children]
            started = asyncio.ensure_future(self._started())
            stopped = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait([started, stopped], return_when=asyncio.FIRST_COMPLETED)
            started.cancel()
            if not self._stop.is_set():
                await front.listen(address)
                host, port = address.getsockname()[:2]
                _log.info("%d workers behind http://%s:%d", self._count, host, port)
            await stopped
            await self._end_workers(front)
        finally:
            for task in keeping:
                task.cancel()
            for child in self._children:
                with contextlib.suppress(ProcessLookupError):
                    if child.process is not None and child.process.returncode is None:
                        child.process.kill()
            await asyncio.gather(*keeping, return_exceptions=True)
            await self._owner.aclose()
            for child in self._children:
                child.close()
        return self._failed or 0

    async def _started(self) -> None:
        for child in self._children:
            await child.ready.wait()

    def _route(self, head: Head) -> tuple[str | None, int]:
        rollout = rollout_of(head.start[1], head.headers, self._session.cookie, self._session.key)
        if rollout is not None:
            return rollout, shard_of(rollout, self._count)
        # Anybody can answer; one that is there does so sooner.
        for _ in range(self._count):
            self._turn = (self._turn + 1) % self._count
            if self._children[self._turn].ready.is_set():
                break
        return None, self._turn

    async def _keep(self, child: _Child) -> None:
        """Run a worker, and run it again when it dies."""
        index = child.shard.index
        ever = False
        while not self._stop.is_set():
            status = await self._run(child)
            was_ready = child.ready.is_set()
            ever = ever or was_ready
            child.ready.clear()
            self._owner.left(index)
            if self._stop.is_set():
                return
            _log.error("worker %d ended with status %d; its rollouts are lost", index, status)
            if not ever:
                self._failed = status if status > 0 else 1
                self._stop.set()
                return
            self._owner.restarts += 1
            if not was_ready:
                await asyncio.sleep(_AGAIN_S)

    async def _run(self, child: _Child) -> int:
        """One life of a worker; gives its exit status."""
        index = child.shard.index
        ours, theirs = socket.socketpair()
        with theirs:
            environment = os.environ | variable(child.shard, theirs.fileno(), child.at.fileno())
            child.process = await asyncio.create_subprocess_exec(
                *self._command,
                env=environment,
                pass_fds=(theirs.fileno(), child.at.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                # A Ctrl-C is for this process, which tells the workers.
                start_new_session=True,
            )

        def hear(message: Any) -> None:
            if message == ["ready"]:
                self._owner.joined(index, channel)
                child.ready.set()
            else:
                self._owner.said(index, message)

        channel = await Channel.over(ours, hear, lambda: self._owner.left(index))
        try:
            return await child.process.wait()
        finally:
            channel.close()

    async def _end_workers(self, front: Front) -> None:
        """Have workers end what is in flight, which callers still get, and then themselves."""
        processes = [child.process for child in self._children if child.process is not None]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        ending = asyncio.gather(*(process.wait() for process in processes))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending, _STOP_S)
        await front.aclose()

    def _memory(self) -> dict[str, int]:
        found = {"front": _resident(os.getpid())}
        for child in self._children:
            if child.process is not None:
                found[f"worker{child.shard.index}"] = _resident(child.process.pid)
        return found


def serve(config: PolicyConfig, host: str, port: int, workers: int, session: Session) -> int:
    """Be the first process of a policy server: this command, once more for each worker.

    Args:
        config: of the policy side.
        host: where to listen.
        port: likewise.
        workers: how many.
        session: how callers without a name of their own are told apart.

    Returns:
        the exit status.

    Raises:
        OSError: the address is taken.
        CallerError: the configuration cannot work.
    """
    command = [sys.executable, *sys.orig_argv[1:]]
    return asyncio.run(_serve(config, workers, session, command, bound_to(host, port)))


def bound_to(host: str, port: int) -> socket.socket:
    """A socket for callers.

    Raises:
        OSError: the address is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small parts at once (TCP_NODELAY) only over what says that it is TCP; else the second part of an
    # answer waits for 40 ms until its caller has acknowledged the first.
    address = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    address.bind((host, port))
    return address


async def _serve(
    config: PolicyConfig, workers: int, session: Session, command: Sequence[str], address: socket.socket
) -> int:
    return await PolicyServer(config, workers, session, command).serve(address)


def _children(count: int) -> list[_Child]:
    with tempfile.TemporaryDirectory(prefix="prorl-policy-") as folder:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return [_Child(Shard(index, count), opened) for index in range(count)]
        finally:
            os.close(opened)


def _resident(process: int) -> int:
    """Bytes of memory; 0 of one that is gone."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
