# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Signals to processes that are not our children: never to a number alone, which the kernel gives away again.

A descriptor of a process (Linux 5.3) is opened first, and then what is known of the process is compared: whatever
bears the number later, the signal goes to the one that was compared. Older kernels leave a moment between the two.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from nemo_gym_prorl.sandbox.limits import usage


_PF_EXITING = 0x4


def start_time(pid: int) -> int | None:
    """When a process was started, in ticks since boot; ``None`` if it has ended."""
    try:
        found = usage.status(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if found[usage.STATE] in usage.ENDED else int(found[usage.STARTED])


def is_exiting(pid: int) -> bool:
    """Whether a process has begun to end, or has ended; the first of a PID namespace ends after all others."""
    try:
        return bool(int(usage.status(pid)[usage.FLAGS]) & _PF_EXITING)
    except (FileNotFoundError, ProcessLookupError):
        return True


def send(pid: int, number: int, is_it: Callable[[], bool]) -> bool:
    """Send a signal to a process if it is the one that is meant; returns whether it was sent.

    Args:
        pid: its number.
        number: of the signal.
        is_it: whether what bears the number now is the one.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:
        # A kernel without, or no descriptor left.
        descriptor = -1
    try:
        if not is_it():
            return False
        if descriptor < 0:
            os.kill(pid, number)
        else:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return True


def kill(pid: int, started: int) -> None:
    """End the process of that number that was started then, if it lives."""
    with contextlib.suppress(PermissionError):
        send(pid, signal.SIGKILL, lambda: start_time(pid) == started)
