# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Memory, processor time and threads of processes, as ``/proc`` says: what the watchdog measures."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass


PAGE = os.sysconf("SC_PAGE_SIZE")

STATE, PARENT, FLAGS, USER_TICKS, SYSTEM_TICKS, THREADS, STARTED, PAGES = 0, 1, 6, 11, 12, 17, 19, 21
"""Positions in :func:`status`."""

ENDED = "ZX"
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


def status(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on.

    Raises:
        OSError: the process is gone.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()


def look(pid: int) -> Process | None:
    """Return one process; ``None`` if it has ended."""
    try:
        found = status(pid)
    except OSError:
        return None
    if found[STATE] in ENDED:
        return None
    return Process(
        pid,
        started=int(found[STARTED]),
        ticks=int(found[USER_TICKS]) + int(found[SYSTEM_TICKS]),
        resident=int(found[PAGES]) * PAGE + _page_tables(pid),
        threads=int(found[THREADS]),
    )


def census(spaces: Iterable[int]) -> dict[int, set[int]]:
    """Return the processes in each of some PID namespaces; looks at every process of the machine."""
    found: dict[int, set[int]] = {number: set() for number in spaces}
    for name in os.listdir("/proc"):
        if name.isdigit():
            # A process that ended just now, or another user's, is in none of them.
            with contextlib.suppress(OSError):
                if (members := found.get(os.stat(f"/proc/{name}/ns/pid").st_ino)) is not None:
                    members.add(int(name))
    return found


def children(pid: int) -> list[int]:
    """Return the children of a process, whichever of its threads has forked them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def threads_in(space: int) -> int:
    """Return the number of processes and threads in a PID namespace; looks at every process of the machine."""
    return sum(process.threads for pid in census([space])[space] if (process := look(pid)))


def proportional(pid: int) -> tuple[int, int]:
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


def available() -> int:
    """Bytes of memory that this machine could still give."""
    with open("/proc/meminfo", "rb") as file:
        found = _AVAILABLE.search(file.read())
    return int(found[1]) << 10 if found else 0
