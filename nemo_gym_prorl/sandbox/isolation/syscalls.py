# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The few kernel calls that sandboxes need and Python's ``os`` lacks: mounts, process controls, capabilities.

Used only by the supervisor and the short-lived children it forks, which are single-threaded: the kernel lets no other
process change its user namespace.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import stat
import struct
from pathlib import Path


MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECUREBITS = 28
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

NO_SETUID_FIXUP = 4
"""Secure bit: a change from root to another user takes no capabilities."""

# The same numbers on every architecture.
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
CLONE_TREE = 1
FROM_EMPTY_PATH = 4
EMPTY_PATH = 0x1000
RECURSIVE = 0x8000
_DETACH = 2

ATTRIBUTE_RDONLY = 1
ATTRIBUTE_NOSUID = 2
ATTRIBUTE_NODEV = 4
_ATTRIBUTE_IDMAP = 0x100000

_OPENAT2 = 437
_NO_LINKS_AND_BENEATH = 0x04 | 0x08
_OPEN_HOW = struct.Struct("3Q")

_MFD_EXEC = 0x10
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


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


def die_with_parent(parent: int) -> None:
    """Have this process end with its parent, which is ``parent``; if that has ended already, end now."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def fork_into_cgroup(group: int) -> int:
    """``fork(2)`` whose child is born in a control group, by the descriptor of its folder; needs Linux 5.7.

    The process must have one thread: where another one waits for the interpreter's lock, the child hands it that lock
    and waits for it forever. Moving a process into a group afterwards takes the kernel some 10 ms.
    """
    arguments = _CLONE_ARGUMENTS.pack(_CLONE_INTO_CGROUP, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, group)
    pid = int(_libc_locked.syscall(_CLONE3, arguments, ctypes.c_size_t(len(arguments))))
    _check(pid, "clone3")
    return pid


def open_tree(source: str | int, *, recursive: bool = False) -> int:
    """A copy of a mount, as a descriptor, that is nowhere to be seen yet; to be given to :func:`attach`.

    Args:
        source: a path, or a descriptor of what lies there.
        recursive: with what is mounted below it.
    """
    folder, path = (-100, os.fsencode(source)) if isinstance(source, str) else (source, b"")
    flags = CLONE_TREE | os.O_CLOEXEC | (RECURSIVE if recursive else 0) | (0 if path else EMPTY_PATH)
    tree = int(_libc.syscall(_OPEN_TREE, folder, path, flags))
    _check(tree, f"mount of {source}")
    return tree


def open_folder_beneath(path: str | bytes, folder: int) -> int:
    """Open the folder at a relative path below an open one, on the way to which there is no link.

    Raises:
        NotADirectoryError: somebody has put a link in its place or in that of one above it.
        OSError: there is none.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    how = _OPEN_HOW.pack(flags, 0, _NO_LINKS_AND_BENEATH)
    found = int(_libc.syscall(_OPENAT2, folder, os.fsencode(path), how, ctypes.c_size_t(len(how))))
    if found < 0 and ctypes.get_errno() == errno.ELOOP:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if found >= 0 or ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
        _check(found, f"open of {os.fsdecode(path)}")
        return found
    # Before Linux 5.6, or in a container whose filter does not know the call.
    found = os.open(".", flags, dir_fd=folder)
    for name in filter(None, os.fsencode(path).split(b"/")):
        above = found
        try:
            found = os.open(name, flags, dir_fd=above)
        finally:
            os.close(above)
    return found


def change_mode(name: str | bytes, folder: int | None, mode: int, kind: int = 0) -> None:
    """``chmod(2)`` of what a name in an open folder is, and never of what a link leads to.

    Args:
        name: of it.
        folder: the open folder.
        mode: what it gets.
        kind: ``os.O_DIRECTORY`` if it has to be a folder.
    """
    held = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=folder)
    try:
        # What lies open by this number is that one, whatever has its name by now.
        os.chmod(f"/proc/self/fd/{held}", mode)
    finally:
        os.close(held)


def set_mount_attributes(tree: int, attributes: int, *, recursive: bool = False) -> None:
    """Set ``ATTRIBUTE_*`` of a detached mount."""
    given = struct.pack("4Q", attributes, 0, 0, 0)
    flags = EMPTY_PATH | (RECURSIVE if recursive else 0)
    _check(_libc.syscall(_MOUNT_SETATTR, tree, b"", flags, given, len(given)), "mount_setattr")


def idmap_mount(tree: int, owner: int) -> None:
    """Have a detached mount show other owners: who has a file's owner's number in the user namespace ``owner``."""
    # What is mounted below it on the host from now on, with other owners, is not to appear there, too.
    given = struct.pack("4Q", _ATTRIBUTE_IDMAP, 0, MS_PRIVATE, owner)
    done = _libc.syscall(_MOUNT_SETATTR, tree, b"", EMPTY_PATH, given, len(given))
    _check(done, "the image with other owners (needs Linux 5.19, and a file system that can)")


def move_mount(tree: int, target: str) -> None:
    """Mount what :func:`detached` gave on ``target``, and close it."""
    _check(_libc.syscall(_MOVE_MOUNT, tree, b"", -100, os.fsencode(target), FROM_EMPTY_PATH), f"mount on {target}")
    os.close(tree)


def create_executable_memfd(name: str) -> int:
    """A new memory file that may be executed and sealed."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Before Linux 6.3, where every one may be executed.
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal_memfd(memory: int) -> None:
    """Make sure that nobody ever changes a memory file again."""
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)


def unmount(target: str) -> None:
    """Take away what is mounted at ``target``, and all below it."""
    _check(_libc.umount2(os.fsencode(target), _DETACH), f"unmount of {target}")


def first_untraversable_parent(path: Path) -> Path | None:
    """The outermost folder above ``path`` that strangers may not enter, or ``None`` if the way is free."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None


def mount_as_owner(source: str, target: str, owner: int | None) -> None:
    """Show the file or folder ``source`` at ``target``, wherever it lies, with one user's files shown as another's.

    Args:
        source: may lie below folders that are closed to others.
        target: exists, and is a file or a folder as ``source`` is.
        owner: a user namespace with one user: what belongs to the number that he has there is shown as belonging to
            him; ``None`` to leave owners as they are.
    """
    tree = open_tree(source)
    if owner is not None:
        idmap_mount(tree, owner)
    move_mount(tree, target)


def unshare_mounts() -> None:
    """Give this process a mount namespace of its own, from which nothing gets out."""
    os.unshare(os.CLONE_NEWNS)
    mount("none", "/", "", MS_REC | MS_PRIVATE)
