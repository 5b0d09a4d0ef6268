# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The type of the file system that holds a path, where the type decides what works there.

Locks, Unix sockets and overlays belong to one machine. On a file system that machines share they hang, fail, or hold
for one machine only. Files on a file system in memory use up memory.
"""

from __future__ import annotations

import re
from pathlib import Path


_SHARED_KINDS = re.compile(
    r"nfs4?|lustre|gpfs|ceph|cifs|smb3?|9p|afs|beegfs|panfs|pvfs2|orangefs|wekafs|fuse\.(?!overlay|fuse-overlay).*"
)


def is_shared(path: Path) -> bool:
    """Return whether ``path``, or the folder where it would be created, may be on a file system shared by machines."""
    return _SHARED_KINDS.fullmatch(filesystem_type(path)) is not None


def filesystem_type(path: Path) -> str:
    """Return the type of the file system that holds ``path`` or the folder where it would be created."""
    while not path.exists():
        path = path.parent
    return filesystem_type_in(Path("/proc/self/mountinfo").read_text(), str(path.resolve()))


def filesystem_type_in(mounts: str, path: str) -> str:
    """Return the type of the file system of the absolute ``path``, given the text of ``/proc/PID/mountinfo``."""
    best, kind = "", ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        target = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        # Of several mounts on one folder the last one is visible.
        if len(target) >= len(best) and (path == target or path.startswith(target.rstrip("/") + "/")):
            best, kind = target, after.split()[0]
    return kind


def is_in_memory(kind: str) -> bool:
    """Return whether file systems of this type keep all contents in memory."""
    return kind in ("tmpfs", "ramfs")
