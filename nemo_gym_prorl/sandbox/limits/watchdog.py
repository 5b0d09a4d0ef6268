# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Decide from measurements which processes and sandboxes exceed limits that the kernel does not enforce (pure).

Control groups need delegation by an administrator, and few machines have disk quotas. So the watchdog measures usage,
mostly of active sandboxes: of two thousand sandboxes, most wait for a model.

- A *hot* sandbox has used CPU time since its last measurement, or started a program; other sandboxes are *cold*. Each
  tick measures the processes of all hot sandboxes, and of cold sandboxes in rotation within a time budget. While the
  machine's available memory drops fast, each tick measures all sandboxes.
- *Memory*: the sum of resident sizes counts shared pages several times, but is cheap. If that sum exceeds the limit,
  the sum of proportional sizes (PSS), which is slow to read, decides. The largest processes are killed until the
  others fit into the limit. A sandbox that exceeds its limit in many consecutive measurements is ended. Where the
  overlay's layer is kept in memory, its size in the last disk scan counts, too.
- *Disk*: sandboxes that were active are scanned in turns, the least recently scanned first. A sandbox is
  ended if its scan exceeds the limit or takes too long.
- *Shared memory*: the kernel enforces the limit; the watchdog reports when it is used up.

A sandbox may exceed a limit between two measurements: the watchdog stops runaway programs and does no accounting.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from nemo_gym_prorl.sandbox.limits.usage import MAX_FOLDERS, MAX_SCAN_S, DiskUsage, Process


TICK_S = 0.5  # seconds between two measurements of hot sandboxes: bounds how far memory use can overshoot

COLD_BUDGET_S = 0.002
"""Seconds per tick for measuring cold sandboxes: 0.4 % of a core."""

SCAN_FRACTION = 0.1
"""Fraction of time for disk scans: a tenth of a core."""

SCAN_PAUSE_S = 2.0
"""Minimum seconds between the starts of two scans of one sandbox."""

SCAN_TURN_S = 0.005
"""CPU seconds of a scan before the next one's turn."""

MAX_MEASUREMENTS_OVER_LIMIT = 10
"""Consecutive measurements above the memory limit after which a sandbox is ended, since killing has not helped."""

FAST_DROP_FRACTION = 0.02
"""Fraction of the machine's memory used up within a tick from which all sandboxes are measured."""


@dataclass(slots=True, eq=False)
class Watched:
    """Limits and measurements of one sandbox.

    Attributes:
        space: inode number of the PID namespace.
        init: host pid of the first process.
        group: folder of the control group; empty without a group.
        folder: upper folder of the overlay, which disk scans measure.
        memory_limit: bytes; 0 if there is no limit, or the kernel enforces it.
        disk_limit: bytes; 0 for no limit.
        shared_memory_mib: size of ``/dev/shm``; 0 for no reports.
        in_memory: whether ``folder`` is on a file system in memory.
        hot: whether the sandbox was active since the last measurement of its processes.
        unmeasured: whether the sandbox was active since the start of the last disk scan.
        scanned: monotonic time of the start of the last disk scan, which found ``disk`` bytes.
        members: host pids of the processes at the last measurement.
        killed: pids of processes that were killed for their memory and may not have ended yet.
        measurements_over: consecutive measurements above the memory limit.
        seen: pid and CPU time of each process at the last measurement.
    """

    name: str
    space: int
    init: int
    group: str
    folder: str
    memory_limit: int
    disk_limit: int
    shared_memory_mib: int = 0
    in_memory: bool = False
    hot: bool = True
    unmeasured: bool = True
    scanned: float = 0.0
    disk: int = 0
    members: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)
    measurements_over: int = 0
    seen: frozenset[tuple[int, int]] = frozenset()

    def record_measurement(self, processes: list[Process]) -> None:
        """Record the measured processes; the sandbox is hot if a process has started, ended or used CPU time."""
        seen = frozenset((process.pid, process.ticks) for process in processes)
        self.hot = seen != self.seen
        self.unmeasured |= self.hot
        self.seen = seen
        self.members = {process.pid for process in processes}

    def may_exceed_memory(self, processes: list[Process]) -> bool:
        """Return whether resident sizes, which are never smaller than proportional sizes, exceed the memory limit.
        Then proportional sizes must be measured; otherwise ``measurements_over`` starts again at 0."""
        used = self._used(sum(one.resident for one in processes))
        may = bool(self.memory_limit) and used > self.memory_limit
        if not may:
            self.measurements_over = 0
        return may

    def memory_victims(self, proportional: dict[int, int]) -> tuple[list[int], str] | None:
        """Return the pids to kill and the reason; ``None`` within the limit. No pids mean that the sandbox must end.

        Processes that were killed before and still exist come first, then the largest. The first process is never a
        victim: its end would end the sandbox, and would be attributed to the machine.

        Args:
            proportional: proportional size in bytes by pid, of all processes of the sandbox.
        """
        used = self._used(sum(proportional.values()))
        self.killed &= proportional.keys()
        if used <= self.memory_limit or not proportional:
            self.measurements_over = 0
            return None
        self.measurements_over += 1
        reason = f"memory: {used >> 20} MiB in use of {self.memory_limit >> 20} MiB"
        if self.measurements_over > MAX_MEASUREMENTS_OVER_LIMIT:
            return [], f"{reason}, although processes were killed for it"
        layer = self.disk if self.in_memory else 0
        shares = {pid: size for pid, size in proportional.items() if pid != self.init}
        victims = []
        if layer <= self.memory_limit:
            for pid in sorted(shares, key=lambda pid: (pid in self.killed, shares[pid]), reverse=True):
                if used <= self.memory_limit:
                    break
                victims.append(pid)
                used -= shares[pid]
        self.killed.update(victims)
        return victims, reason

    def disk_violation(self, found: DiskUsage) -> str:
        """Return why a disk scan must end the sandbox; empty if the sandbox may continue."""
        if not self.disk_limit:
            return ""
        if found.crowded:
            return f"disk: more than {MAX_FOLDERS} folders"
        if found.seconds > MAX_SCAN_S:
            return f"disk: too many files and folders to measure within {MAX_SCAN_S:.0f} s"
        if found.disk > self.disk_limit:
            return f"disk: wrote {found.disk >> 20} MiB of {self.disk_limit >> 20} MiB"
        return ""

    def _used(self, processes: int) -> int:
        return processes + (self.disk if self.in_memory else 0)


class WatchList:
    """All watched sandboxes by name, the least recently measured cold sandbox first."""

    def __init__(self) -> None:
        self.all: dict[str, Watched] = {}

    def hot(self) -> list[Watched]:
        return [box for box in self.all.values() if box.hot]

    def cold(self) -> Iterator[Watched]:
        """Yield the cold sandboxes, the least recently measured first; each yielded sandbox becomes the last."""
        for name in [name for name, box in self.all.items() if not box.hot]:
            box = self.all.pop(name)
            self.all[name] = box
            yield box

    def next_to_scan(self, now: float, scanning: Container[str] = ()) -> Watched | None:
        """Return the sandbox whose disk scan is due longest at the monotonic time ``now``; ``None`` if none is due.
        ``scanning``: names of sandboxes whose scan goes on."""
        due = (
            box
            for box in list(self.all.values())
            if box.unmeasured
            and box.name not in scanning
            and (box.disk_limit or box.in_memory)
            and now - box.scanned >= SCAN_PAUSE_S
        )
        return min(due, key=lambda box: box.scanned, default=None)


def is_memory_dropping(before: int, now: int, total: int) -> bool:
    """Return whether available memory (bytes) has dropped by more than :data:`FAST_DROP_FRACTION` of ``total``."""
    return before - now > total * FAST_DROP_FRACTION
