# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Limits that the kernel keeps for each process, and a report of how every limit of a sandbox is kept on this machine.

Limits of a sandbox as a whole are elsewhere: :mod:`.cgroups` and :mod:`.watchdog`.

- *Processes*: from Linux 5.14 on the kernel counts a user's processes in each user namespace apart, so the limit is
  the sandbox's own. Before, it counts all processes of the user on the machine, including a trainer's threads, against
  the limit of whoever forks. A limit of 512 would then forbid every fork inside once the user has 512 threads outside.
  So on these kernels sandboxes may use three quarters of the user's processes, and have no limit of their own.
- *Open files*: the supervisor raises its own soft limit to the hard one, and checks before each start that enough
  descriptors are left. Programs in a sandbox get the usual soft limit, on which users of ``select`` rely.
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
"""The Linux from which on a user's processes are counted in each user namespace apart."""

_SCOPE = "--scope -p Delegate=yes COMMAND"

STATE_DIR_HINT = "set PRORL_STATE to a folder on a local disk"


class Enforcement(StrEnum):
    """How a limit is kept."""

    KERNEL = "enforced"
    POLLED = "watched"
    """Looked at every now and then; overrun in between."""
    NONE = "not enforced"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What decides.

    Attributes:
        controllers: of control groups, those that bound each sandbox.
        kernel: the version of Linux.
        exempt: whether sandboxes' processes are the machine's root's, whose number the kernel does not bound.
    """

    controllers: frozenset[str]
    kernel: tuple[int, int]
    exempt: bool = False

    @classmethod
    def of_host(cls, controllers: frozenset[str]) -> Self:
        """This machine's, with these controllers."""
        major, minor = re.findall(r"\d+", os.uname().release)[:2]
        return cls(controllers, (int(major), int(minor)), is_machine_root_in_namespace())


@dataclass(frozen=True, slots=True)
class Limit:
    """How one limit is kept.

    Attributes:
        name: what is bounded.
        enforcement: how well.
        mechanism: by what, in a few words.
    """

    name: str
    enforcement: Enforcement
    mechanism: str


def enforced_limits(facts: HostFacts) -> tuple[Limit, ...]:
    """Every limit of a sandbox, and how it is kept."""
    return (
        Limit("memory", Enforcement.KERNEL, "memory.max, no swap")
        if "memory" in facts.controllers
        else Limit("memory", Enforcement.POLLED, "twice a second where something runs, the largest process is killed"),
        Limit("cpu", Enforcement.KERNEL, "cpu.max")
        if "cpu" in facts.controllers
        else Limit("cpu", Enforcement.NONE, "no cpu controller"),
        _processes(facts),
        Limit("disk", Enforcement.POLLED, "every 2 s where something runs, the sandbox is ended"),
        Limit("file size", Enforcement.KERNEL, "RLIMIT_FSIZE"),
        Limit("shared memory", Enforcement.KERNEL, "size of each memory file system"),
    )


def cgroup_remedy(mountinfo: str, *, root: bool, systemd: bool) -> str:
    """How a server can get the control groups that it lacks.

    Args:
        mountinfo: the text of ``/proc/self/mountinfo``.
        root: whether root asks.
        systemd: whether systemd runs the machine.
    """
    if re.search(r" - cgroup \S+ \S*\b(cpu|memory|pids)\b", mountinfo) or " - cgroup2 " not in mountinfo:
        return (
            "use a machine with control groups of version 2 alone (kernel parameter "
            "systemd.unified_cgroup_hierarchy=1): version 1, which has the controllers here, hands none on"
        )
    if systemd:
        return f"start the server with: systemd-run {'' if root else '--user '}{_SCOPE}"
    return (
        "start this container with control groups of its own that can be written (Docker, Podman: --privileged, or "
        "--cgroupns=private with /sys/fs/cgroup mounted rw)"
    )


def cgroup_remedy_here() -> str:
    """As :func:`remedy`, for this process."""
    mountinfo = Path("/proc/self/mountinfo").read_text()
    return cgroup_remedy(mountinfo, root=is_machine_root(), systemd=Path("/run/systemd/system").is_dir())


def _processes(facts: HostFacts) -> Limit:
    if "pids" in facts.controllers:
        return Limit("processes", Enforcement.KERNEL, "pids.max")
    if facts.exempt:
        return Limit(
            "processes", Enforcement.NONE, "the machine's root, who is root of the user namespace here, is exempt"
        )
    if facts.kernel >= COUNTED_PER_NAMESPACE:
        return Limit("processes", Enforcement.KERNEL, "RLIMIT_NPROC in each user namespace")
    return Limit(
        "processes", Enforcement.NONE, "before Linux 5.14 only all of a user's together, less a quarter of his own"
    )


def file_size_violation(mib: int) -> str:
    """What is noted of a sandbox in which a file came to the size that none may exceed."""
    return f"file size: a file reached the limit of {mib} MiB"


def weak_limits(found: Sequence[Limit]) -> str:
    """The limits that the kernel does not keep, in one line; empty if there are none."""
    parts = []
    for by in (Enforcement.POLLED, Enforcement.NONE):
        if weak := [f"{limit.name} ({limit.mechanism})" for limit in found if limit.enforcement is by]:
            parts.append(f"{by}: {', '.join(weak)}")
    return "; ".join(parts)


_said = False
_said_why_slow = False


def warn_slow_start_once(trouble: str) -> None:
    """Log why the runtime makes sandboxes of an image, the first time that it is so against expectation."""
    global _said_why_slow
    if trouble and not _said_why_slow:
        _said_why_slow = True
        LOGGER.warning("sandboxes start by the container runtime, which is slower: %s", trouble)


def warn_weak_limits_once(controllers: frozenset[str], *, in_memory: bool) -> None:
    """Log what does not hold, the first time that this process starts a sandbox.

    Args:
        controllers: of control groups, those that bound it.
        in_memory: whether what sandboxes write goes into the machine's memory.
    """
    global _said
    if not _said:
        _said = True
        if weak := weak_limits(enforced_limits(HostFacts.of_host(controllers))):
            more = "" if controllers == cgroups.CONTROLLERS else f"; for more, {cgroup_remedy_here()}"
            LOGGER.warning("sandbox limits on this machine: %s%s", weak, more)
        if in_memory:
            LOGGER.warning("sandboxes are kept in memory, and what they write counts as theirs: %s", STATE_DIR_HINT)


USER_RESERVE_DIVISOR = 4
"""One part in so many of all that the user may have is out of reach of sandboxes."""


def process_limit(wanted: int, kernel: tuple[int, int], most: int) -> int:
    """``RLIMIT_NPROC`` inside a sandbox that is to have ``wanted`` processes.

    Args:
        wanted: processes and threads at a time.
        kernel: the version of Linux.
        most: how many the user may have on the machine.
    """
    if kernel >= COUNTED_PER_NAMESPACE:
        return wanted
    return most - most // USER_RESERVE_DIVISOR


def process_limit_here(wanted: int) -> int:
    """As :func:`process_limit`, on this machine."""
    kernel = HostFacts.of_host(frozenset()).kernel
    machine = min(int(Path("/proc/sys/kernel", name).read_text()) for name in ("pid_max", "threads-max"))
    own, _hard = resource.getrlimit(resource.RLIMIT_NPROC)
    return process_limit(wanted, kernel, machine if own == resource.RLIM_INFINITY else min(own, machine))


def program_limits(processes: int, disk_mib: int) -> dict[int, int]:
    """``RLIMIT_*`` to the hard limit of whatever is executed in a sandbox.

    Args:
        processes: how many it may have.
        disk_mib: what it may write, and so the largest file; 0 for any.
    """
    limits = {resource.RLIMIT_NPROC: process_limit_here(processes), resource.RLIMIT_CORE: 0}
    if disk_mib:
        limits[resource.RLIMIT_FSIZE] = disk_mib << 20
    return limits


DESCRIPTORS_PER_SANDBOX = 5
"""Descriptors that a sandbox may take: its channel, its first process, the lock on its image, a terminal and who holds
it."""

RESERVED_DESCRIPTORS = 64
"""Descriptors for everything else: connections, and what is on its way to somebody."""

_original: list[int] = []


def raise_open_files_limit() -> None:
    """Raise this process's soft limit to the hard one, for good."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _original[:] = [soft]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def command_open_files_limit() -> tuple[int, int] | None:
    """Return the soft and hard limit of programs in a sandbox; ``None`` if this process's own was not raised.

    The soft limit is the one from before :func:`raise_limit`.
    """
    if not _original:
        return None
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return min(_original[0], hard), hard


def restore_open_files_limit() -> None:
    """Set the limits of :func:`of_commands`, in a forked child that executes a program of the sandbox."""
    if limits := command_open_files_limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def descriptor_shortage(sandboxes: int) -> str:
    """Why there are too few descriptors for one sandbox more than there are; empty if there are enough."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    # Linux tells the number as the folder's size since 6.2, and 0 before.
    count = os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    if limit - count >= DESCRIPTORS_PER_SANDBOX + RESERVED_DESCRIPTORS:
        return ""
    needed = (sandboxes + 1) * DESCRIPTORS_PER_SANDBOX + RESERVED_DESCRIPTORS
    return (
        f"the limit of open files ({limit}) allows no more than these {sandboxes} sandboxes: raise it (ulimit -Hn) "
        f"before the server starts, to {DESCRIPTORS_PER_SANDBOX} for each and {RESERVED_DESCRIPTORS} besides ({needed} or more)"
    )


def close_all_but(kept: Sequence[int]) -> None:
    """Close every open file but these."""
    begin = 0
    for number in sorted(set(kept)):
        if begin < number:
            os.closerange(begin, number)
        begin = number + 1
    os.closerange(begin, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
