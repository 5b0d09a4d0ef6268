# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Whether we are root of the machine, or only of a user namespace, as in containers of enroot, Pyxis and Apptainer.

Only the former may give files to ids that nobody has, map ranges of them without help, and show a folder under other
owners (which the kernel asks in the namespace that its disk was mounted in). So root of a namespace, however many ids
that has, is an ordinary user in all that sandboxes need, and what asks for user number 0 alone would promise it more.
Root of a container without a user namespace of its own, as Docker's by default, is root of the machine here.
"""

from __future__ import annotations

import os
from pathlib import Path


INITIAL_NAMESPACE = 0xEFFFFFFD
"""The number of the first user namespace, on every Linux. That of ids in the map says less: a namespace with all of
them can't do these things either."""


def is_machine_root() -> bool:
    """Whether this process is root in the user namespace that no other is around."""
    return os.geteuid() == 0 and not in_user_namespace()


def is_machine_root_outside() -> bool:
    """Whether this process, in a user namespace, is still the machine's root to the kernel: whom it lets have any
    number of processes, and whose its devices and settings are, as far as they can be seen."""
    return in_user_namespace() and os.stat("/proc/sys/kernel").st_uid == os.geteuid()


def in_user_namespace() -> bool:
    """Whether a user namespace is around this process that is not the machine's own."""
    return os.stat("/proc/self/ns/user").st_ino != INITIAL_NAMESPACE


def mapped(kind: str = "uid") -> list[tuple[int, int, int]]:
    """The ids that there are here: first one, the same id around this namespace, and how many follow on.

    Args:
        kind: ``uid`` or ``gid``.
    """
    lines = Path(f"/proc/self/{kind}_map").read_text().splitlines()
    return [(int(own), int(outside), int(count)) for own, outside, count in map(str.split, lines)]


def has_one_id() -> bool:
    """Whether there is nobody here but this user, so that no program, setuid or not, can map another."""
    return sum(count for _own, _outside, count in mapped()) == 1


def user_outside() -> int:
    """This process's user as he is known around its namespace, by which users of one machine are told apart: each of
    them may be number 0 in a container of his own."""
    user = os.geteuid()
    return next((outside + user - own for own, outside, count in mapped() if own <= user < own + count), user)
