# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""One control group (version 2) for each sandbox, where this process may make groups.

A group enforces limits exactly, ends all of its processes at once however fast they fork, and reports when it is
empty. Root is not needed, only a delegated group to make others in. systemd delegates a group to ``systemd-run --user
--scope -p Delegate=yes`` and to services; a privileged container has its own. Sandboxes' groups are made below the
server's group, so all limits of the server apply to its sandboxes.

The kernel refuses to enable controllers in a group that holds processes, except in the root group. The delegated group
holds the server and the supervisor. So all processes of the delegated group first move into a subgroup
(:data:`SERVER_GROUP`), to which the limits of the delegated group still apply.

The delegation is tested rather than read from settings: a probe group is made, a process started in it, and the group
removed.
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
"""Name of the subgroup for the processes of the delegated group."""

GROUP_PREFIX = "prorl-s-"
"""Prefix of group names; a sandbox's group name continues with the names of its owner and of the sandbox."""

PROCESS_SLACK = 16
"""Processes of a group beyond the limit of the sandbox: helpers that start commands."""

CPU_PERIOD_US = 100_000
MIN_CPU_US = 1000
"""Smallest quota that the kernel accepts."""

_UNITS = frozenset({".scope", ".service", ".slice"})
"""Suffixes of group names that belong to systemd."""

STALE_PROBE_S = 60.0
"""Age of a probe group whose maker is dead; a probe takes milliseconds."""

REMOVE_S = 1.0
"""Time for processes that are ending to leave a group, so that it can be removed."""

_MOVES = 100
"""Rounds of moving processes, since processes may fork meanwhile."""


def group_of(mountinfo: str, membership: str) -> Path | None:
    """Return the folder of a process's group; ``None`` if it is not visible or version 2 is not mounted.

    Args:
        mountinfo: text of ``/proc/self/mountinfo``.
        membership: text of ``/proc/self/cgroup``.
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
    """Return the name of a sandbox's control group, given the sandbox's folder."""
    return f"prorl-{folder.parent.name}-{folder.name}"


def delegation_base(group: Path) -> Path:
    """Return the group in which a process of ``group`` makes others: the parent of :data:`SERVER_GROUP`, else
    ``group``."""
    return group.parent if group.name == SERVER_GROUP else group


@dataclass(frozen=True, slots=True)
class Delegation:
    """A control group in which this process may make others.

    Attributes:
        controllers: those of :data:`CONTROLLERS` that the group can enable for others.
    """

    base: Path
    controllers: frozenset[str]


def probe_delegation() -> Delegation | None:
    """Return this process's delegation, tested with a probe group that is removed again; ``None`` without one."""
    group = group_of(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    if group is None:
        return None
    base = delegation_base(group)
    if not os.access(base / "cgroup.procs", os.W_OK) or not is_delegated(base):
        return None
    _remove_stale_probes(base)
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


def _remove_stale_probes(base: Path) -> None:
    """Remove the empty probe groups of processes that were killed during their probe."""
    for left in base.glob(f"{GROUP_PREFIX}probe-*"):
        # Not a group with processes, which rmdir refuses, nor a new one, which another process may be probing.
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_PROBE_S:
                left.rmdir()


def is_delegated(base: Path) -> bool:
    """Return whether this process may move all processes of a group.

    Root can write to every group, even to the scope of a login, so for root the group must be delegated by systemd.
    systemd's user manager can't mark delegation before version 251. So a group that an ordinary user may write to
    counts as delegated.
    """
    if os.geteuid() != 0 or base.suffix not in _UNITS:
        return True
    for attribute in ("trusted.delegate", "user.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(base, attribute) == b"1":
                return True
    return False


def _can_start_in(group: Group) -> bool:
    """Return whether a process can start in ``group``. A child makes the attempt, since it must have one thread."""
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
    """Enable the controllers of ``granted`` for groups below its base, as far as the kernel allows; return the
    enabled ones."""
    missing = granted.controllers - _handed_out(granted.base)
    if not missing:
        return granted.controllers
    # Several supervisors may prepare the group at the same time.
    lock = os.open(granted.base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # The root group alone has no type, and may enable controllers while it holds processes. In other groups the
        # kernel would make the group and those below threaded.
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
    """Move every process of ``base`` into its subgroup, this process included."""
    leaf = base / SERVER_GROUP
    leaf.mkdir(exist_ok=True)
    for _ in range(_MOVES):
        processes = _read(base, "procs").split()
        if not processes:
            return
        for pid in processes:
            # The process has ended, or may not be moved; then enabling the controllers fails.
            with contextlib.suppress(OSError):
                _write(leaf, "procs", pid)


def limit_files(controllers: frozenset[str], *, memory: int, processes: int, cpus: float) -> dict[str, str]:
    """Return the file to text that limit a group in bytes, processes and processors; 0 is no limit."""
    wanted = {
        "memory": ("memory.max", str(memory) if memory else ""),
        "pids": ("pids.max", str(processes) if processes else ""),
        "cpu": ("cpu.max", f"{max(MIN_CPU_US, round(cpus * CPU_PERIOD_US))} {CPU_PERIOD_US}" if cpus else ""),
    }
    return dict(entry for name, entry in wanted.items() if name in controllers and entry[1])


@dataclass(frozen=True, slots=True)
class Group:
    """The control group of one sandbox."""

    path: Path
    controllers: frozenset[str]

    @classmethod
    def make(cls, path: Path) -> Group:
        path.mkdir()
        return cls(path, CONTROLLERS & set(_read(path, "controllers").split()))

    def set_limits(self, *, memory: int, processes: int, cpus: float) -> None:
        """Set limits in bytes, processes and processors, as far as controllers are enabled; 0 for none.

        To be called after the start of the sandbox: the runtime's threads and processor time would exceed the limits.
        """
        present = int((self.path / "pids.current").read_text()) if "pids" in self.controllers else 0
        allowed = processes and processes + present + PROCESS_SLACK
        for name, value in limit_files(self.controllers, memory=memory, processes=allowed, cpus=cpus).items():
            (self.path / name).write_text(value)
        if "memory" in self.controllers and memory and (swap := self.path / "memory.swap.max").exists():
            # Swapped memory does not count as memory. Some kernels have no swap controller.
            swap.write_text("0")

    def fork(self) -> int:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return syscalls.fork_into_cgroup(descriptor)
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        """Send SIGKILL to every process in the group at once; a process can't escape by forking."""
        with contextlib.suppress(FileNotFoundError):
            _write(self.path, "kill", "1")

    def processes(self) -> list[int]:
        """Return the processes in the group. A process that is ending is not listed, but still prevents removal."""
        try:
            return [int(pid) for pid in _read(self.path, "procs").split()]
        except FileNotFoundError:
            return []

    def is_full(self) -> bool:
        """Return whether the group has as many processes as its limit."""
        if "pids" not in self.controllers:
            return False
        allowed = (self.path / "pids.max").read_text().strip()
        return allowed != "max" and int((self.path / "pids.current").read_text()) >= int(allowed)

    def oom_kills(self) -> int:
        """Return how many processes the kernel has killed in the group, for lack of the group's or the machine's
        memory."""
        return self._memory_event("oom_kill")

    def exceeded_memory(self) -> bool:
        """Return whether the group ever reached its own memory limit."""
        return bool(self._memory_event("oom"))

    def _memory_event(self, name: str) -> int:
        found = re.search(rf"^{name} (\d+)$", (self.path / "memory.events").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0

    def remove(self) -> None:
        """Remove the group, which proves that it is empty. Idempotent; blocks for up to :data:`REMOVE_S`.

        Raises:
            OSError: processes are left in the group.
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
