# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Snapshots of sandboxes: files that hold what a sandbox has written, from which other sandboxes can go on.

A snapshot has files only: no processes, no memory, nothing that is mounted from the host. It belongs to the image that
it was taken over, and is restored over no other. It outlives the sandbox, the server and the machine's next start, so
whoever takes one has to delete it.

Failing to take a snapshot counts as the agent's failure where the agent wrote what can't be kept. Failing to restore
one is the caller's, who named it.

Gym finds the capability ``SupportsSandboxSnapshot`` by its methods, so on a Gym that does not know it
:class:`SnapshotSupport` only adds methods.
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

from nemo_gym_prorl.failures import OF_THE_MACHINE, AgentError, CallerError
from nemo_gym_prorl.sandbox.container import Container, container_of
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.isolation.layer_archive import HEADER
from nemo_gym_prorl.sandbox.spec import SNAPSHOT, ContainerSpec
from nemo_gym_prorl.sandbox.supervisor.connection import Message
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxRefused, SnapshotRequest
from nemo_gym_prorl.sandbox.supervisor.state_dir import state_root


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


_NOT_THE_AGENTS = (*OF_THE_MACHINE, errno.EOPNOTSUPP)
"""Why none can be taken: all else is of names and files of those inside, which others may have changed meanwhile. The
last is of how the sandbox was made."""

LONGEST_HEADER = 1 << 16
"""Bytes at the beginning that say what it is of."""


@dataclass(frozen=True, slots=True)
class Base:
    """What a snapshot was taken of.

    Attributes:
        image: path of the image that it belongs to.
        identity: what tells that image from any other, and from what lay at its path at other times.
        root: whether there was root inside.
        users: whether there were several users.
    """

    image: Annotated[str, Strict()]
    identity: Annotated[str, Strict()]
    root: Annotated[bool, Strict()]
    users: Annotated[bool, Strict()]

    @classmethod
    def of(cls, image: Path, spec: ContainerSpec) -> Self:
        """Return the base of a sandbox of ``image`` that was ordered as ``spec``."""
        return cls(str(image), ImageStore().identity(image), spec.root, spec.users)

    def check(self, spec: ContainerSpec) -> None:
        """Refuse to go on from here in a sandbox of another base.

        Raises:
            CallerError: the sandbox would be no continuation; names both.
        """
        other = Base.of(spec.image, spec)
        if self.identity != other.identity:
            same = self.image == other.image
            reason = f"the image at {self.image} was changed since" if same else f"this sandbox is of {other.image}"
            raise CallerError(f"the snapshot was taken over {self.image}; {reason}", field=SNAPSHOT)
        for name in ("root", "users"):
            if getattr(self, name) != getattr(other, name):
                was = str(getattr(self, name)).lower()
                raise CallerError(f"the snapshot is of a sandbox with {name}: {was}; ask for the same", field=SNAPSHOT)


_BASE = TypeAdapter(Base)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot, with what it was taken of.

    Attributes:
        path: where it lies.
        base: what of.
    """

    path: Path
    base: Base


def default_folder() -> Path:
    """Where they are kept if nobody says otherwise: beside the sandboxes, on this machine's disk."""
    return state_root() / "snapshots"


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A snapshot that was just taken.

    Attributes:
        name: in its folder.
        size: of its file, in bytes.
        programs: how many ran in the sandbox then that nobody outside has started.
    """

    name: str
    size: int
    programs: int


async def take(container: Container, folder: Path, name: str, *, quiescent: bool = False) -> SnapshotInfo:
    """Write down in ``folder`` what a sandbox has written; it stands still meanwhile. Who has nothing running in it
    but shells that wait (``quiescent``) need not have it stopped, which takes longer than to copy what most write.

    Raises:
        CallerError: there can be no snapshots in that folder.
        AgentError: it has written what can't be kept: more than it may, or paths that nothing can open.
        SandboxRefused: the sandbox can't be stopped or read, or there is no room.
    """
    stem = re.sub(r"[^A-Za-z0-9_.-]", "-", name).lstrip("-._")[:80] or "snapshot"
    snapshot = f"{stem}-{secrets.token_hex(6)}"
    fresh = folder / f".{snapshot}"
    base = await asyncio.to_thread(Base.of, container.image, container.spec)
    target = await asyncio.to_thread(_open_fresh, fresh)
    try:
        header = json.dumps(asdict(base))
        try:
            answer: Message = {"busy": True}
            if quiescent and not container.paused:
                answer, _files = await container.ask(SnapshotRequest(container.name, header, quiescent=True), [target])
            if "busy" in answer:
                async with _standing_still(container):
                    answer, _files = await container.ask(SnapshotRequest(container.name, header), [target])
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
    return SnapshotInfo(snapshot, answer["bytes"], answer["programs"])


@contextlib.asynccontextmanager
async def _standing_still(container: Container) -> AsyncIterator[None]:
    was_paused = container.paused
    if not was_paused:
        await container.pause()
    try:
        yield
    finally:
        if not was_paused:
            await container.resume()


def is_named(snapshot: str, stem: str) -> bool:
    """Whether a snapshot was taken under exactly that name."""
    return re.fullmatch(rf"{re.escape(stem)}-[0-9a-f]{{12}}", snapshot) is not None


def sweep(folder: Path, stem: str, age_s: float) -> None:
    """Delete the snapshots of that name that were taken or renewed more than so many seconds ago."""
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
        if error.errno in OF_THE_MACHINE:
            raise
        raise CallerError(f"{path.parent} can hold none: {error.strerror}", field="snapshots") from error


def find(folder: Path, snapshot: str) -> Path:
    """Where the snapshot of that name lies.

    Raises:
        CallerError: there is none of that name.
    """
    if not isinstance(snapshot, str) or not _NAME.fullmatch(snapshot) or not (folder / snapshot).is_file():
        raise CallerError(f"there is no snapshot {snapshot!r} in {folder}", field=SNAPSHOT)
    return folder / snapshot


def read(path: Path) -> Snapshot:
    """The snapshot in a file.

    Raises:
        CallerError: it is no snapshot.
    """
    try:
        with path.open("rb") as file:
            # Such an archive begins with what its maker says, and tarfile would read that whatever its size.
            begin = tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), "utf-8", "surrogateescape")
            if begin.type != tarfile.XGLTYPE or begin.size > LONGEST_HEADER:
                raise ValueError("it begins otherwise")
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as archive:
                told = base64.b64decode(archive.pax_headers[HEADER], validate=True)
        return Snapshot(path, _BASE.validate_json(told))
    except OSError as error:
        raise CallerError(f"{path} can't be read: {error.strerror}", field=SNAPSHOT) from error
    except (tarfile.TarError, EOFError, KeyError, ValueError) as error:
        raise CallerError(f"{path} is no snapshot of a sandbox", field=SNAPSHOT) from error


class SnapshotSupport:
    """See the module; a part of :class:`.provider.SingularityProvider`."""

    _kept: str | None
    """Folder of snapshots, if not the usual one."""

    async def snapshot(self, handle: SandboxHandle, name: str = "snapshot") -> str:
        """Keep what the sandbox has written; it stands still meanwhile. ``create`` takes the result as the option
        ``snapshot_id``, in place of an image; see :mod:`.snapshots`."""
        return (await take(container_of(handle), self._snapshots_folder(), name)).name

    async def checkpoint(self, handle: SandboxHandle, name: str) -> SnapshotInfo:
        """As :meth:`snapshot`, of one in which nobody has anything running but a shell that waits, unless that left
        something in the background; and what there is to tell of it."""
        return await take(container_of(handle), self._snapshots_folder(), name, quiescent=True)

    async def delete_old_snapshots(self, name: str, age_s: float) -> None:
        """Delete the snapshots that were taken under that name, or renewed, more than so many seconds ago."""
        await asyncio.to_thread(sweep, self._snapshots_folder(), name, age_s)

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Delete a snapshot; one that is not there is deleted already."""
        await self._with_snapshot(snapshot_id, lambda path: path.unlink(missing_ok=True))

    async def renew_snapshot(self, snapshot_id: str) -> None:
        """Have a snapshot count as new for :meth:`delete_old_snapshots`, if it is there."""
        await self._with_snapshot(snapshot_id, os.utime)

    async def _with_snapshot(self, snapshot_id: str, work: Callable[[Path], None]) -> None:
        with contextlib.suppress(CallerError, FileNotFoundError):
            path = await asyncio.to_thread(find, self._snapshots_folder(), snapshot_id)
            await asyncio.to_thread(work, path)

    def snapshot_to_restore(self, snapshot_id: str | None, image: str | None) -> Snapshot | None:
        """The snapshot that a specification names in place of an image.

        Raises:
            CallerError: there is none, or there is an image besides.
        """
        if snapshot_id is None:
            return None
        if image:
            raise CallerError("a snapshot stands in place of an image; give one of both", field=SNAPSHOT)
        return read(find(self._snapshots_folder(), snapshot_id))

    def _snapshots_folder(self) -> Path:
        return Path(self._kept) if self._kept else default_folder()
