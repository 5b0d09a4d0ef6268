# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Who cleans up: what a dead supervisor left, processes and files, goes with the next start of any supervisor.

Usually it is the server that does so, as it notices its supervisor's end (:mod:`..rpc.own_supervisor`), or the
supervisor itself (:mod:`..server` has the cases). Where all died at once, the next one of the same user finds their
folders, of which the lock can be had (:mod:`.state_dir`).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.supervisor.processes import pidfd
from nemo_gym_prorl.sandbox.supervisor.processes.pidfd import start_time
from nemo_gym_prorl.sandbox.supervisor.storage import state_dir
from nemo_gym_prorl.sandbox.supervisor.storage.erase import remove_tree


_UNFINISHED_S = 60.0
"""A folder without a lock that is younger than this may be one whose owner is just starting."""


def sweep(root: Path) -> list[Path]:
    """Remove what dead owners left: processes, then files. Returns their folders; live ones are not touched."""
    # What can't be removed is the next sweep's; the others need not wait for it.
    return [folder for folder in sorted(root.glob("s-*")) if folder.exists() and bury(folder)]


def bury(folder: Path, patience_s: float = 5.0) -> bool:
    """Remove what the owner of ``folder`` left, if it is dead; returns whether nothing of it is left."""
    try:
        lock = _lock_of_the_dead(folder)
    except FileNotFoundError:
        return True
    if lock is None:
        return False
    try:
        clear(folder, patience_s)
    except OSError:
        # Processes that do not die, or a file that came while its folder was emptied.
        return False
    finally:
        os.close(lock)
    return True


def _lock_of_the_dead(folder: Path) -> int | None:
    try:
        lock = os.open(folder / state_dir.LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        if time.time() - folder.stat().st_mtime < _UNFINISHED_S:
            return None
        lock = os.open(folder / state_dir.LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def clear(folder: Path, patience_s: float = 5.0) -> None:
    """Kill every process that belongs to the owner's ``folder``, then remove it.

    Raises:
        TimeoutError: processes are left that even SIGKILL does not end, waiting for a device, say; the folder stays.
    """
    deadline = time.monotonic() + patience_s
    groups = state_dir.groups_of(folder)
    while remains := _kill_all(folder, groups):
        while living := [pid for pid, started in remains.items() if start_time(pid) == started]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {living} of {folder} do not die")
            time.sleep(0.005)
    for group in groups:
        group.remove()
    if not folder.is_dir():
        # Somebody clears old folders away.
        return
    # The lock goes last: whoever is killed on the way leaves a folder that can be told to be a dead one's.
    for entry in folder.iterdir():
        if entry.name != state_dir.LOCK_FILE:
            remove_tree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink(missing_ok=True)
    remove_tree(folder)


def _kill_all(folder: Path, groups: Sequence[cgroups.Group]) -> dict[int, int]:
    """Kill what there is; returns the numbers and start times of those that had to be killed.

    The first process of each sandbox ends all others inside, and only after them. One look at all processes of the
    machine finds the runtime's helpers, however many sandboxes there were.
    """
    for group in groups:
        group.kill()
    known = {space.init: space.started for space in state_dir.spaces_of(folder) if space.alive}
    known |= {pid: started for pid in state_dir.helpers_of(folder) if (started := start_time(pid)) is not None}
    grouped = [pid for group in groups for pid in group.processes()]
    known |= {pid: started for pid in grouped if (started := start_time(pid)) is not None}
    for pid, started in known.items():
        pidfd.kill(pid, started)
    return known
