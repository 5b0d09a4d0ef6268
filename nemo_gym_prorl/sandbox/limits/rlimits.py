# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Limits that the kernel enforces for each process, and a report of how every sandbox limit is enforced on this
machine.

Limits of a sandbox as a whole are in :mod:`.cgroups` and :mod:`.watchdog`.

- *Processes*: from Linux 5.14 on, the kernel counts a user's processes per user namespace, so the limit is the
  sandbox's own. Earlier kernels count all processes of the user on the machine, a trainer's threads included. A limit
  of 512 would then forbid every fork inside once the user has 512 threads outside. So on these kernels sandboxes may
  use three quarters of the user's processes, and have no limit of their own.
- *Open files*: the supervisor raises its own soft limit to the hard one, and checks before each start that enough
  descriptors are left. Programs in a sandbox get the soft limit that the server was started with, on which users of
  ``select`` rely, and may raise it to the hard one.
"""

from __future__ import annotations

import logging
import os
import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root, is_machine_root_in_namespace
from nemo_gym_prorl.sandbox.limits import cgroups


LOGGER = logging.getLogger(__name__)

COUNTED_PER_NAMESPACE = (5, 14)
"""First Linux version that counts a user's processes per user namespace."""

_SCOPE = "--scope -p Delegate=yes COMMAND"

STATE_DIR_HINT = "set PRORL_STATE to a folder on a local disk"


class Enforcement(StrEnum):
    """Strictness of a limit."""

    KERNEL = "enforced"
    POLLED = "watched"
    """Measured at intervals; a sandbox can exceed the limit in between."""
    NONE = "not enforced"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Properties of the machine that decide how limits are enforced.

    Attributes:
        controllers: control group controllers that limit each sandbox.
        kernel: Linux version.
        exempt: whether sandboxes' processes belong to the machine's root user, whom the kernel exempts from process
            limits.
    """

    controllers: frozenset[str]
    kernel: tuple[int, int]
    exempt: bool = False

    @classmethod
    def of_host(cls, controllers: frozenset[str]) -> Self:
        major, minor = re.findall(r"\d+", os.uname().release)[:2]
        return cls(controllers, (int(major), int(minor)), is_machine_root_in_namespace())


@dataclass(frozen=True, slots=True)
class Limit:
    """Enforcement of one limit.

    Attributes:
        enforcement: how strictly the limit holds.
        mechanism: kernel interface or check, in a few words.
    """

    name: str
    enforcement: Enforcement
    mechanism: str


def enforced_limits(facts: HostFacts) -> tuple[Limit, ...]:
    return (
        Limit("memory", Enforcement.KERNEL, "memory.max, no swap")
        if "memory" in facts.controllers
        else Limit("memory", Enforcement.POLLED, "measured twice a second, then the largest process is killed"),
        Limit("cpu", Enforcement.KERNEL, "cpu.max")
        if "cpu" in facts.controllers
        else Limit("cpu", Enforcement.NONE, "no cpu controller"),
        _processes(facts),
        Limit("disk", Enforcement.POLLED, "measured every 2 s, then the sandbox is ended"),
        Limit("file size", Enforcement.KERNEL, "RLIMIT_FSIZE"),
        Limit("shared memory", Enforcement.KERNEL, "size of each memory file system"),
    )


def cgroup_remedy(mountinfo: str, *, root: bool, systemd: bool) -> str:
    """Return the remedy for control groups that a server lacks.

    Args:
        mountinfo: text of ``/proc/self/mountinfo``.
        root: whether this process is machine root.
        systemd: whether systemd runs the machine.
    """
    if re.search(r" - cgroup \S+ \S*\b(cpu|memory|pids)\b", mountinfo) or " - cgroup2 " not in mountinfo:
        return (
            "use a machine with control groups of version 2 alone (kernel parameter "
            "systemd.unified_cgroup_hierarchy=1): version 1, which has the controllers here, can't delegate them"
        )
    if systemd:
        return f"start the server with: systemd-run {'' if root else '--user '}{_SCOPE}"
    return (
        "start this container with its own writable control groups (Docker, Podman: --privileged, or "
        "--cgroupns=private with /sys/fs/cgroup mounted rw)"
    )


def cgroup_remedy_here() -> str:
    """Return :func:`cgroup_remedy` for this process."""
    mountinfo = Path("/proc/self/mountinfo").read_text()
    return cgroup_remedy(mountinfo, root=is_machine_root(), systemd=Path("/run/systemd/system").is_dir())


def _processes(facts: HostFacts) -> Limit:
    if "pids" in facts.controllers:
        return Limit("processes", Enforcement.KERNEL, "pids.max")
    if facts.exempt:
        return Limit("processes", Enforcement.NONE, "the kernel exempts the machine's root user")
    if facts.kernel >= COUNTED_PER_NAMESPACE:
        return Limit("processes", Enforcement.KERNEL, "RLIMIT_NPROC in each user namespace")
    return Limit("processes", Enforcement.NONE, "before Linux 5.14 the kernel counts all processes of a user together")


def file_size_violation(mib: int) -> str:
    """Return the note for a sandbox in which a file reached the size limit."""
    return f"file size: a file reached the limit of {mib} MiB"


def weak_limits(found: Sequence[Limit]) -> str:
    """Return the limits that the kernel does not enforce, in one line; empty if there are none."""
    parts = []
    for by in (Enforcement.POLLED, Enforcement.NONE):
        if weak := [f"{limit.name} ({limit.mechanism})" for limit in found if limit.enforcement is by]:
            parts.append(f"{by}: {', '.join(weak)}")
    return "; ".join(parts)


_warned_weak_limits = False
_warned_slow_start = False


def warn_slow_start_once(trouble: str) -> None:
    """Log why the container runtime starts the sandboxes, once in each process."""
    global _warned_slow_start
    if trouble and not _warned_slow_start:
        _warned_slow_start = True
        LOGGER.warning("sandboxes start through the container runtime, which is slower: %s", trouble)


def warn_weak_limits_once(controllers: frozenset[str], *, in_memory: bool) -> None:
    """Log the limits that are not enforced, once in each process.

    Args:
        controllers: control group controllers that limit the sandboxes.
        in_memory: whether sandboxes' files are kept in the machine's memory.
    """
    global _warned_weak_limits
    if not _warned_weak_limits:
        _warned_weak_limits = True
        if weak := weak_limits(enforced_limits(HostFacts.of_host(controllers))):
            more = "" if controllers == cgroups.CONTROLLERS else f"; for more, {cgroup_remedy_here()}"
            LOGGER.warning("sandbox limits on this machine: %s%s", weak, more)
        if in_memory:
            LOGGER.warning(
                "sandboxes' files are kept in memory and count against their memory limit: %s", STATE_DIR_HINT
            )


USER_RESERVE_DIVISOR = 4
"""Sandboxes leave one fourth of the user's processes to other programs."""


def process_limit(wanted: int, kernel: tuple[int, int], most: int) -> int:
    """Return ``RLIMIT_NPROC`` for a sandbox with a limit of ``wanted`` processes.

    Args:
        wanted: processes and threads at a time.
        kernel: Linux version.
        most: processes that the user may have on the machine.
    """
    if kernel >= COUNTED_PER_NAMESPACE:
        return wanted
    return most - most // USER_RESERVE_DIVISOR


def process_limit_here(wanted: int) -> int:
    """Return :func:`process_limit` for this machine, at most this process's hard limit (``ulimit -Hu``)."""
    kernel = HostFacts.of_host(frozenset()).kernel
    machine = min(int(Path("/proc/sys/kernel", name).read_text()) for name in ("pid_max", "threads-max"))
    own, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = process_limit(wanted, kernel, machine if own == resource.RLIM_INFINITY else min(own, machine))
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def program_limits(processes: int, disk_mib: int) -> dict[int, int]:
    """Return the limits of every program in a sandbox: ``RLIMIT_*`` constant to value, soft and hard limit alike.

    Args:
        processes: limit of processes.
        disk_mib: limit of written data, and so of a file; 0 for none.
    """
    limits = {resource.RLIMIT_NPROC: process_limit_here(processes), resource.RLIMIT_CORE: 0}
    if disk_mib:
        limits[resource.RLIMIT_FSIZE] = disk_mib << 20
    return limits


DESCRIPTORS_PER_SANDBOX = 6
"""Descriptors of one sandbox: channel, first process, lock on the image, a terminal and its holder, the proxy's port.
"""

RESERVED_DESCRIPTORS = 64
"""Descriptors for everything else: connections, and descriptors that are being sent."""

_original: list[int] = []


def raise_supervisor_file_limit() -> None:
    """Raise this process's soft limit to the hard one, permanently."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _original[:] = [soft]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def program_file_limits() -> tuple[int, int] | None:
    """Return soft and hard limit of programs in a sandbox; ``None`` if this process's limit was not raised.

    The soft limit is the one from before :func:`raise_supervisor_file_limit`.
    """
    if not _original:
        return None
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return min(_original[0], hard), hard


def set_program_file_limits() -> None:
    """Set the limits of :func:`program_file_limits`, in a forked child that executes the container runtime."""
    if limits := program_file_limits():
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def descriptor_shortage(sandboxes: int) -> str:
    """Return why too few descriptors are left for one more sandbox; empty if there are enough."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    # Linux reports the count as the folder's size from 6.2 on, and 0 before.
    count = os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    if limit - count >= DESCRIPTORS_PER_SANDBOX + RESERVED_DESCRIPTORS:
        return ""
    needed = (sandboxes + 1) * DESCRIPTORS_PER_SANDBOX + RESERVED_DESCRIPTORS
    return (
        f"the limit of open files ({limit}) allows no more than {sandboxes} sandboxes: raise it (ulimit -Hn) to "
        f"{needed} or more before the server starts ({DESCRIPTORS_PER_SANDBOX} a sandbox and {RESERVED_DESCRIPTORS})"
    )


def close_all_but(kept: Sequence[int]) -> None:
    begin = 0
    for number in sorted(set(kept)):
        if begin < number:
            os.closerange(begin, number)
        begin = number + 1
    os.closerange(begin, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
