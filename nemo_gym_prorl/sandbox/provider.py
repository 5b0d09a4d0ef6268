# SPDX-License-Identifier: Apache-2.0
"""NeMo Gym's ``SandboxProvider`` named ``singularity``: Gym's words on one side, :mod:`.container` on the other.

What the installed Gym defines beyond the common core (terminals, endpoints, reconnecting) is there as methods of the
same names; Gym finds capabilities by looking for them.

A command that ran has ``error_type`` ``None`` and its own exit code. One that was stopped when its time was up has
``timeout``, 124 and the output so far; one that could not run has ``sandbox``, 125 and the reason as its stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import weakref
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers import base
from nemo_gym.sandbox.providers.base import (
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxSpec,
    SandboxStatus,
)

from nemo_gym_prorl.failures import CallerError, InfrastructureError, RolloutError
from nemo_gym_prorl.sandbox import relay
from nemo_gym_prorl.sandbox.container import DEFAULT_EXEC_TIMEOUT_S, OUTPUT_LIMIT, Container, ContainerSpec
from nemo_gym_prorl.sandbox.gates import StartGates
from nemo_gym_prorl.sandbox.kernel import Kernel
from nemo_gym_prorl.sandbox.lease import state_root
from nemo_gym_prorl.sandbox.link import SandboxLost, SandboxRefused
from nemo_gym_prorl.sandbox.pool import WarmPool
from nemo_gym_prorl.sandbox.runtime import Runtime, require_runtime
from nemo_gym_prorl.sandbox.shell import Shell
from nemo_gym_prorl.sandbox.store.images import ImageStore
from nemo_gym_prorl.sandbox.store.node import NodeImages
from nemo_gym_prorl.sandbox.store.reference import parse
from nemo_gym_prorl.sandbox.terminal import Terminal


TIMED_OUT = 124
NOT_RUN = 125

SPEC_OPTIONS = ("network", "root", "binds", "memory_mib", "cpus", "processes", "disk_mib", "shared_memory_mib")
"""Options of :class:`.container.ContainerSpec` that can be set for the provider, and per sandbox in
``provider_options``."""


class SandboxStartError(InfrastructureError, SandboxCreateError):  # type: ignore[misc]  # Gym has no types
    """A sandbox did not start: Gym's error and ours in one, so that either side knows it."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """The provider's own options.

    Attributes:
        image: for sandboxes that name none; the default image if not given.
        exec_timeout_s: for commands without a time limit of their own.
        output_limit: bytes kept of each output stream of a command.
        warm: sandboxes to keep started ahead, of each specification that is asked for.
        concurrent_starts: most sandboxes of a user that start at a time on this machine; more only slow each other.
        pull: get images of registries that are not there yet.
        unpack: start SIFs from an unpacked copy on this machine's disk, where there is room for one.
    """

    image: str | None = None
    exec_timeout_s: float = DEFAULT_EXEC_TIMEOUT_S
    output_limit: int = OUTPUT_LIMIT
    warm: int = 0
    concurrent_starts: int = 2 * (os.cpu_count() or 1)
    pull: bool = True
    unpack: bool = True


_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, WarmPool]] = weakref.WeakKeyDictionary()


async def close_pools() -> None:
    """End the sandboxes that the running loop keeps started ahead; they end with the process in any case."""
    for pool in _pools.pop(asyncio.get_running_loop(), {}).values():
        await pool.close()


class SingularityProvider:
    """See the module.

    Args:
        options: of :class:`_Settings`, and those named in :data:`SPEC_OPTIONS` as defaults for every sandbox.

    Raises:
        CallerError: an option is unknown; names those there are.
    """

    name = "singularity"

    def __init__(self, **options: Any) -> None:
        own = {field.name for field in fields(_Settings)}
        _refuse_unknown(options, own | set(SPEC_OPTIONS), "sandbox provider option")
        self._settings = _Settings(**{name: value for name, value in options.items() if name in own})
        self._defaults = {name: value for name, value in options.items() if name in SPEC_OPTIONS}
        self._runtime: Runtime | None = None
        self._images = NodeImages(ImageStore(), pull=self._settings.pull, unpack=self._settings.unpack)

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Start a sandbox.

        Raises:
            SandboxStartError: it did not start, or the request is wrong; nothing of it is left.
        """
        try:
            wanted = self._container_spec(spec)
            named = spec.image or self._settings.image
            image = parse(named) if named else None
            if self._runtime is None:
                self._runtime = await asyncio.to_thread(require_runtime)
            wanted = replace(wanted, image=await self._images.locate(image, self._runtime))
            container = await self._take(wanted) if self._settings.warm else await self._start(wanted)
        except RolloutError as error:
            raise SandboxStartError(error.reason, kind=error.kind) from error
        if spec.entrypoint:
            try:
                null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
                try:
                    await container.spawn(spec.entrypoint, [null] * 3)
                finally:
                    os.close(null)
            except RolloutError as error:
                await container.close()
                raise SandboxStartError(f"entrypoint: {error.reason}", kind=error.kind) from error
        return SandboxHandle(sandbox_id=container.name, provider_name=self.name, raw=container)

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
            CallerError: ``user`` is not the sandbox's own; there is no other in it.
        """
        container = _container(handle)
        _check_user(user, container.spec)
        limit = self._settings.exec_timeout_s if timeout_s is None else timeout_s
        try:
            done = await container.run(
                command, cwd=cwd, env=env, timeout_s=limit, output_limit=self._settings.output_limit
            )
        except (SandboxLost, SandboxRefused, CallerError) as error:
            return SandboxExecResult(stdout=None, stderr=error.reason, return_code=NOT_RUN, error_type="sandbox")
        if done.timed_out:
            return SandboxExecResult(done.stdout, done.stderr, TIMED_OUT, "timeout")
        return SandboxExecResult(done.stdout, done.stderr, done.exit_code)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        """Copy one file into the sandbox, its permissions with it."""
        await _container(handle).upload(Path(source_path), target_path)

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        """Copy one file out of the sandbox."""
        await _container(handle).download(source_path, Path(target_path))

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """``running`` while its processes can be joined, ``paused`` after :meth:`pause`, else ``stopped``."""
        container = _container(handle)
        if not container.alive:
            return SandboxStatus.STOPPED
        # Gym 0.4 has no such state.
        return getattr(SandboxStatus, "PAUSED", SandboxStatus.UNKNOWN) if container.paused else SandboxStatus.RUNNING

    async def pause(self, handle: SandboxHandle) -> None:
        """Stop everything that runs in the sandbox; its memory stays in use."""
        await _container(handle).pause()

    async def resume(self, handle: SandboxHandle) -> None:
        """Let everything in the sandbox go on."""
        await _container(handle).resume()

    async def close(self, handle: SandboxHandle) -> None:
        """End the sandbox; returns when nothing of it is left. May be called again."""
        await _container(handle).close()

    async def aclose(self) -> None:
        """Nothing: the supervisor is the process's, not this object's, and goes with the process."""

    async def shell(self, handle: SandboxHandle, *, env: Mapping[str, str] | None = None) -> Shell:
        """A persistent shell in the sandbox's working folder, the caller's to close; see :class:`.shell.Shell`.

        Raises:
            InfrastructureError: the image has no bash, or it does not answer.
        """
        return await Shell.start(_container(handle), env=env)

    async def kernel(self, handle: SandboxHandle) -> Kernel:
        """An IPython kernel in the sandbox's working folder, the caller's to close; see :class:`.kernel.Kernel`.

        Raises:
            InfrastructureError: the image has no ipykernel, or it does not answer.
        """
        return await Kernel.start(_container(handle))

    async def serialize_handle(self, handle: SandboxHandle, *, scope: str | None = None) -> dict[str, Any]:
        """What another process of the same user on this machine needs to :meth:`connect`. Holds no secret but the
        sandbox's own variables."""
        return {
            "provider": self.name,
            "hostname": socket.gethostname(),
            "uid": os.geteuid(),
            **_container(handle).describe(),
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

    async def create_pty(self, handle: SandboxHandle, spec: Any) -> Terminal:
        """Open a terminal, by Gym's ``SandboxPtySpec``; see :class:`.terminal.Terminal`."""
        container = _container(handle)
        _check_user(spec.user, container.spec)
        return await Terminal.open(
            container,
            spec.command,
            cwd=spec.cwd,
            env=spec.env,
            size=(spec.rows, spec.cols) if spec.pty else None,
        )

    async def attach_pty(
        self, handle: SandboxHandle, session_id: str, *, takeover: bool = True, since: int | None = None
    ) -> Terminal:
        """Hold a session that was opened before, here or by another process; see :meth:`.terminal.Terminal.attach`."""
        return await Terminal.attach(_container(handle), session_id, takeover=takeover, since=since)

    async def endpoint(self, handle: SandboxHandle, port: int) -> Any:
        """Where a port of the sandbox's own loopback device can be reached, as Gym's ``SandboxEndpoint``.

        A port of this machine's loopback device that is open for as long as the sandbox lives; see :mod:`.relay`.
        """
        if not 1 <= port <= 65535:
            raise CallerError(f"must be between 1 and 65535, not {port}", field="port")
        return base.SandboxEndpoint(f"http://{relay.HOST}:{relay.expose(_container(handle), port)}")

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
            yield _container(handle)
        finally:
            await self.close(handle)

    async def _start(self, spec: ContainerSpec) -> Container:
        assert self._runtime
        async with self._images.start(spec.image, self._runtime) as start:
            held = [start.hold.descriptor] if start.hold else []
            async with StartGates.of(state_root()).start(start.path, self._settings.concurrent_starts):
                return await Container.start(replace(spec, image=start.path), self._runtime, held)

    async def _take(self, spec: ContainerSpec) -> Container:
        pools = _pools.setdefault(asyncio.get_running_loop(), {})
        key = repr(replace(spec, env={}, workdir=None))
        if key not in pools:
            pools[key] = WarmPool(spec, self._settings.warm, self._start)
        return await pools[key].take(spec.env, spec.workdir)

    def _container_spec(self, spec: SandboxSpec) -> ContainerSpec:
        options = dict(spec.provider_options)
        _refuse_unknown(options, set(SPEC_OPTIONS), "provider_options")
        resources = spec.resources
        if resources.gpu:
            raise CallerError("this provider gives sandboxes no GPU", field="resources.gpu")
        wanted = ContainerSpec(
            # Known last, since it may have to be pulled.
            image=Path(),
            env=dict(spec.env),
            workdir=spec.workdir,
            ttl_s=spec.ttl_s,
            **{**self._defaults, **options},
        )
        if resources.cpu:
            wanted = replace(wanted, cpus=float(resources.cpu))
        if resources.memory_mib:
            wanted = replace(wanted, memory_mib=resources.memory_mib)
        if resources.disk_gib:
            wanted = replace(wanted, disk_mib=resources.disk_gib << 10)
        if spec.ready_timeout_s:
            wanted = replace(wanted, start_timeout_s=float(spec.ready_timeout_s))
        return wanted


def _container(handle: SandboxHandle) -> Container:
    container = handle.raw
    if not isinstance(container, Container):
        raise CallerError(f"{handle.sandbox_id} is not a sandbox of this provider", field="handle")
    return container


def _check_user(user: str | int | None, spec: ContainerSpec) -> None:
    own: tuple[str | int | None, ...] = (None, "root", 0, "0") if spec.root else (None, 1000, "1000")
    if user not in own:
        raise CallerError(f"there is no {user!r} in this sandbox, only {own[1]!r}", field="user")


def _refuse_unknown(options: Mapping[str, Any], known: set[str], what: str) -> None:
    if unknown := sorted(set(options) - known):
        raise CallerError(f"unknown {what} {', '.join(unknown)}; there are {', '.join(sorted(known))}")
