# SPDX-License-Identifier: Apache-2.0
"""What a forked child of the supervisor does to work in a container, and how one from the runtime is set up.

Joining the namespaces of a running container takes well under a millisecond, where a second ``apptainer exec`` takes
fifty. Every function here runs in a child that was forked for it and ends with it. None executes anything inside: what
is started there, the launcher starts (``launcher/launcher.c``), with the same invariants.

Invariants, against a container whose every process is hostile:

- The child makes itself undumpable *before* it joins, so nothing inside can trace it, read its memory or open its
  files.
- Names are looked up by the kernel inside the container's root: no link, ``..`` or mount leads out of it.
- Files are copied by a process that is outside of the container's PID namespace, so ``/proc/self`` leads nowhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nemo_gym_prorl.sandbox.isolation import accounts, syscalls
from nemo_gym_prorl.sandbox.isolation.mounts import KERNELS, SMALL_TMPFS, terminal_options
from nemo_gym_prorl.sandbox.limits import kernel_shares
from nemo_gym_prorl.sandbox.supervisor.rpc.answers import Unreachable


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

MOUNTS_FIELD_TARGET = 1
MOUNTS_FIELD_KIND = 2


@dataclass(frozen=True, slots=True)
class Place:
    """A running container, as far as a child must know it.

    Attributes:
        pid: the container's PID 1, as the host numbers it.
        uid: the only user id that exists inside; 0 for one that has root.
        limits: ``resource.RLIMIT_*`` to hard limit, for whatever is executed.
        spaces: ``CLONE_NEW*`` flags of the namespaces that are not ours, too; see :func:`spaces_of`.
        rooted: whether the root of its mount namespace is its own root.
        capabilities: that its root has beyond the usual, by number.
    """

    pid: int
    uid: int
    limits: dict[int, int]
    spaces: int
    rooted: bool = False
    capabilities: frozenset[int] = frozenset()


def spaces_of(pid: int) -> int:
    """``CLONE_NEW*`` flags of the namespaces of a process that this one does not share: a shared one can't be joined
    by everybody, and needs no joining."""
    differing = (
        flag
        for name, flag in NAMESPACES.items()
        if os.stat(f"/proc/{pid}/ns/{name}").st_ino != os.stat(f"/proc/self/ns/{name}").st_ino
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
    base = None if place.rooted else os.open(f"/proc/{place.pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    _enter_all(place)
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
    if base is not None:
        # Only now: a root that the runtime mounted with FUSE is open to nobody but the container's user.
        root = os.open("root", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=base)
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
    _enter_all(replace(place, spaces=os.CLONE_NEWUSER))
    # New rights made the kernel forget it.
    syscalls.end_with(parent)


def _enter_all(place: Place) -> None:
    """Join all namespaces of a process at once, or one after the other before Linux 5.8."""
    try:
        process = os.pidfd_open(place.pid)
        os.setns(process, place.spaces)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EINVAL):
            raise
        doors = [
            os.open(f"/proc/{place.pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
            for name, flag in NAMESPACES.items()
            if flag & place.spaces
        ]
        for door in doors:
            os.setns(door)


def prepare(place: Place, shared_memory_mib: int, host_network: bool, image: str) -> None:
    """Close what the runtime leaves open: unbounded memory file systems, and further user namespaces.

    Take away what it shows of the host: accounts, hosts, nameservers where the network is not the host's, time zone.
    """
    resolver = accounts.resolver(host_network)
    copied = [path for path in accounts.COPIED_BY_THE_RUNTIME if not os.path.lexists(image + path)]
    join(place)
    for path in KERNELS:
        # What the runtime mounted by way of a link may hide the settings below, or be nothing of the kernel's.
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "the image has no folder of its own there", path)
    # Not /proc/self: this process is in the mount namespace, but not in the PID namespace that /proc shows.
    with open("/proc/1/mounts") as table:
        mounts = [line.split() for line in table]
    for fields in mounts:
        target, kind = fields[MOUNTS_FIELD_TARGET], fields[MOUNTS_FIELD_KIND]
        if kind == "tmpfs" and not target.startswith("/sys"):
            size = kernel_shares.shared_memory_options(shared_memory_mib) if target == "/dev/shm" else SMALL_TMPFS
            # One of the host that is bound in, as is ours where the sandboxes' folder is on one, has its own bound.
            with contextlib.suppress(PermissionError):
                syscalls.mount("tmpfs", target, "tmpfs", syscalls.MS_REMOUNT, size)
        if kind == "devpts":
            flags = syscalls.MS_REMOUNT | syscalls.MS_NOSUID | syscalls.MS_NOEXEC
            with contextlib.suppress(PermissionError):
                syscalls.mount("devpts", target, "devpts", flags, terminal_options())
    # The runtime's shows the network devices and control groups of the host. Some machines let nobody mount another.
    with contextlib.suppress(PermissionError):
        syscalls.mount("sysfs", "/sys", "sysfs", syscalls.MS_RDONLY)
    for path in accounts.OF_THE_RUNTIME:
        # Nothing is mounted there if the runtime was set up not to.
        with contextlib.suppress(OSError):
            syscalls.unmount(path)
    for path in copied:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    accounts.write(place.uid, place.uid, resolver)
    # In a user namespace of its own a process would have every capability again.
    with open("/proc/sys/user/max_user_namespaces", "w") as setting:
        setting.write("0")
    kernel_shares.settle(shared_memory_mib)
