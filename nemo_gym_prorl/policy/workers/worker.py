# SPDX-License-Identifier: Apache-2.0
"""What makes a process a worker: which rollouts are its own, its socket, its line to the owner of the pool, and that
it does not outlive that owner."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from nemo_gym_prorl.policy.config import PolicyConfig
from nemo_gym_prorl.policy.workers.remote import RemoteBackends
from nemo_gym_prorl.policy.workers.shards import Shard


VARIABLE = "NEMO_GYM_PRORL_WORKER"
"""Environment variable that makes a worker of a process: index, count, parent, and the descriptors of the line to the
owner and of the socket."""

_GRACE_S = 1
"""How long requests in flight may take at the end, as with one process."""
_FORCED_S = 3.0
_FOR_EVER_S = 365 * 86_400
"""The front keeps connections as long as it likes."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Worker:
    """This process, as a worker.

    Attributes:
        shard: which rollouts are its own.
        line: to the owner.
        socket: where its requests come.
    """

    shard: Shard
    line: socket.socket
    socket: socket.socket

    def backends(self, config: PolicyConfig) -> RemoteBackends:
        """The owner's backends."""
        return RemoteBackends(config, self.line, _end)

    def serve(self, app: ASGIApp) -> None:
        """Answer requests until the owner says or is gone."""
        config = uvicorn.Config(app, timeout_graceful_shutdown=_GRACE_S, timeout_keep_alive=_FOR_EVER_S)
        uvicorn.Server(config).run(sockets=[self.socket])


def variable(shard: Shard, line: int, at: int) -> dict[str, str]:
    """The environment that makes a worker of a child process.

    Args:
        shard: which rollouts are its own.
        line: descriptor of its end of the line to this process.
        at: descriptor of its listening socket.
    """
    return {VARIABLE: f"{shard.index} {shard.count} {os.getpid()} {line} {at}"}


@functools.cache
def this_worker() -> Worker | None:
    """This process as a worker, which ends when its parent does; ``None`` if it is none."""
    given = os.environ.pop(VARIABLE, None)
    if given is None:
        return None
    index, count, parent, line, at = map(int, given.split())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the server that this worker is of has ended")
    for number in (line, at):
        os.set_inheritable(number, False)
    return Worker(Shard(index, count), socket.socket(fileno=line), socket.socket(fileno=at))


def _end(*_: Any) -> None:
    """The owner is gone: end in the way of a server, or after a while in any way."""
    timer = threading.Timer(_FORCED_S, os._exit, (1,))
    timer.daemon = True
    timer.start()
    os.kill(os.getpid(), signal.SIGTERM)
