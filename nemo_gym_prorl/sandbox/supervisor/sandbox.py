# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""State of one sandbox in the supervisor."""

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

from nemo_gym_prorl.sandbox.launcher.requests import SandboxNamespaces
from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.runtime import launch
from nemo_gym_prorl.sandbox.supervisor import state_dir
from nemo_gym_prorl.sandbox.supervisor.children import Child
from nemo_gym_prorl.sandbox.supervisor.connection import Connection, Message
from nemo_gym_prorl.sandbox.supervisor.protocol import CreateRequest, Refused


Client = Connection[Message, list[int]]
"""The supervisor's end of a client's connection: receives requests, sends replies and events."""

STUCK_S = 5.0
"""Seconds of closing a sandbox until processes that survive SIGKILL are reported; a kill takes milliseconds."""


class SandboxStage(StrEnum):
    """Stages of a sandbox's life; :mod:`.lifecycle` describes them."""

    CREATING = "creating"
    UP = "up"
    CLOSING = "closing"
    GONE = "gone"


class NoSandbox(Refused):
    """The sandbox does not exist or is not up."""

    def __init__(self, reason: str) -> None:
        super().__init__({"error": reason, "lost": True})


@dataclass(slots=True, eq=False)
class Sandbox:
    """State of one sandbox; optional fields are ``None`` until they are set.

    Attributes:
        folder: folder on the host with all files of the sandbox.
        request: the create request, with validated binds.
        clients: connections that receive the sandbox's events.
        held_files: descriptors that stay open until the sandbox is gone, such as the lock on the image.
        start_timeout: time limit of the start; closing the sandbox expires the limit at once.
        created: set when the creation has succeeded or failed.
        fallback_reason: why ``start: auto`` used the runtime instead of a direct start; empty otherwise.
        channel: the supervisor's end of a socket to the first process.
        starter: the supervisor's child for the sandbox: the runtime's process on the host, or the first process.
        group: control group of the sandbox; ``None`` without delegated control groups.
        namespaces: namespaces that helpers join; set once the first process is recorded.
        pid_namespace: PID namespace, whose first process is killed to end the sandbox.
        log: descriptor of the runtime's output, until the output is read.
        environment: environment variables that the image sets.
        paused: whether programs have SIGSTOP, and new programs are refused.
        pausing: serialises snapshots.
        reported_limits: texts of the limits that were reported to the clients.
        oom_kills: number of OOM kills in the control group that were handled already.
        machine_kills: number of OOM kills on the machine, from its boot until the sandbox was up.
        over_memory: text of the last memory violation, at the loop time ``over_memory_at``; empty if there was none.
        changed: set when a process of the closing sandbox has ended, so that closing continues.
    """

    name: str
    folder: Path
    request: CreateRequest
    clients: list[Client]
    held_files: list[int]
    stage: SandboxStage = SandboxStage.CREATING
    start_timeout: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    created: asyncio.Event = field(default_factory=asyncio.Event)
    step_seconds: dict[str, float] = field(default_factory=dict)
    start_method: Literal["direct", "runtime"] = "runtime"
    fallback_reason: str = ""
    channel: socket.socket | None = None
    starter: Child | None = None
    group: cgroups.Group | None = None
    namespaces: SandboxNamespaces | None = None
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
        """Add the duration of the block to the step ``name`` in ``step_seconds``."""
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
            Refused: processes or files cannot be removed; the supervisor keeps retrying.
        """
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.end_waiters.append(end)
        await end

    def resolve_end_waiters(self, error: Refused | None = None) -> None:
        """Wake all callers of :meth:`wait_gone`; with an ``error``, raise it in these callers."""
        waiters, self.end_waiters = self.end_waiters, []
        for end in waiters:
            if not end.done():
                if error:
                    end.set_exception(error)
                else:
                    end.set_result(None)

    def namespaces_to_join(self) -> SandboxNamespaces:
        """Return the namespaces to join of a sandbox whose first process is recorded.

        Raises:
            Refused: the sandbox is paused.
        """
        if self.paused:
            raise Refused({"error": "the sandbox is paused for a snapshot; try again"})
        assert self.namespaces
        return self.namespaces

    def take_log(self) -> str:
        """Return the runtime's output so far, and close the log; empty if there is no log."""
        if self.log is None:
            return ""
        log, self.log = self.log, None
        try:
            return launch.read_log(log)
        finally:
            os.close(log)

    def report_limit(self, reason: str, resource: str) -> None:
        """Send a reached limit to all clients, unless the same ``reason`` was sent before."""
        if reason not in self.reported_limits:
            self.reported_limits.add(reason)
            self.send_event("limit", reason, resource)

    def send_event(self, event: str, reason: str = "", resource: str = "", *, inside: bool = False) -> None:
        for client in self.clients:
            message = {"event": event, "sandbox": self.name, "reason": reason, "resource": resource, "inside": inside}
            client.post(message)
