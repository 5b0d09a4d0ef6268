# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Artifacts of the agent: what a separate verifier gets, and what is kept on the host.

Artifacts are copied out of a fresh sandbox, which has no files of the agent but the declared ones. So no program of
the agent makes the archives or delays them. The archives are untrusted nevertheless: only files, folders and links at
or below a declared path count, and nothing below a link. Sparse files end a copy.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import posixpath
import shlex
import shutil
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.harbor.task_config import Artifact
from nemo_gym_prorl.tasks.sandbox import HasContainer


ARTIFACTS_FOLDER = "/logs/artifacts"
"""Folder inside that is always an artifact."""

ARCHIVE = "artifacts.tar"
"""Name of the merged archive in its folder."""

COLLECT_TIMEOUT_S = 600.0  # for all artifacts: reading gigabytes from a loaded disk

MAX_ARCHIVE_BYTES = 1 << 30  # of one artifact: what a sandbox lets out

MAX_BYTES = 4 << 30
"""Bytes of all artifacts together; members after a limit are left out."""

MAX_KEPT_BYTES = 256 << 20
"""Bytes of a step's artifacts that are kept on the host; larger files are left out."""

MAX_KEPT_FILES = 10_000  # files and folders of a step: shared disks limit their number
MAX_KEPT_DEPTH = 100  # folders in folders, whose deletion may recurse

MAX_HEADER_BYTES = 10 << 10  # two paths of 4 KiB, and more

MEMBER_BYTES = 256  # for each character of a member's name and 100 more, since members take memory
SANITIZE_CPU_S = 60.0  # 100,000 members take a third of this time

_LAST_TIME = 2**33 - 1  # of a plain header

_UNSANITIZED = "/.prorl-artifact.tar"  # inside

_MANIFEST = "manifest.json"

_OF_NAMES = {errno.EEXIST, errno.EILSEQ, errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR}
"""Errors of writing a file that its name causes, rather than the host."""

Archives = Mapping[int, tuple[str, Path]]
"""Index of an artifact to its path inside, without the leading slash, and its untrusted archive."""


class ScratchFolder(Protocol):
    """A folder of the host for binds, removed with the object, or after the server's death. Removing blocks."""

    @property
    def path(self) -> Path: ...

    def close(self) -> object: ...


def paths_of(artifacts: Sequence[Artifact], folder: str) -> list[str]:
    """Return the absolute paths inside, given the working folder, from which relative artifacts start."""
    return [posixpath.normpath(posixpath.join(folder, artifact.source)) for artifact in artifacts]


async def collect(sandbox: HasContainer, artifacts: Sequence[Artifact], folder: str, target: Path) -> Archives:
    """Copy artifacts out of a fresh sandbox that has them, into the folder ``target`` of the host.

    Raises:
        AgentError: the artifacts exceed a limit of the sandbox.
    """
    found = {}
    deadline = time.monotonic() + COLLECT_TIMEOUT_S
    for number, (path, artifact) in enumerate(zip(paths_of(artifacts, folder), artifacts, strict=True)):
        excluded = " ".join(f"--exclude={shlex.quote(pattern)}" for pattern in artifact.exclude)
        member = shlex.quote(path.lstrip("/") or ".")
        command = f"tar -cf - -C / {excluded} -- {member} | head -c {MAX_ARCHIVE_BYTES} > {_UNSANITIZED}"
        await sandbox.exec(command, cwd="/", timeout_s=max(1.0, deadline - time.monotonic()))
        # Without an archive the verifier decides on nothing.
        with contextlib.suppress(CallerError):
            await sandbox.download(_UNSANITIZED, archive := target / f"raw-{number}")
            found[number] = path.strip("/"), archive
    return found


def sanitize(archives: Archives, target: Path) -> None:
    """Merge archives, each limited to files, folders and links at or below its path. Damage ends a copy.

    Links that lead out of all these paths are left out, and so are paths below a link.
    """
    merged = _Merged([path for path, _ in archives.values()])
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as out:
        for path, archive in archives.values():
            for member, data in merged.members(path, archive):
                if member is not None:
                    out.addfile(member, data if member.isreg() else None)
                # The archive would keep all members in memory.
                out.members.clear()  # type: ignore[attr-defined]


def keep(artifacts: Sequence[Artifact], archives: Archives, folder: Path) -> list[dict[str, Any]]:
    """Unpack archives into a new folder of the host, laid out as Harbor does; return Harbor's manifest.

    The status of an absent artifact is ``missing``. The manifest also counts ``files``, ``bytes`` and ``left_out``:
    links, special files, files above a limit, and 1 for a copy that ended early. No link is made, so none is followed.

    Raises:
        OSError: the host's disk failed.
    """
    folder.mkdir(parents=True)
    claimed, manifest = [PurePosixPath(_MANIFEST)], []
    left = {"bytes": MAX_KEPT_BYTES, "files": MAX_KEPT_FILES}
    for number, artifact in enumerate(artifacts):
        place = PurePosixPath(artifact.destination or artifact.source.lstrip("/"))
        target, before, left_out = folder / place, dict(left), 0
        status = "failed"
        if any(place == one or place in one.parents or one in place.parents for one in claimed):
            status = "skipped"
        elif number in archives:
            path, archive = archives[number]
            status = "missing"  # unless the archive has a member
            for member, data in _Merged([path]).members(path, archive):
                status = "failed"
                left_out += member is None or not _write(member, data, target, path, left)
            if target.exists():
                status = "empty" if target.is_dir() and not any(target.iterdir()) else "ok"
        claimed.append(place)
        entry: dict[str, Any] = {"source": artifact.source, "destination": f"artifacts/{place}", "status": status}
        kind = ("file" if target.is_file() else "directory") if target.exists() else None
        entry |= {"type": kind, "exclude": list(artifact.exclude)}
        manifest.append(entry | {name: before[name] - left[name] for name in left} | {"left_out": left_out})
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2))
    return manifest


def _write(member: tarfile.TarInfo, data: BinaryIO, target: Path, path: str, left: dict[str, int]) -> bool:
    """Write a member below ``target`` and return whether there was room for it."""
    place, origin = (target / name[len(path) :].lstrip("/") for name in (member.name, member.linkname or path))
    try:
        size = origin.stat().st_size if member.islnk() else member.size
        is_beyond = size > left["bytes"] or not left["files"] or member.name.count("/") > MAX_KEPT_DEPTH
        if is_beyond or member.issym():
            return False
        (place if member.isdir() else place.parent).mkdir(parents=True, exist_ok=True)
        if member.islnk():
            shutil.copyfile(origin, place)
        elif member.isreg():
            with place.open("wb") as file:
                while rest := size - file.tell():
                    file.write(data.read(min(rest, 1 << 20)))
    except (OSError, ValueError) as error:  # ValueError: a name with the character NUL
        if isinstance(error, OSError) and error.errno not in _OF_NAMES:
            raise
        return False
    left["files"] -= 1
    left["bytes"] -= size
    return True


class _Headers(io.FileIO):
    """An untrusted archive. ``tarfile`` reads headers into memory, and takes quadratic time for them."""

    def read(self, size: int | None = -1) -> bytes | Any:
        if size is None or not 0 <= size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError("a header is too large")
        return super().read(size)


class _Merged:
    """Filter of the members of archives, given those before."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._kept: set[str] = set()
        self._links: set[str] = set()
        self._size = 0
        self._end_s = time.thread_time() + SANITIZE_CPU_S

    def members(self, path: str, source: Path) -> Iterator[tuple[tarfile.TarInfo | None, BinaryIO]]:
        """Yield the members of an archive that are at or below a path, with a file at the member's data; ``None`` for
        a member that is left out, and for damage, which ends the archive."""
        size = source.stat().st_size
        with source.open("rb") as data, _Headers(source) as headers:
            with contextlib.suppress(Exception):  # damage
                archive = tarfile.open(fileobj=headers, mode="r:")  # noqa: SIM115  # headers is closed
                while not archive.pax_headers and time.thread_time() < self._end_s:
                    if (member := archive.next()) is None and size < MAX_ARCHIVE_BYTES:
                        return
                    if member is None or member.offset_data + member.size > size:
                        break
                    clean = self.admit(member, path)
                    data.seek(member.offset_data)
                    yield clean, data
                    archive.members.clear()  # type: ignore[attr-defined]
            yield None, data

    def admit(self, member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        """Return the member to write; ``None`` if it is left out."""
        name = posixpath.normpath(f"/{member.name}").lstrip("/")
        self._size += member.size + MEMBER_BYTES * (len(name) + 100)
        if member.size < 0 or member.issparse() or self._size > MAX_BYTES:
            raise tarfile.ReadError("too much, or a sparse file")
        if not _is_at_or_below(name, path) or self._links & {name, *_parents(name)}:
            return None
        clean = tarfile.TarInfo(name)
        clean.mode, clean.mtime = member.mode & 0o777, int(min(max(0, member.mtime), _LAST_TIME))
        if member.isreg():
            clean.size = member.size
        elif member.isdir():
            clean.type = tarfile.DIRTYPE
        elif member.islnk():
            clean.type, clean.linkname = tarfile.LNKTYPE, posixpath.normpath(f"/{member.linkname}").lstrip("/")
            if clean.linkname not in self._kept:
                return None
        elif member.issym() and name not in self._kept:
            # Unlike a normal path, "link/.." leads elsewhere than its text says.
            clean.type, clean.linkname = tarfile.SYMTYPE, posixpath.normpath(member.linkname)
            leads_to = posixpath.normpath(posixpath.join("/", posixpath.dirname(name), member.linkname)).lstrip("/")
            if not any(_is_at_or_below(leads_to, one) for one in self._paths):
                return None
            self._links.add(name)
        else:
            return None
        self._kept.add(name)
        return clean


def _parents(name: str) -> set[str]:
    parts = name.split("/")
    return {"/".join(parts[:count]) for count in range(1, len(parts))}


def _is_at_or_below(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}/")
