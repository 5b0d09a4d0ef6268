# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a program and everything that it started cost: core-seconds and memory, by ``/proc``.

The kernel adds what a process used to its parent's account when the parent takes note of its end. So the sum over a
process and all that live below it holds the dead as well, as long as none of them gets a parent outside: a benchmark
that is a :func:`subreaper` adopts those that lose theirs, as daemons do.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path


_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")
_PARENT, _FIRST_TIME = 1, 11
"""Fields of ``/proc/PID/stat`` behind the name: the parent, and from here on user and system time, own and of the
dead."""


def subreaper() -> None:
    """Adopt whatever loses its parent below this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def below(root: int) -> set[int]:
    """A process and all that it started, and that live or are not yet taken note of."""
    parents = {pid: int(fields[_PARENT]) for pid, fields in _all()}
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, ahead = set(), [root]
    while ahead:
        pid = ahead.pop()
        found.add(pid)
        ahead += children.get(pid, [])
    return found


def core_seconds(root: int) -> float:
    """What a process and all below it used so far, the dead among them too."""
    members = below(root)
    return sum(sum(_times(fields)) for pid, fields in _all() if pid in members)


def own_core_seconds(pid: int) -> float:
    """What one process used itself."""
    return sum(_times(_fields(pid))[:2])


def precise_core_seconds(pid: int) -> float:
    """What one process used itself, threads that have ended included, to the microsecond; 0.0 once it is gone."""
    try:
        # The kernel's number of the clock that counts a process's CPU time (CPUCLOCK_SCHED).
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def supervisor_of(root: int) -> int:
    """The supervisor of sandboxes that a process started."""
    for pid, fields in _all():
        if int(fields[_PARENT]) == root and b"supervisor" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise LookupError(f"process {root} has no supervisor")


def memory_mib(pids: Iterable[int]) -> float:
    """What processes take of memory, shared pages divided among those who share them."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total / 1024


def _all() -> Iterator[tuple[int, list[str]]]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                yield int(entry.name), _fields(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _times(fields: list[str]) -> list[float]:
    return [int(ticks) / _TICKS for ticks in fields[_FIRST_TIME : _FIRST_TIME + 4]]
