# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Process settings of a server: exit with Gym's command line, limit of open files, garbage collection.

``gym env start`` ends its servers on SIGINT. If the command is killed, or fails because a port is taken, the servers
become orphans and hold memory and ports. Our Hydra plugin (``hydra_plugins/prorl_gym``) passes the id of Gym's process
to the servers, so that the servers can exit with that process.

A rollout in flight uses several connections. The soft limit of open files is often 1,024 and the hard limit far
higher, so a server raises the soft limit at start.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import sys
import threading
import time


STARTER_VARIABLE = "PRORL_GYM_STARTER"
"""Environment variable with the process id of Gym's command line."""

END_S = 40.0
"""Seconds that a server may take to release its resources before its process exits."""


def exit_with_starter() -> None:
    """Send this server SIGTERM when the process in :data:`STARTER_VARIABLE` ends; no-op without the variable.

    Raises:
        SystemExit: that process has ended already.
    """
    starter = int(os.environ.get(STARTER_VARIABLE, "0"))
    if starter in (0, os.getpid()):
        return
    try:
        watched = os.pidfd_open(starter)
    except ProcessLookupError:
        sys.exit("the Gym that started this server has ended")
    threading.Thread(target=_end_after, args=(watched,), name="starter", daemon=True).start()


def _end_after(watched: int) -> None:
    ended = select.poll()
    ended.register(watched, select.POLLIN)
    ended.poll()
    print("prorl: ending this server, since the Gym that started it has ended", file=sys.stderr, flush=True)
    if threading.main_thread().is_alive():  # otherwise the process is already exiting
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os._exit(1)


FILES_PER_ROLLOUT = 4
"""File descriptors of a rollout in flight in one process: connections from the caller, to the model server and to the
resources server, and one spare."""

BASE = 256
"""File descriptors that an idle process may use."""


def open_files_needed(rollouts: int) -> int:
    """Return the limit of open files that a process needs for this many rollouts in flight."""
    return BASE + FILES_PER_ROLLOUT * rollouts


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit; return the limit, or 2**30 if there is none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 1 << 30 if hard == resource.RLIM_INFINITY else hard


COLLECTED_AT = (5_000, 20, 50)
"""Thresholds of the garbage collector's three generations: collections about every 25, 500 and 25,000 turns."""


def tune_garbage_collection() -> None:
    """Exclude all existing objects from garbage collection (``gc.freeze``), and make further collections rare. Stored
    rollouts have no reference cycles and are freed by reference counting. A full collection would block the event loop
    while it scans stored rollouts and modules."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED_AT)
