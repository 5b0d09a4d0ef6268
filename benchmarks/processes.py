# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""CPU time and memory of a process and of all its descendants, from ``/proc``.

The kernel adds the CPU time of a dead process to its parent when the parent reaps it. So the sum over a process tree
includes dead processes, unless an orphan is reparented to a process outside the tree; :func:`subreaper` prevents that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from nemo_gym_prorl.sandbox.limits.cgroups import group_of


_PR_SET_CHILD_SUBREAPER = 36
_CPUCLOCK_SCHED = 2
"""Kernel constant of the clock that counts a process's CPU time."""
_TICKS = os.sysconf("SC_CLK_TCK")
_PARENT, _CHILDREN_TIME = 1, slice(13, 15)
"""Indices, after the process name, of fields of ``/proc/PID/stat``: parent; user and system time of dead children."""


def subreaper() -> None:
    """Make this process the parent of orphans among its descendants (PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def below(root: int) -> set[int]:
    """Return the pids of a process and its descendants, including zombies."""
    children: dict[int, list[int]] = {}
    for pid, fields in _all():
        children.setdefault(int(fields[_PARENT]), []).append(pid)
    found, ahead = set(), [root]
    while ahead:
        pid = ahead.pop()
        found.add(pid)
        ahead += children.get(pid, [])
    return found


def own_cgroup() -> Path | None:
    """Move this process into a new cgroup, so that cgroups of its descendants lie below, and return the new cgroup's
    path; ``None`` if this process has no permission."""
    group = group_of(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    if group is None or not os.access(group / "cgroup.procs", os.W_OK):
        return None
    own = group / f"benchmark-{os.getpid()}"
    own.mkdir()
    (own / "cgroup.procs").write_text(str(os.getpid()))
    return own


def leave_cgroup(own: str) -> None:
    """Move this process to the parent of the cgroup ``own``, and remove that cgroup unless it has other processes."""
    with contextlib.suppress(OSError):
        (Path(own).parent / "cgroup.procs").write_text(str(os.getpid()))
        Path(own).rmdir()


def core_seconds(root: int) -> float:
    """Return the CPU seconds of a process and its descendants; those of dead processes are multiples of 10 ms."""
    members, total = below(root), 0.0
    for pid, fields in _all():
        if pid in members:
            ticks = sum(map(int, fields[_CHILDREN_TIME]))
            total += precise_core_seconds(pid) + ticks / _TICKS
    return total


def precise_core_seconds(pid: int) -> float:
    """Return the CPU seconds of one process without its children; 0.0 once the process is gone."""
    try:
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0


def memory_mib(pids: Iterable[int]) -> float:
    """Return the sum of the proportional set sizes of processes in MiB; processes that are gone count 0."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total / 1024


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return _fields(pid)[0] not in "ZX"
    except OSError:
        return False


def is_isolated(pid: int) -> bool:
    """Return whether a process runs in another PID namespace than this process; ``False`` for a zombie."""
    try:
        return Path(f"/proc/{pid}/ns/pid").readlink() != Path("/proc/self/ns/pid").readlink()
    except OSError:
        return False


def command_line(pid: int) -> bytes:
    """Return the arguments of a process, each with a final zero byte; empty once the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _all() -> Iterator[tuple[int, list[str]]]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                yield int(entry.name), _fields(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
