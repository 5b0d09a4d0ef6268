# SPDX-License-Identifier: Apache-2.0
"""The supervisor's janitor: removes what ended sandboxes left, many at a time and none before its turn.

One process for all of them, as a fork for each would cost more than most have to remove; in small steps in turn, as
one may have left a million files. What it removed is gone for certain: a control group that could be removed held
nothing.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.supervisor.processes.children import tell
from nemo_gym_prorl.sandbox.supervisor.processes.worker import wait_for
from nemo_gym_prorl.sandbox.supervisor.rpc.answers import in_words
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message, PeerGone, receive
from nemo_gym_prorl.sandbox.supervisor.storage.erase import erase


PAUSE_S = 0.002
"""When all that is left to do waits for processes that are ending."""


def order(name: str, folder: Path, group: cgroups.Group | None) -> Message:
    """What the janitor is told of a sandbox whose processes have ended."""
    return {"sandbox": name, "folder": str(folder), "group": str(group.path) if group else ""}


def removal(order: Message) -> Iterator[bool]:
    """Remove what a sandbox left, step by step; ``False`` where a step had to wait.

    Raises:
        OSError: processes are left, or a file can't be removed.
    """
    if order["group"]:
        group = cgroups.Group(Path(order["group"]), frozenset())
        deadline = time.monotonic() + cgroups.REMOVE_S
        while not group.try_to_remove():
            if time.monotonic() > deadline:
                raise OSError(f"{order['group']} still holds processes")
            yield False
    yield from erase(Path(order["folder"]))


def serve(channel: socket.socket) -> None:
    """Until the supervisor is gone: take orders, and say of each when it is done, or why it can't be."""
    jobs: deque[tuple[str, Iterator[bool]]] = deque()
    idle = 0
    while True:
        wait_s = None if not jobs else PAUSE_S if idle >= len(jobs) else 0.0
        try:
            while wait_for(channel, wait_s):
                message, _files = receive(channel)
                jobs.append((message["sandbox"], removal(message)))
                wait_s = 0.0
        except PeerGone:
            return
        name, steps = jobs.popleft()
        try:
            idle = 0 if next(steps) else idle + 1
            jobs.append((name, steps))
        except StopIteration:
            idle = 0
            tell(channel, {"sandbox": name})
        except OSError as error:
            tell(channel, {"sandbox": name, "error": in_words(error)})
