# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Artifacts: files of the agent that a separate verifier gets, and that are kept on the host.

Artifacts are copied out of a fresh sandbox, whose only files of the agent are the declared ones. So no program of the
agent can replace or delay the archives. Archives are untrusted nevertheless: only files, folders and links at or below
a declared path are copied, and nothing below a symlink. A sparse file ends the copy of its archive.
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
from typing import Any, BinaryIO

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.harbor.task_config import Artifact
from nemo_gym_prorl.tasks.sandbox import Sandbox


ARTIFACTS_FOLDER = "/logs/artifacts"
"""Folder of the sandbox that is always an artifact."""

ARCHIVE = "artifacts.tar"
"""File name of the archive into which all artifacts are merged."""

COLLECT_TIMEOUT_S = 600.0  # seconds for all artifacts of a step: gigabytes from a loaded disk

MAX_ARCHIVE_BYTES = 1 << 30  # per artifact: the size limit of a sandbox's downloads

MAX_BYTES = 4 << 30
"""Maximum bytes of all artifacts together; each archive is cut where the total exceeds the limit."""

MAX_KEPT_BYTES = 256 << 20
"""Maximum bytes of a step's artifacts that are kept on the host; files that exceed the rest are left out."""

MAX_KEPT_FILES = 10_000  # files and folders of a step: shared disks limit their number
MAX_KEPT_DEPTH = 100  # nesting levels; deleting a folder may recurse

MAX_HEADER_BYTES = 10 << 10  # an extended tar header may contain two paths of 4 KiB

MEMBER_BYTES = 256  # a member counts this for each character of its name and 100 times more: headers take memory
SANITIZE_CPU_S = 60.0  # three times the CPU time of 100,000 members

_LAST_TIME = 2**33 - 1  # seconds; the maximum of a plain tar header

_UNSANITIZED = "/.prorl-artifact.tar"  # path of an archive in the sandbox

_MANIFEST = "manifest.json"

_NAME_ERRNO = {errno.EEXIST, errno.EILSEQ, errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR}
"""Errors of writing a file that the file's name causes, and not the host's disk."""

Archives = Mapping[int, tuple[str, Path]]
"""By index of an artifact: its path in the sandbox without the leading slash, and its untrusted archive."""


def paths_of(artifacts: Sequence[Artifact], folder: str) -> list[str]:
    """Return the absolute paths of artifacts in the sandbox; relative ones start at the working folder ``folder``."""
    return [posixpath.normpath(posixpath.join(folder, artifact.source)) for artifact in artifacts]


async def collect(sandbox: Sandbox, artifacts: Sequence[Artifact], folder: str, target: Path) -> Archives:
    """Copy artifacts from the sandbox into the folder ``target`` of the host."""
    found = {}
    deadline = time.monotonic() + COLLECT_TIMEOUT_S
    for number, (path, artifact) in enumerate(zip(paths_of(artifacts, folder), artifacts, strict=True)):
        excluded = " ".join(f"--exclude={shlex.quote(pattern)}" for pattern in artifact.exclude)
        member = shlex.quote(path.lstrip("/") or ".")
        command = f"tar -cf - -C / {excluded} -- {member} | head -c {MAX_ARCHIVE_BYTES} > {_UNSANITIZED}"
        await sandbox.exec(command, cwd="/", timeout_s=max(1.0, deadline - time.monotonic()))
        # A missing archive is no error: the verifier judges without the artifact.
        with contextlib.suppress(CallerError):
            await sandbox.download(_UNSANITIZED, archive := target / f"raw-{number}")
            found[number] = path.strip("/"), archive
    return found


def sanitize(archives: Archives, target: Path) -> None:
    """Merge archives into ``target``. Of a damaged archive, the members before the damage are copied.

    Only files, folders and links at or below the path of their artifact are copied. Symlinks that lead out of all
    artifacts are left out, and so are paths below a symlink.
    """
    merged = _MemberFilter([path for path, _ in archives.values()])
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as out:
        for path, archive in archives.values():
            for member, data in merged.members(path, archive):
                if member is not None:
                    out.addfile(member, data if member.isreg() else None)
                # tarfile keeps all added members in memory.
                out.members.clear()  # type: ignore[attr-defined]


def keep(artifacts: Sequence[Artifact], archives: Archives, folder: Path) -> list[dict[str, Any]]:
    """Unpack archives into a new folder of the host with Harbor's layout; return Harbor's manifest.

    The status of an absent artifact is ``missing``. The manifest also counts ``files``, ``bytes`` and ``left_out``:
    symlinks, special files, files above a limit, and 1 for a damaged archive. No symlink is created, so no write
    follows one.

    Raises:
        OSError: the host's disk failed.
    """
    folder.mkdir(parents=True)
    claimed, manifest = [PurePosixPath(_MANIFEST)], []
    left = {"bytes": MAX_KEPT_BYTES, "files": MAX_KEPT_FILES}
    for number, artifact in enumerate(artifacts):
        relative = PurePosixPath(artifact.destination or artifact.source.lstrip("/"))
        target, before, left_out = folder / relative, dict(left), 0
        status = "failed"
        if any(relative == one or relative in one.parents or one in relative.parents for one in claimed):
            status = "skipped"
        elif number in archives:
            path, archive = archives[number]
            status = "missing"  # unless the archive has a member
            for member, data in _MemberFilter([path]).members(path, archive):
                status = "failed"
                left_out += member is None or not _write(member, data, target, path, left)
            if target.exists():
                status = "empty" if target.is_dir() and not any(target.iterdir()) else "ok"
        claimed.append(relative)
        entry: dict[str, Any] = {"source": artifact.source, "destination": f"artifacts/{relative}", "status": status}
        kind = ("file" if target.is_file() else "directory") if target.exists() else None
        entry |= {"type": kind, "exclude": list(artifact.exclude)}
        manifest.append(entry | {name: before[name] - left[name] for name in left} | {"left_out": left_out})
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2))
    return manifest


def _write(member: tarfile.TarInfo, data: BinaryIO, target: Path, path: str, left: dict[str, int]) -> bool:
    """Write an archive member below ``target``; return ``False`` for symlinks, unusable names, and above a limit."""
    copy, origin = (target / name[len(path) :].lstrip("/") for name in (member.name, member.linkname or path))
    try:
        size = origin.stat().st_size if member.islnk() else member.size
        is_beyond = size > left["bytes"] or not left["files"] or member.name.count("/") > MAX_KEPT_DEPTH
        if is_beyond or member.issym():
            return False
        (copy if member.isdir() else copy.parent).mkdir(parents=True, exist_ok=True)
        if member.islnk():
            shutil.copyfile(origin, copy)
        elif member.isreg():
            with copy.open("wb") as file:
                while rest := size - file.tell():
                    file.write(data.read(min(rest, 1 << 20)))
    except (OSError, ValueError) as error:  # ValueError: a name with the character NUL
        if isinstance(error, OSError) and error.errno not in _NAME_ERRNO:
            raise
        return False
    left["files"] -= 1
    left["bytes"] -= size
    return True


class _BoundedReader(io.FileIO):
    """Untrusted archive that refuses long headers, which ``tarfile`` reads into memory in quadratic time."""

    def read(self, size: int | None = -1) -> bytes | Any:
        if size is None or not 0 <= size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError("a header is too large")
        return super().read(size)


class _MemberFilter:
    """Filter of untrusted archive members. The archives of one filter share its limits of bytes and CPU time, and a
    symlink in an earlier archive also hides members of later archives."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._kept: set[str] = set()
        self._links: set[str] = set()
        self._size = 0
        self._end_s = time.thread_time() + SANITIZE_CPU_S

    def members(self, path: str, source: Path) -> Iterator[tuple[tarfile.TarInfo | None, BinaryIO]]:
        """Yield a clean header of each member at or below ``path``, and a file positioned at the member's data. The
        header is ``None`` for a member that is left out, and for damage, which ends the iteration."""
        size = source.stat().st_size
        with source.open("rb") as data, _BoundedReader(source) as headers:
            with contextlib.suppress(Exception):  # tarfile raises many types of errors for a damaged archive
                archive = tarfile.open(fileobj=headers, mode="r:")  # noqa: SIM115  # closing ``headers`` suffices
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
        """Return a clean header of a member; ``None`` if the member is left out. Raises ReadError above a limit."""
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
            # The kernel resolves "link/.." to the parent of the link's target, so the text must not contain "..".
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
