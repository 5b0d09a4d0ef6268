# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What kind of file system a folder is on, where that decides what can be done in it.

Locks, sockets and overlays are one machine's: on a file system that machines share they hang, fail, or are believed by
one and not by another. And what is written to a file system in memory is memory.
"""

from __future__ import annotations

import re
from pathlib import Path


_SHARED_KINDS = re.compile(
    r"nfs4?|lustre|gpfs|ceph|cifs|smb3?|9p|afs|beegfs|panfs|pvfs2|orangefs|wekafs|fuse\.(?!overlay|fuse-overlay).*"
)


def is_shared(path: Path) -> bool:
    """Whether ``path``, or the folder it would be made in, is on a file system that other machines may have too."""
    return _SHARED_KINDS.fullmatch(filesystem_type(path)) is not None


def filesystem_type(path: Path) -> str:
    """The type of the file system that holds ``path``, or the folder it would be made in."""
    while not path.exists():
        path = path.parent
    return filesystem_type_in(Path("/proc/self/mountinfo").read_text(), str(path.resolve()))


def filesystem_type_in(mounts: str, path: str) -> str:
    """The type of the file system that holds the absolute ``path``, by the text of ``/proc/PID/mountinfo``."""
    best, kind = "", ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        target = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        # The last one of those on the same place covers the others.
        if len(target) >= len(best) and (path == target or path.startswith(target.rstrip("/") + "/")):
            best, kind = target, after.split()[0]
    return kind


def is_in_memory(kind: str) -> bool:
    """Whether file systems of this type keep everything in memory."""
    return kind in ("tmpfs", "ramfs")
