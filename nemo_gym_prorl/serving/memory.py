# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What becomes of large blocks of memory that are freed.

Kept results go back to the system when they are forgotten (:func:`map_large_blocks`). A result is one block of some
hundred kilobytes to some megabytes. glibc maps such blocks one by one at first, but each one that is freed raises the
size from which it does, up to 32 MiB; from then on they are cut from the heap and leave holes that the next results do
not fit into. A service that kept 64 MiB of results grew from 0.55 to 0.67 GB in ten thousand rollouts, and went on
growing. With the size held where it began it stands still at 0.45 GB.

Prompts that pass through are there for the next ones (:func:`recycle_large_blocks`). Half a megabyte comes and goes
with each turn at 64k tokens, twelve where an agent echoes all ids, and nothing of that size stays. Mapped one by one,
half a megabyte costs a page fault every 4 KiB, 0.27 ms on a virtual machine, and cut from the heap 0.02 ms.

Python's collector looks for cycles, and everything waits while it does (:func:`collect_rarely`). What is kept of
rollouts has none and goes with its last reference, but a full collection walks through all of it, and through what
some thousand modules made of themselves: 0.3 s in a model server of two thousand young rollouts, again and again.
"""

from __future__ import annotations

import ctypes
import gc


MAPPED_FROM_BYTES = 128 * 1024
"""glibc's own size at the start of a process."""

RECYCLED_BYTES = 16 * 1024 * 1024
"""Larger ones than all that a turn moves at once."""
_KEPT_BYTES = 4 * RECYCLED_BYTES

COLLECTED_AT = (5_000, 20, 50)
"""How many containers more there are when young ones are looked through, how many such looks come before those of
middle age have their turn, and how many of theirs before all are: every 25, 500 and 25,000 turns, about."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def map_large_blocks() -> bool:
    """Have every large block mapped on its own, so that freeing it gives it back; ``False`` where the C library has no
    such switch (musl, which does so by itself)."""
    return _set(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)


def recycle_large_blocks() -> bool:
    """Have blocks of up to :data:`RECYCLED_BYTES` cut from the heap, which keeps 64 MiB for the next ones; ``False``
    where the C library has no such switches."""
    return _set(_M_MMAP_THRESHOLD, RECYCLED_BYTES) and _set(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def collect_rarely() -> None:
    """Have the collector leave out what is there now, which stays, and look through old objects rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED_AT)


def _set(parameter: int, value: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(parameter, value))
