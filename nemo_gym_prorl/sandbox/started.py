# SPDX-License-Identifier: Apache-2.0
"""A started sandbox of any of Gym's providers as one object, with sessions where its provider has them.

Gym's own ``AsyncSandbox`` keeps provider and handle to itself, and a shell needs both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers import create_provider
from nemo_gym.sandbox.providers.base import SandboxExecResult, SandboxHandle, SandboxSpec, SandboxStatus

from nemo_gym_prorl.sandbox.kernel import Kernel
from nemo_gym_prorl.sandbox.shell import Shell


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
        try:
            await self._provider.close(self._handle)
        finally:
            await self._provider.aclose()


class SandboxWithSessions(StartedSandbox):
    """One whose provider has shells and kernels, as ``singularity`` has."""

    async def shell(self, *, env: Mapping[str, str] | None = None) -> Shell:
        """A persistent shell, the caller's to close."""
        shell: Shell = await self._provider.shell(self._handle, env=env)
        return shell

    async def kernel(self) -> Kernel:
        """An IPython kernel, the caller's to close."""
        kernel: Kernel = await self._provider.kernel(self._handle)
        return kernel


async def start(provider: Mapping[str, Any], spec: SandboxSpec) -> StartedSandbox:
    """Start a sandbox.

    Args:
        provider: as in Gym's configuration: one name with its options.
        spec: what the sandbox is to be.

    Raises:
        SandboxCreateError: it did not start, or another error of the provider's.
    """
    made = create_provider(provider)
    kind = SandboxWithSessions if hasattr(made, "shell") and hasattr(made, "kernel") else StartedSandbox
    try:
        return kind(made, await made.create(spec))
    except BaseException:
        await made.aclose()
        raise
