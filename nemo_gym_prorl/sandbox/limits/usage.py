# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What the watchdog measures: memory, processor time and threads of processes, and the disk use of a sandbox.

The disk scan runs in steps and is bounded: it ends the sandbox when it takes too long or finds too many folders
(:mod:`.watchdog`). A sandbox may replace any folder by a link to the host meanwhile, so folders are opened beneath the
top one and no link is followed. Not counted: folders that are closed to the server's user or lie deeper than a path
can be long, and files without a name that are only mapped or on their way over a socket.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

from nemo_gym_prorl.sandbox.isolation.syscalls import open_folder_beneath


PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

STATE, PARENT, FLAGS, USER_TICKS, SYSTEM_TICKS, THREADS, STARTED, PAGES = 0, 1, 6, 11, 12, 17, 19, 21
"""Positions in :func:`status`."""

ENDED_STATES = "ZX"
"""States of a process that has ended."""

_PSS = re.compile(rb"^Pss:\s+(\d+) kB$", re.MULTILINE)
_PSS_OF_MEMORY_FILES = re.compile(rb"^Pss_Shmem:\s+(\d+) kB$", re.MULTILINE)
_PAGE_TABLES = re.compile(rb"^VmPTE:\s+(\d+) kB$", re.MULTILINE)
_OOM_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_AVAILABLE = re.compile(rb"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Process:
    """One process, as it was looked at.

    Attributes:
        pid: its number on the host.
        started: when it was started, which makes the number unique.
        ticks: processor time it has used.
        resident: bytes of memory, those that it shares counted in full, and the tables that say where they are.
        threads: how many it has.
    """

    pid: int
    started: int
    ticks: int
    resident: int
    threads: int = 1


def read_stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on.

    Raises:
        OSError: the process is gone.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()


def read_process(pid: int) -> Process | None:
    """Return one process; ``None`` if it has ended."""
    try:
        found = read_stat(pid)
    except OSError:
        return None
    if found[STATE] in ENDED_STATES:
        return None
    return Process(
        pid,
        started=int(found[STARTED]),
        ticks=int(found[USER_TICKS]) + int(found[SYSTEM_TICKS]),
        resident=int(found[PAGES]) * PAGE_BYTES + _page_tables(pid),
        threads=int(found[THREADS]),
    )


def processes_by_namespace(spaces: Iterable[int]) -> dict[int, set[int]]:
    """Return the processes in each of some PID namespaces; looks at every process of the machine."""
    found: dict[int, set[int]] = {number: set() for number in spaces}
    for name in os.listdir("/proc"):
        if name.isdigit():
            # A process that ended just now, or another user's, is in none of them.
            with contextlib.suppress(OSError):
                if (members := found.get(os.stat(f"/proc/{name}/ns/pid").st_ino)) is not None:
                    members.add(int(name))
    return found


def child_pids(pid: int) -> list[int]:
    """Return the children of a process, whichever of its threads has forked them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def threads_in(space: int) -> int:
    """Return the number of processes and threads in a PID namespace; looks at every process of the machine."""
    return sum(process.threads for pid in processes_by_namespace([space])[space] if (process := read_process(pid)))


def proportional_memory(pid: int) -> tuple[int, int]:
    """Return bytes of memory of a process, each shared page divided by those who share it, and those of them that are
    in memory files. Slow."""
    text = _read(f"/proc/{pid}/smaps_rollup")
    return _bytes(_PSS, text) + _page_tables(pid), _bytes(_PSS_OF_MEMORY_FILES, text)


def _page_tables(pid: int) -> int:
    """Return bytes of a process's page tables: 4 KiB for each 2 MiB in which it has read a byte."""
    return _bytes(_PAGE_TABLES, _read(f"/proc/{pid}/status"))


def _bytes(pattern: re.Pattern[bytes], text: bytes) -> int:
    found = pattern.search(text)
    return int(found[1]) << 10 if found else 0


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def oom_kills() -> int:
    """Processes that this machine's kernel has killed for want of memory, of whomever; 0 where it does not tell."""
    with open("/proc/vmstat", "rb") as file:
        found = _OOM_KILLS.search(file.read())
    return int(found[1]) if found else 0


def available_memory() -> int:
    """Bytes of memory that this machine could still give."""
    with open("/proc/meminfo", "rb") as file:
        found = _AVAILABLE.search(file.read())
    return int(found[1]) << 10 if found else 0


ENTRIES_PER_STEP = 64
"""Entries between two pauses."""

MIN_ENTRY_BYTES = 4096
"""Bytes that each file, link and folder counts at least: it takes an inode and a name."""

MAX_FOLDERS = 100_000
"""Folders that a scan has found and not entered yet."""

BLOCK_BYTES = 512

OPEN_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

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
    found.disk += max(status.st_blocks * BLOCK_BYTES, MIN_ENTRY_BYTES)
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
                found.held[pid] = found.held.get(pid, 0) + status.st_blocks * BLOCK_BYTES
            elif not status.st_nlink:
                found.disk += status.st_blocks * BLOCK_BYTES


@cache
def _device_of_memory_files() -> int:
    """Return the device number that the kernel reports for memory files."""
    file = os.memfd_create("probe", os.MFD_CLOEXEC)
    try:
        return os.fstat(file).st_dev
    finally:
        os.close(file)
