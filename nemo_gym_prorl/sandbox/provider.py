# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""NeMo Gym's ``SandboxProvider`` named ``singularity``: translates Gym's calls to :mod:`.container`.

Images are pulled and unpacked in threads, once for all callers that wait. If a caller is cancelled, the thread
continues for the next caller. Threads end with the process, and an incomplete image never becomes visible.

Gym detects optional capabilities by method names. Snapshots are in :mod:`.snapshots`, all other capabilities here.

Results of a command, as ``error_type`` and exit code:

- ``None`` and the command's own exit code: the command ran.
- ``timeout`` and 124, with the output so far: the command was killed at its time limit.
- ``sandbox`` and 125, with the reason as stderr: the command could not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
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
from nemo_gym_prorl.network_access import HOST, POLICY_PORT
from nemo_gym_prorl.sandbox.container import Container, container_of
from nemo_gym_prorl.sandbox.images.builder import default_image_path
from nemo_gym_prorl.sandbox.images.pull import Puller
from nemo_gym_prorl.sandbox.images.reference import Reference, RegistryImage, parse
from nemo_gym_prorl.sandbox.images.store import ImageStore, OpenImage
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime, require_runtime
from nemo_gym_prorl.sandbox.sessions.kernel import Kernel
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.snapshots import Snapshot, SnapshotSupport
from nemo_gym_prorl.sandbox.spec import SNAPSHOT, container_spec, provider_options
from nemo_gym_prorl.sandbox.supervisor.protocol import EgressRequest, PolicyRequest, SandboxLost, SandboxRefused


_running: dict[str, Future[None]] = {}
"""Pulls by image URI, and unpacks by image path, in progress; callers wait for the future."""

_job_limit = threading.Semaphore(4)
"""Limits concurrent pulls and unpacks of the process, which share one network and disk."""


class AsyncImageStore:
    """Pull, unpack and open images without blocking the event loop."""

    def __init__(self, store: ImageStore, *, pull: bool = True) -> None:
        self._store = store
        self._pull = pull
        self._default: Path | None = None

    async def locate(self, wanted: Reference | None, runtime: Runtime) -> Path:
        """Return the path of an image, pulled if missing; the default image if ``wanted`` is ``None``.

        Raises:
            CallerError: the image does not exist, or is missing and the provider may not pull.
            InfrastructureError: the image can't be pulled.
        """
        if wanted is None:
            return await asyncio.to_thread(self._find_default)
        path = await asyncio.to_thread(self._store.locate, wanted)
        if path is not None:
            return path
        assert isinstance(wanted, RegistryImage)
        if not self._pull:
            raise CallerError(f"{wanted.uri} is not pulled yet: run 'prorl image pull {wanted.uri}'", field="image")
        await _once(wanted.uri, lambda: Puller(self._store, runtime).pull(wanted))
        return await self.locate(wanted, runtime)

    async def fetch(self, wanted: Reference | None, runtime: Runtime) -> None:
        """Pull and unpack an image, so that a later start does not have to wait.

        Raises:
            CallerError, InfrastructureError: as :meth:`locate` and :meth:`.store.ImageStore.open`.
        """
        await self._unpack_once(await self.locate(wanted, runtime), runtime)

    async def _unpack_once(self, image: Path, runtime: Runtime) -> None:
        if not await asyncio.to_thread(self._store.is_ready, image):
            await _once(str(image), lambda: self._store.open(image, runtime).release())

    def _find_default(self) -> Path:
        # Cached, since computing the path reads files.
        if not self._default or not self._default.is_dir():
            self._default = default_image_path()
            if not self._default.is_dir():
                raise CallerError("the default image is not built: run 'prorl setup'", field="image")
        return self._default

    @asynccontextmanager
    async def start(self, image: Path, runtime: Runtime) -> AsyncIterator[OpenImage]:
        """Open the root folder from which a sandbox of ``image`` starts. The image's lock prevents the folder's
        removal until the block ends, and until every process with a copy of the lock's descriptor has closed the copy.

        Raises:
            CallerError, InfrastructureError: as :meth:`.store.ImageStore.open`.
        """
        await self._unpack_once(image, runtime)
        opening = asyncio.ensure_future(asyncio.to_thread(self._store.open, image, runtime))
        try:
            start = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The thread cannot be cancelled, and will take the lock; release the lock afterwards.
            opening.add_done_callback(_release_opened)
            raise
        try:
            yield start
        finally:
            start.release()


async def _once(what: str, work: Callable[[], object]) -> None:
    """Run ``work`` in a thread, or wait for the same work in progress; raise its error in both cases."""
    future = _running.get(what)
    if future is None:
        future = _running[what] = Future()
        # A running future cannot be cancelled: cancelling one caller must not cancel the work of others.
        future.set_running_or_notify_cancel()
        # A daemon thread: asyncio's executor has few threads, and the interpreter waits for them at exit.
        threading.Thread(target=_run_job, args=(what, work, future), name=f"image {what}", daemon=True).start()
    await asyncio.wrap_future(future)


def _run_job(what: str, work: Callable[[], object], future: Future[None]) -> None:
    error: Exception | None = None
    try:
        with _job_limit:
            work()
    except Exception as caught:
        error = caught
    del _running[what]
    if error:
        future.set_exception(error)
    else:
        future.set_result(None)


def _release_opened(opening: asyncio.Future[OpenImage]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().release()


TIMED_OUT = 124  # as timeout(1)
NOT_RUN = 125  # as timeout(1) if timeout itself fails


class SandboxStartError(InfrastructureError, SandboxCreateError):  # type: ignore[misc]  # Gym has no types
    """A sandbox did not start; an error of both Gym and this package. ``field`` names the wrong field, if any."""


class SingularityProvider(SnapshotSupport):
    """Gym's sandbox provider over rootless containers.

    Args:
        options: fields of :class:`.spec.ProviderOptions`.

    Raises:
        CallerError: an option is unknown or wrong; the message lists the options.
    """

    name = "singularity"

    def __init__(self, **options: Any) -> None:
        self._settings = provider_options(options)
        self._runtime: Runtime | None = None
        self._snapshots_setting = self._settings.snapshots
        self._images = AsyncImageStore(ImageStore(), pull=self._settings.pull)

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Start a sandbox, and its ``entrypoint`` if the specification has one.

        Raises:
            SandboxStartError: the specification is wrong, or the sandbox did not start; no process or file remains.
        """
        with _start_errors():
            wanted = container_spec(spec, self._settings)
            snapshot, image = await self._base(spec.provider_options.get(SNAPSHOT), spec.image)
            runtime = await self._require_runtime()
            located = await self._images.locate(image, runtime)
            if snapshot:
                await asyncio.to_thread(snapshot.base.check, replace(wanted, image=located))
            async with self._images.start(located, runtime) as start:
                held_files = [start.lock.descriptor] if start.lock else []
                path = snapshot.path if snapshot else None
                container = await Container.start(replace(wanted, image=start.path), runtime, held_files, path)
            # Not start.path: that may be an unpacked copy, which the image store may evict.
            container.image = located
            try:
                if spec.entrypoint:
                    await self._start_entrypoint(container, spec.entrypoint)
            except BaseException:
                await container.close()
                raise
        return SandboxHandle(sandbox_id=container.name, provider_name=self.name, raw=container)

    async def fetch_image(self, spec: SandboxSpec) -> None:
        """Pull and unpack the image of a specification before its sandbox starts, since this may take minutes.

        Raises:
            SandboxStartError: the specification is wrong, or its image cannot be pulled or unpacked.
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
        """Run a command with ``/bin/sh``; the module's docstring lists the results.

        Args:
            cwd, env, user: as for :meth:`.Container.spawn`.
            timeout_s: time limit in seconds; ``None`` for the option ``exec_timeout_s``.

        Raises:
            CallerError: the handle belongs to another provider.
            AgentError: programs in the sandbox have ended the sandbox.
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
        """Copy a file of the host into the sandbox; see :meth:`.FileTransfer.upload`."""
        await container_of(handle).files.upload(Path(source_path), target_path)

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        """Copy a file of the sandbox to the host; see :meth:`.FileTransfer.download`."""
        await container_of(handle).files.download(source_path, Path(target_path))

    async def read_file(self, handle: SandboxHandle, path: str, *, limit: int) -> bytes:
        """Read a regular file in the sandbox into memory; see :meth:`.FileTransfer.read_file`."""
        return await container_of(handle).files.read_file(path, limit)

    async def write_file(self, handle: SandboxHandle, path: str, data: bytes) -> bool:
        """Write a file in the sandbox from memory; see :meth:`.FileTransfer.write_file`."""
        return await container_of(handle).files.write_file(path, data)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """Return ``running``, or ``stopped`` once the sandbox has ended."""
        return SandboxStatus.RUNNING if container_of(handle).alive else SandboxStatus.STOPPED

    def published(self, handle: SandboxHandle) -> tuple[str, str]:
        """Return working folder and user that the image's registry configuration names; each empty if not named."""
        return container_of(handle).published

    async def check(self, handle: SandboxHandle) -> list[str]:
        """Return the limits that the sandbox has reached; see :meth:`.container.Container.check`.

        Raises:
            AgentError: programs in the sandbox have ended the sandbox.
            InfrastructureError: the machine has ended the sandbox or a process in the sandbox, or has a full disk.
        """
        return await container_of(handle).check()

    async def has_room(self, handle: SandboxHandle) -> bool:
        """Return whether the host's disk with the files of all sandboxes has free space."""
        return await container_of(handle).has_room()

    async def egress(self, handle: SandboxHandle) -> list[dict[str, Any]]:
        """Return the hosts that the sandbox has requested from the proxy: fields of :class:`.egress.proxy.HostUse`."""
        message, _files = await container_of(handle).ask(EgressRequest(container_of(handle).name))
        return list(message["hosts"])

    async def open_policy(self, handle: SandboxHandle, url: str, key: str) -> str:
        """Forward :data:`.POLICY_PORT` in the sandbox to the policy at ``url`` with ``key``; return the port's URL.

        Raises:
            CallerError: ``url`` has a path or no host, or the sandbox shares the host's network; names the field.
            SandboxRefused: a program in the sandbox uses the port.
        """
        container = container_of(handle)
        if container.spec.network == HOST:
            raise CallerError("must not be host: all programs of the machine would reach the policy", field="network")
        if not re.fullmatch(r"https?://[^/?#@\s]+/?", url):
            raise CallerError(f"{url!r} must be http://HOST:PORT or https://HOST:PORT, without a path", field="url")
        await container.ask(PolicyRequest(container.name, url, key))
        return f"http://127.0.0.1:{POLICY_PORT}"

    async def close_policy(self, handle: SandboxHandle) -> None:
        """Refuse new calls at the port of :meth:`open_policy`; calls in flight continue. Idempotent."""
        with contextlib.suppress(SandboxLost, AgentError):  # a sandbox that has ended has no open port
            await container_of(handle).ask(PolicyRequest(container_of(handle).name))

    async def close(self, handle: SandboxHandle) -> None:
        """End the sandbox and wait until its processes and files are gone. Idempotent."""
        await container_of(handle).close()

    async def aclose(self) -> None:
        """Do nothing: the supervisor belongs to the process and not to a provider, and ends with the process."""

    async def shell(
        self, handle: SandboxHandle, *, env: Mapping[str, str] | None = None, user: str | int | None = None
    ) -> Shell:
        """Start a persistent shell in the sandbox's working folder; the caller closes the shell. See :class:`.Shell`.

        Raises:
            InfrastructureError: the image has no bash, or bash does not answer.
        """
        return await Shell.start(container_of(handle), env=env, user=user)

    async def kernel(self, handle: SandboxHandle) -> Kernel:
        """Start an IPython kernel in the sandbox's working folder; the caller closes the kernel. See :class:`.Kernel`.

        Raises:
            InfrastructureError: the image has no IPython, or the kernel does not answer.
        """
        return await Kernel.start(container_of(handle))

    async def serialize_handle(self, handle: SandboxHandle, *, scope: str | None = None) -> dict[str, Any]:
        """Return a description with which another process of the same user and machine can :meth:`connect`. The
        description has no secrets except the sandbox's environment variables."""
        return {
            "provider": self.name,
            "hostname": socket.gethostname(),
            "uid": os.geteuid(),
            **container_of(handle).describe(),
        }

    async def connect(self, descriptor: Mapping[str, Any]) -> SandboxHandle:
        """Return a handle on a sandbox of another process, by the description that its :meth:`serialize_handle`
        returned. The sandbox still ends with the process that created the sandbox.

        Raises:
            ValueError: the description is from another provider, machine or user.
            SandboxLost: the sandbox has ended.
        """
        expected = {"provider": self.name, "hostname": socket.gethostname(), "uid": os.geteuid()}
        for key, value in expected.items():
            if descriptor.get(key) != value:
                raise ValueError(f"{key} of the descriptor must be {value!r} here, not {descriptor.get(key)!r}")
        container = await Container.attach(descriptor)
        return SandboxHandle(sandbox_id=container.name, provider_name=self.name, raw=container)

    async def _base(self, snapshot_id: str | None, image: str | None) -> tuple[Snapshot | None, Reference | None]:
        """Return the snapshot and the image from which a sandbox starts; an image ``None`` is the default image."""
        snapshot = await asyncio.to_thread(self.snapshot_to_restore, snapshot_id, image)
        named = (snapshot.base.image if snapshot else image) or self._settings.image
        return snapshot, parse(named) if named else None

    async def _require_runtime(self) -> Runtime:
        if self._runtime is None:
            self._runtime = await asyncio.to_thread(require_runtime)
        return self._runtime

    async def _start_entrypoint(self, container: Container, argv: Sequence[str]) -> None:
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        try:
            await container.spawn(argv, [null] * 3)
        except CallerError as error:
            raise CallerError(f"entrypoint: {error.reason}", field="entrypoint") from error
        finally:
            os.close(null)


@contextlib.contextmanager
def _start_errors() -> Iterator[None]:
    try:
        yield
    except RolloutError as error:
        raise SandboxStartError(error.reason, kind=error.kind, field=error.field) from error
