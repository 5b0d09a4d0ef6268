# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""One control group (version 2) for each sandbox, where this process may create control groups.

A control group enforces limits exactly, and kills all of its processes at once however fast they fork. Root is not
needed, only a *delegated* group, below which this process may create groups. systemd delegates a group to services and
to ``systemd-run --user --scope -p Delegate=yes``; a privileged container has its own. Sandboxes' groups are created
below the server's group, so all limits of the server also apply to its sandboxes.

The kernel refuses to enable controllers in a group that contains processes, except in the root group. The delegated
group contains the server and the supervisor. So all processes of the delegated group first move into a subgroup
(:data:`SERVER_GROUP`), to which the limits of the delegated group still apply.

The delegation is tested and not read from settings: a probe group is created, a process is started in the probe
group, and the probe group is removed.
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
"""Controllers that limit a sandbox."""

SERVER_GROUP = "prorl-server"
"""Name of the subgroup into which the processes of the delegated group move."""

GROUP_PREFIX = "prorl-s-"
"""Prefix of the names of sandboxes' groups (:func:`group_name`) and of probe groups."""

PROCESS_SLACK = 16
"""Processes that a group may have beyond the sandbox's limit: the supervisor's helpers that start commands."""

CPU_PERIOD_US = 100_000  # the kernel's default
MIN_CPU_US = 1000
"""Smallest CPU quota that the kernel accepts."""

_SYSTEMD_SUFFIXES = frozenset({".scope", ".service", ".slice"})
"""Suffixes of the names of groups that systemd manages."""

REMOVE_S = 1.0
"""Seconds to wait for exiting processes to leave a group, which cannot be removed before."""

_MAX_MOVE_ROUNDS = 100
"""Rounds of moving all processes of a group; each round moves processes that were forked during the last round."""


def group_of(mountinfo: str, membership: str) -> Path | None:
    """Return the folder of a process's control group of version 2, by the texts of ``/proc/self/mountinfo`` and
    ``/proc/self/cgroup``; ``None`` if no such folder is visible."""
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
    """Return the name of a sandbox's control group: ``prorl-``, the supervisor's folder name, the sandbox's name."""
    return f"prorl-{folder.parent.name}-{folder.name}"


@dataclass(frozen=True, slots=True)
class Delegation:
    """Folder of a control group below which this process may create groups, and the members of :data:`CONTROLLERS`
    that these groups can have."""

    base: Path
    controllers: frozenset[str]


def probe_delegation() -> Delegation | None:
    """Return this process's delegation, tested with a temporary probe group; ``None`` without a delegated group."""
    group = group_of(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    if group is None:
        return None
    base = group.parent if group.name == SERVER_GROUP else group
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
    """Return whether a writable group counts as delegated, so that its processes may be moved.

    Root can write to every group, even to the scope of a login. So for root, systemd must have marked a group that it
    manages as delegated. For an ordinary user, any writable group counts: before version 251 systemd's user manager
    could not mark delegation.
    """
    if os.geteuid() != 0 or base.suffix not in _SYSTEMD_SUFFIXES:
        return True
    for attribute in ("trusted.delegate", "user.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(base, attribute) == b"1":
                return True
    return False


def _can_start_in(group: Group) -> bool:
    """Return whether a process can start in ``group``; tested in a child, as :meth:`Group.fork` needs one thread."""
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
    """Enable the controllers of a delegation for groups below its base; return those that the kernel has enabled."""
    missing = granted.controllers - _enabled_below(granted.base)
    if not missing:
        return granted.controllers
    # Several supervisors may enable controllers of the same group at the same time.
    lock = os.open(granted.base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Only the root group has no cgroup.type, and may enable controllers while it contains processes. Elsewhere the
        # kernel refuses that, or makes the group a threaded domain.
        if (granted.base / "cgroup.type").exists():
            _move_to_subgroup(granted.base)
        for name in sorted(missing):
            with contextlib.suppress(OSError):
                _write(granted.base, "subtree_control", f"+{name}")
    finally:
        os.close(lock)
    return granted.controllers & _enabled_below(granted.base)


def _enabled_below(base: Path) -> set[str]:
    return set((base / "cgroup.subtree_control").read_text().split())


def _move_to_subgroup(base: Path) -> None:
    leaf = base / SERVER_GROUP
    leaf.mkdir(exist_ok=True)
    for _ in range(_MAX_MOVE_ROUNDS):
        processes = _read(base, "procs").split()
        if not processes:
            return
        for pid in processes:
            # OSError: the process has ended, or may not be moved. In the second case enabling the controllers fails.
            with contextlib.suppress(OSError):
                _write(leaf, "procs", pid)


@dataclass(frozen=True, slots=True)
class Group:
    """Control group of one sandbox; ``controllers`` are those of :data:`CONTROLLERS` that are enabled in the group."""

    path: Path
    controllers: frozenset[str]

    @classmethod
    def make(cls, path: Path) -> Group:
        path.mkdir()
        return cls(path, CONTROLLERS & set(_read(path, "controllers").split()))

    def set_limits(self, *, memory: int, processes: int, cpus: float) -> None:
        """Limit memory (bytes, 0 for no limit; no swap), processes and threads, and CPUs (0 for no limit), as far as
        controllers are enabled. Call this after the start of the sandbox, which needs more threads and CPU time than
        the sandbox may use."""
        if "memory" in self.controllers and memory:
            (self.path / "memory.max").write_text(str(memory))
            if (swap := self.path / "memory.swap.max").exists():
                # memory.max does not include swap. Kernels without swap accounting have no such file.
                swap.write_text("0")
        if "pids" in self.controllers:
            present = int((self.path / "pids.current").read_text())
            (self.path / "pids.max").write_text(str(processes + present + PROCESS_SLACK))
        if "cpu" in self.controllers and cpus:
            quota_us = max(MIN_CPU_US, round(cpus * CPU_PERIOD_US))
            (self.path / "cpu.max").write_text(f"{quota_us} {CPU_PERIOD_US}")

    def fork(self) -> int:
        """Fork a child that starts in the group; otherwise as :func:`.syscalls.fork_into_cgroup`."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return syscalls.fork_into_cgroup(descriptor)
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        """Send SIGKILL to all processes of the group in one step, so that none escapes by forking; idempotent."""
        with contextlib.suppress(FileNotFoundError):
            _write(self.path, "kill", "1")

    def processes(self) -> list[int]:
        """Return the pids of the group's processes. A zombie is not listed, but prevents the removal of the group."""
        try:
            return [int(pid) for pid in _read(self.path, "procs").split()]
        except FileNotFoundError:
            return []

    def is_full(self) -> bool:
        """Return whether processes and threads use up the group's limit; ``False`` without the pids controller."""
        if "pids" not in self.controllers:
            return False
        allowed = (self.path / "pids.max").read_text().strip()
        return allowed != "max" and int((self.path / "pids.current").read_text()) >= int(allowed)

    def oom_kills(self) -> int:
        """Return how many processes of the group the OOM killer has killed, at the group's limit or the machine's."""
        return self._memory_event("oom_kill")

    def exceeded_memory(self) -> bool:
        """Return whether the group ever reached its own memory limit."""
        return bool(self._memory_event("oom"))

    def _memory_event(self, name: str) -> int:
        found = re.search(rf"^{name} (\d+)$", (self.path / "memory.events").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0

    def remove(self) -> None:
        """Remove the group. Idempotent; blocks for up to :data:`REMOVE_S` while processes of the group are exiting.

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
