# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Root folders of images: making them safe to keep on the host, copying them, and where paths in them lead.

What is unpacked from a foreign image lies on the host as files of its user. Invariants of :func:`settle`:

- everything belongs to the caller, since a sandbox knows one user only: what belonged to another could be neither
  changed nor always read in it;
- nothing is setuid or setgid, and nothing is a device: a stranger's program with root's rights, or a disk as a file,
  in a cache folder would be a gift to an intruder;
- the caller can read everything and enter every folder, so it can be used, copied and removed.

Somebody else may still hold a folder of it open, and put links in place of what is in it: a stranger whom a recipe
handed it, or the owner of a folder that is copied. So nothing is named but in a folder that is open, to which no link
led (:func:`everything`).
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from nemo_gym_prorl.failures import OF_THE_MACHINE, CallerError
from nemo_gym_prorl.sandbox.isolation import user_ids
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.isolation.syscalls import change_mode, open_folder_beneath
from nemo_gym_prorl.sandbox.limits.walk import FOLDER


_MAX_LINKS = 40


def settle(root: Path) -> int:
    """Make an unpacked image safe, see the module; gives its size on disk in bytes.

    Raises:
        OSError: something belongs to somebody whom the caller has no power over.
    """
    try:
        return _settle(root, os.geteuid(), os.getegid())
    except PermissionError:
        if is_machine_root():
            raise
    # What a build gave to users of the caller's range.
    child = user_ids.fork_as_all_users(lambda: _settle(root, 0, 0))
    user_ids.raise_for(os.waitpid(child, 0)[1], root)
    return _settle(root, os.geteuid(), os.getegid())


def everything(root: Path) -> Iterator[tuple[str, str, int]]:
    """All that there is, itself first: relative path, last name, and the open folder that this one is in. A folder
    comes before what is in it, and is not looked into before the next is asked for.

    Raises:
        NotADirectoryError: somebody puts a link in place of a folder just now.
        OSError: something can't be read.
    """
    top = os.open(root, FOLDER)
    try:
        yield ".", ".", top
        todo = [""]
        while todo:
            path = todo.pop()
            here = open_folder_beneath(path or ".", top)
            try:
                with os.scandir(here) as entries:
                    for entry in entries:
                        yield f"{path}{entry.name}", entry.name, here
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(f"{path}{entry.name}/")
            finally:
                os.close(here)
    finally:
        os.close(top)


def _settle(root: Path, uid: int, gid: int) -> int:
    return sum(_settle_one(name, folder, uid, gid) for _path, name, folder in everything(root))


def _settle_one(name: str, folder: int, uid: int, gid: int) -> int:
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if (found.st_uid, found.st_gid) != (uid, gid):
        os.chown(name, uid, gid, dir_fd=folder, follow_symlinks=False)
    mode = found.st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        os.unlink(name, dir_fd=folder)
        return 0
    if not stat.S_ISLNK(mode):
        wanted = (stat.S_IMODE(mode) | (0o700 if stat.S_ISDIR(mode) else 0o400)) & ~0o6000
        if wanted != stat.S_IMODE(mode):
            change_mode(name, folder, wanted)
    return found.st_blocks * 512


def copy(root: Path, target: Path) -> Path:
    """Copy somebody else's root folder, so that it is ours; devices and pipes stay behind.

    Raises:
        CallerError: something in it can't be read; for the field ``base``.
    """
    for path, name, folder in everything(root):
        try:
            _copy_one(name, folder, target / path)
        except OSError as error:
            if error.errno in OF_THE_MACHINE:
                raise
            raise CallerError(f"{root / path} can't be copied: {error.strerror}", field="base") from error
    settle(target)
    return target


def _copy_one(name: str, folder: int, target: Path) -> None:
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        target.symlink_to(os.readlink(name, dir_fd=folder))
    elif stat.S_ISDIR(found.st_mode):
        target.mkdir()
        target.chmod(stat.S_IMODE(found.st_mode) | 0o700)
    elif stat.S_ISREG(found.st_mode):
        # It may be a pipe by now.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as source, target.open("xb") as copied:
            shutil.copyfileobj(source, copied)
            os.fchmod(copied.fileno(), stat.S_IMODE(found.st_mode))
        os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


def inside(root: Path, path: str) -> Path:
    """Where ``path`` leads in an image, as one who has ``root`` for root would find it.

    Raises:
        OSError: nowhere, since its links lead in a circle, or are longer than a path can be.
    """
    pending = [part for part in reversed(path.split("/")) if part]
    done: list[str] = []
    links = 0
    while pending:
        part = pending.pop()
        if part == "..":
            done[-1:] = []
            continue
        here = root.joinpath(*done, part)
        if part == "." or not here.is_symlink():
            done += [] if part == "." else [part]
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = str(here.readlink())
        if target.startswith("/"):
            done = []
        pending += [piece for piece in reversed(target.split("/")) if piece]
    return root.joinpath(*done)
