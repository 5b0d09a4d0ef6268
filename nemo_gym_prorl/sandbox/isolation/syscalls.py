# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""System calls that Python's ``os`` lacks: mounts, process controls, executable and sealed memfds.

The supervisor and forked children use this module. Callers that change namespaces have a single thread, because the
kernel refuses to change the user namespace of a process with several threads.
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
"""Secure bit (``prctl``) with which a change from root to another user id keeps all capabilities."""

# System call numbers from 424 on are the same on every architecture.
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
F_ADD_SEALS, SEAL_SIZE = 1033, 0x06
_ALL_SEALS = 0x0F
"""All seals of a memfd: no writes, no change of size, no further seals. Some Python builds lack the constants."""

_CLONE3 = 435
_CLONE_INTO_CGROUP = 0x200000000
_CLONE_ARGUMENTS = struct.Struct("11Q")

_libc = ctypes.CDLL(None, use_errno=True)
# PyDLL holds the GIL during the call, or the forked child could not run Python code.
_libc_locked = ctypes.PyDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    done = _libc.mount(
        source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode() or None
    )
    _check(done, f"mount on {target}")


def bind(source: str, target: str) -> None:
    mount(source, target, "", MS_BIND)


def prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit at once unless ``parent`` is the parent's pid."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def fork_into_cgroup(group: int) -> int:
    """Fork a child that starts in a control group, given the descriptor of the group's folder; needs Linux 5.7.

    The process must have one thread: a child of a process with several threads may wait for a lock forever."""
    arguments = _CLONE_ARGUMENTS.pack(_CLONE_INTO_CGROUP, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, group)
    pid = int(_libc_locked.syscall(_CLONE3, arguments, ctypes.c_size_t(len(arguments))))
    _check(pid, "clone3")
    return pid


def open_tree(source: str | int, *, recursive: bool = False) -> int:
    """Return a descriptor of a detached copy of a mount, for :func:`move_mount`.

    Args:
        source: path or descriptor of a file or folder, which becomes the root of the mount.
        recursive: whether to copy the mounts below, too.
    """
    folder, path = (-100, os.fsencode(source)) if isinstance(source, str) else (source, b"")
    flags = CLONE_TREE | os.O_CLOEXEC | (RECURSIVE if recursive else 0) | (0 if path else EMPTY_PATH)
    tree = int(_libc.syscall(_OPEN_TREE, folder, path, flags))
    _check(tree, f"mount of {source}")
    return tree


def open_folder_beneath(path: str | bytes, folder: int) -> int:
    """Open the folder at ``path``, relative to the descriptor ``folder``; no symlink and no ``..`` is followed.

    Raises:
        NotADirectoryError: a component of the path is a symlink.
        OSError: the folder does not exist or can't be opened.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    how = _OPEN_HOW.pack(flags, 0, _NO_LINKS_AND_BENEATH)
    found = int(_libc.syscall(_OPENAT2, folder, os.fsencode(path), how, ctypes.c_size_t(len(how))))
    if found < 0 and ctypes.get_errno() == errno.ELOOP:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if found >= 0 or ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
        _check(found, f"open of {os.fsdecode(path)}")
        return found
    # Linux before 5.6 lacks openat2, and seccomp filters of containers may refuse it.
    found = os.open(".", flags, dir_fd=folder)
    for name in filter(None, os.fsencode(path).split(b"/")):
        above = found
        try:
            found = os.open(name, flags, dir_fd=above)
        finally:
            os.close(above)
    return found


def change_mode(name: str, folder: int, mode: int) -> None:
    """Change the mode of the entry ``name`` of an open folder, but never of the target of a symlink."""
    held = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        # This path leads to the open file, even if another file has the name by now.
        os.chmod(f"/proc/self/fd/{held}", mode)
    finally:
        os.close(held)


def set_mount_attributes(tree: int, attributes: int) -> None:
    """Set attributes of the detached mount ``tree`` and of the mounts below."""
    given = struct.pack("4Q", attributes, 0, 0, 0)
    _check(_libc.syscall(_MOUNT_SETATTR, tree, b"", EMPTY_PATH | RECURSIVE, given, len(given)), "mount_setattr")


def idmap_mount(tree: int, owner: int) -> None:
    """Make the detached mount ``tree`` an idmapped mount, with the id maps of the user namespace ``owner``.

    Both are descriptors.

    Raises:
        OSError: the kernel or the file system does not support idmapped mounts.
    """
    # MS_PRIVATE: later mounts of the host would otherwise appear below, with the owners not mapped.
    given = struct.pack("4Q", _ATTRIBUTE_IDMAP, 0, MS_PRIVATE, owner)
    done = _libc.syscall(_MOUNT_SETATTR, tree, b"", EMPTY_PATH, given, len(given))
    _check(done, "idmapped mount (needs Linux 5.19 and a file system with support)")


def move_mount(tree: int, target: str) -> None:
    """Attach a detached mount, the descriptor of :func:`open_tree`, at ``target``; then close the descriptor."""
    _check(_libc.syscall(_MOVE_MOUNT, tree, b"", -100, os.fsencode(target), FROM_EMPTY_PATH), f"mount on {target}")
    os.close(tree)


def create_executable_memfd(name: str) -> int:
    """Return the descriptor of a new memfd that can be sealed, and executed despite ``vm.memfd_noexec=1``."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Before Linux 6.3 every memfd can be executed, and the flag is unknown.
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal_memfd(memory: int) -> None:
    fcntl.fcntl(memory, F_ADD_SEALS, _ALL_SEALS)


def unmount(target: str) -> None:
    """Detach the mount at ``target``, also while it is in use, and the mounts below."""
    _check(_libc.umount2(os.fsencode(target), _DETACH), f"unmount of {target}")


def first_untraversable_parent(path: Path) -> Path | None:
    """Return the outermost parent of ``path`` that other users may not traverse; ``None`` if all are traversable."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None


def mount_as_owner(source: str, target: str, owner: int | None) -> None:
    """Mount ``source`` at ``target``, optionally as an idmapped mount.

    Args:
        source: file or folder; other users need not be able to traverse its parents.
        target: existing file or folder, of the same type as ``source``.
        owner: descriptor of the user namespace whose id maps are applied; ``None`` keeps the owners.

    Raises:
        OSError: a mount fails, for example because the file system does not support idmapped mounts.
    """
    tree = open_tree(source)
    if owner is not None:
        idmap_mount(tree, owner)
    move_mount(tree, target)


def unshare_mounts() -> None:
    """Move this process to a new mount namespace, whose mounts do not propagate to the host."""
    os.unshare(os.CLONE_NEWNS)
    mount("none", "/", "", MS_REC | MS_PRIVATE)
