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
_OOM_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_AVAILABLE = re.compile(rb"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Process:
    """One process, as it was looked at.

    Attributes:
        pid: its number on the host.
        started: when it was started, which makes the number unique.
        ticks: processor time it has used.
        resident: bytes of memory, those that it shares counted in full.
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
        resident=int(found[threads.PAGES]) * PAGE,
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


def proportional(pid: int) -> tuple[int, int]:
    """Bytes of memory of a process, what it shares divided by those who share it, and how many of them are in files of
    memory. Slow."""
    text = _maps(f"/proc/{pid}")
    if not text:
        # Its first thread has ended, and the memory is the others'.
        text = next(filter(None, map(_maps, threads.threads(pid))), b"")
    found = [pattern.search(text) for pattern in (_PSS, _PSS_OF_FILES_OF_MEMORY)]
    total, shared = (int(one[1]) << 10 if one else 0 for one in found)
    return total, shared


def _maps(folder: str) -> bytes:
    try:
        with open(f"{folder}/smaps_rollup", "rb") as file:
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
