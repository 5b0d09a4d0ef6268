# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The kernel's limits of a sandbox's programs (``RLIMIT_*``), by what was asked for; another one is added here.

What counts for a sandbox as a whole stands elsewhere: :mod:`.cgroups` and :mod:`.watchdog`. Open files are limited
when a program starts (:func:`.descriptors.of_commands`), since the supervisor raises its own.

Processes: from Linux 5.14 on the kernel counts a user's in each user namespace apart, and the limit is the sandbox's
own. Before, it counts all that the user has on the machine, a trainer's threads and other sandboxes included, against
the limit of whoever forks. A limit of 512 would then forbid every fork inside as soon as the user has 512 threads
outside, which one Ray node has; and no limit would let a sandbox use up what the user's own programs need to go on.
So there the limit inside leaves a part of what the user may have to the user's own work, and no sandbox has its own.
"""

from __future__ import annotations

import resource
from pathlib import Path

from nemo_gym_prorl.sandbox.limits.report import COUNTED_PER_NAMESPACE, Facts


LEFT_TO_THE_USER = 4
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
    return most - most // LEFT_TO_THE_USER


def process_limit_here(wanted: int) -> int:
    """As :func:`process_limit`, on this machine."""
    kernel = Facts.here(frozenset()).kernel
    machine = min(int(Path("/proc/sys/kernel", name).read_text()) for name in ("pid_max", "threads-max"))
    own, _hard = resource.getrlimit(resource.RLIMIT_NPROC)
    return process_limit(wanted, kernel, machine if own == resource.RLIM_INFINITY else min(own, machine))


def of_programs(processes: int, disk_mib: int) -> dict[int, int]:
    """``RLIMIT_*`` to the hard limit of whatever is executed in a sandbox.

    Args:
        processes: how many it may have.
        disk_mib: what it may write, and so the largest file; 0 for any.
    """
    limits = {resource.RLIMIT_NPROC: process_limit_here(processes), resource.RLIMIT_CORE: 0}
    if disk_mib:
        limits[resource.RLIMIT_FSIZE] = disk_mib << 20
    return limits
