# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What the runtime, and the image's own ``sh``, say while a sandbox is started by them: within a bound.

Both may write as much as they like. So it goes to a file of memory that can't grow, and whoever writes more is told
that he may not: nothing of the disk is taken, nobody waits for a reader, and no writer ends for want of one.
"""

from __future__ import annotations

import fcntl
import os


ROOM = 64 << 10
"""Bytes that are kept of it."""

SHOWN = 4000
"""Bytes of its end that are shown."""


def create() -> int:
    """A log, to be written to as a file."""
    log = os.memfd_create("log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(log, 0o600)
    os.ftruncate(log, ROOM)
    fcntl.fcntl(log, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return log


def said(log: int) -> str:
    """The end of what was written to it."""
    return os.pread(log, ROOM, 0).rstrip(b"\0")[-SHOWN:].decode("utf-8", "replace").strip()
