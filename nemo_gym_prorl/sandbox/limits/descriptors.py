# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Open files of the supervisor: as many as it may have, checked before a sandbox takes some, and kept from others.

The soft limit is often 1,024 where the hard one is far higher. What the supervisor raises for itself is not for those
inside: programs that close every possible file, or wait with ``select``, count on the usual one.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence


PER_SANDBOX = 5
"""Descriptors that a sandbox may take: its channel, its first process, the lock on its image, a terminal and who holds
it."""

RESERVE = 64
"""Descriptors for everything else: connections, and what is on its way to somebody."""

_original: list[int] = []


def raise_limit() -> None:
    """Raise this process's soft limit to the hard one, for good."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _original[:] = [soft]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def of_commands() -> tuple[int, int] | None:
    """Return the soft and hard limit of programs in a sandbox; ``None`` if this process's own was not raised.

    The soft limit is the one from before :func:`raise_limit`.
    """
    if not _original:
        return None
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return min(_original[0], hard), hard


def usual_limit() -> None:
    """Set the limits of :func:`of_commands`, in a forked child that executes a program of the sandbox."""
    if limits := of_commands():
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def shortage(sandboxes: int) -> str:
    """Why there are too few descriptors for one sandbox more than there are; empty if there are enough."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    # Linux tells the number as the folder's size since 6.2, and 0 before.
    count = os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    if limit - count >= PER_SANDBOX + RESERVE:
        return ""
    needed = (sandboxes + 1) * PER_SANDBOX + RESERVE
    return (
        f"the limit of open files ({limit}) allows no more than these {sandboxes} sandboxes: raise it (ulimit -Hn) "
        f"before the server starts, to {PER_SANDBOX} for each and {RESERVE} besides ({needed} or more)"
    )


def close_all_but(kept: Sequence[int]) -> None:
    """Close every open file but these."""
    begin = 0
    for number in sorted(set(kept)):
        if begin < number:
            os.closerange(begin, number)
        begin = number + 1
    os.closerange(begin, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
