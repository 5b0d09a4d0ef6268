# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Validate and sanitize root folders of images.

An unpacked image is a folder of a user's files on the host, and its contents are untrusted. After :func:`sanitize`:

- The caller owns all files. A sandbox has one user by default, who could not change files of other users.
- No file is setuid, setgid or a device, which would give other users of the host rights of root or access to a disk.
- The caller can read all files and enter all folders, so the image can be used, copied and removed.

Other users may have a folder of the image open and replace entries by symlinks. So each name is resolved relative to
an open folder that was reached without symlinks (:func:`walk`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.images.entries import machine
from nemo_gym_prorl.sandbox.isolation import mounts, user_ids
from nemo_gym_prorl.sandbox.isolation.mounts import KERNEL_FILESYSTEMS
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.isolation.syscalls import change_mode, open_folder_beneath
from nemo_gym_prorl.sandbox.limits.usage import OPEN_FOLDER_FLAGS


_MAX_LINKS = 40  # symlinks followed for one path, as in the kernel

_BLOCK_BYTES = 1 << 20  # per read when two files are compared

_SIF_MAGIC_END = 42
"""Offset in bytes of the end of a SIF's magic text."""


def sanitize(root: Path) -> int:
    """Establish the module's invariants in an unpacked image; return its size on disk in bytes.

    Raises:
        OSError: a file belongs to a user id that is neither the caller's nor subordinate to the caller.
    """
    try:
        return _sanitize(root, os.geteuid(), os.getegid())
    except PermissionError:
        if is_machine_root():
            raise
    # A build may have set the caller's subordinate ids as owners, which only a user namespace can change back.
    user_ids.run_as_all_users(lambda: _sanitize(root, 0, 0), root)
    return _sanitize(root, os.geteuid(), os.getegid())


def walk(root: Path) -> Iterator[tuple[str, str, int]]:
    """Yield the folder itself and all entries below: relative path, name, and the descriptor of the parent folder.

    A folder is yielded before its entries; it is opened only after the caller has processed the folder's own entry.

    Raises:
        NotADirectoryError: another process has replaced a folder by a symlink.
        OSError: an entry can't be read.
    """
    top = os.open(root, OPEN_FOLDER_FLAGS)
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


def _sanitize(root: Path, uid: int, gid: int) -> int:
    return sum(_sanitize_entry(name, folder, uid, gid) for _path, name, folder in walk(root))


def _sanitize_entry(name: str, folder: int, uid: int, gid: int) -> int:
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


def link_unchanged(root: Path, base: Path) -> int:
    """Replace files in ``root`` by hard links to equal files in ``base``; return the bytes saved. Both folders must be
    sanitized and never written again. Files are equal if path, contents, owner, permissions and modification time are
    equal. Symlinks in ``base`` are not followed. A file that cannot be linked stays."""
    saved, fresh = 0, root.with_name("fresh-link")
    top = os.open(base, OPEN_FOLDER_FLAGS)
    try:
        for path, name, folder in walk(root):
            with contextlib.suppress(OSError):  # the base lacks the file, or no further link is allowed
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                above = open_folder_beneath(path.removesuffix(name).rstrip("/") or ".", top)
                try:
                    if _is_same(name, found, folder, above):
                        os.link(name, fresh, src_dir_fd=above, follow_symlinks=False)
                        os.rename(fresh, name, dst_dir_fd=folder)
                        saved += found.st_blocks * 512
                finally:
                    os.close(above)
    finally:
        os.close(top)
        fresh.unlink(missing_ok=True)
    return saved


def _is_same(name: str, found: os.stat_result, folder: int, other_folder: int) -> bool:
    """Return whether two regular files are equal, and the first has no further hard links."""
    other = os.stat(name, dir_fd=other_folder, follow_symlinks=False)
    # Apptainer truncates modification times to whole seconds when it copies a base.
    facts = [
        (one.st_mode, one.st_uid, one.st_gid, one.st_size, int(one.st_mtime), one.st_dev) for one in (found, other)
    ]
    if not stat.S_ISREG(found.st_mode) or facts[0] != facts[1] or found.st_nlink > 1:
        return False
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with (
        os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as one,
        os.fdopen(os.open(name, flags, dir_fd=other_folder), "rb") as two,
    ):
        while block := one.read(_BLOCK_BYTES):
            if block != two.read(_BLOCK_BYTES):
                return False
    return True


def resolve_inside(root: Path, path: str) -> Path:
    """Return the host path of ``path`` in an image, with symlinks resolved as if ``root`` were the root folder.

    The last parts of the path need not exist.

    Raises:
        OSError: the path has more than 40 symlinks, or is too long, or a folder cannot be entered.
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


_ELF_MACHINES = {3: "i686", 21: "ppc64le", 22: "s390x", 40: "armv7l", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
"""Processor architecture by the machine number in the header of an ELF program."""

SANDBOX_FOLDERS = ("/etc", "/tmp", "/root", "/var", "/var/tmp")
"""Folders that every sandbox has besides the kernel's; in an image none of them may lead into a kernel file system."""


def check_usable(image: Path) -> None:
    """Refuse a root folder without a usable ``/bin/sh``, or a file that is not a SIF.

    Raises:
        CallerError: the path is not an image, is not readable, or is a root folder that belongs to another user or is
            for another processor architecture; names the field ``image``.
    """
    if image.is_dir():
        _check_root(image)
        return
    try:
        with image.open("rb") as file:
            head = file.read(_SIF_MAGIC_END)
    except PermissionError as error:
        raise CallerError(f"{image} is not readable: run 'chmod a+r {image}' as its owner", field="image") from error
    except OSError as error:
        raise CallerError(f"{image}: {error.strerror}", field="image") from error
    if not head.endswith(b"SIF_MAGIC\0"):
        raise CallerError(f"{image} is neither a root folder nor a SIF: build or pull it again", field="image")


def check_image(image: Path) -> None:
    """Refuse an image from which no sandbox can start.

    Raises:
        CallerError: the path is not a root folder, :func:`check_usable` refuses the folder, or the folder has files of
            another type at the paths that every sandbox mounts or writes.
    """
    try:
        if not image.exists():
            raise CallerError(f"{image} does not exist; 'prorl setup' builds the default image", field="image")
        check_usable(image)
        if not image.is_dir():
            raise CallerError(
                f"{image} is a SIF: unpack it with 'apptainer build --sandbox FOLDER {image}' and name FOLDER",
                field="image",
            )
        _check_sandbox_paths(image)
    except PermissionError as error:
        raise CallerError(
            f"{image} is not readable: run 'chmod a+rX' on it and the folders above as their owner", field="image"
        ) from error


def _check_root(root: Path) -> None:
    owner = root.stat().st_uid
    # Machine root can mount any owner's files as files of the sandbox's user.
    if os.geteuid() != owner and not is_machine_root():
        raise CallerError(
            f"{root} belongs to user {owner}, not to you ({os.geteuid()}), so a sandbox could not change its files: "
            "copy it for yourself, or use a SIF",
            field="image",
        )
    try:
        # O_NONBLOCK: opening a named pipe would otherwise block.
        with os.fdopen(
            os.open(resolve_inside(root, "/bin/sh"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb"
        ) as file:
            head = file.read(20) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    except PermissionError as error:
        raise CallerError(f"{root} is not readable: run 'chmod -R a+rX {root}' as its owner", field="image") from error
    except OSError as error:
        raise CallerError(f"{root} is no root folder of an image: /bin/sh: {error.strerror}", field="image") from error
    if head is None:
        raise CallerError(f"{root} is no root folder of an image: /bin/sh is no regular file", field="image")
    if head[:4] != b"\x7fELF":
        return
    found = _ELF_MACHINES.get(int.from_bytes(head[18:20], "little" if head[5] == 1 else "big"), "")
    if found and found != machine():
        raise CallerError(f"{root} is for {found}, but this machine is {machine()}", field="image")


def _check_sandbox_paths(root: Path) -> None:
    """Refuse an image with files of the wrong type, or with misleading symlinks, at the paths that a sandbox needs.
    Only for early errors: the launcher does not rely on this check."""
    for path in KERNEL_FILESYSTEMS:
        if _file_type(root, f"{root}{path}", path) not in (0, stat.S_IFDIR):
            raise _unfit(root, path, "is no folder: make it an empty one")
    for path in SANDBOX_FOLDERS:
        if _file_type(root, _resolve_checked(root, path), path) not in (0, stat.S_IFDIR):
            raise _unfit(root, path, "is no folder: make it one")
    for path in ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf"):
        folder, name = os.path.split(path)
        if _file_type(root, f"{_resolve_checked(root, folder)}/{name}", path) == stat.S_IFDIR:
            raise _unfit(root, path, "is a folder where each sandbox has a file: remove it")
    for path in mounts.ACCOUNT_FILES:
        if _file_type(root, _resolve_checked(root, path), path) not in (0, stat.S_IFREG):
            raise _unfit(root, path, "is no regular file: make it one, or remove it")


def _resolve_checked(root: Path, path: str) -> str:
    """Return the host path of ``path`` with symlinks resolved; refuse a path in a kernel file system."""
    parts = path.split("/")
    if not any(Path(str(root) + "/".join(parts[:count])).is_symlink() for count in range(2, len(parts) + 1)):
        return f"{root}{path}"
    try:
        found = resolve_inside(root, path)
    except PermissionError:
        raise
    except OSError as error:
        raise _unfit(root, path, f"leads nowhere ({error.strerror}): remove the link") from error
    inside = f"/{found.relative_to(root)}"
    if any(inside == own or inside.startswith(f"{own}/") for own in KERNEL_FILESYSTEMS):
        raise _unfit(root, path, f"is a link to {inside}, where each sandbox has its own files: remove the link")
    return str(found)


def _file_type(root: Path, found: str, path: str) -> int:
    try:
        return stat.S_IFMT(os.lstat(found).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except PermissionError:
        raise
    except OSError as error:
        raise _unfit(root, path, f"can't be read ({error.strerror})") from error


def _unfit(root: Path, path: str, reason: str) -> CallerError:
    return CallerError(f"{root} can't be used as a sandbox's root: its {path} {reason}", field="image")
