# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Limits where the kernel keeps none for us: decide from measurements who is killed.

Control groups need an administrator who delegates them, and disk quotas are rarer still. So use is measured, where
something happens: two thousand sandboxes, most of which wait for a model, cost next to nothing.

- *Hot* sandboxes used processor time since the last look, or a program was started in them. Each tick looks at all hot
  ones, at others in rotation for a share of the tick, and at all when the machine's memory goes fast.
- *Memory*: the sum of resident sizes counts shared pages many times but is cheap. Only where it exceeds the limit, the
  slow sum of proportional sizes decides. The largest processes are killed, as many as it takes; a sandbox that exceeds
  its limit look after look is ended. Memory files count once a scan has found them, and so does a layer in memory.
- *Disk*: hot sandboxes are scanned in turn, for a share of each tick. A sandbox that wrote too much is ended as soon
  as the scan has seen it, and so is one whose scan takes too long.
- *Processes, shared memory*: the kernel keeps these limits; the watchdog reports when they are used up.

Between two looks a sandbox may exceed its limits: the watchdog stops runaway programs and does no accounting. This
module is pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nemo_gym_prorl.sandbox.limits.usage import MAX_FOLDERS, DiskUsage, Process


TICK_S = 0.5

COLD_BUDGET_S = 0.002
"""Of each tick, for sandboxes in which nothing happens."""

SCAN_BUDGET_S = 0.05
"""Of each tick, for measuring disk use."""

MAX_SCAN_S = 10.0
"""Processor time of one scan: about a million folders or three million files."""

SCAN_PAUSE_S = 2.0
"""Between two scans of one sandbox."""

PROC_SCAN_FRACTION = 0.01
"""Of all time, for looking at every process of the machine where no control groups list those of sandboxes."""

MAX_LOOKS_OVER_LIMIT = 10
"""In a row at which a sandbox is over its memory limit; then killing what is largest has not helped."""

FAST_DROP_FRACTION = 0.02
"""Of the machine's memory, used up within a tick: then everybody is looked at."""


@dataclass(slots=True, eq=False)
class Watched:
    """One sandbox.

    Attributes:
        name: the sandbox's.
        space: number of its PID namespace.
        init: its first process.
        group: folder of its control group; empty without.
        folder: where its layer lies.
        memory_limit: in bytes; 0 if there is none, or the kernel keeps it.
        disk_limit: in bytes; 0 for none.
        process_limit: of processes and threads; 0 if the kernel keeps none for the sandbox alone.
        shared_memory_mib: size of ``/dev/shm``.
        outside: the runtime's process, which is not among those inside but counts as one of the sandbox's user.
        in_memory: whether its layer is.
        hot: it did something since the last look.
        unmeasured: it did something since it was last scanned.
        scanned: when that was.
        scanning: a scan of it is under way.
        disk: bytes found then.
        held: bytes in files of memory found then, by process.
        members: the processes that are known of it.
        killed: those of them that were killed for their memory, and may not have ended yet.
        looks_over: how often in a row it was found over its memory limit.
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
    held: dict[int, int] = field(default_factory=dict)
    members: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)
    looks_over: int = 0
    seen: frozenset[tuple[int, int]] = frozenset()

    def record_look(self, processes: list[Process]) -> None:
        """Take note of a look: whether anything happened."""
        seen = frozenset((process.pid, process.ticks) for process in processes)
        self.hot = seen != self.seen
        self.unmeasured |= self.hot
        self.seen = seen
        self.members = {process.pid for process in processes}

    def may_exceed_memory(self, processes: list[Process]) -> bool:
        """Whether it is worth measuring properly: resident sizes count too much, never too little."""
        counted = sum(one.resident for one in processes) + sum(self.held.values())
        may = bool(self.memory_limit) and self._used(counted) > self.memory_limit
        if not may:
            self.looks_over = 0
        return may

    def memory_victims(self, proportional: dict[int, tuple[int, int]]) -> tuple[list[int], str] | None:
        """Whom to kill, and why; nobody where no process's end would help, and the sandbox has to end.

        The largest first, as many as it takes; who was killed before and is still there goes before all others. Never
        the first process: with it the sandbox would be lost, and nobody could tell that this was its own doing.

        Args:
            proportional: of each process its proportional size, and how much of that is in files of memory.
        """
        # A file of memory may be mapped, or held open, or both.
        mapped = sum(shared for _size, shared in proportional.values())
        unmapped = max(0, sum(self.held.values()) - mapped)
        used = self._used(sum(size for size, _shared in proportional.values()) + unmapped)
        self.killed &= proportional.keys()
        if used <= self.memory_limit or not proportional:
            self.looks_over = 0
            return None
        self.looks_over += 1
        reason = f"memory: {used >> 20} MiB in use of {self.memory_limit >> 20} MiB"
        if self.looks_over > MAX_LOOKS_OVER_LIMIT:
            return [], f"{reason}, and again however many processes were killed for it"
        layer = self.disk if self.in_memory else 0
        shares = {
            pid: max(size, self.held.get(pid, 0)) for pid, (size, _shared) in proportional.items() if pid != self.init
        }
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
        """Return why the sandbox has to end for what a scan has found so far, or an empty text."""
        if not self.disk_limit:
            return ""
        if found.crowded:
            return f"disk: more than {MAX_FOLDERS} folders"
        if found.seconds > MAX_SCAN_S:
            return f"disk: so many files and folders that measuring them takes more than {MAX_SCAN_S:.0f} s"
        if found.disk > self.disk_limit:
            return f"disk: wrote {found.disk >> 20} MiB of {self.disk_limit >> 20} MiB"
        return ""

    def record_scan(self, found: DiskUsage) -> None:
        """Keep the result of a scan."""
        self.disk, self.held, self.scanning = found.disk, found.held, False
        # The next look counts what is known now.
        self.hot |= bool(found.held)

    def exhausted_limits(self, processes: list[Process], shared_memory_free: int) -> list[tuple[str, str]]:
        """Of which limits that the kernel keeps all is in use, and in words."""
        found = []
        # With one left no command could be started that starts another.
        if self.process_limit and sum(one.threads for one in processes) >= self.process_limit - 1:
            found.append(("processes", f"processes: all of {self.process_limit} in use"))
        if self.shared_memory_mib and not shared_memory_free:
            found.append(("shared memory", f"shared memory: all of {self.shared_memory_mib} MiB in use"))
        return found

    def _used(self, processes: int) -> int:
        return processes + (self.disk if self.in_memory else 0)


class WatchList:
    """Whose turn it is."""

    def __init__(self) -> None:
        self.all: dict[str, Watched] = {}

    def hot(self) -> list[Watched]:
        """Those that are looked at with every tick."""
        return [box for box in self.all.values() if box.hot]

    def cold(self) -> Iterator[Watched]:
        """The others, longest not looked at first; who is given has had its turn."""
        for name in [name for name, box in self.all.items() if not box.hot]:
            box = self.all.pop(name)
            self.all[name] = box
            yield box

    def next_to_scan(self, now: float) -> Watched | None:
        """Whose disk use is to be measured next."""
        due = (
            box
            for box in self.all.values()
            if box.unmeasured
            and not box.scanning
            and (box.disk_limit or box.in_memory or box.memory_limit)
            and now - box.scanned >= SCAN_PAUSE_S
        )
        return min(due, key=lambda box: box.scanned, default=None)


def is_memory_dropping(before: int, now: int, total: int) -> bool:
    """Whether the machine's memory, as available before and now, goes so fast that everybody must be looked at."""
    return before - now > total * FAST_DROP_FRACTION
