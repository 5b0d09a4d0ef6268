# SPDX-License-Identifier: Apache-2.0
"""The few kernel calls that sandboxes need and Python's ``os`` lacks: mounts, process controls, capabilities.

Used only by the supervisor and the short-lived children it forks, which are single-threaded: the kernel lets no other
process change its user namespace.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
from pathlib import Path


MS_RDONLY = 1
MS_NOSUID = 2
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31})
"""Numbers of the capabilities that root keeps inside a sandbox: chown, dac_override, fowner, fsetid, kill, setgid,
setuid, setpcap, net_bind_service, net_raw, sys_chroot, mknod, audit_write and setfcap, as is customary for containers.
Without sys_admin nothing can be mounted, without sys_ptrace nothing that has more rights can be looked into, and
without sys_resource the limits below can't be lifted."""

# The same numbers on every architecture.
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_CLONE_TREE = 1
_FROM_EMPTY_PATH = 4
_EMPTY_PATH = 0x1000
_ATTRIBUTE_IDMAP = 0x100000

_CLONE3 = 435
_CLONE_INTO_CGROUP = 0x200000000
_CLONE_ARGUMENTS = struct.Struct("11Q")

_libc = ctypes.CDLL(None, use_errno=True)
# Holds on to the interpreter's lock, as a fork must.
_libc_locked = ctypes.PyDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """``mount(2)``."""
    done = _libc.mount(
        source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode() or None
    )
    _check(done, f"mount on {target}")


def bind(source: str, target: str) -> None:
    """Show ``source`` at ``target``, too, as it is."""
    mount(source, target, "", MS_BIND)


def prctl(option: int, value: int) -> None:
    """``prctl(2)`` with one argument."""
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def drop_capabilities() -> None:
    """Make sure that nothing this process executes ever has more than :data:`KEPT_CAPABILITIES`."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for number in range(last + 1):
        if number not in KEPT_CAPABILITIES:
            prctl(PR_CAPBSET_DROP, number)
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def fork_into(group: int) -> int:
    """``fork(2)`` whose child is born in a control group, by the descriptor of its folder; needs Linux 5.7.

    Moving a process into a group afterwards takes the kernel some 10 ms.
    """
    arguments = _CLONE_ARGUMENTS.pack(_CLONE_INTO_CGROUP, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, group)
    pid = int(_libc_locked.syscall(_CLONE3, arguments, ctypes.c_size_t(len(arguments))))
    _check(pid, "clone3")
    return pid


def walled_in(path: Path) -> Path | None:
    """The outermost folder above ``path`` that strangers may not enter, or ``None`` if the way is free."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None


def user_namespace(inside: int, uid: int, gid: int, *, group: int | None = None) -> int:
    """A new user namespace in which only one user and one group exist: ``uid`` and ``gid`` here, ``inside`` there.

    The group's number inside is ``group``, or the user's if not given.
    Returns a descriptor of it. The caller may join it, as it is the owner.
    """
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.unshare(os.CLONE_NEWUSER)
            os.write(ready[1], b"\n")
            # Until it is mapped and opened.
            os.close(done[1])
            os.read(done[0], 1)
        finally:
            os._exit(0)
    os.close(ready[1])
    try:
        if not os.read(ready[0], 1):
            raise OSError(errno.EPERM, "this machine lets users make no user namespaces")
        base = Path(f"/proc/{pid}")
        if os.geteuid():
            (base / "setgroups").write_text("deny")
        (base / "uid_map").write_text(f"{inside} {uid} 1")
        (base / "gid_map").write_text(f"{inside if group is None else group} {gid} 1")
        return os.open(base / "ns" / "user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for descriptor in (ready[0], *done):
            os.close(descriptor)
        os.waitpid(pid, 0)


def mount_for(source: str, target: str, owner: int | None) -> None:
    """Show the file or folder ``source`` at ``target``, wherever it lies, with one user's files shown as another's.

    Args:
        source: may lie below folders that are closed to others.
        target: exists, and is a file or a folder as ``source`` is.
        owner: a user namespace with one user: what belongs to the number that he has there is shown as belonging to
            him; ``None`` to leave owners as they are.
    """
    tree = _libc.syscall(_OPEN_TREE, -100, os.fsencode(source), _CLONE_TREE | os.O_CLOEXEC)
    _check(tree, source)
    if owner is not None:
        attributes = struct.pack("4Q", _ATTRIBUTE_IDMAP, 0, 0, owner)
        done = _libc.syscall(_MOUNT_SETATTR, tree, b"", _EMPTY_PATH, attributes, len(attributes))
        _check(done, f"{source} with other owners (needs Linux 5.19, and a file system that can)")
    _check(_libc.syscall(_MOVE_MOUNT, tree, b"", -100, os.fsencode(target), _FROM_EMPTY_PATH), target)
    os.close(tree)


def private_mounts() -> None:
    """Give this process a mount namespace of its own, from which nothing gets out."""
    os.unshare(os.CLONE_NEWNS)
    mount("none", "/", "", MS_REC | MS_PRIVATE)
