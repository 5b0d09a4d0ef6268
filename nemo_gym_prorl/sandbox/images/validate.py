# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a sandbox can be made of an image at all, found out in well under a millisecond before anything is started.

The runtime would find out, too, but says it in its own words, some of them about other things.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.images import rootfs, sif
from nemo_gym_prorl.sandbox.images.cache import machine
from nemo_gym_prorl.sandbox.isolation import accounts
from nemo_gym_prorl.sandbox.isolation.mounts import KERNELS
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root


_ELF_MACHINES = {3: "i686", 21: "ppc64le", 22: "s390x", 40: "armv7l", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
"""By the number in the header of programs."""

UNPACK = "apptainer build --sandbox FOLDER"
"""How to unpack an image; its source follows."""

FOLDERS = ("/etc", "/tmp", "/root", "/var", "/var/tmp")
"""What each sandbox has besides; links of an image may lead from there to other folders of it."""


def check_made(image: Path) -> None:
    """Refuse a root folder or SIF, just made or about to be used, that is damaged or not for us; takes some 50 µs.

    Raises:
        CallerError: it is no image, cut off, not readable, somebody else's, or for another processor; for the field
            ``image``.
    """
    if image.is_dir():
        _check_root(image)
    else:
        sif.read(image, machine())


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
        check_made(image)
        if image.is_dir():
            _check_places(image)
        elif trouble := fuse_trouble():
            raise InfrastructureError(
                f"image: {image} is a SIF, which can't be mounted: {trouble}; or unpack it with '{UNPACK} {image}' "
                "and name FOLDER"
            )
    except PermissionError as error:
        raise CallerError(f"{image} is closed to you: chmod a+rX it and the folders above", field="image") from error


def fuse_trouble() -> str | None:
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
            os.open(rootfs.inside(root, "/bin/sh"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb"
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
    for path in KERNELS:
        if _kind(root, f"{root}{path}", path) not in (0, stat.S_IFDIR):
            raise _unfit(root, path, "is no folder: make it an empty one")
    for path in FOLDERS:
        if _kind(root, _led(root, path), path) not in (0, stat.S_IFDIR):
            raise _unfit(root, path, "is no folder: make it one")
    for path, _text in accounts.own(""):
        folder, name = os.path.split(path)
        if _kind(root, f"{_led(root, folder)}/{name}", path) == stat.S_IFDIR:
            raise _unfit(root, path, "is a folder, and each sandbox has a file of its own there: remove it")
    for path in accounts.OF_ACCOUNTS:
        if _kind(root, _led(root, path), path) not in (0, stat.S_IFREG):
            raise _unfit(root, path, "is no ordinary file: make it one, or remove it")


def _led(root: Path, path: str) -> str:
    """Where a path of an image leads, if that is of the image and not of the kernel's."""
    parts = path.split("/")
    if not any(Path(str(root) + "/".join(parts[:count])).is_symlink() for count in range(2, len(parts) + 1)):
        return f"{root}{path}"
    try:
        found = rootfs.inside(root, path)
    except PermissionError:
        raise
    except OSError as error:
        raise _unfit(root, path, f"leads nowhere ({error.strerror}): remove the link") from error
    place = f"/{found.relative_to(root)}"
    if any(place == own or place.startswith(f"{own}/") for own in KERNELS):
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
