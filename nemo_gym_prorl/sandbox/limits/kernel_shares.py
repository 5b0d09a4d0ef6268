# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What the kernel counts for a user, or for all: how much of it one sandbox may take from the others.

An ordinary user's sandboxes all are that user to the kernel, and so are the supervisor and the server. Whoever among
them takes the last of something leaves the others without. Where the kernel lets a user namespace, a process or a
mount have a bound of its own, every sandbox gets a part of the whole:

- *open files on their way over sockets* are counted for the user, and compared with the limit of open files of whoever
  sends. So what may be on its way from all sandboxes is half of what the supervisor may have on its way;
- *queued signals and timers, bytes in POSIX message queues* count in each user namespace apart, and in those above it:
  a part of the user's own;
- *inotify* counts the same way, with settings in place of limits;
- *System V segments, semaphores and queues* are an IPC namespace's own, but the kernel's usual bounds are no bounds:
  semaphores alone could take 64 GB;
- *terminals* are counted for the machine, and for each mount of ``devpts``.

What has no such bound is told in ``docs/security.md``.
"""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path


COMMANDS_FILES, RUNTIMES_FILES = 1 / 2, 3 / 4
"""How much of the supervisor's limit of open files commands have, and the container runtime, which sends some, too."""

PARTS = {resource.RLIMIT_SIGPENDING: (16, 4096), resource.RLIMIT_MSGQUEUE: (4, 1 << 20)}
"""Of limits that count for the user: one part in how many a sandbox has, and at most how much."""

INOTIFY = {"max_inotify_instances": "max_user_instances", "max_inotify_watches": "max_user_watches"}
"""The settings of a user namespace, by those of the machine which they are a part of."""

INOTIFY_PART = 16

TERMINALS = 128
"""Most terminals of a sandbox; Linux has 3,072 for all namespaces but the first."""

INODES_A_MIB = 1024
"""Files, links and folders in ``/dev/shm`` for each MiB of it: each takes the kernel a KiB, empty or not."""

SEMAPHORES = "32000 32000 500 1024"
"""In a set, in all, operations at a time, sets: the usual bounds but for the second, which is 32,000 times that."""

MESSAGE_QUEUES = 256


TERMINALS_OF_ALL = Path("/proc/sys/kernel/pty")
"""How many there are, and may be; of these the kernel keeps a reserve for the host."""


def no_terminal_left() -> bool:
    """Whether all sandboxes together have taken those that the machine has for them."""
    taken, most, reserve = (int((TERMINALS_OF_ALL / name).read_text()) for name in ("nr", "max", "reserve"))
    return taken >= most - reserve


def limits() -> dict[int, int]:
    """Limits of every process inside, by ``resource.RLIMIT_*``; parts of this process's own."""
    found = {}
    for number, (part, most) in PARTS.items():
        hard = resource.getrlimit(number)[1]
        found[number] = most if hard == resource.RLIM_INFINITY else min(hard // part, most)
    return found


def settings(shared_memory_mib: int) -> dict[str, str]:
    """What to write into which file below ``/proc/sys``, by the root of a sandbox's namespaces.

    Those of the IPC namespace are the machine's root's to set before Linux 5.19, and where there is no root inside.
    """
    found = {
        "kernel/shmall": str((shared_memory_mib << 20) // os.sysconf("SC_PAGE_SIZE")),
        "kernel/sem": SEMAPHORES,
        "kernel/msgmni": str(MESSAGE_QUEUES),
    }
    for own, machine in INOTIFY.items():
        with contextlib.suppress(OSError):
            found[f"user/{own}"] = str(int(Path("/proc/sys/fs/inotify", machine).read_text()) // INOTIFY_PART)
    return found


def shared_memory_options(mib: int) -> str:
    """Of the mount at ``/dev/shm``."""
    return f"size={mib}m,nr_inodes={mib * INODES_A_MIB}"
