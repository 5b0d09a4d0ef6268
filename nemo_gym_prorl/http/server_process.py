# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The process of a server of ours: its end with Gym's command line, its limit of open files, its garbage collection.

``gym env start`` ends its servers when it is interrupted. Where it fails instead, because another deployment has its
port, or is killed, it leaves them: they hold memory and ports for minutes, or for ever. Our Hydra plugin
(``hydra_plugins/prorl_gym``) names Gym's process to them.

A rollout in flight is a few connections. The soft limit of open files is often 1,024 where the hard one is far higher,
so a server raises it when it starts. Beyond the hard limit rollouts fail with an infrastructure error that names it.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import select
import signal
import sys
import threading
import time

from nemo_gym_prorl.failures import FailureKind, InfrastructureError


STARTER_VARIABLE = "PRORL_GYM_STARTER"
"""Environment variable with the process id of Gym's command line."""

END_S = 40.0
"""How long a server may take to give back what it holds."""


def exit_with_starter() -> None:
    """From now on this server ends, in its own way, when the process that started it has ended; if that has already,
    it ends at once."""
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
    print("prorl: the Gym that started this server has ended, and so does the server", file=sys.stderr, flush=True)
    if threading.main_thread().is_alive():  # else the process is at its end already, and starts no thread for a timer
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os._exit(1)


FILES_PER_ROLLOUT = 4
"""Descriptors that a rollout in flight may take in one process: its caller's connection, those to the model server and
the resources server, and one to spare."""

BASE = 256
"""Descriptors of a process of ours without any rollout."""


def open_files_needed(rollouts: int) -> int:
    """The limit of open files that a process needs for that many rollouts at once."""
    return BASE + FILES_PER_ROLLOUT * rollouts


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files to the hard one; gives the limit that then holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return _finite(hard)


def is_descriptor_exhaustion(error: BaseException) -> bool:
    """Whether an error says that this process or this machine can open no further file."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def descriptor_exhaustion() -> InfrastructureError:
    """Our own want of descriptors, as the failure that it is."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return InfrastructureError(
        f"this process has no file descriptor left (limit {soft}); raise the limit of open files (ulimit -n), "
        f"{FILES_PER_ROLLOUT} for each rollout in flight, or run fewer at once",
        kind=FailureKind.PROVIDER_QUOTA_EXHAUSTED,
    )


def _finite(limit: int) -> int:
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit


COLLECTED_AT = (5_000, 20, 50)
"""Thresholds of the three generations: they are collected every 25, 500 and 25,000 turns, about."""


def tune_garbage_collection() -> None:
    """Exempt what is there now, which stays, and collect rarely from here on.

    What is kept of rollouts has no cycles and goes with its last reference, but a full collection walks through all of
    it, and through what some thousand modules made of themselves, while everything waits.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED_AT)
