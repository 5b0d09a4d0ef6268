# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The namespaces of a running sandbox, as far as the launcher must know them to join it (``launcher/launcher.c``).

Joining them takes well under a millisecond, where a second ``apptainer exec`` takes fifty.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


NAMESPACE_FLAGS = {
    "user": os.CLONE_NEWUSER,
    "mnt": os.CLONE_NEWNS,
    "pid": os.CLONE_NEWPID,
    "ipc": os.CLONE_NEWIPC,
    "net": os.CLONE_NEWNET,
    "uts": os.CLONE_NEWUTS,
    "cgroup": os.CLONE_NEWCGROUP,
}
"""The user namespace comes first: it gives the right to join the others."""


class ProcDirectory:
    """The folder in ``/proc`` of a process, as an open descriptor: of this one, whatever gets its number. It is closed
    when nobody refers to it any more, nor to what is still to be sent with it."""

    def __init__(self, pid: int) -> None:
        self.fd: int = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.fd)

    def namespace_inode(self, name: str) -> int:
        """What tells one of its namespaces, which the kernel gives away again when that has ended."""
        return os.stat(f"ns/{name}", dir_fd=self.fd).st_ino


@dataclass(frozen=True, slots=True)
class SandboxNamespaces:
    """A running container, as far as a child must know it.

    Attributes:
        process: of the container's PID 1.
        uid: the only user id that exists inside; 0 for one that has root.
        limits: ``resource.RLIMIT_*`` to hard limit, for whatever is executed.
        namespace_flags: ``CLONE_NEW*`` flags of the namespaces that are not ours, too; see :func:`spaces_of`.
        is_pivoted: whether the root of its mount namespace is its own root.
        capabilities: that its root has beyond the usual, by number.
    """

    process: ProcDirectory
    uid: int
    limits: dict[int, int]
    namespace_flags: int
    is_pivoted: bool = False
    capabilities: frozenset[int] = frozenset()


def unshared_namespaces(process: ProcDirectory) -> int:
    """``CLONE_NEW*`` flags of the namespaces of a process that this one does not share: a shared one can't be joined
    by everybody, and needs no joining."""
    differing = (
        flag
        for name, flag in NAMESPACE_FLAGS.items()
        if process.namespace_inode(name) != os.stat(f"/proc/self/ns/{name}").st_ino
    )
    return sum(differing)
