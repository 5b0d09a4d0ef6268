# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Measurements for the watchdog: memory, processor time and threads of processes, and a sandbox's disk use.

The disk scan runs in steps. A scan stops at too many folders, and the watchdog ends a sandbox whose scan takes too
long (:mod:`.watchdog`). A sandbox may replace any folder by a link to the host meanwhile. So folders are opened
beneath the top one, and no link is followed.

Memory files have no name, so they count as disk use, and as memory where they are mapped. Not counted: page tables,
folders closed to the server's user, folders deeper than the longest path, and unnamed files that are only mapped or in
transit over a socket.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nemo_gym_prorl.sandbox.isolation.syscalls import open_folder_beneath


PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

STATE, PARENT, FLAGS, USER_TICKS, SYSTEM_TICKS, THREADS, STARTED, PAGES = 0, 1, 6, 11, 12, 17, 19, 21
"""Indexes of the fields that :func:`read_stat` returns."""

ENDED_STATES = "ZX"
"""States of a process that has ended."""

_PSS = re.compile(rb"^Pss:\s+(\d+) kB$", re.MULTILINE)
_OOM_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_AVAILABLE = re.compile(rb"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Process:
    """One process at one moment.

    Attributes:
        pid: number on the host.
        started: start time in clock ticks, which makes the number unique.
        ticks: processor time used.
        resident: bytes of memory, shared pages counted in full.
    """

    pid: int
    started: int
    ticks: int
    resident: int
    threads: int = 1


def read_stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on.

    Raises:
        OSError: the process has ended.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()


def read_process(pid: int) -> Process | None:
    """Return one process; ``None`` if it has ended."""
    try:
        first = read_stat(pid)
        found = read_stat(living_thread(pid)) if first[STATE] in ENDED_STATES else first
    except OSError:
        return None
    return Process(
        pid,
        started=int(first[STARTED]),
        ticks=int(found[USER_TICKS]) + int(found[SYSTEM_TICKS]),
        resident=int(found[PAGES]) * PAGE_BYTES,
        threads=int(found[THREADS]),
    )


def living_thread(pid: int) -> int:
    """Return a thread that has not ended, by whose number ``/proc`` describes the process.

    A process whose first thread ends looks like an ended process, but continues.

    Raises:
        OSError: the process has ended.
    """
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
        with contextlib.suppress(OSError):
            if read_stat(thread)[STATE] not in ENDED_STATES:
                return thread
    raise ProcessLookupError(pid)


def process_trees(pids: Iterable[int]) -> list[Process]:
    found: dict[int, Process] = {}
    todo = [*pids]
    while todo:
        pid = todo.pop()
        if pid not in found and (process := read_process(pid)):
            found[pid] = process
            # A process's first thread has its number.
            todo += _children(pid, pid) if process.threads == 1 else child_pids(pid)
    return [*found.values()]


def processes_by_namespace(spaces: Iterable[int]) -> dict[int, set[int]]:
    """Return the processes in each of some PID namespaces; read every process of the machine."""
    found: dict[int, set[int]] = {number: set() for number in spaces}
    for name in os.listdir("/proc"):
        if name.isdigit():
            # Skip processes that have ended or belong to another user.
            with contextlib.suppress(OSError):
                if (members := found.get(os.stat(f"/proc/{name}/ns/pid").st_ino)) is not None:
                    members.add(int(name))
    return found


def child_pids(pid: int) -> list[int]:
    """Return the children of a process, forked by any of its threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += _children(pid, thread)
    return found


def _children(pid: int, thread: int | str) -> list[int]:
    return [int(child) for child in _read(f"/proc/{pid}/task/{thread}/children").split()]


def threads_in(space: int) -> int:
    """Return the number of processes and threads in a PID namespace; read every process of the machine."""
    return sum(process.threads for pid in processes_by_namespace([space])[space] if (process := read_process(pid)))


def proportional_memory(pid: int) -> int:
    """Return bytes of a process's memory, each shared page divided by its users; 0 if it has ended.

    Slow: the kernel walks the page tables of the process.
    """
    try:
        found = _PSS.search(_read(f"/proc/{living_thread(pid)}/smaps_rollup"))
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def oom_kills() -> int:
    """Return how many processes the machine's kernel has killed for lack of memory; 0 if unknown."""
    with open("/proc/vmstat", "rb") as file:
        found = _OOM_KILLS.search(file.read())
    return int(found[1]) if found else 0


def available_memory() -> int:
    with open("/proc/meminfo", "rb") as file:
        found = _AVAILABLE.search(file.read())
    return int(found[1]) << 10 if found else 0


ENTRIES_PER_STEP = 64
"""Entries between two pauses of a scan."""

MIN_ENTRY_BYTES = 4096
"""Minimum size of a file, link or folder, for its inode and name."""

MAX_FOLDERS = 100_000
"""Folders that a scan has found and not yet entered; more would need too much memory."""

BLOCK_BYTES = 512

OPEN_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_GONE = " (deleted)"


@dataclass(slots=True)
class DiskUsage:
    """Result of a scan.

    Attributes:
        disk: bytes on disk.
        largest: size of the largest file in bytes.
        crowded: whether there are more than :data:`MAX_FOLDERS` folders.
        seconds: processor time of the scan.
    """

    disk: int = 0
    largest: int = 0
    crowded: bool = False
    seconds: float = 0.0


def scan(folders: Iterable[str], processes: Iterable[int], found: DiskUsage) -> Iterator[None]:
    """Add contents of ``folders`` and open files of ``processes`` to ``found``; yields every :data:`ENTRIES_PER_STEP`
    entries."""
    begin = time.thread_time()
    for number, _ in enumerate(_entries(folders, processes, found)):
        if number % ENTRIES_PER_STEP == 0:
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
        descriptor = os.open(top, OPEN_FOLDER_FLAGS)
    except OSError:
        return
    try:
        todo = [""]
        while todo and not found.crowded:
            path = todo.pop()
            # The folder was removed, closed or replaced by a link.
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
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return False
    found.disk += max(status.st_blocks * BLOCK_BYTES, MIN_ENTRY_BYTES)
    if stat.S_ISDIR(status.st_mode):
        return True
    found.largest = max(found.largest, status.st_size)
    return False


def _of_process(pid: int, seen: set[tuple[int, int]], found: DiskUsage) -> Iterator[None]:
    """Count the unlinked files that a process has open."""
    try:
        folder = f"/proc/{living_thread(pid)}/fd"
        numbers = os.listdir(folder)
    except OSError:
        return
    for number in numbers:
        yield
        path = f"{folder}/{number}"
        # The process may have closed the file meanwhile.
        with contextlib.suppress(OSError):
            if not os.readlink(path).endswith(_GONE):
                continue
            status = os.stat(path)
            if (file := (status.st_dev, status.st_ino)) in seen:
                continue
            seen.add(file)
            if not status.st_nlink:
                found.disk += status.st_blocks * BLOCK_BYTES
