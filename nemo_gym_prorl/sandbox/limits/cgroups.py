# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""One control group (version 2) for each sandbox, where this process may make any.

A group keeps limits that cannot be overrun, ends all of its processes at once however fast they fork, and says when
the last is gone. It needs no root, only a group of ours to make others in: systemd delegates one to
``systemd-run --user --scope -p Delegate=yes`` and to services, a privileged container has one. Groups are made in the
group that we are in and nowhere else, so that whatever bounds the server bounds its sandboxes too.

The kernel lets a group that hands out controllers hold no processes itself, unless it is the root of all. Ours does
hold some: the server and us. So before the controllers are handed out everything in it moves into one leaf
(:data:`LEAF`), where nothing changes for it: the limits of the group above go on to bound it.

What can be had is tried out rather than read off: a probe group is made, a process started in it, and all removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from nemo_gym_prorl.sandbox.isolation import syscalls


CONTROLLERS = frozenset({"cpu", "memory", "pids"})

SERVER_GROUP = "prorl-server"
"""Where the processes go that were in the group which hands out controllers."""

GROUP_PREFIX = "prorl-s-"
"""What the names of our groups begin with: those of sandboxes go on with their owner's and their own name."""

PROCESS_SLACK = 16
"""Processes that a group may hold beyond the sandbox's own and the runtime's: those that start a command."""

CPU_PERIOD_US = 100_000
MIN_CPU_US = 1000
"""The kernel takes no less."""

_UNITS = frozenset({".scope", ".service", ".slice"})
"""Ends of the names of systemd's groups."""

REMOVE_S = 1.0
"""How long processes that are ending may keep a group from being removed."""

_MOVES = 100
"""Rounds of moving processes that fork meanwhile."""


def group_of(mountinfo: str, membership: str) -> Path | None:
    """The folder of the group that a process is in; ``None`` if it can't be seen or there is no version 2.

    Args:
        mountinfo: the text of ``/proc/self/mountinfo``.
        membership: the text of ``/proc/self/cgroup``.
    """
    group = next((line[3:] for line in membership.splitlines() if line.startswith("0::/")), None)
    if group is None or "/.." in group:
        return None
    for line in mountinfo.splitlines():
        fields, _, kind = line.partition(" - ")
        root, target = fields.split()[3:5]
        if kind.startswith("cgroup2 ") and root == "/":
            folder = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), target)
            return Path(folder, group.lstrip("/"))
    return None


def group_name(folder: Path) -> str:
    """The name of the group of the sandbox whose folder this is."""
    return f"prorl-{folder.parent.name}-{folder.name}"


def delegation_base(group: Path) -> Path:
    """Where a process in ``group`` makes others: beside the leaf if it was moved there, else below."""
    return group.parent if group.name == SERVER_GROUP else group


@dataclass(frozen=True, slots=True)
class Delegation:
    """A group in which others can be made.

    Attributes:
        base: its folder.
        controllers: of :data:`CONTROLLERS`, those that it has to hand out.
    """

    base: Path
    controllers: frozenset[str]


def probe_delegation() -> Delegation | None:
    """The delegation that this process has, tried out; leaves things as they were. Some milliseconds."""
    group = group_of(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    if group is None:
        return None
    base = delegation_base(group)
    if not os.access(base / "cgroup.procs", os.W_OK) or not is_delegated(base):
        return None
    probe = Group(base / f"{GROUP_PREFIX}probe-{secrets.token_hex(4)}", frozenset())
    try:
        probe.path.mkdir()
    except OSError:
        return None
    try:
        if not (probe.path / "cgroup.kill").exists() or not _can_start_in(probe):
            return None
        return Delegation(base, CONTROLLERS & set((base / "cgroup.controllers").read_text().split()))
    finally:
        probe.remove()


def is_delegated(base: Path) -> bool:
    """Whether all processes of a group may be moved: root can write to any group, as to the scope of a login.

    systemd marks the units that it delegates. Its user manager cannot before version 251, so the groups that an
    ordinary user may write to count as delegated.
    """
    if os.geteuid() != 0 or base.suffix not in _UNITS:
        return True
    for attribute in ("trusted.delegate", "user.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(base, attribute) == b"1":
                return True
    return False


def _can_start_in(group: Group) -> bool:
    """Try it in a child, which has one thread, whatever this process has."""
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            pid = group.fork()
            if pid:
                os.waitpid(pid, 0)
            failed = 0
        finally:
            os._exit(failed)
    return os.waitpid(child, 0)[1] == 0


def enable_controllers(granted: Delegation) -> frozenset[str]:
    """Have groups below ``granted.base`` get its controllers, as far as it can be had; returns those that they get."""
    missing = granted.controllers - _handed_out(granted.base)
    if not missing:
        return granted.controllers
    # Several supervisors may be at it.
    lock = os.open(granted.base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Some controllers can be handed out by a group with processes, but then it is one of threads, and so are those
        # below. Only the root of all is free of that; it alone has no type.
        if (granted.base / "cgroup.type").exists():
            _evacuate(granted.base)
        for name in sorted(missing):
            with contextlib.suppress(OSError):
                _write(granted.base, "subtree_control", f"+{name}")
    finally:
        os.close(lock)
    return granted.controllers & _handed_out(granted.base)


def _handed_out(base: Path) -> set[str]:
    return set((base / "cgroup.subtree_control").read_text().split())


def _evacuate(base: Path) -> None:
    """Move every process of ``base`` itself into its leaf, ourselves included."""
    leaf = base / SERVER_GROUP
    leaf.mkdir(exist_ok=True)
    for _ in range(_MOVES):
        processes = _read(base, "procs").split()
        if not processes:
            return
        for pid in processes:
            # Ended meanwhile, or not ours to move: then the kernel refuses to hand out, and that is that.
            with contextlib.suppress(OSError):
                _write(leaf, "procs", pid)


def limit_files(controllers: frozenset[str], *, memory: int, processes: int, cpus: float) -> dict[str, str]:
    """What to write into which file of a group for limits in bytes, number and processors; 0 is no limit."""
    wanted = {
        "memory": ("memory.max", str(memory) if memory else ""),
        "pids": ("pids.max", str(processes) if processes else ""),
        "cpu": ("cpu.max", f"{max(MIN_CPU_US, round(cpus * CPU_PERIOD_US))} {CPU_PERIOD_US}" if cpus else ""),
    }
    return dict(entry for name, entry in wanted.items() if name in controllers and entry[1])


@dataclass(frozen=True, slots=True)
class Group:
    """One sandbox's group.

    Attributes:
        path: its folder.
        controllers: those that bound it.
    """

    path: Path
    controllers: frozenset[str]

    @classmethod
    def make(cls, path: Path) -> Group:
        """Make a group without limits."""
        path.mkdir()
        return cls(path, CONTROLLERS & set(_read(path, "controllers").split()))

    def set_limits(self, *, memory: int, processes: int, cpus: float) -> None:
        """Set limits in bytes, number and processors, as far as there are controllers; 0 for none.

        For when the runtime has done its work, whose own threads and processors' time are many for a moment.
        """
        present = int((self.path / "pids.current").read_text()) if "pids" in self.controllers else 0
        allowed = processes and processes + present + PROCESS_SLACK
        for name, value in limit_files(self.controllers, memory=memory, processes=allowed, cpus=cpus).items():
            (self.path / name).write_text(value)
        if "memory" in self.controllers and memory and (swap := self.path / "memory.swap.max").exists():
            # What is swapped out does not count as memory. Some kernels have no swap to bound.
            swap.write_text("0")

    def fork(self) -> int:
        """``os.fork`` whose child is in the group from its birth."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return syscalls.fork_into_cgroup(descriptor)
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        """Send SIGKILL to every process in it, at once; none forks away."""
        with contextlib.suppress(FileNotFoundError):
            _write(self.path, "kill", "1")

    def processes(self) -> list[int]:
        """Those in it. One that is just ending is not listed, but still keeps the group from being removed."""
        try:
            return [int(pid) for pid in _read(self.path, "procs").split()]
        except FileNotFoundError:
            return []

    def is_full(self) -> bool:
        """Whether it holds as many processes as it may."""
        if "pids" not in self.controllers:
            return False
        allowed = (self.path / "pids.max").read_text().strip()
        return allowed != "max" and int((self.path / "pids.current").read_text()) >= int(allowed)

    def oom_kills(self) -> int:
        """How many processes the kernel has killed in it for want of memory, its own or the machine's."""
        return self._memory_event("oom_kill")

    def exceeded_memory(self) -> bool:
        """Whether it ever wanted more memory than it may have."""
        return bool(self._memory_event("oom"))

    def _memory_event(self, name: str) -> int:
        found = re.search(rf"^{name} (\d+)$", (self.path / "memory.events").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0

    def remove(self) -> None:
        """Remove it, which is the proof that nothing lives in it; harmless when it is gone. Blocks for a moment.

        Raises:
            OSError: there are processes in it.
        """
        deadline = time.monotonic() + REMOVE_S
        while True:
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
            time.sleep(0.001)


def _read(group: Path, name: str) -> str:
    return (group / f"cgroup.{name}").read_text()


def _write(group: Path, name: str, text: str) -> None:
    (group / f"cgroup.{name}").write_text(text)
