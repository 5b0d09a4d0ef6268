# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Types of file systems, and bounded reads of untrusted files.

Locks, Unix sockets and overlay mounts need a local file system: on a network file system they hang, fail, or affect
one machine only. Files on ``tmpfs`` and ``ramfs`` use up memory.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path


_SHARED_KINDS = re.compile(
    r"nfs4?|lustre|gpfs|ceph|cifs|smb3?|9p|afs|beegfs|panfs|pvfs2|orangefs|wekafs|fuse\.(?!overlay|fuse-overlay).*"
)


def is_shared(path: Path) -> bool:
    """Return whether the file system of ``path`` may be shared by machines; ``path`` need not exist."""
    return _SHARED_KINDS.fullmatch(filesystem_type(path)) is not None


def filesystem_type(path: Path) -> str:
    """Return the type of the file system that holds ``path``, or its nearest existing parent folder."""
    while not path.exists():
        path = path.parent
    return filesystem_type_in(Path("/proc/self/mountinfo").read_text(), str(path.resolve()))


def filesystem_type_in(mounts: str, path: str) -> str:
    """Return the type of the file system of the absolute ``path``, given the text of ``/proc/PID/mountinfo``."""
    best, kind = "", ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        target = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        # If several file systems are mounted on one folder, the last one listed is visible.
        if len(target) >= len(best) and (path == target or path.startswith(target.rstrip("/") + "/")):
            best, kind = target, after.split()[0]
    return kind


def read_text(path: Path, limit: int, errors: str = "strict") -> str:
    """Return the UTF-8 text of an untrusted file, without a byte order mark.

    Args:
        limit: maximum size of the file in bytes.
        errors: how :meth:`bytes.decode` handles bytes that are not UTF-8.

    Raises:
        OSError: the file cannot be opened or read.
        ValueError: the path is not a regular file, has more than ``limit`` bytes, or is not UTF-8.
    """
    # O_NONBLOCK: opening a named pipe without a writer would otherwise block.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit >> 20} MiB")
    return content.decode("utf-8-sig", errors)


def is_in_memory(kind: str) -> bool:
    """Return whether file systems of this type keep all contents in memory."""
    return kind in ("tmpfs", "ramfs")
