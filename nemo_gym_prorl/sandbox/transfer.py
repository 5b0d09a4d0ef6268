# SPDX-License-Identifier: Apache-2.0
"""The host's side of copying files into and out of a sandbox: only ordinary files, never half of one.

The other side is :mod:`.enter`, where names are looked up inside of the sandbox.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from nemo_gym_prorl.failures import CallerError


FILE_LIMIT = 1 << 30
"""Largest file that is uploaded or downloaded."""


def open_source(source: Path, limit: int) -> int:
    """Open an ordinary file of the host of at most ``limit`` bytes."""
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CallerError(f"{source}: {error.strerror}", field="source_path") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
        os.close(descriptor)
        reason = f"larger than {limit} bytes" if stat.S_ISREG(found.st_mode) else "not an ordinary file"
        raise CallerError(f"{source} is {reason}", field="source_path")
    return descriptor


def open_target(target: Path) -> tuple[int, Path]:
    """Open a fresh file beside ``target``, to be renamed to it once it is whole."""
    if target.is_dir():
        raise CallerError(f"{target} is a folder; name the file", field="target_path")
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    os.fchmod(descriptor, 0o644)
    return descriptor, Path(name)
