# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sandbox protocols that tasks depend on, independent of the sandbox provider.

Every sandbox runs commands and accepts uploads. Optional capabilities are protocols of their own, such as
:class:`HasSessions`; a task must work without them.

Any operation raises :class:`InfrastructureError` if the machine fails. A session that ended in a live sandbox was
ended by code inside. Any operation raises :class:`AgentError` if the sandbox ended because its processes exceeded the
disk limit, or if no process is left for the operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from nemo_gym_prorl.sandbox_results import CellResult, ShellResult


class ExecResult(Protocol):
    """Result of a command."""

    @property
    def stdout(self) -> str | None: ...

    @property
    def stderr(self) -> str | None: ...

    @property
    def return_code(self) -> int: ...

    @property
    def error_type(self) -> str | None: ...


class Sandbox(Protocol):
    """Subset of Gym's ``AsyncSandbox`` that tasks use."""

    async def exec(
        self, command: str, *, cwd: str | None = None, timeout_s: int | float | None = None
    ) -> ExecResult: ...

    async def upload(self, local_path: Path | str, remote_path: str) -> None: ...

    async def status(self) -> Enum: ...

    async def stop(self) -> None: ...


class ShellSession(Protocol):
    """Shell on a terminal; runs one command at a time."""

    @property
    def running(self) -> bool: ...

    @property
    def exited(self) -> bool: ...

    async def run(
        self, command: str, *, timeout_s: float, silence_s: float | None, output_limit: int = ...
    ) -> ShellResult: ...

    async def aside(self, command: str, *, timeout_s: float, output_limit: int = ...) -> ShellResult: ...

    async def wait(self, *, timeout_s: float, silence_s: float | None) -> ShellResult: ...

    async def send(self, text: str) -> None: ...

    async def interrupt(self) -> None: ...

    async def restart(self) -> None: ...

    async def close(self) -> None: ...


class KernelSession(Protocol):
    """IPython kernel; runs one cell at a time."""

    async def run(self, code: str, *, timeout_s: float, output_limit: int = ...) -> CellResult: ...

    async def restart(self) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class HasSessions(Protocol):
    """Sandbox with persistent sessions. Both kinds start in the sandbox's working folder."""

    async def shell(self, *, env: Mapping[str, str] | None = None) -> ShellSession: ...

    async def kernel(self) -> KernelSession: ...


@runtime_checkable
class HasHealthCheck(Protocol):
    """Sandbox that can attribute its end to sandboxed code or to the machine."""

    async def check(self) -> list[str]:
        """Check that the sandbox lives, and return the limits that it has met.

        Raises:
            AgentError: sandboxed code ended the sandbox.
            InfrastructureError: the machine ended the sandbox or a process in it.
        """
        ...


@runtime_checkable
class HasDiskCheck(Protocol):
    """Sandbox that can check the host's free disk space."""

    async def has_room(self) -> bool:
        """Return whether the host's disk has space left; if not, writes in the sandbox may have failed."""
        ...


@runtime_checkable
class HasEgress(Protocol):
    """Sandbox that may reach other hosts through a proxy, which counts."""

    async def egress(self) -> list[dict[str, Any]]:
        """Return the use of each host, with ``host``, ``port``, ``allowed`` and ``connections``."""
        ...


@runtime_checkable
class HasPolicyAccess(HasHealthCheck, Protocol):
    """Sandbox whose programs can call a policy, without a network."""

    async def open_policy(self, url: str, key: str) -> str:
        """Serve the policy at the origin ``url`` on a port inside, in place of the last one; return its origin there.

        Requests below ``/v1/`` are sent on with ``key`` as the bearer token, which never enters the sandbox.

        Raises:
            CallerError: ``url`` is no origin, or the sandbox shares the host's network.
        """
        ...

    async def close_policy(self) -> None:
        """Take no more calls; those in flight go on until their programs end. Idempotent."""
        ...


class SandboxCheckpoint(Protocol):
    """Checkpoint of a sandbox's files, with the number of running programs that were not saved."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def programs(self) -> int: ...


@runtime_checkable
class HasCheckpoints(Protocol):
    """Sandbox whose files can be saved for other sandboxes."""

    async def checkpoint(self, name: str) -> SandboxCheckpoint:
        """Save the files under a name.

        Raises:
            AgentError: sandboxed code wrote files that cannot be saved.
        """
        ...


@runtime_checkable
class HasContainer(HasSessions, HasCheckpoints, Protocol):
    """Sandbox with all that a container of the field's has: users, variables and an image's settings."""

    @property
    def published(self) -> tuple[str, str]:
        """Working folder and user that the image was published with; empty if it has none."""
        ...

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = None,
        user: str | int | None = None,
    ) -> ExecResult: ...

    async def shell(self, *, env: Mapping[str, str] | None = None, user: str | int | None = None) -> ShellSession: ...

    async def upload(self, local_path: Path | str, remote_path: str) -> None: ...

    async def download(self, remote_path: str, local_path: Path) -> None: ...

    async def read_file(self, path: str, *, limit: int) -> bytes: ...

    async def write_file(self, path: str, data: bytes) -> bool: ...

    async def has_room(self) -> bool: ...

    async def check(self) -> list[str]: ...

    async def status(self) -> Enum: ...

    async def stop(self) -> None: ...


@runtime_checkable
class HasFiles(Protocol):
    """Sandbox with direct file access. Paths are resolved inside the sandbox, with its own user's rights.

    Errors are the :class:`OSError` that a program inside would get.
    """

    async def read_file(self, path: str, *, limit: int) -> bytes:
        """Return a regular file of at most ``limit`` bytes; ``EFBIG`` if longer, ``EINVAL`` if not a regular file."""
        ...

    async def write_file(self, path: str, data: bytes) -> bool:
        """Write a file and its parent folders; return whether the file existed. An existing file keeps its
        permissions.
        """
        ...
