# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Where a sandbox is: by whom it can be joined, and how, by what is not the launcher's.

Joining the namespaces of a running container takes well under a millisecond, where a second ``apptainer exec`` takes
fifty. The launcher does so for whatever is done in a sandbox (``launcher/launcher.c``), but for packing and unpacking
its layer: that do children forked for it (:mod:`.files.snapshots`), with the same invariants against a container whose
every process is hostile:

- The child makes itself undumpable *before* it joins, so nothing inside can trace it, read its memory or open its
  files.
- Names are looked up by the kernel inside the container's root: no link, ``..`` or mount leads out of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass

from nemo_gym_prorl.sandbox.isolation import syscalls
from nemo_gym_prorl.sandbox.supervisor.errors import Unreachable


NAMESPACES = {
    "user": os.CLONE_NEWUSER,
    "mnt": os.CLONE_NEWNS,
    "pid": os.CLONE_NEWPID,
    "ipc": os.CLONE_NEWIPC,
    "net": os.CLONE_NEWNET,
    "uts": os.CLONE_NEWUTS,
    "cgroup": os.CLONE_NEWCGROUP,
}
"""The user namespace comes first: it gives the right to join the others."""


class ProcessFolder:
    """The folder in ``/proc`` of a process, as an open descriptor: of this one, whatever gets its number. It is closed
    when nobody refers to it any more, nor to what is still to be sent with it."""

    def __init__(self, pid: int) -> None:
        self.number: int = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)

    def namespace(self, name: str) -> int:
        """What tells one of its namespaces, which the kernel gives away again when that has ended."""
        return os.stat(f"ns/{name}", dir_fd=self.number).st_ino


@dataclass(frozen=True, slots=True)
class Place:
    """A running container, as far as a child must know it.

    Attributes:
        process: of the container's PID 1.
        uid: the only user id that exists inside; 0 for one that has root.
        limits: ``resource.RLIMIT_*`` to hard limit, for whatever is executed.
        spaces: ``CLONE_NEW*`` flags of the namespaces that are not ours, too; see :func:`spaces_of`.
        rooted: whether the root of its mount namespace is its own root.
        capabilities: that its root has beyond the usual, by number.
    """

    process: ProcessFolder
    uid: int
    limits: dict[int, int]
    spaces: int
    rooted: bool = False
    capabilities: frozenset[int] = frozenset()


def spaces_of(process: ProcessFolder) -> int:
    """``CLONE_NEW*`` flags of the namespaces of a process that this one does not share: a shared one can't be joined
    by everybody, and needs no joining."""
    differing = (
        flag for name, flag in NAMESPACES.items() if process.namespace(name) != os.stat(f"/proc/self/ns/{name}").st_ino
    )
    return sum(differing)


@contextlib.contextmanager
def reaching() -> Iterator[None]:
    """Errors in the block are the container's, which may have ended meanwhile: nothing in it depends on a request."""
    try:
        yield
    except OSError as error:
        raise Unreachable(f"the sandbox can't be joined: {error}") from error


@reaching()
def join(place: Place) -> None:
    """Become a process in the container's namespaces; children forked later are in its PID namespace too.

    Raises:
        Unreachable: it has ended.
    """
    parent = os.getppid()
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    _enter(place, place.spaces)
    with contextlib.suppress(PermissionError):
        # Refused in namespaces of ordinary users, whose groups mean nothing inside.
        os.setgroups([])
    # Where there are several users this may be a change from root to another, which has a program to start first.
    syscalls.prctl(syscalls.PR_SET_SECUREBITS, syscalls.NO_SETUID_FIXUP)
    os.setresgid(place.uid, place.uid, place.uid)
    os.setresuid(place.uid, place.uid, place.uid)
    # Changed ids made the kernel forget it.
    syscalls.end_with(parent)
    # Changed ids make a process dumpable or not by a system setting; ours is not up to it.
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    if not place.rooted:
        # Only now: a root that the runtime mounted with FUSE is open to nobody but the container's user.
        root = os.open("root", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place.process.number)
        os.fchdir(root)
        os.chroot(".")


@contextlib.contextmanager
def by_names_inside() -> Iterator[None]:
    """What goes wrong in the block is by names and files of those inside, whatever they made of them: none of it is a
    failure of ours, which would be tried again. What the machine is short of says so by its number."""
    try:
        yield
    except MemoryError as error:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
    except (OSError, Unreachable):
        raise
    except Exception as error:
        raise OSError(errno.EINVAL, f"{type(error).__name__}: {error}") from error


@reaching()
def join_users(place: Place) -> None:
    """Become one of the container's users, with every right over what is theirs, but join nothing else of it."""
    parent = os.getppid()
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    _enter(place, os.CLONE_NEWUSER)
    # New rights made the kernel forget it.
    syscalls.end_with(parent)


def _enter(place: Place, spaces: int) -> None:
    descriptors = [
        os.open(f"ns/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=place.process.number)
        for name, flag in NAMESPACES.items()
        if flag & place.spaces & spaces
    ]
    for descriptor in descriptors:
        os.setns(descriptor)
