# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Disk use of a sandbox, added up in steps: files in its folders, and files without a name that processes hold open.

The scan is bounded: it ends the sandbox when it takes too long or finds too many folders (:mod:`.watchdog`). A sandbox
may replace any folder by a link to the host meanwhile, so folders are opened beneath the top one and no link is
followed. Not counted: folders that are closed to the server's user or lie deeper than a path can be long, and files
without a name that are only mapped or on their way over a socket.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

from nemo_gym_prorl.sandbox.isolation.syscalls import open_folder_beneath


STEP = 64
"""Entries between two pauses."""

MIN_ENTRY_BYTES = 4096
"""Bytes that each file, link and folder counts at least: it takes an inode and a name."""

MAX_FOLDERS = 100_000
"""Folders that a scan has found and not entered yet."""

BLOCK = 512

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_GONE = " (deleted)"


@dataclass(slots=True)
class DiskUsage:
    """Result of a scan.

    Attributes:
        disk: bytes on disk.
        largest: size of the largest file.
        crowded: there are more folders than :data:`MAX_FOLDERS`.
        seconds: processor time that the scan took.
        held: bytes in memory files, by the number of a process that has them open; each file counts once.
    """

    disk: int = 0
    largest: int = 0
    crowded: bool = False
    seconds: float = 0.0
    held: dict[int, int] = field(default_factory=dict)


def scan(folders: Iterable[str], processes: Iterable[int], found: DiskUsage) -> Iterator[None]:
    """Add up in ``found`` what ``folders`` contain and ``processes`` hold open; pauses every :data:`STEP` entries."""
    begin = time.thread_time()
    for number, _ in enumerate(_entries(folders, processes, found)):
        if number % STEP == 0:
            found.seconds += time.thread_time() - begin
            yield
            begin = time.thread_time()
    found.seconds += time.thread_time() - begin


def _entries(folders: Iterable[str], processes: Iterable[int], found: DiskUsage) -> Iterator[None]:
    seen: set[tuple[int, int]] = set()
    for pid in tuple(processes):
        yield from _of_process(pid, seen, found)
    for folder in folders:
        yield from _below(folder, found)


def _below(top: str, found: DiskUsage) -> Iterator[None]:
    """Count the entries of a folder, depth first."""
    try:
        descriptor = os.open(top, FOLDER)
    except OSError:
        return
    try:
        todo = [""]
        while todo and not found.crowded:
            path = todo.pop()
            # A folder may be gone, closed or a link by now.
            with contextlib.suppress(OSError):
                here = open_folder_beneath(path or ".", descriptor)
                try:
                    with os.scandir(here) as entries:
                        for entry in entries:
                            yield
                            if _count(entry, found):
                                todo.append(f"{path}{entry.name}/")
                finally:
                    os.close(here)
            found.crowded = len(todo) > MAX_FOLDERS
    finally:
        os.close(descriptor)


def _count(entry: os.DirEntry[str], found: DiskUsage) -> bool:
    """Count one entry; return whether it is a folder."""
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return False
    found.disk += max(status.st_blocks * BLOCK, MIN_ENTRY_BYTES)
    if stat.S_ISDIR(status.st_mode):
        return True
    found.largest = max(found.largest, status.st_size)
    return False


def _of_process(pid: int, seen: set[tuple[int, int]], found: DiskUsage) -> Iterator[None]:
    """Count the open files of a process that have no name."""
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for number in numbers:
        yield
        path = f"/proc/{pid}/fd/{number}"
        # The process may have closed it meanwhile.
        with contextlib.suppress(OSError):
            if not os.readlink(path).endswith(_GONE):
                continue
            status = os.stat(path)
            if (file := (status.st_dev, status.st_ino)) in seen:
                continue
            seen.add(file)
            if status.st_dev == _device_of_memory_files():
                found.held[pid] = found.held.get(pid, 0) + status.st_blocks * BLOCK
            elif not status.st_nlink:
                found.disk += status.st_blocks * BLOCK


@cache
def _device_of_memory_files() -> int:
    """Return the device number that the kernel reports for memory files."""
    file = os.memfd_create("probe", os.MFD_CLOEXEC)
    try:
        return os.fstat(file).st_dev
    finally:
        os.close(file)
