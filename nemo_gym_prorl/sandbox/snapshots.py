# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Snapshots: archives of a sandbox's writable layer, from which other sandboxes start.

A snapshot contains files only: no processes, no memory and no files of bind mounts. A snapshot can be restored only
over its own image. A snapshot outlives the sandbox, the server and a reboot, so its owner has to delete the snapshot.

If a snapshot cannot be taken because of files that the agent wrote, the error's origin is the agent. If a snapshot
cannot be restored, the error's origin is the caller.

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
from collections.abc import Callable
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
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxRefused, SnapshotRequest
from nemo_gym_prorl.sandbox.supervisor.state_dir import state_root


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

_NOT_AGENT_ERRNOS = (*MACHINE_ERRNOS, errno.EOPNOTSUPP)
"""Errors (``errno``) that the agent does not cause: of the machine, and of a start method without snapshots."""

MAX_HEADER_BYTES = 1 << 16
"""Maximum bytes of a snapshot's header, which has one path, one identity and two flags."""


@dataclass(frozen=True, slots=True)
class SnapshotBase:
    """Properties of a sandbox that must be the same in each sandbox restored from its snapshot.

    ``identity`` is that of the image, and changes when the image at the same path is replaced.
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
            CallerError: the image's identity, ``root`` or ``users`` differ.
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
    """Path of a snapshot's archive, and the base from the archive's header."""

    path: Path
    base: SnapshotBase


def default_folder() -> Path:
    """Return the default folder of snapshots, in :func:`.state_root`."""
    return state_root() / "snapshots"


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """Result of taking a snapshot.

    Attributes:
        name: file name of the snapshot in its folder.
        size: size of the file in bytes.
        programs: number of running programs that the supervisor did not start, such as background jobs.
    """

    name: str
    size: int
    programs: int


async def take(container: Container, folder: Path, name: str, *, quiescent: bool = False) -> SnapshotInfo:
    """Pause a sandbox's programs, archive its writable layer in ``folder``, and resume the programs.

    Args:
        folder: folder of snapshots; created if missing.
        name: name of the snapshot; a random suffix makes the file name unique.
        quiescent: as in :class:`.SnapshotRequest`.

    Raises:
        CallerError: the folder cannot be created, or no file can be created in the folder.
        AgentError: the sandbox has files that cannot be archived: too many bytes, or paths that cannot be opened.
        SandboxRefused: the sandbox cannot be paused or read, or the machine's disk is full.
        SandboxLost: the sandbox ended.
    """
    stem = re.sub(r"[^A-Za-z0-9_.-]", "-", name).lstrip("-._")[:80] or "snapshot"
    snapshot = f"{stem}-{secrets.token_hex(6)}"
    fresh = folder / f".{snapshot}"
    base = await asyncio.to_thread(SnapshotBase.of, container.image, container.spec)
    target = await asyncio.to_thread(_open_fresh, fresh)
    try:
        header = json.dumps(asdict(base))
        try:
            reply, _files = await container.ask(SnapshotRequest(container.name, header, quiescent), [target])
        except SandboxRefused as error:
            if error.number and error.number not in _NOT_AGENT_ERRNOS:
                await container.check()  # the end of a sandbox makes its files unreadable, too
                raise AgentError(f"no snapshot can be taken: {error.reason}") from error
            raise
        await asyncio.to_thread(fresh.rename, folder / snapshot)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    finally:
        os.close(target)
    return SnapshotInfo(snapshot, reply["bytes"], reply["programs"])


def is_named(snapshot: str, stem: str) -> bool:
    """Return whether a snapshot's file name is ``stem`` with the random suffix of :func:`take`."""
    return re.fullmatch(rf"{re.escape(stem)}-[0-9a-f]{{12}}", snapshot) is not None


def sweep(folder: Path, stem: str, age_s: float) -> None:
    """Delete snapshots taken as ``stem``, also unfinished ones, that were neither taken nor renewed in the last
    ``age_s`` seconds."""
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
    """Parse the header of an untrusted snapshot file.

    Raises:
        CallerError: the file cannot be read or is not a snapshot.
    """
    try:
        with path.open("rb") as file:
            # Checked before tarfile opens the archive, since tarfile reads a header of any size into memory.
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
    """Folder from the provider's option ``snapshots``; ``None`` for :func:`default_folder`."""

    async def snapshot(self, handle: SandboxHandle, name: str = "snapshot") -> str:
        """Pause the sandbox, take a snapshot, and return its id, the option ``snapshot_id`` of ``create``."""
        return (await take(container_of(handle), self._snapshots_folder(), name)).name

    async def checkpoint(self, handle: SandboxHandle, name: str) -> SnapshotInfo:
        """Take a snapshot; the sandbox is paused only if programs other than idle shells run."""
        return await take(container_of(handle), self._snapshots_folder(), name, quiescent=True)

    async def delete_old_snapshots(self, name: str, age_s: float) -> None:
        """Delete snapshots taken as ``name`` that were neither taken nor renewed in the last ``age_s`` seconds."""
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
        """Return the snapshot that a specification names in place of an image; ``None`` without ``snapshot_id``.

        Raises:
            CallerError: the snapshot does not exist or is invalid, or the specification also names an image.
        """
        if snapshot_id is None:
            return None
        if image:
            raise CallerError("a snapshot replaces the image; give only one of both", field=SNAPSHOT)
        return read(find(self._snapshots_folder(), snapshot_id))

    def _snapshots_folder(self) -> Path:
        return Path(self._snapshots_setting) if self._snapshots_setting else default_folder()
