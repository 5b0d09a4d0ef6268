# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Signals to processes that are not children. Identity is checked beyond the pid, since the kernel reuses pids.

:func:`send` opens a pidfd first (Linux 5.3) and then checks the process, so the signal reaches the checked process
even if its pid is reused. Older kernels leave a race between the check and the signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from nemo_gym_prorl.sandbox.limits import usage


_PF_EXITING = 0x4  # the kernel's flag of processes that are exiting


def start_time(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot; ``None`` if the process has ended."""
    try:
        found = usage.read_stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if found[usage.STATE] in usage.ENDED_STATES else int(found[usage.STARTED])


def is_exiting(pid: int) -> bool:
    """Return whether a process is exiting or has ended. A PID namespace's first process is exiting until all other
    processes of the namespace have ended."""
    try:
        return bool(int(usage.read_stat(pid)[usage.FLAGS]) & _PF_EXITING)
    except (FileNotFoundError, ProcessLookupError):
        return True


def send(pid: int, number: int, is_it: Callable[[], bool]) -> bool:
    """Send a signal to a process after a check of its identity; return whether the signal was sent.

    Args:
        pid: the process id.
        number: the signal.
        is_it: returns whether the process that now has the pid is the intended process.

    Raises:
        PermissionError: this process may not signal the intended process.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:
        # The kernel does not support pidfds, or this process has no descriptor left.
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
    """Kill the process with this pid and start time, if it lives."""
    with contextlib.suppress(PermissionError):
        send(pid, signal.SIGKILL, lambda: start_time(pid) == started)
