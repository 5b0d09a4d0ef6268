# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of a process by way of all its threads, where its first one can't answer for them.

``/proc/PID`` tells of a process's first thread. That one may end while others go on: the kernel then calls the process
a zombie, though it is none, and has no memory, no open files and no flags of it to tell. What others of its threads
have forked was never the first one's, nor are open files of a thread that has a table of its own. So where there are
others, they are asked, too. Of all who have but one thread, who are the most by far, nothing more is read.
"""

from __future__ import annotations

import os


STATE, PARENT, FLAGS, USER_TICKS, SYSTEM_TICKS, THREADS, STARTED, PAGES = 0, 1, 6, 11, 12, 17, 19, 21
"""Where what is in :func:`status`."""

ENDED = "ZX"

_ONE_FOLDER = 3
"""Links that a folder with one folder in it has."""

_TRIES = 8
"""Where threads are gone before they are looked at, as they are when each begins the next and ends."""


def status(pid: int) -> list[str]:
    """What the kernel says of a process in ``stat``, from its state on: ``Z`` or ``X`` of none that has a live thread.

    State, flags and resident pages are those of a thread that lives; times are those of all.

    Raises:
        OSError: it has ended, and its parent knows.
    """
    found = _read(f"/proc/{pid}/stat")
    if found[STATE] not in ENDED or int(found[THREADS]) <= 1:
        return found
    for _ in range(_TRIES):
        missed = False
        for name in os.listdir(f"/proc/{pid}/task"):
            try:
                of_thread = _read(f"/proc/{pid}/task/{name}/stat")
            except OSError:
                missed = True
                continue
            if of_thread[STATE] not in ENDED:
                for number in (STATE, FLAGS, PAGES):
                    found[number] = of_thread[number]
                return found
        if not missed:
            # They have ended, and wait for a debugger to hear of it.
            return found
    found = _read(f"/proc/{pid}/stat")
    if int(found[THREADS]) > 1:
        found[STATE] = "R"
    return found


def threads(pid: int) -> list[str]:
    """Folders below ``/proc``, one for each thread of a process; none if it has ended."""
    try:
        # It has a link for each of its folders.
        if os.stat(f"/proc/{pid}/task").st_nlink <= _ONE_FOLDER:
            return [f"/proc/{pid}/task/{pid}"]
        return [f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def children(pid: int) -> list[int]:
    """The children of a process, whichever of its threads has forked them; as far as the kernel tells."""
    found: list[int] = []
    for folder in threads(pid):
        try:
            with open(f"{folder}/children", "rb") as file:
                found += map(int, file.read().split())
        except OSError:
            continue
    return found


def _read(path: str) -> list[str]:
    with open(path, "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()
