# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Root folders and SIFs of images: whether a sandbox can be made of one, making it safe to keep, and copying it.

What is unpacked from a foreign image lies on the host as files of its user. Invariants of :func:`settle`:

- everything belongs to the caller, since a sandbox knows one user only: what belonged to another could be neither
  changed nor always read in it;
- nothing is setuid or setgid, and nothing is a device: a stranger's program with root's rights, or a disk as a file,
  in a cache folder would be a gift to an intruder;
- the caller can read everything and enter every folder, so it can be used, copied and removed.

Other users may still hold one of its folders open and put links in place of entries. So each name is looked up in an
open folder to which no link led (:func:`everything`).

A SIF is a header of 128 bytes, a table of descriptors, and what they describe, in little-endian numbers. Reading its
first 64 KiB finds a file that is cut short or for another processor before the runtime fails in its own words.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_gym_prorl.failures import OF_THE_MACHINE, CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.images.entries import machine
from nemo_gym_prorl.sandbox.isolation import mounts, user_ids
from nemo_gym_prorl.sandbox.isolation.mounts import KERNEL_FILESYSTEMS
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.isolation.syscalls import change_mode, open_folder_beneath
from nemo_gym_prorl.sandbox.limits.usage import OPEN_FOLDER_FLAGS


_MAX_LINKS = 40


def sanitize(root: Path) -> int:
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
    user_ids.raise_child_error(os.waitpid(child, 0)[1], root)
    return _settle(root, os.geteuid(), os.getegid())


def walk(root: Path) -> Iterator[tuple[str, str, int]]:
    """All that there is, itself first: relative path, last name, and the open folder that this one is in. A folder
    comes before what is in it, and is not looked into before the next is asked for.

    Raises:
        NotADirectoryError: somebody puts a link in place of a folder just now.
        OSError: something can't be read.
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


def _settle(root: Path, uid: int, gid: int) -> int:
    return sum(_settle_one(name, folder, uid, gid) for _path, name, folder in walk(root))


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
    for path, name, folder in walk(root):
        try:
            _copy_one(name, folder, target / path)
        except OSError as error:
            if error.errno in OF_THE_MACHINE:
                raise
            raise CallerError(f"{root / path} can't be copied: {error.strerror}", field="base") from error
    sanitize(target)
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


def resolve_inside(root: Path, path: str) -> Path:
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


_SIF_PROCESSORS = {b"02": "x86_64", b"04": "aarch64"}
"""The header's numbers of processors, by the names that ``uname -m`` has for them; others are not checked."""

_HEADER = struct.Struct("<32s10s3s3s16s8q")
_DESCRIPTOR = struct.Struct("<i?iiiqqqqqqq128s384s")
_PARTITION = struct.Struct("<ii3s")
_READ_BYTES = 1 << 16
_PARTITION_KIND, _SQUASHFS, _SYSTEM = 0x4004, 1, 2


@dataclass(frozen=True, slots=True)
class Sif:
    """An image file.

    Attributes:
        machine: the processor it is for, as ``uname -m`` says it; empty if not known.
        identity: the random number that it got when it was made.
        offset: where its root file system begins; ``None`` if that is not squashfs, or encrypted.
        size: how many bytes belong to it.
    """

    machine: str
    identity: str
    offset: int | None
    size: int


def parse_sif(head: bytes) -> Sif:
    """Read the beginning of an image file.

    Raises:
        ValueError: it is not one, or its table is damaged; says what is wrong.
    """
    if len(head) < _HEADER.size or head[32:42] != b"SIF_MAGIC\0":
        raise ValueError("not a Singularity image file")
    header = _HEADER.unpack_from(head)
    total, table = header[8], header[9]
    if not 0 <= total * _DESCRIPTOR.size <= len(head) - table or table < _HEADER.size:
        raise ValueError("its table of contents is damaged or cut off")
    end = size = table + total * _DESCRIPTOR.size
    system: tuple[int | None, bytes] | None = None
    for kind, used, *_ids, offset, length, _, _, _, _, _, _, extra in _DESCRIPTOR.iter_unpack(head[table:end]):
        size = max(size, offset + length) if used else size
        if used and kind == _PARTITION_KIND:
            file_system, role, processor = _PARTITION.unpack_from(extra)
            if role == _SYSTEM:
                system = offset if file_system == _SQUASHFS else None, processor
    if system is None:
        raise ValueError("there is no root file system in it")
    processor = system[1].rstrip(b"\0") or header[3].rstrip(b"\0")
    return Sif(_SIF_PROCESSORS.get(processor, ""), header[4].hex(), system[0], size)


def read_sif(path: Path, machine: str) -> Sif:
    """Read and check an image file that is to be started on this ``machine``.

    Raises:
        CallerError: it can't be read, is damaged or cut short, or for another processor; for the field ``image``.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_READ_BYTES)
            length = file.seek(0, 2)
    except PermissionError as error:
        raise CallerError(f"{path} can't be read by you: chmod a+r it", field="image") from error
    except OSError as error:
        raise CallerError(f"{path}: {error.strerror}", field="image") from error
    try:
        found = parse_sif(head)
    except ValueError as error:
        raise CallerError(f"{path} is no usable image: {error}; build or pull it again", field="image") from error
    if length < found.size:
        raise CallerError(
            f"{path} is cut short ({length} of {found.size} bytes); copy, build or pull it again", field="image"
        )
    if found.machine not in ("", machine):
        raise CallerError(f"{path} is for {found.machine}, but this machine is {machine}", field="image")
    return found


_ELF_MACHINES = {3: "i686", 21: "ppc64le", 22: "s390x", 40: "armv7l", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
"""By the number in the header of programs."""

UNPACK_COMMAND = "apptainer build --sandbox FOLDER"
"""How to unpack an image; its source follows."""

SANDBOX_FOLDERS = ("/etc", "/tmp", "/root", "/var", "/var/tmp")
"""What each sandbox has besides; links of an image may lead from there to other folders of it."""


def check_usable(image: Path) -> None:
    """Refuse a root folder or SIF, just made or about to be used, that is damaged or not for us; takes some 50 µs.

    Raises:
        CallerError: it is no image, cut off, not readable, somebody else's, or for another processor; for the field
            ``image``.
    """
    if image.is_dir():
        _check_root(image)
    else:
        read_sif(image, machine())


def check_image(image: Path) -> None:
    """Refuse what no sandbox can be made of.

    Raises:
        CallerError: it is not there, no image, cut off, not readable, somebody else's, or has something else where
            each sandbox has its own.
        InfrastructureError: this machine can't mount it; says what to use instead.
    """
    try:
        if not image.exists():
            raise CallerError(f"there is no {image}; 'prorl setup' builds the default image", field="image")
        check_usable(image)
        if image.is_dir():
            _check_places(image)
        elif trouble := fuse_error():
            raise InfrastructureError(
                f"image: {image} is a SIF, which can't be mounted: {trouble}; or unpack it with "
                f"'{UNPACK_COMMAND} {image}' and name FOLDER"
            )
    except PermissionError as error:
        raise CallerError(f"{image} is closed to you: chmod a+rX it and the folders above", field="image") from error


def fuse_error() -> str | None:
    """Why sandboxes can't start from a mounted SIF here, with the fix; ``None`` if they can."""
    device = Path("/dev/fuse")
    if not device.exists():
        return "there is no /dev/fuse (modprobe fuse, by the machine's administrator)"
    # Root's sandboxes get a device of their own.
    if not is_machine_root() and not os.access(device, os.R_OK | os.W_OK):
        return "/dev/fuse is closed to ordinary users (chmod 666 /dev/fuse, by the machine's administrator)"
    return None


def _check_root(root: Path) -> None:
    owner = root.stat().st_uid
    # Root's sandboxes see whoever owns an image as themselves.
    if os.geteuid() != owner and not is_machine_root():
        raise CallerError(
            f"{root} belongs to user {owner}, not to you ({os.geteuid()}), and a sandbox could not change its files: "
            f"'prorl image build plain --base {root}' makes an image of your own, or use a SIF",
            field="image",
        )
    try:
        # Without O_NONBLOCK a named pipe would hold us for ever.
        with os.fdopen(
            os.open(resolve_inside(root, "/bin/sh"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb"
        ) as file:
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
    if found and found != machine():
        raise CallerError(f"{root} is for {found}, but this machine is {machine()}", field="image")


def _check_places(root: Path) -> None:
    """Refuse what no sandbox's own folders and files could be put into, or only elsewhere.

    Whoever makes the sandbox relies on nothing of this.
    """
    for path in KERNEL_FILESYSTEMS:
        if _kind(root, f"{root}{path}", path) not in (0, stat.S_IFDIR):
            raise _unfit(root, path, "is no folder: make it an empty one")
    for path in SANDBOX_FOLDERS:
        if _kind(root, _led(root, path), path) not in (0, stat.S_IFDIR):
            raise _unfit(root, path, "is no folder: make it one")
    for path, _text in mounts.etc_files(""):
        folder, name = os.path.split(path)
        if _kind(root, f"{_led(root, folder)}/{name}", path) == stat.S_IFDIR:
            raise _unfit(root, path, "is a folder, and each sandbox has a file of its own there: remove it")
    for path in mounts.ACCOUNT_FILES:
        if _kind(root, _led(root, path), path) not in (0, stat.S_IFREG):
            raise _unfit(root, path, "is no ordinary file: make it one, or remove it")


def _led(root: Path, path: str) -> str:
    """Where a path of an image leads, if that is of the image and not of the kernel's."""
    parts = path.split("/")
    if not any(Path(str(root) + "/".join(parts[:count])).is_symlink() for count in range(2, len(parts) + 1)):
        return f"{root}{path}"
    try:
        found = resolve_inside(root, path)
    except PermissionError:
        raise
    except OSError as error:
        raise _unfit(root, path, f"leads nowhere ({error.strerror}): remove the link") from error
    place = f"/{found.relative_to(root)}"
    if any(place == own or place.startswith(f"{own}/") for own in KERNEL_FILESYSTEMS):
        raise _unfit(root, path, f"is a link to {place}, which is each sandbox's own: remove the link")
    return str(found)


def _kind(root: Path, place: str, path: str) -> int:
    """What lies in a place without links, as ``stat.S_IF*``; 0 for nothing."""
    try:
        return stat.S_IFMT(os.lstat(place).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except PermissionError:
        raise
    except OSError as error:
        raise _unfit(root, path, f"can't be looked at ({error.strerror})") from error


def _unfit(root: Path, path: str, reason: str) -> CallerError:
    return CallerError(f"{root} can't be a sandbox's root: its {path} {reason}", field="image")
