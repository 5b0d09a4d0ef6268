# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a deployment leaves whose whole tree was killed, its reaper too, as a batch system does at the end of a job.

Nobody is there to tidy up then, and a folder of Ray's with the policy's key in it would stay for ever. So a deployment
locks its folder: the lock is free when both its owner and its reaper are gone, and the next start of any of the same
user removes what they left.
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
"""Of deployments' Rays, whose sockets' paths may have 107 bytes only."""
PREFIX = "prorl-ray-"
_LOCK = "lock"


def lock(folder: Path, mark: ProcessMark, temporary: Path | None) -> int:
    """A descriptor that locks a deployment's folder until all its copies are closed.

    Args:
        folder: below :data:`FOLDERS`.
        mark: of its processes.
        temporary: another folder that goes with it.
    """
    fresh = folder / f".{_LOCK}"
    held = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.write(held, orjson.dumps({"mark": [mark.name, mark.value], "temporary": str(temporary or "")}))
    fresh.rename(folder / _LOCK)  # nobody finds it before it is held
    return held


async def sweep() -> None:
    """Remove what the dead have left: processes, then files. What lives is not touched."""
    for folder, held in _of_the_dead():
        try:
            # It says nothing where a machine has lost its power, or another start was quicker.
            with suppress(OSError, ValueError, LookupError, TypeError):
                told = orjson.loads((folder / _LOCK).read_bytes())
                await ProcessMark(*told["mark"]).kill(settle_s=0)
                if told["temporary"]:
                    await asyncio.to_thread(shutil.rmtree, told["temporary"], ignore_errors=True)
            await asyncio.to_thread(_remove, folder)
        finally:
            os.close(held)


def _remove(folder: Path) -> None:
    """The lock last, or nobody would find the rest after an end in between."""
    with suppress(FileNotFoundError):
        for path in [path for path in folder.iterdir() if path.name != _LOCK]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _of_the_dead() -> Iterator[tuple[Path, int]]:
    for folder in FOLDERS.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it has no lock, or that is held; or it has just been removed
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            held = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(held)
                raise
            yield folder, held
