# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""State of one sandbox in its supervisor, and the pure decision about its next step while it closes."""

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

from nemo_gym_prorl.sandbox.isolation.prepared_image import PreparedImage
from nemo_gym_prorl.sandbox.launcher.requests import SandboxNamespaces
from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.runtime import launch
from nemo_gym_prorl.sandbox.supervisor import state_dir
from nemo_gym_prorl.sandbox.supervisor.children import Child
from nemo_gym_prorl.sandbox.supervisor.connection import Connection, Message
from nemo_gym_prorl.sandbox.supervisor.protocol import CreateRequest, Refused


Client = Connection[Message, list[int]]
"""A server's connection: sends requests, receives replies and events."""

STUCK_S = 5.0
"""Time after which processes that survive SIGKILL are reported; the kernel ends others within milliseconds. The
supervisor keeps retrying."""


class SandboxStage(StrEnum):
    """See :mod:`.lifecycle`."""

    WAITING = "waiting"
    CREATING = "creating"
    UP = "up"
    CLOSING = "closing"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Step:
    """Next step for a sandbox that is closing.

    Attributes:
        kill_init: kill the first process, with which the kernel ends all others inside.
        kill_starter: kill the runtime's process outside.
        delete: every process has ended; delete the files.
        report: report to the waiters that closing takes too long.
    """

    kill_init: bool = False
    kill_starter: bool = False
    delete: bool = False
    report: bool = False


def step_down(*, starter: bool, init: bool | None, closing_s: float) -> Step:
    """Return the next step for a closing sandbox.

    Args:
        starter: whether the supervisor's child for the sandbox is not reaped yet.
        init: whether the first process inside lives; ``None`` if it is unknown. The kernel ends the first process
            after all others of its PID namespace.
        closing_s: seconds since closing began.
    """
    late = closing_s > STUCK_S
    # The runtime's process ends its own helpers after the inside is dead, so it gets STUCK_S to do that.
    kill_starter = starter and (init is None or late)
    if not starter and not init:
        return Step(delete=True)
    return Step(kill_init=bool(init), kill_starter=kill_starter, report=late)


class NoSandbox(Refused):
    """The sandbox does not exist or is not up."""

    def __init__(self, reason: str) -> None:
        super().__init__({"error": reason, "lost": True})


@dataclass(slots=True, eq=False)
class Sandbox:
    """One sandbox.

    Attributes:
        name: chosen by the client.
        folder: holds all files of the sandbox on disk.
        request: the specification, with resolved binds.
        clients: connections that receive the sandbox's events.
        held_files: files that stay open until the sandbox is gone.
        stage: see :mod:`.lifecycle`.
        start_timeout: bounds the creation; closing the sandbox expires it.
        created: set when the creation has succeeded or failed.
        fallback_reason: reason that a direct start was not possible.
        channel: socket to the first process.
        starter: the supervisor's child for the sandbox: the runtime's process outside, or the first process itself.
        place: namespaces to join; set once the first process has reported.
        pid_namespace: identity of the first process, by which the sandbox is ended.
        log: output of the runtime until the sandbox is up.
        environment: variables that the image sets.
        expiry: timer of the time to live.
        paused: whether programs are stopped and must not be started.
        pausing: serialises pauses and resumes, so that the last request takes effect last.
        reported_limits: limits that the clients know of already.
        oom_kills: kills for memory in the control group that are handled already.
        machine_kills: kills for memory on the whole machine when the sandbox came up.
        over_memory: text of the last memory violation.
        over_memory_at: loop time of the last memory violation.
        changed: set when closing may continue.
        end_waiters: resolved when the sandbox is gone.
    """

    name: str
    folder: Path
    request: CreateRequest
    clients: list[Client]
    held_files: list[int]
    stage: SandboxStage = SandboxStage.WAITING
    start_timeout: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    created: asyncio.Event = field(default_factory=asyncio.Event)
    step_seconds: dict[str, float] = field(default_factory=dict)
    start_method: Literal["direct", "runtime"] = "runtime"
    prepared: PreparedImage | None = None
    fallback_reason: str = ""
    channel: socket.socket | None = None
    starter: Child | None = None
    group: cgroups.Group | None = None
    place: SandboxNamespaces | None = None
    pid_namespace: state_dir.PidNamespace | None = None
    log: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    expiry: asyncio.TimerHandle | None = None
    paused: bool = False
    pausing: asyncio.Lock = field(default_factory=asyncio.Lock)
    reported_limits: set[str] = field(default_factory=set)
    oom_kills: int = 0
    machine_kills: int = 0
    over_memory: str = ""
    over_memory_at: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    end_waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure a step of the creation."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.step_seconds[name] = self.step_seconds.get(name, 0.0) + time.monotonic() - begin

    def steps(self) -> str:
        return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.step_seconds.items())

    async def wait_gone(self) -> None:
        """Wait until the sandbox's processes and files are gone.

        Raises:
            Refused: closing takes too long; the supervisor keeps retrying.
        """
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.end_waiters.append(end)
        await end

    def resolve_end_waiters(self, error: Refused | None = None) -> None:
        """Wake callers that wait for the end, or raise ``error`` in them."""
        waiters, self.end_waiters = self.end_waiters, []
        for end in waiters:
            if not end.done():
                if error:
                    end.set_exception(error)
                else:
                    end.set_result(None)

    def place_to_join(self) -> SandboxNamespaces:
        """Return the namespaces to join of a sandbox that is up.

        Raises:
            Refused: the sandbox is paused.
        """
        if self.paused:
            raise Refused({"error": "the sandbox is paused; resume it first"})
        assert self.place
        return self.place

    def take_log(self) -> str:
        """Return the runtime's output so far, and close the log."""
        if self.log is None:
            return ""
        log, self.log = self.log, None
        try:
            return launch.read_log(log)
        finally:
            os.close(log)

    def apply_limits(self) -> None:
        memory, processes, cpus = (self.request.memory_mib, self.request.processes, self.request.cpus)
        if self.group:
            self.group.set_limits(memory=memory << 20, processes=processes, cpus=cpus)

    def report_limit(self, reason: str, resource: str) -> None:
        """Send each limit that the sandbox reached to all clients, once."""
        if reason not in self.reported_limits:
            self.reported_limits.add(reason)
            self.send_event("limit", reason, resource)

    def send_event(self, event: str, reason: str = "", resource: str = "", *, inside: bool = False) -> None:
        for client in self.clients:
            message = {"event": event, "sandbox": self.name, "reason": reason, "resource": resource, "inside": inside}
            client.post(message)
