# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Removal of orphaned deployments: processes and folders of a deployment whose whole process tree was killed.

A batch system kills all processes of a job, including a deployment's reaper, so its Ray folder with the policy's key
would remain. Each deployment therefore holds a lock on its folder. The kernel frees the lock when both the owner and
the reaper are gone; the user's next deployment then removes the orphan.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import orjson

from nemo_gym_prorl.processes import ProcessMark


FOLDERS = Path("/tmp")
"""Parent of the deployments' Ray folders: short, because paths of Ray's sockets must not exceed 107 bytes."""
PREFIX = "prorl-ray-"
_LOCK = "lock"


def lock(folder: Path, mark: ProcessMark, temporary: Path | None) -> int:
    """Lock a deployment's folder; return the descriptor, which holds the lock until all its copies are closed.

    Args:
        folder: the deployment's Ray folder, below :data:`FOLDERS`.
        temporary: another folder to remove with an orphan.
    """
    new_file = folder / f".{_LOCK}"
    descriptor = os.open(new_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, orjson.dumps({"mark": [mark.name, mark.value], "temporary": str(temporary or "")}))
    new_file.rename(folder / _LOCK)  # the lock file becomes visible only once it is locked
    return descriptor


async def remove_orphans() -> None:
    """Remove the processes and folders of orphaned deployments; running deployments are not touched."""
    for folder, held in _of_the_dead():
        try:
            # The file is empty after a power failure, and missing if another start removed the orphan.
            with suppress(OSError, ValueError, LookupError, TypeError):
                owner = orjson.loads((folder / _LOCK).read_bytes())
                await ProcessMark(*owner["mark"]).kill(settle_s=0)
                if owner["temporary"]:
                    await asyncio.to_thread(shutil.rmtree, owner["temporary"], ignore_errors=True)
            await asyncio.to_thread(_remove, folder)
        finally:
            os.close(held)


def _remove(folder: Path) -> None:
    """Remove a folder, its lock file last, so that an interrupted removal is found again."""
    with suppress(FileNotFoundError):
        for path in [path for path in folder.iterdir() if path.name != _LOCK]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _of_the_dead() -> Iterator[tuple[Path, int]]:
    for folder in FOLDERS.glob(f"{PREFIX}*"):
        with suppress(OSError):  # no lock file, a lock in use, or a folder that was just removed
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                raise
            yield folder, descriptor
