# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Measurements for the watchdog: memory and CPU time of processes, and a sandbox's disk use.

A disk scan stops at the disk limit, at too many folders and after too much time. A sandbox may replace a scanned
folder by a symlink to the host at any time. So folders are opened relative to the top folder (``openat2``), and
symlinks are not followed.

An open memfd is an unlinked file, and so counts as disk use; mapped parts count as memory, too. Not counted: page
tables, folders that the server's user may not read, folders deeper than the longest path, and unlinked files that are
only mapped or in transit over a socket.
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
"""States in ``/proc/PID/stat`` of a process that has ended: zombie, dead."""

_PSS = re.compile(rb"^Pss:\s+(\d+) kB$", re.MULTILINE)
_OOM_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_AVAILABLE = re.compile(rb"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Process:
    """Measurement of one process.

    Attributes:
        pid: process id on the host.
        started: start time in clock ticks since boot; pid and start time together are unique.
        ticks: CPU time used, in clock ticks.
        resident: resident memory in bytes, with shared pages counted in full.
    """

    pid: int
    started: int
    ticks: int
    resident: int


def read_stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; :data:`STATE` and so on are their indexes.

    Raises:
        OSError: the process has ended and is reaped.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()


def read_process(pid: int) -> Process | None:
    """Return the measurement of a process; ``None`` if the process has ended."""
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
    )


def living_thread(pid: int) -> int:
    """Return the id of a thread that has not ended; the thread's ``/proc`` folder describes the whole process.

    A process whose main thread has ended looks like a zombie in ``/proc/PID``, but its other threads continue.

    Raises:
        OSError: the process has ended.
    """
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
        with contextlib.suppress(OSError):
            if read_stat(thread)[STATE] not in ENDED_STATES:
                return thread
    raise ProcessLookupError(pid)


def processes_by_namespace(spaces: Iterable[int]) -> dict[int, set[int]]:
    """Return the pids by PID namespace, given the namespaces' inode numbers; scans all processes of the machine."""
    found: dict[int, set[int]] = {number: set() for number in spaces}
    for name in os.listdir("/proc"):
        if name.isdigit():
            # Skip processes that have ended or belong to another user.
            with contextlib.suppress(OSError):
                if (members := found.get(os.stat(f"/proc/{name}/ns/pid").st_ino)) is not None:
                    members.add(int(name))
    return found


def child_pids(pid: int) -> list[int]:
    """Return the pids of a process's children, forked by any of its threads; empty if the process has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += [int(child) for child in _read(f"/proc/{pid}/task/{thread}/children").split()]
    return found


def proportional_memory(pid: int) -> int:
    """Return the proportional set size (PSS) of a process in bytes; 0 if the process has ended. PSS divides each
    shared page by the number of processes that map it; the kernel walks all page tables for that."""
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
    """Return the number of OOM kills on this machine since boot; 0 if unknown."""
    with open("/proc/vmstat", "rb") as file:
        found = _OOM_KILLS.search(file.read())
    return int(found[1]) if found else 0


def available_memory() -> int:
    """Return the machine's available memory in bytes; 0 if unknown."""
    with open("/proc/meminfo", "rb") as file:
        found = _AVAILABLE.search(file.read())
    return int(found[1]) << 10 if found else 0


MAX_SCAN_S = 10.0
"""CPU seconds of one scan, enough for about a million folders or three million files."""

MIN_ENTRY_BYTES = 4096
"""Bytes that each directory entry counts at least, for its inode and name."""

MAX_FOLDERS = 100_000
"""Maximum folders that a scan has found and not yet entered; bounds the memory for their paths."""

BLOCK_BYTES = 512  # unit of st_blocks

OPEN_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_GONE = " (deleted)"


@dataclass(slots=True)
class DiskUsage:
    """Result of a disk scan.

    Attributes:
        disk: bytes on disk.
        largest: apparent size of the largest file, in bytes.
        crowded: whether the scan stopped at more than :data:`MAX_FOLDERS` waiting folders.
        seconds: CPU time of the scan, which stops above :data:`MAX_SCAN_S`.
    """

    disk: int = 0
    largest: int = 0
    crowded: bool = False
    seconds: float = 0.0


class DiskScan:
    """A scan in parts of the use by a folder's contents and by unlinked files that processes have open.

    Args:
        folder: path of the folder.
        processes: host pids.
        limit: bytes above which the scan stops.
    """

    def __init__(self, folder: str, processes: Iterable[int], limit: int) -> None:
        self.found = DiskUsage()
        self._limit = limit
        self._todo = _entries(folder, processes, self.found)

    def advance(self, seconds: float) -> bool:
        """Scan for so many CPU seconds at most; return whether the scan has ended."""
        begin, before = time.thread_time(), self.found.seconds
        for _ in self._todo:
            spent = time.thread_time() - begin
            self.found.seconds = before + spent
            if self.found.disk > self._limit or self.found.seconds > MAX_SCAN_S:
                return True
            if spent > seconds:
                return False
        return True


def scan(folder: str, limit: int) -> DiskUsage:
    """Return the disk use by the contents of ``folder``; the scan stops above ``limit`` bytes."""
    whole = DiskScan(folder, (), limit)
    whole.advance(MAX_SCAN_S)
    return whole.found


def _entries(folder: str, processes: Iterable[int], found: DiskUsage) -> Iterator[None]:
    seen: set[tuple[int, int]] = set()
    for pid in processes:
        yield from _count_unlinked(pid, seen, found)
    yield from _count_folder(folder, found)


def _count_folder(top: str, found: DiskUsage) -> Iterator[None]:
    """Add the entries below the folder ``top`` to ``found``, depth first; yields before each entry."""
    try:
        descriptor = os.open(top, OPEN_FOLDER_FLAGS)
    except OSError:
        return
    try:
        todo = [""]
        while todo and not found.crowded:
            path = todo.pop()
            # OSError: the folder was removed, made unreadable or replaced by a symlink.
            with contextlib.suppress(OSError):
                here = open_folder_beneath(path or ".", descriptor)
                try:
                    with os.scandir(here) as entries:
                        for entry in entries:
                            yield
                            if _count_entry(entry, found):
                                todo.append(f"{path}{entry.name}/")
                finally:
                    os.close(here)
            found.crowded = len(todo) > MAX_FOLDERS
    finally:
        os.close(descriptor)


def _count_entry(entry: os.DirEntry[str], found: DiskUsage) -> bool:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return False
    found.disk += max(status.st_blocks * BLOCK_BYTES, MIN_ENTRY_BYTES)
    if stat.S_ISDIR(status.st_mode):
        return True
    found.largest = max(found.largest, status.st_size)
    return False


def _count_unlinked(pid: int, seen: set[tuple[int, int]], found: DiskUsage) -> Iterator[None]:
    """Add the unlinked files that a process has open to ``found``; ``seen`` has device and inode of counted files."""
    try:
        folder = f"/proc/{living_thread(pid)}/fd"
        numbers = os.listdir(folder)
    except OSError:
        return
    for number in numbers:
        yield
        path = f"{folder}/{number}"
        # OSError: the process has closed the file.
        with contextlib.suppress(OSError):
            if not os.readlink(path).endswith(_GONE):
                continue
            status = os.stat(path)
            if (file := (status.st_dev, status.st_ino)) in seen:
                continue
            seen.add(file)
            if not status.st_nlink:
                found.disk += status.st_blocks * BLOCK_BYTES
