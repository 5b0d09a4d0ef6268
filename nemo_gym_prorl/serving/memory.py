# SPDX-License-Identifier: Apache-2.0
"""Memory of results goes back to the system when they are forgotten.

A result is one block of some hundred kilobytes to some megabytes. glibc maps such blocks one by one at first, but each
one that is freed raises the size from which it does, up to 32 MiB; from then on they are cut from the heap and leave
holes that the next results do not fit into. A service that kept 64 MiB of results grew from 0.55 to 0.67 GB in ten
thousand rollouts, and went on growing. With the size held where it began it stands still at 0.45 GB: see
``make bench-soak``.
"""

from __future__ import annotations

import ctypes


MAPPED_FROM_BYTES = 128 * 1024
"""glibc's own size at the start of a process."""

_M_MMAP_THRESHOLD = -3  # malloc.h


def map_large_blocks() -> bool:
    """Have every large block mapped on its own, so that freeing it gives it back; ``False`` where the C library has no
    such switch (musl, which does so by itself)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES))
