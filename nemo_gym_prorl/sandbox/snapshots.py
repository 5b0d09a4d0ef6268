# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Snapshots: archives of a sandbox's writable layer, from which other sandboxes start.

A snapshot contains files only: no processes, no memory and no mounts of the host. A snapshot can be restored only
over its own image. A snapshot outlives the sandbox, the server and a reboot, so its owner has to delete it.

Failing to take a snapshot is the agent's failure if the agent wrote files that cannot be archived. Failing to restore
a snapshot is the caller's failure.

Gym detects the capability ``SupportsSandboxSnapshot`` by method names. A Gym without that capability ignores the
methods of :class:`SnapshotSupport`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import json
import os
import re
import secrets
import tarfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Self

from nemo_gym.sandbox.providers.base import SandboxHandle
from pydantic import Strict, TypeAdapter

from nemo_gym_prorl.failures import MACHINE_ERRNOS, AgentError, CallerError
from nemo_gym_prorl.sandbox.container import Container, container_of
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.isolation.layer_archive import HEADER
from nemo_gym_prorl.sandbox.spec import SNAPSHOT, ContainerSpec
from nemo_gym_prorl.sandbox.supervisor.connection import Message
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxRefused, SnapshotRequest
from nemo_gym_prorl.sandbox.supervisor.state_dir import state_root


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


_NOT_THE_AGENTS = (*MACHINE_ERRNOS, errno.EOPNOTSUPP)
"""Errors of taking a snapshot that are not the agent's: of the machine, and of the start method (``EOPNOTSUPP``)."""

MAX_HEADER_BYTES = 1 << 16
"""Bytes of the header; it has one path, one identity and two flags."""


@dataclass(frozen=True, slots=True)
class SnapshotBase:
    """The image and the users that a snapshot depends on.

    Attributes:
        image: path of the image.
        identity: identifies the image; changes when the image at the same path is replaced.
        root: whether the sandbox ran as root.
        users: whether the sandbox had several user ids.
    """

    image: Annotated[str, Strict()]
    identity: Annotated[str, Strict()]
    root: Annotated[bool, Strict()]
    users: Annotated[bool, Strict()]

    @classmethod
    def of(cls, image: Path, spec: ContainerSpec) -> Self:
        """Return the base of a sandbox of ``image`` with the specification ``spec``."""
        return cls(str(image), ImageStore().identity(image), spec.root, spec.users)

    def check(self, spec: ContainerSpec) -> None:
        """Check that a sandbox of ``spec`` can be restored from a snapshot with this base.

        Raises:
            CallerError: the image, root or users differ; names both.
        """
        other = SnapshotBase.of(spec.image, spec)
        if self.identity != other.identity:
            same = self.image == other.image
            reason = f"the image at {self.image} was changed since" if same else f"this sandbox is of {other.image}"
            raise CallerError(f"the snapshot was taken over {self.image}; {reason}", field=SNAPSHOT)
        for name in ("root", "users"):
            if getattr(self, name) != getattr(other, name):
                was = str(getattr(self, name)).lower()
                raise CallerError(f"the snapshot is of a sandbox with {name}: {was}; ask for the same", field=SNAPSHOT)


_BASE = TypeAdapter(SnapshotBase)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A stored snapshot."""

    path: Path
    base: SnapshotBase


def default_folder() -> Path:
    """Return the default folder of snapshots, beside the sandboxes on this machine's disk."""
    return state_root() / "snapshots"


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """Result of taking a snapshot.

    Attributes:
        name: file name of the snapshot in its folder.
        size: bytes of the file.
        programs: programs running in the sandbox that the supervisor has not started, such as background jobs.
    """

    name: str
    size: int
    programs: int


async def take(container: Container, folder: Path, name: str, *, quiescent: bool = False) -> SnapshotInfo:
    """Archive the writable layer of a sandbox in ``folder``. The sandbox is paused meanwhile.

    Args:
        folder: folder of snapshots; made if missing.
        name: stem of the snapshot's file name.
        quiescent: skip the pause if only idle shells run in the sandbox, since pausing may take longer than copying.

    Raises:
        CallerError: the folder cannot hold snapshots.
        AgentError: the sandbox has files that cannot be archived: too many bytes, or paths that cannot be opened.
        SandboxRefused: the sandbox cannot be paused or read, or the machine has no room.
    """
    stem = re.sub(r"[^A-Za-z0-9_.-]", "-", name).lstrip("-._")[:80] or "snapshot"
    snapshot = f"{stem}-{secrets.token_hex(6)}"
    fresh = folder / f".{snapshot}"
    base = await asyncio.to_thread(SnapshotBase.of, container.image, container.spec)
    target = await asyncio.to_thread(_open_fresh, fresh)
    try:
        header = json.dumps(asdict(base))
        try:
            reply: Message = {"busy": True}
            if quiescent and not container.paused:
                reply, _files = await container.ask(SnapshotRequest(container.name, header, quiescent=True), [target])
            if "busy" in reply:
                async with _paused(container):
                    reply, _files = await container.ask(SnapshotRequest(container.name, header), [target])
        except SandboxRefused as error:
            if error.number and error.number not in _NOT_THE_AGENTS:
                raise AgentError(f"no snapshot can be taken: {error.reason}") from error
            raise
        await asyncio.to_thread(fresh.rename, folder / snapshot)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    finally:
        os.close(target)
    return SnapshotInfo(snapshot, reply["bytes"], reply["programs"])


@contextlib.asynccontextmanager
async def _paused(container: Container) -> AsyncIterator[None]:
    was_paused = container.paused
    if not was_paused:
        await container.pause()
    try:
        yield
    finally:
        if not was_paused:
            await container.resume()


def is_named(snapshot: str, stem: str) -> bool:
    """Return whether a snapshot was taken under exactly the name ``stem``."""
    return re.fullmatch(rf"{re.escape(stem)}-[0-9a-f]{{12}}", snapshot) is not None


def sweep(folder: Path, stem: str, age_s: float) -> None:
    """Delete the snapshots of a name that were taken or renewed more than ``age_s`` seconds ago."""
    horizon = time.time() - age_s
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            if is_named(path.name.removeprefix("."), stem) and path.stat().st_mtime < horizon:
                path.unlink()


def _open_fresh(path: Path) -> int:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in MACHINE_ERRNOS:
            raise
        raise CallerError(f"{path.parent} can't hold snapshots: {error.strerror}", field="snapshots") from error


def find(folder: Path, snapshot: str) -> Path:
    """Return the path of a snapshot.

    Raises:
        CallerError: the folder has no snapshot of that name.
    """
    if not isinstance(snapshot, str) or not _NAME.fullmatch(snapshot) or not (folder / snapshot).is_file():
        raise CallerError(f"there is no snapshot {snapshot!r} in {folder}", field=SNAPSHOT)
    return folder / snapshot


def read(path: Path) -> Snapshot:
    """Return the snapshot of a file, which is untrusted.

    Raises:
        CallerError: the file cannot be read or is not a snapshot.
    """
    try:
        with path.open("rb") as file:
            # Checked before tarfile opens the archive, since tarfile reads a header of any size.
            begin = tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), "utf-8", "surrogateescape")
            if begin.type != tarfile.XGLTYPE or begin.size > MAX_HEADER_BYTES:
                raise ValueError("not a snapshot's header")
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as archive:
                header = base64.b64decode(archive.pax_headers[HEADER], validate=True)
        return Snapshot(path, _BASE.validate_json(header))
    except OSError as error:
        raise CallerError(f"{path} can't be read: {error.strerror}", field=SNAPSHOT) from error
    except (tarfile.TarError, EOFError, KeyError, ValueError) as error:
        raise CallerError(f"{path} is no snapshot of a sandbox", field=SNAPSHOT) from error


class SnapshotSupport:
    """Snapshot methods of :class:`.provider.SingularityProvider`."""

    _snapshots_setting: str | None
    """The option ``snapshots``; ``None`` for :func:`default_folder`."""

    async def snapshot(self, handle: SandboxHandle, name: str = "snapshot") -> str:
        """Take a snapshot and return its id, which ``create`` accepts as ``snapshot_id`` in place of an image.

        The sandbox is paused meanwhile.
        """
        return (await take(container_of(handle), self._snapshots_folder(), name)).name

    async def checkpoint(self, handle: SandboxHandle, name: str) -> SnapshotInfo:
        """Take a snapshot of a sandbox with idle shells; the sandbox is paused only if other programs run."""
        return await take(container_of(handle), self._snapshots_folder(), name, quiescent=True)

    async def delete_old_snapshots(self, name: str, age_s: float) -> None:
        """Delete the snapshots of a name that were taken or renewed more than ``age_s`` seconds ago."""
        await asyncio.to_thread(sweep, self._snapshots_folder(), name, age_s)

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Delete a snapshot. Idempotent."""
        await self._with_snapshot(snapshot_id, lambda path: path.unlink(missing_ok=True))

    async def renew_snapshot(self, snapshot_id: str) -> None:
        """Reset the age of a snapshot for :meth:`delete_old_snapshots`, if the snapshot exists."""
        await self._with_snapshot(snapshot_id, os.utime)

    async def _with_snapshot(self, snapshot_id: str, work: Callable[[Path], None]) -> None:
        with contextlib.suppress(CallerError, FileNotFoundError):
            path = await asyncio.to_thread(find, self._snapshots_folder(), snapshot_id)
            await asyncio.to_thread(work, path)

    def snapshot_to_restore(self, snapshot_id: str | None, image: str | None) -> Snapshot | None:
        """Return the snapshot that a specification names in place of an image.

        Raises:
            CallerError: the snapshot does not exist, or the specification also names an image.
        """
        if snapshot_id is None:
            return None
        if image:
            raise CallerError("a snapshot replaces the image; give only one of both", field=SNAPSHOT)
        return read(find(self._snapshots_folder(), snapshot_id))

    def _snapshots_folder(self) -> Path:
        return Path(self._snapshots_setting) if self._snapshots_setting else default_folder()
