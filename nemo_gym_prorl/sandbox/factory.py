# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A started sandbox of any of Gym's providers as one object, with sessions where its provider has them.

Gym's own ``AsyncSandbox`` keeps provider and handle to itself, and a shell needs both; and it makes a provider for
each sandbox, which looks for its runtime anew. Here one provider starts them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers import create_provider
from nemo_gym.sandbox.providers.base import SandboxExecResult, SandboxHandle, SandboxSpec, SandboxStatus

from nemo_gym_prorl.sandbox.sessions.kernel import Kernel
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.snapshots import SnapshotInfo


class StartedSandbox:
    """The part of ``AsyncSandbox`` that needs a started sandbox."""

    def __init__(self, provider: Any, handle: SandboxHandle) -> None:
        self._provider = provider
        self._handle = handle

    @property
    def sandbox_id(self) -> str:
        """What the provider calls it."""
        return str(self._handle.sandbox_id)

    async def exec(
        self, command: str, *, cwd: str | None = None, timeout_s: int | float | None = None
    ) -> SandboxExecResult:
        """Run a command."""
        return await self._provider.exec(self._handle, command, cwd=cwd, timeout_s=timeout_s)

    async def upload(self, local_path: Path | str, remote_path: str) -> None:
        """Copy a file into it."""
        await self._provider.upload_file(self._handle, Path(local_path), remote_path)

    async def status(self) -> SandboxStatus:
        """Whether it runs."""
        return await self._provider.status(self._handle)

    async def stop(self) -> None:
        """End it; returns when it is gone. May be called again."""
        await self._provider.close(self._handle)


class SandboxWithSessions(StartedSandbox):
    """One whose provider has shells and kernels, reaches files without a program inside, and knows whose doing an end
    is, as ``singularity``."""

    async def shell(self, *, env: Mapping[str, str] | None = None) -> Shell:
        """A persistent shell, the caller's to close."""
        shell: Shell = await self._provider.shell(self._handle, env=env)
        return shell

    async def kernel(self) -> Kernel:
        """An IPython kernel, the caller's to close."""
        kernel: Kernel = await self._provider.kernel(self._handle)
        return kernel

    async def read_file(self, path: str, *, limit: int) -> bytes:
        """An ordinary file of it."""
        data: bytes = await self._provider.read_file(self._handle, path, limit=limit)
        return data

    async def write_file(self, path: str, data: bytes) -> bool:
        """Write a file of it; says whether there was one."""
        existed: bool = await self._provider.write_file(self._handle, path, data)
        return existed

    async def check(self) -> None:
        """Whose doing it is if something ended in it, or all of it.

        Raises:
            AgentError: what ran in it has ended it.
            InfrastructureError: the machine has, or something in it.
        """
        await self._provider.check(self._handle)

    async def has_room(self) -> bool:
        """Whether there is any left on the disk that sandboxes are kept on."""
        has_room: bool = await self._provider.has_room(self._handle)
        return has_room

    async def checkpoint(self, name: str) -> SnapshotInfo:
        """Keep what it has written, for others that go on from there."""
        taken: SnapshotInfo = await self._provider.checkpoint(self._handle, name)
        return taken


class SandboxFactory:
    """Starts sandboxes of one provider, and closes it in the end.

    Args:
        provider: as in Gym's configuration: one name with its options.
    """

    def __init__(self, provider: Mapping[str, Any]) -> None:
        self._provider = create_provider(provider)
        wanted = ("shell", "kernel", "read_file", "write_file", "check", "has_room")
        has_all = all(hasattr(self._provider, name) for name in wanted)
        self._kind = SandboxWithSessions if has_all else StartedSandbox

    async def fetch_image(self, spec: SandboxSpec) -> None:
        """Have the image here that a sandbox starts from, where the provider can do that ahead.

        Raises:
            SandboxCreateError: no such sandbox could start.
        """
        if (fetch := getattr(self._provider, "fetch_image", None)) is not None:
            await fetch(spec)

    async def start(self, spec: SandboxSpec) -> StartedSandbox:
        """Start a sandbox.

        Raises:
            SandboxCreateError: it did not start, or another error of the provider's.
        """
        return self._kind(self._provider, await self._provider.create(spec))

    async def delete_snapshot(self, name: str) -> None:
        """Delete what :meth:`SandboxWithSessions.checkpoint` has kept."""
        await self._provider.delete_snapshot(name)

    async def renew_snapshot(self, name: str) -> None:
        """Have it count as new."""
        await self._provider.renew_snapshot(name)

    async def delete_old_snapshots(self, name: str, age_s: float) -> None:
        """Delete what was kept or renewed under a name so many seconds ago, where the provider keeps any."""
        if (delete := getattr(self._provider, "delete_old_snapshots", None)) is not None:
            await delete(name, age_s)

    async def aclose(self) -> None:
        """Let go of what the provider holds; best when its sandboxes have ended."""
        await self._provider.aclose()
