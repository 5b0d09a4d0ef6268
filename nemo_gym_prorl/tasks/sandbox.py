# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A started sandbox of :class:`.SingularityProvider`, as tasks and their graders use it.

Any operation raises :class:`InfrastructureError` if the machine fails. If a session ends in a live sandbox, sandboxed
code has ended the session. Any operation raises :class:`AgentError` if the sandbox ended because its processes
exceeded the disk limit, or if the process limit leaves no process for the operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Protocol


class ExecResult(Protocol):
    """Result of a command; ``error_type`` is ``None`` if the command ended by itself, else for example ``timeout``."""

    @property
    def stdout(self) -> str | None: ...

    @property
    def stderr(self) -> str | None: ...

    @property
    def return_code(self) -> int: ...

    @property
    def error_type(self) -> str | None: ...


class Sandbox:
    """A started sandbox with commands, sessions, files and snapshots.

    Paths are resolved in the sandbox, with the rights of the sandbox's user. Methods that access a file raise the
    :class:`OSError` that a program in the sandbox would get.
    """

    def __init__(self, provider: Any, handle: Any) -> None:
        self._provider = provider
        self._handle = handle

    @property
    def sandbox_id(self) -> str:
        return str(self._handle.sandbox_id)

    @property
    def published(self) -> tuple[str, str]:
        """Working folder and user in the published image's settings; empty strings where not set."""
        published: tuple[str, str] = self._provider.published(self._handle)
        return published

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        done: ExecResult = await self._provider.exec(
            self._handle, command, cwd=cwd, env=env, timeout_s=timeout_s, user=user
        )
        return done

    async def shell(self, *, env: Mapping[str, str] | None = None, user: str | int | None = None) -> Any:
        """Start a persistent :class:`.Shell` in the sandbox's working folder."""
        return await self._provider.shell(self._handle, env=env, user=user)

    async def kernel(self) -> Any:
        """Start an IPython :class:`.Kernel` in the sandbox's working folder."""
        return await self._provider.kernel(self._handle)

    async def upload(self, local_path: Path | str, remote_path: str) -> None:
        await self._provider.upload_file(self._handle, Path(local_path), remote_path)

    async def download(self, remote_path: str, local_path: Path) -> None:
        await self._provider.download_file(self._handle, remote_path, local_path)

    async def read_file(self, path: str, *, limit: int) -> bytes:
        """Return a regular file's bytes; the error is ``EFBIG`` above ``limit`` bytes, ``EINVAL`` for other files."""
        data: bytes = await self._provider.read_file(self._handle, path, limit=limit)
        return data

    async def write_file(self, path: str, data: bytes) -> bool:
        """Write a file and its parent folders; return whether the file existed. An existing file keeps its
        permissions.
        """
        existed: bool = await self._provider.write_file(self._handle, path, data)
        return existed

    async def check(self) -> list[str]:
        """Check that the sandbox lives, and describe the limits that it has reached so far, oldest first.

        Raises:
            AgentError: sandboxed code ended the sandbox.
            InfrastructureError: the machine ended the sandbox or a process in it, or the host's disk is full.
        """
        limits: list[str] = await self._provider.check(self._handle)
        return limits

    async def has_room(self) -> bool:
        """Return whether the host's disk has free space. Without free space, writes in the sandbox may have failed."""
        has_room: bool = await self._provider.has_room(self._handle)
        return has_room

    async def egress(self) -> list[dict[str, Any]]:
        """Return ``host``, ``port``, ``allowed`` and ``connections`` of each host requested from the proxy."""
        hosts: list[dict[str, Any]] = await self._provider.egress(self._handle)
        return hosts

    async def open_policy(self, url: str, key: str) -> str:
        """Forward a port on the sandbox's loopback to a model server, and return the origin in the sandbox.

        Requests below ``/v1/`` are forwarded with ``key`` as the bearer token, which never enters the sandbox. A
        further call replaces the model server.

        Raises:
            CallerError: ``url`` is not an origin (scheme, host and port), or the sandbox shares the host's network.
        """
        base_url: str = await self._provider.open_policy(self._handle, url, key)
        return base_url

    async def close_policy(self) -> None:
        """Refuse further requests to the model server; requests in flight continue. Idempotent."""
        await self._provider.close_policy(self._handle)

    async def checkpoint(self, name: str) -> Any:
        """Save the files as a snapshot with the label ``name``, from which other sandboxes can start; return its
        ``name``, ``size`` in bytes, and the number of running ``programs``, which are not saved.

        Raises:
            AgentError: sandboxed code wrote files that cannot be saved.
        """
        return await self._provider.checkpoint(self._handle, name)

    async def status(self) -> Enum:
        status: Enum = await self._provider.status(self._handle)
        return status

    async def stop(self) -> None:
        """End the sandbox, and wait until all its processes have ended. Idempotent."""
        await self._provider.close(self._handle)
