# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""NeMo Gym's ``SandboxProvider`` named ``singularity``: Gym's words on one side, :mod:`.container` on the other.

What Gym defines beyond the common core is there as methods of the same names, since Gym finds capabilities by looking
for them: snapshots are in :mod:`.snapshots`, the rest is here.

A command that ran has ``error_type`` ``None`` and its own exit code. One that was stopped when its time was up has
``timeout``, 124 and the output so far; one that could not run has ``sandbox``, 125 and the reason as its stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers.base import (
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxSpec,
    SandboxStatus,
)

from nemo_gym_prorl.failures import AgentError, CallerError, InfrastructureError, RolloutError
from nemo_gym_prorl.sandbox import transfer
from nemo_gym_prorl.sandbox.container import Container, container_of
from nemo_gym_prorl.sandbox.images.async_store import AsyncImageStore
from nemo_gym_prorl.sandbox.images.reference import Reference, parse
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime, require_runtime
from nemo_gym_prorl.sandbox.sessions.kernel import Kernel
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.snapshots import Snapshot, SnapshotSupport
from nemo_gym_prorl.sandbox.spec import SNAPSHOT, container_spec, provider_options
from nemo_gym_prorl.sandbox.supervisor.errors import SandboxLost, SandboxRefused


TIMED_OUT = 124
NOT_RUN = 125


class SandboxStartError(InfrastructureError, SandboxCreateError):  # type: ignore[misc]  # Gym has no types
    """A sandbox did not start: Gym's error and ours in one, so that either side knows it. ``field`` is what is wrong
    in what was asked for, if anything is."""


class SingularityProvider(SnapshotSupport):
    """See the module.

    Args:
        options: of :class:`.spec.ProviderOptions`.

    Raises:
        CallerError: an option is unknown, and which there are; or is wrong, and what it could be.
    """

    name = "singularity"

    def __init__(self, **options: Any) -> None:
        self._settings = provider_options(options)
        self._runtime: Runtime | None = None
        self._kept = self._settings.snapshots
        self._images = AsyncImageStore(ImageStore(), pull=self._settings.pull, unpack=self._settings.unpack)

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Start a sandbox.

        Raises:
            SandboxStartError: it did not start, or the request is wrong; nothing of it is left.
        """
        with _start_errors():
            wanted = container_spec(spec, self._settings)
            snapshot, image = await self._base(spec.provider_options.get(SNAPSHOT), spec.image)
            runtime = await self._require_runtime()
            located = await self._images.locate(image, runtime)
            if snapshot:
                await asyncio.to_thread(snapshot.base.check, replace(wanted, image=located))
            async with self._images.start(located, runtime) as start:
                held = [start.lock.descriptor] if start.lock else []
                path = snapshot.path if snapshot else None
                container = await Container.start(replace(wanted, image=start.path), runtime, held, path)
            # It may have been started from an unpacked copy, which comes and goes.
            container.image = located
            try:
                if spec.entrypoint:
                    await self._enter(container, spec.entrypoint)
            except BaseException:
                await container.close()
                raise
        return SandboxHandle(sandbox_id=container.name, provider_name=self.name, raw=container)

    async def fetch_image(self, spec: SandboxSpec) -> None:
        """Pull and unpack what a start would pull and unpack, which takes minutes where starting takes milliseconds.

        Raises:
            SandboxStartError: no such sandbox could start.
        """
        with _start_errors():
            container_spec(spec, self._settings)
            _, image = await self._base(spec.provider_options.get(SNAPSHOT), spec.image)
            await self._images.fetch(image, await self._require_runtime())

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        """Run a command with ``/bin/sh``; see the module for what comes back.

        Raises:
            CallerError: the handle is not one of this provider's.
            AgentError: what ran in the sandbox has ended it.
        """
        container = container_of(handle)
        limit = self._settings.exec_timeout_s if timeout_s is None else timeout_s
        try:
            done = await container.run(
                command, cwd=cwd, env=env, timeout_s=limit, output_limit=self._settings.output_limit, user=user
            )
        except (SandboxLost, SandboxRefused, AgentError, CallerError) as error:
            if isinstance(error, AgentError) and not container.alive:
                raise
            return SandboxExecResult(stdout=None, stderr=error.reason, return_code=NOT_RUN, error_type="sandbox")
        if done.timed_out:
            return SandboxExecResult(done.stdout, done.stderr, TIMED_OUT, "timeout")
        return SandboxExecResult(done.stdout, done.stderr, done.exit_code)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        """Copy one file into the sandbox, its permissions with it."""
        await container_of(handle).upload(Path(source_path), target_path)

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        """Copy one file out of the sandbox."""
        await container_of(handle).download(source_path, Path(target_path))

    async def read_file(self, handle: SandboxHandle, path: str, *, limit: int) -> bytes:
        """An ordinary file of the sandbox, without one on the host; see :func:`.transfer.read_file`."""
        return await transfer.read_file(container_of(handle), path, limit)

    async def write_file(self, handle: SandboxHandle, path: str, data: bytes) -> bool:
        """Write a file of the sandbox, without one on the host; see :func:`.transfer.write_file`."""
        return await transfer.write_file(container_of(handle), path, data)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """``running`` while its processes can be joined, ``paused`` after :meth:`pause`, else ``stopped``."""
        container = container_of(handle)
        if not container.alive:
            return SandboxStatus.STOPPED
        # Gym 0.4 has no such state.
        return getattr(SandboxStatus, "PAUSED", SandboxStatus.UNKNOWN) if container.paused else SandboxStatus.RUNNING

    async def check(self, handle: SandboxHandle) -> None:
        """Whose doing it is if something ended in the sandbox, or all of it; see :meth:`.container.Container.check`.

        Raises:
            AgentError: what ran in it has ended it.
            InfrastructureError: the machine has, or something in it.
        """
        await container_of(handle).check()

    async def has_room(self, handle: SandboxHandle) -> bool:
        """Whether there is any left on the disk that sandboxes are kept on."""
        return await container_of(handle).has_room()

    async def pause(self, handle: SandboxHandle) -> None:
        """Stop everything that runs in the sandbox; its memory stays in use."""
        await container_of(handle).pause()

    async def resume(self, handle: SandboxHandle) -> None:
        """Let everything in the sandbox go on."""
        await container_of(handle).resume()

    async def close(self, handle: SandboxHandle) -> None:
        """End the sandbox; returns when nothing of it is left. May be called again."""
        await container_of(handle).close()

    async def aclose(self) -> None:
        """Nothing: the supervisor is the process's, not this object's, and goes with the process."""

    async def shell(self, handle: SandboxHandle, *, env: Mapping[str, str] | None = None) -> Shell:
        """A persistent shell in the sandbox's working folder, the caller's to close; see :class:`.shell.Shell`.

        Raises:
            InfrastructureError: the image has no bash, or it does not answer.
        """
        return await Shell.start(container_of(handle), env=env)

    async def kernel(self, handle: SandboxHandle) -> Kernel:
        """An IPython kernel in the sandbox's working folder, the caller's to close; see :class:`.kernel.Kernel`.

        Raises:
            InfrastructureError: the image has no IPython, or it does not answer.
        """
        return await Kernel.start(container_of(handle))

    async def serialize_handle(self, handle: SandboxHandle, *, scope: str | None = None) -> dict[str, Any]:
        """What another process of the same user on this machine needs to :meth:`connect`. Holds no secret but the
        sandbox's own variables."""
        return {
            "provider": self.name,
            "hostname": socket.gethostname(),
            "uid": os.geteuid(),
            **container_of(handle).describe(),
        }

    async def connect(self, descriptor: Mapping[str, Any]) -> SandboxHandle:
        """A handle on a sandbox of another process, which goes on owning it: it ends when that process does.

        Raises:
            ValueError: the descriptor is not one of this provider's, from this machine and user.
            SandboxLost: the sandbox has ended.
        """
        expected = {"provider": self.name, "hostname": socket.gethostname(), "uid": os.geteuid()}
        for key, value in expected.items():
            if descriptor.get(key) != value:
                raise ValueError(f"{key} of the descriptor is {descriptor.get(key)!r}, here it is {value!r}")
        container = await Container.attach(descriptor)
        return SandboxHandle(sandbox_id=container.name, provider_name=self.name, raw=container)

    async def exec_with_background_services(
        self, handle: SandboxHandle, command: str, *, cwd: str | None = None, timeout_s: int | float | None = None
    ) -> SandboxExecResult:
        """As :meth:`exec`: what a command leaves running in the background goes on running in any case."""
        return await self.exec(handle, command, cwd=cwd, timeout_s=timeout_s)

    @contextlib.asynccontextmanager
    async def sandbox(self, spec: SandboxSpec) -> AsyncIterator[Container]:
        """A sandbox for the length of a block, as our own richer object."""
        handle = await self.create(spec)
        try:
            yield container_of(handle)
        finally:
            await self.close(handle)

    async def _base(self, snapshot_id: str | None, image: str | None) -> tuple[Snapshot | None, Reference | None]:
        """Return what a sandbox starts from: what to put into it, and the name of its image."""
        snapshot = await asyncio.to_thread(self.snapshot_to_restore, snapshot_id, image)
        named = (snapshot.base.image if snapshot else image) or self._settings.image
        return snapshot, parse(named) if named else None

    async def _require_runtime(self) -> Runtime:
        if self._runtime is None:
            self._runtime = await asyncio.to_thread(require_runtime)
        return self._runtime

    async def _enter(self, container: Container, argv: Sequence[str]) -> None:
        """Start the program that is to run beside the commands."""
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        try:
            await container.spawn(argv, [null] * 3)
        except CallerError as error:
            raise CallerError(f"entrypoint: {error.reason}", field="entrypoint") from error
        finally:
            os.close(null)


@contextlib.contextmanager
def _start_errors() -> Iterator[None]:
    """Errors in the block are raised as Gym's error of a start, too."""
    try:
        yield
    except RolloutError as error:
        raise SandboxStartError(error.reason, kind=error.kind, field=error.field) from error
