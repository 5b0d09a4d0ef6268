# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Decide from measurements which processes and sandboxes exceed limits that the kernel does not enforce.

Control groups need delegation by an administrator, and few machines have disk quotas. So the watchdog measures, mostly
in sandboxes that are active: of two thousand sandboxes most wait for a model.

- A *hot* sandbox used processor time since the last look, or started a program. Each tick looks at all hot sandboxes,
  and at others in rotation for a share of the tick. The watchdog looks at all sandboxes while the machine's available
  memory drops fast.
- *Memory*: the sum of resident sizes counts shared pages several times, but is cheap. Where that sum exceeds the
  limit, the slow sum of proportional sizes decides. The largest processes are killed until the rest fits. A sandbox
  that still exceeds its limit look after look is ended. A layer in memory counts once a scan has found it.
- *Disk*: hot sandboxes are scanned in turn, for a share of each tick. A sandbox is ended as soon as a scan exceeds its
  limit or takes too long.
- *Processes, shared memory*: the kernel enforces these limits; the watchdog reports when one is used up.

A sandbox may exceed its limits between two looks: the watchdog stops runaway programs and does no accounting. This
module is pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nemo_gym_prorl.sandbox.limits.usage import MAX_FOLDERS, DiskUsage, Process


TICK_S = 0.5

COLD_BUDGET_S = 0.002
"""Share of each tick for sandboxes that are not hot."""

SCAN_BUDGET_S = 0.05
"""Share of each tick for disk scans."""

MAX_SCAN_S = 10.0
"""Processor time of one scan: about a million folders or three million files."""

SCAN_PAUSE_S = 2.0
"""Pause between two scans of one sandbox."""

PROC_SCAN_FRACTION = 0.002
"""Share of all time for reading every process of the machine, where no control groups list sandboxes' processes. Such
a scan finds processes that a new watchdog does not know; every look finds the descendants of known processes."""

MAX_LOOKS_OVER_LIMIT = 10
"""Looks in a row above the memory limit, after which killing processes has not helped and the sandbox is ended."""

FAST_DROP_FRACTION = 0.02
"""Share of the machine's memory used up within a tick, at which the watchdog looks at all sandboxes."""


@dataclass(slots=True, eq=False)
class Watched:
    """State of one sandbox.

    Attributes:
        space: inode number of its PID namespace.
        init: pid of the first process.
        group: folder of the control group; empty without a group.
        folder: folder with the sandbox's layer.
        memory_limit: in bytes; 0 if there is none, or the kernel enforces it.
        disk_limit: in bytes; 0 for none.
        process_limit: processes and threads; 0 if the kernel counts no processes for the sandbox alone.
        shared_memory_mib: size of ``/dev/shm``.
        outside: the runtime's process, which runs outside but counts as one of the sandbox's user.
        hot: whether the sandbox was active since the last look.
        unmeasured: whether the sandbox was active since the last scan.
        disk: bytes that the last scan found.
        members: known processes of the sandbox.
        killed: members that were killed for their memory and may not have ended yet.
        looks_over: looks in a row above the memory limit.
        seen: pid and processor time of each process at the last look.
    """

    name: str
    space: int
    init: int
    group: str
    folder: str
    memory_limit: int
    disk_limit: int
    process_limit: int = 0
    shared_memory_mib: int = 0
    outside: int | None = None
    in_memory: bool = False
    hot: bool = True
    unmeasured: bool = True
    scanned: float = 0.0
    scanning: bool = False
    disk: int = 0
    members: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)
    looks_over: int = 0
    seen: frozenset[tuple[int, int]] = frozenset()

    def record_look(self, processes: list[Process]) -> None:
        """Record the processes of a look, and whether any was active since the last one."""
        seen = frozenset((process.pid, process.ticks) for process in processes)
        self.hot = seen != self.seen
        self.unmeasured |= self.hot
        self.seen = seen
        self.members = {process.pid for process in processes}

    def may_exceed_memory(self, processes: list[Process]) -> bool:
        """Return whether proportional sizes must be measured: resident sizes count too much, never too little."""
        used = self._used(sum(one.resident for one in processes))
        may = bool(self.memory_limit) and used > self.memory_limit
        if not may:
            self.looks_over = 0
        return may

    def memory_victims(self, proportional: dict[int, int]) -> tuple[list[int], str] | None:
        """Return the processes to kill and the reason; an empty list if killing would not help, so the sandbox has to
        end.

        The largest processes come first, after those that were killed before and still exist. The first process is
        never a victim: its end would end the sandbox, and would look like an end caused outside.

        Args:
            proportional: proportional size of each process.
        """
        used = self._used(sum(proportional.values()))
        self.killed &= proportional.keys()
        if used <= self.memory_limit or not proportional:
            self.looks_over = 0
            return None
        self.looks_over += 1
        reason = f"memory: {used >> 20} MiB in use of {self.memory_limit >> 20} MiB"
        if self.looks_over > MAX_LOOKS_OVER_LIMIT:
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
        """Return why a running scan must end the sandbox; empty if it need not."""
        if not self.disk_limit:
            return ""
        if found.crowded:
            return f"disk: more than {MAX_FOLDERS} folders"
        if found.seconds > MAX_SCAN_S:
            return f"disk: too many files and folders to measure within {MAX_SCAN_S:.0f} s"
        if found.disk > self.disk_limit:
            return f"disk: wrote {found.disk >> 20} MiB of {self.disk_limit >> 20} MiB"
        return ""

    def record_scan(self, found: DiskUsage) -> None:
        self.disk, self.scanning = found.disk, False

    def exhausted_limits(self, processes: list[Process], shared_memory_free: int) -> list[tuple[str, str]]:
        """Return the limits enforced by the kernel that are used up: resource and description."""
        found = []
        # With one process left, no command could start another.
        if self.process_limit and sum(one.threads for one in processes) >= self.process_limit - 1:
            found.append(("processes", f"processes: all of {self.process_limit} in use"))
        if self.shared_memory_mib and not shared_memory_free:
            found.append(("shared memory", f"shared memory: all of {self.shared_memory_mib} MiB in use"))
        return found

    def _used(self, processes: int) -> int:
        return processes + (self.disk if self.in_memory else 0)


class WatchList:
    """All watched sandboxes, in the order in which they are looked at."""

    def __init__(self) -> None:
        self.all: dict[str, Watched] = {}

    def hot(self) -> list[Watched]:
        """Return the sandboxes to look at in every tick."""
        return [box for box in self.all.values() if box.hot]

    def cold(self) -> Iterator[Watched]:
        """Yield the sandboxes that are not hot, the least recently measured first; each moves to the end."""
        for name in [name for name, box in self.all.items() if not box.hot]:
            box = self.all.pop(name)
            self.all[name] = box
            yield box

    def next_to_scan(self, now: float) -> Watched | None:
        """Return the sandbox whose disk use is to be scanned next; ``None`` if no scan is due."""
        due = (
            box
            for box in self.all.values()
            if box.unmeasured
            and not box.scanning
            and (box.disk_limit or box.in_memory)
            and now - box.scanned >= SCAN_PAUSE_S
        )
        return min(due, key=lambda box: box.scanned, default=None)


def is_memory_dropping(before: int, now: int, total: int) -> bool:
    """Return whether available memory drops so fast that all sandboxes must be looked at."""
    return before - now > total * FAST_DROP_FRACTION
