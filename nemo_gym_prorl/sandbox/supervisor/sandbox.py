# SPDX-License-Identifier: Apache-2.0
"""One sandbox, as its supervisor knows it, and what to do next on its way down."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from nemo_gym_prorl.sandbox.isolation import joining
from nemo_gym_prorl.sandbox.isolation.mould.cast import Mould
from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.runtime import log as logs
from nemo_gym_prorl.sandbox.supervisor.processes.children import in_words
from nemo_gym_prorl.sandbox.supervisor.rpc.connections import Client, Request
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message
from nemo_gym_prorl.sandbox.supervisor.storage import state_dir


STUCK_S = 5.0
"""After this long a container that does not die is reported as such; it is tried again for ever."""


class Stage(StrEnum):
    """See :mod:`.lifecycle`."""

    WAITING = "waiting"
    CREATING = "creating"
    UP = "up"
    CLOSING = "closing"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Step:
    """What to do next with a sandbox that is to end.

    Attributes:
        kill_init: its first process, and with it all that is inside.
        kill_starter: the runtime's process outside.
        delete: nothing of it lives: what is left can go.
        report: it takes too long: those who wait are told.
    """

    kill_init: bool = False
    kill_starter: bool = False
    delete: bool = False
    report: bool = False


def step_down(*, starter: bool, init: bool | None, closing_s: float) -> Step:
    """The next step towards a sandbox's end.

    Args:
        starter: whether our child that was forked for it has not been reaped yet.
        init: whether the first process inside lives; ``None`` if none was heard of. The kernel lets it end only after
            all others of its process numbers.
        closing_s: for how long it has been closing.
    """
    late = closing_s > STUCK_S
    # The runtime's process ends its own helpers once the inside is dead, so it is left alone unless that takes long.
    kill_starter = starter and (init is None or late)
    if not starter and not init:
        return Step(delete=True)
    return Step(kill_init=bool(init), kill_starter=kill_starter, report=late)


@dataclass(slots=True, eq=False)
class Sandbox:
    """One container.

    ``place`` and ``space`` are known once its first process has spoken. ``starter`` is our own child for it as long as
    it is not reaped: the runtime's process outside of it, or the first process itself where that is our child. ``way``
    is how it is made, ``mould`` what from, ``fallback`` why not from one, ``ready`` that its first process said so,
    ``log`` where the runtime complains until it is up.
    """

    name: str
    folder: Path
    order: Message
    clients: list[Client]
    creating: Request | None
    channel: socket.socket | None = None
    starter: int | None = None
    casting: bool = False
    """Whether a helper is about to start the first process: then there will be a starter."""
    group: cgroups.Group | None = None
    oom_kills: int = 0
    machine_kills: int = 0
    """What the machine's kernel had killed for want of memory when it came up."""
    over_memory: str = ""
    """That it used more memory than it may, in words; and when that was last so."""
    over_memory_at: float = 0.0
    stage: Stage = Stage.WAITING
    place: joining.Place | None = None
    space: state_dir.Space | None = None
    closing_since: float = 0.0
    closing: list[tuple[Request, Message]] = field(default_factory=list)
    deleting: bool = False
    paused: bool = False
    held: list[int] = field(default_factory=list)
    way: str = "runtime"
    mould: Mould | None = None
    fallback: str = ""
    ready: bool = False
    log: int | None = None
    noted: set[str] = field(default_factory=set)
    environment: dict[str, str] = field(default_factory=dict)

    def place_to_join(self) -> joining.Place:
        """Where to join it, when it is up.

        Raises:
            OSError: it is paused.
        """
        if self.paused:
            raise OSError("the sandbox is paused; resume it first")
        assert self.place
        return self.place

    def take_log(self) -> str:
        """What the runtime has said; nobody reads what it says from now on."""
        if self.log is None:
            return ""
        log, self.log = self.log, None
        try:
            return logs.said(log)
        finally:
            os.close(log)

    def bound(self) -> str:
        """Set the limits of its control group, if it has one; returns what went wrong."""
        memory, processes, cpus = (self.order[name] for name in ("memory_mib", "processes", "cpus"))
        try:
            if self.group:
                self.group.bound(memory=memory << 20, processes=processes, cpus=cpus)
        except OSError as error:
            return in_words(error)
        return ""

    def note(self, reason: str, resource: str) -> None:
        """Have everybody know once that it ran into a limit."""
        if reason not in self.noted:
            self.noted.add(reason)
            self.tell("limit", reason, resource)

    def tell(self, event: str, reason: str = "", resource: str = "", *, inside: bool = False) -> None:
        """Have everybody who uses the sandbox know."""
        for client in self.clients:
            message = {"event": event, "sandbox": self.name, "reason": reason, "resource": resource, "inside": inside}
            client.send(message, [])
