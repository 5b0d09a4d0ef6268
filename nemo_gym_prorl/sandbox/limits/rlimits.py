# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Limits that the kernel enforces per process (rlimits), and how each limit of a sandbox is enforced on this machine.

:mod:`.cgroups` and :mod:`.watchdog` enforce limits of a sandbox as a whole.

- *Processes*: from Linux 5.14 on, the kernel counts a user's processes per user namespace, so each sandbox has its own
  limit. Earlier kernels count all processes of the user on the machine, a trainer's threads included. A limit of 512
  would then forbid every fork in the sandbox once the user has 512 threads on the machine. So on these kernels a
  sandbox has no limit of its own: forks in a sandbox fail once the user has three quarters of the allowed processes.
- *Open files*: the supervisor raises its own soft limit to the hard limit, and checks before each start that enough
  descriptors are left. Programs in a sandbox start with the soft limit that the server was started with, because
  ``select`` fails above 1024 descriptors. Programs may raise their soft limit to the hard limit.
"""

from __future__ import annotations

import logging
import os
import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Self

from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root, is_machine_root_in_namespace
from nemo_gym_prorl.sandbox.limits import cgroups


LOGGER = logging.getLogger(__name__)

COUNTED_PER_NAMESPACE = (5, 14)
"""First Linux version that counts a user's processes per user namespace."""

_SYSTEMD_RUN_ARGUMENTS = "--scope -p Delegate=yes COMMAND"  # arguments of systemd-run that delegate a control group

STATE_DIR_HINT = "set PRORL_STATE to a folder on a local disk"


class Enforcement(StrEnum):
    """Strictness of a limit's enforcement. A ``POLLED`` limit is measured at intervals, between which a sandbox can
    exceed it."""

    KERNEL = "enforced"
    POLLED = "watched"
    NONE = "not enforced"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Properties of the machine that decide how limits are enforced.

    Attributes:
        controllers: names of the control group controllers that limit each sandbox.
        kernel: Linux version, major and minor.
        exempt: whether sandboxed processes run as the machine's root user, to whom no process limit applies.
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
    """Enforcement of the limit of the resource ``name``; ``mechanism`` describes a kernel interface or measurement."""

    name: str
    enforcement: Enforcement
    mechanism: str


def enforced_limits(facts: HostFacts) -> tuple[Limit, ...]:
    """Return how each limit of a sandbox is enforced on a machine with the properties ``facts``."""
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
    """Return how a user can give a server a delegated control group, by the text of ``/proc/self/mountinfo``, and by
    whether the server is machine ``root`` and ``systemd`` manages the machine's services."""
    if re.search(r" - cgroup \S+ \S*\b(cpu|memory|pids)\b", mountinfo) or " - cgroup2 " not in mountinfo:
        return (
            "use a machine with control groups of version 2 alone (kernel parameter "
            "systemd.unified_cgroup_hierarchy=1): version 1, which has the controllers here, can't delegate them"
        )
    if systemd:
        return f"start the server with: systemd-run {'' if root else '--user '}{_SYSTEMD_RUN_ARGUMENTS}"
    return (
        "start this container with its own writable control groups (Docker, Podman: --privileged, or "
        "--cgroupns=private with /sys/fs/cgroup mounted rw)"
    )


def cgroup_remedy_here() -> str:
    """Return :func:`cgroup_remedy` for this process and machine."""
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
    return f"file size: a file reached the limit of {mib} MiB"


def weak_limits(found: Sequence[Limit]) -> str:
    """Return a line with the limits that are only polled or not enforced; empty if the kernel enforces all."""
    parts = []
    for by in (Enforcement.POLLED, Enforcement.NONE):
        if weak := [f"{limit.name} ({limit.mechanism})" for limit in found if limit.enforcement is by]:
            parts.append(f"{by}: {', '.join(weak)}")
    return "; ".join(parts)


@cache
def warn_slow_start_once(trouble: str) -> None:
    """Log why direct starts are not possible, each reason once in a process; a no-op if ``trouble`` is empty."""
    if trouble:
        LOGGER.warning("sandboxes start through the container runtime, which is slower: %s", trouble)


@cache
def warn_weak_limits_once(controllers: frozenset[str], *, in_memory: bool) -> None:
    """Log the limits that the kernel does not enforce, and that sandboxes' files are in memory, once in a process for
    the same arguments."""
    if weak := weak_limits(enforced_limits(HostFacts.of_host(controllers))):
        more = "" if controllers == cgroups.CONTROLLERS else f"; for more, {cgroup_remedy_here()}"
        LOGGER.warning("sandbox limits on this machine: %s%s", weak, more)
    if in_memory:
        LOGGER.warning("sandboxes' files are kept in memory and count against their memory limit: %s", STATE_DIR_HINT)


USER_RESERVE_DIVISOR = 4
"""One fourth of the processes allowed to a user is reserved for programs that are not in sandboxes."""


def process_limit(wanted: int, kernel: tuple[int, int], most: int) -> int:
    """Return ``RLIMIT_NPROC`` for a sandbox's programs, given its limit ``wanted`` and the user's limit ``most``
    of processes and threads on the machine."""
    if kernel >= COUNTED_PER_NAMESPACE:
        return wanted
    return most - most // USER_RESERVE_DIVISOR


def process_limit_here(wanted: int) -> int:
    """Return :func:`process_limit` on this machine, but at most this process's hard limit (``ulimit -Hu``)."""
    kernel = HostFacts.of_host(frozenset()).kernel
    machine = min(int(Path("/proc/sys/kernel", name).read_text()) for name in ("pid_max", "threads-max"))
    own, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = process_limit(wanted, kernel, machine if own == resource.RLIM_INFINITY else min(own, machine))
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


DESCRIPTORS_PER_SANDBOX = 6
"""The supervisor's descriptors per sandbox: channel, ``/proc`` folder of the first process, image lock, proxy port;
while a program starts, also the joiner's socket and the terminal."""

RESERVED_DESCRIPTORS = 64
"""Descriptors of the supervisor that no sandbox needs: client connections, and descriptors in transit."""

_initial_soft_limit: list[int] = []
"""Soft limit of open files before :func:`raise_supervisor_file_limit`; empty before the call."""


def raise_supervisor_file_limit() -> None:
    """Raise this process's soft limit of open files to the hard limit, permanently."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _initial_soft_limit[:] = [soft]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def program_file_limits() -> tuple[int, int] | None:
    """Return soft and hard limit of open files for programs in a sandbox; ``None`` before the call of
    :func:`raise_supervisor_file_limit`, which saves the soft limit."""
    if not _initial_soft_limit:
        return None
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return min(_initial_soft_limit[0], hard), hard


def descriptor_shortage(sandboxes: int) -> str:
    """Return an error message if this process has too few descriptors left for one more sandbox; empty otherwise."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    # From Linux 6.2 on, the folder's size is the number of open descriptors; before, 0.
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
