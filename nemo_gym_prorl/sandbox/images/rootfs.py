# SPDX-License-Identifier: Apache-2.0
"""Root folders of images: making them safe to keep on the host, and looking whether they can be started.

What is unpacked from a foreign image lies on the host as files of its user. Invariants of :func:`settle`:

- everything belongs to the caller, since a sandbox knows one user only: what belonged to another could be neither
  changed nor always read in it;
- nothing is setuid or setgid, and nothing is a device: a stranger's program with root's rights, or a disk as a file,
  in a cache folder would be a gift to an intruder;
- the caller can read everything and enter every folder, so it can be used, copied and removed.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.isolation import user_domain


_ELF_MACHINES = {3: "i686", 21: "ppc64le", 22: "s390x", 40: "armv7l", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
"""By the number in the header of programs."""

_MAX_LINKS = 40


def settle(root: Path) -> int:
    """Make an unpacked image safe, see the module; gives its size on disk in bytes.

    Raises:
        OSError: something belongs to somebody whom the caller has no power over.
    """
    try:
        return _settle(root, os.geteuid(), os.getegid())
    except PermissionError:
        if os.geteuid() == 0:
            raise
    # What a build gave to users of the caller's range.
    child = user_domain.fork_as_all_users(lambda: _settle(root, 0, 0))
    user_domain.raise_for(os.waitpid(child, 0)[1], root)
    return _settle(root, os.geteuid(), os.getegid())


def _settle(root: Path, uid: int, gid: int) -> int:
    total = _settle_one(root, uid, gid)
    # Folders are settled before they are looked into.
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            total += _settle_one(Path(folder, name), uid, gid)
    return total


def _settle_one(path: Path, uid: int, gid: int) -> int:
    found = path.lstat()
    if (found.st_uid, found.st_gid) != (uid, gid):
        os.lchown(path, uid, gid)
    mode = found.st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        path.unlink()
        return 0
    if not stat.S_ISLNK(mode):
        wanted = (stat.S_IMODE(mode) | (0o700 if stat.S_ISDIR(mode) else 0o400)) & ~0o6000
        if wanted != stat.S_IMODE(mode):
            path.chmod(wanted)
    return found.st_blocks * 512


def copy(root: Path, target: Path) -> Path:
    """Copy somebody else's root folder, so that it is ours; devices and pipes stay behind.

    Raises:
        CallerError: something in it can't be read; for the field ``base``.
    """

    def special(folder: str, names: list[str]) -> list[str]:
        kinds = {name: Path(folder, name).lstat().st_mode for name in names}
        return [
            name
            for name, mode in kinds.items()
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))
        ]

    try:
        shutil.copytree(root, target, symlinks=True, ignore=special)
    except shutil.Error as error:
        where, _copy, reason = error.args[0][0]
        raise CallerError(f"{where} can't be copied: {reason}", field="base") from error
    settle(target)
    return target


def check_root(root: Path, machine: str) -> None:
    """See whether a root folder can be started as a sandbox on this ``machine``; takes some 50 µs.

    Raises:
        CallerError: it can't; for the field ``image``.
    """
    owner = root.stat().st_uid
    # Root's sandboxes see whoever owns an image as themselves.
    if os.geteuid() not in (0, owner):
        raise CallerError(
            f"{root} belongs to user {owner}, not to you ({os.geteuid()}), and a sandbox could not change its files: "
            f"'prorl image build plain --base {root}' makes an image of your own, or use a SIF",
            field="image",
        )
    try:
        # Without O_NONBLOCK a named pipe would hold us for ever.
        with os.fdopen(os.open(inside(root, "/bin/sh"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            head = file.read(20) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    except PermissionError as error:
        raise CallerError(f"{root} can't be read by you: chmod -R a+rX it", field="image") from error
    except OSError as error:
        raise CallerError(f"{root} is no root folder of an image: /bin/sh: {error.strerror}", field="image") from error
    if head is None:
        raise CallerError(f"{root} is no root folder of an image: /bin/sh is no ordinary file", field="image")
    if head[:4] != b"\x7fELF":
        return
    found = _ELF_MACHINES.get(int.from_bytes(head[18:20], "little" if head[5] == 1 else "big"), "")
    if found and found != machine:
        raise CallerError(f"{root} is for {found}, but this machine is {machine}", field="image")


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
