# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What processes and folders use, as the kernel says: what the watchdog looks at."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from nemo_gym_prorl.sandbox.limits import threads


PAGE = os.sysconf("SC_PAGE_SIZE")

_PSS = re.compile(rb"^Pss:\s+(\d+) kB$", re.MULTILINE)
_PSS_OF_FILES_OF_MEMORY = re.compile(rb"^Pss_Shmem:\s+(\d+) kB$", re.MULTILINE)
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


def look(pid: int) -> Process | None:
    """One process; ``None`` if it has ended."""
    try:
        found = threads.status(pid)
    except OSError:
        return None
    if found[threads.STATE] in threads.ENDED:
        return None
    return Process(
        pid,
        started=int(found[threads.STARTED]),
        ticks=int(found[threads.USER_TICKS]) + int(found[threads.SYSTEM_TICKS]),
        resident=int(found[threads.PAGES]) * PAGE + _page_tables(pid),
        threads=int(found[threads.THREADS]),
    )


def census(spaces: Iterable[int]) -> dict[int, set[int]]:
    """The processes in each of some PID namespaces; looks at every process of the machine."""
    found: dict[int, set[int]] = {number: set() for number in spaces}
    for name in os.listdir("/proc"):
        if name.isdigit():
            # One that ended just now, or somebody else's, is none of ours.
            with contextlib.suppress(OSError):
                if (members := found.get(os.stat(f"/proc/{name}/ns/pid").st_ino)) is not None:
                    members.add(int(name))
    return found


def threads_in(space: int) -> int:
    """Processes and threads in a PID namespace; looks at every process of the machine."""
    return sum(process.threads for pid in census([space])[space] if (process := look(pid)))


def proportional(pid: int) -> tuple[int, int]:
    """Bytes of memory of a process, what it shares divided by those who share it, and how many of them are in files of
    memory. Slow."""
    text = _of_memory(pid, "smaps_rollup", b"\nPss:")
    total, shared = (_bytes(pattern, text) for pattern in (_PSS, _PSS_OF_FILES_OF_MEMORY))
    return total + _page_tables(pid), shared


def _page_tables(pid: int) -> int:
    """Bytes of the tables that say where a process's memory is: 4 KiB for each 2 MiB in which it has read a byte."""
    return _bytes(_PAGE_TABLES, _of_memory(pid, "status", b"\nVmPTE:"))


def _of_memory(pid: int, name: str, mark: bytes) -> bytes:
    """What a file in ``/proc`` says of a process, with ``mark`` in it as all have it that have memory."""
    text = _read(f"/proc/{pid}/{name}")
    if mark in text:
        return text
    # Its first thread has ended, and the memory is the others'.
    others = (_read(f"{folder}/{name}") for folder in threads.threads(pid))
    return next((text for text in others if mark in text), b"")


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
