# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""One sandbox, as its supervisor knows it, and what to do next on its way down."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from nemo_gym_prorl.sandbox.isolation import namespaces
from nemo_gym_prorl.sandbox.isolation.prepared_image import PreparedImage
from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.runtime import launch
from nemo_gym_prorl.sandbox.supervisor import state_dir
from nemo_gym_prorl.sandbox.supervisor.connection import Connection, Message
from nemo_gym_prorl.sandbox.supervisor.errors import Refused
from nemo_gym_prorl.sandbox.supervisor.messages import CreateRequest
from nemo_gym_prorl.sandbox.supervisor.processes import Child


Client = Connection[Message, list[int]]
"""A server that asks, and is told."""

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


class NoSandbox(Refused):
    """There is no such sandbox, or it is not up."""

    def __init__(self, reason: str) -> None:
        super().__init__({"error": reason, "lost": True})


@dataclass(slots=True, eq=False)
class Sandbox:
    """One container.

    Attributes:
        name: as its asker chose it.
        folder: with what it leaves on disk.
        order: what it is to be, its binds resolved.
        clients: who is told of it.
        held: files that stay open until it is gone.
        wanted: the time in which it is created, which its end cuts short.
        took: seconds that each step of its creation took.
        start_method: how it is made; ``prepared`` its image, if directly; ``fallback_reason`` why not.
        channel: to its first process.
        starter: our own child for it: the runtime's process outside of it, or its first process where that is ours.
        group: its control group, if it can have one.
        place: where it is joined, known once its first process has spoken; ``space`` the same for its end.
        log: where the runtime complains until it is up.
        environment: the variables that its image sets.
        expiry: when its time to live is up.
        machine_kills: what the machine's kernel had killed for want of memory when it came up.
        over_memory: that it used more memory than it may, in words; and when that was last so.
        changed: something that its end waits for has happened.
        ends: who waits for its end.
    """

    name: str
    folder: Path
    order: CreateRequest
    clients: list[Client]
    held: list[int]
    stage: Stage = Stage.WAITING
    wanted: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    created: asyncio.Event = field(default_factory=asyncio.Event)
    """Or it never will be."""
    took: dict[str, float] = field(default_factory=dict)
    start_method: Literal["direct", "runtime"] = "runtime"
    prepared: PreparedImage | None = None
    fallback_reason: str = ""
    channel: socket.socket | None = None
    starter: Child | None = None
    group: cgroups.Group | None = None
    place: namespaces.SandboxNamespaces | None = None
    space: state_dir.Space | None = None
    log: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    expiry: asyncio.TimerHandle | None = None
    paused: bool = False
    pausing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Whoever pauses or resumes it: the one that was asked for last is done last."""
    noted: set[str] = field(default_factory=set)
    oom_kills: int = 0
    machine_kills: int = 0
    over_memory: str = ""
    over_memory_at: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ends: list[asyncio.Future[None]] = field(default_factory=list)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """One step of its creation: how long it took is told with the sandbox."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.took[name] = self.took.get(name, 0.0) + time.monotonic() - begin

    def steps(self) -> str:
        """How long what took, in words."""
        return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.took.items())

    async def gone(self) -> None:
        """Wait until nothing of it is left.

        Raises:
            Refused: that takes too long; it is tried again until nothing is.
        """
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ends.append(end)
        await end

    def tell_gone(self, error: Refused | None = None) -> None:
        """Tell those who wait for its end, or that it takes too long."""
        ends, self.ends = self.ends, []
        for end in ends:
            if not end.done():
                if error:
                    end.set_exception(error)
                else:
                    end.set_result(None)

    def place_to_join(self) -> namespaces.SandboxNamespaces:
        """Where to join it, when it is up.

        Raises:
            Refused: it is paused.
        """
        if self.paused:
            raise Refused({"error": "the sandbox is paused; resume it first"})
        assert self.place
        return self.place

    def take_log(self) -> str:
        """What the runtime has said; nobody reads what it says from now on."""
        if self.log is None:
            return ""
        log, self.log = self.log, None
        try:
            return launch.read_log(log)
        finally:
            os.close(log)

    def bound(self) -> None:
        """Set the limits of its control group, if it has one."""
        memory, processes, cpus = (self.order.memory_mib, self.order.processes, self.order.cpus)
        if self.group:
            self.group.set_limits(memory=memory << 20, processes=processes, cpus=cpus)

    def note(self, reason: str, resource: str) -> None:
        """Have everybody know once that it ran into a limit."""
        if reason not in self.noted:
            self.noted.add(reason)
            self.tell("limit", reason, resource)

    def tell(self, event: str, reason: str = "", resource: str = "", *, inside: bool = False) -> None:
        """Have everybody who uses the sandbox know."""
        for client in self.clients:
            message = {"event": event, "sandbox": self.name, "reason": reason, "resource": resource, "inside": inside}
            client.post(message)
