# SPDX-License-Identifier: Apache-2.0
"""Whether a sandbox can be made of an image at all, found out in well under a millisecond before anything is started.

The runtime would find out, too, but says it in its own words, some of them about other things.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from nemo_gym_prorl.failures import CallerError, InfrastructureError


UNPACK = "apptainer build --sandbox FOLDER"
"""How to unpack an image; its source follows."""

FUSE = Path("/dev/fuse")

_SIF_HEADER = struct.Struct("<32s10s3s3s16s8q")
"""Launch script, magic, version, architecture, id, then times and the places and sizes of descriptors and data."""

_SIF_MAGIC = b"SIF_MAGIC\0"


def check_image(image: Path) -> None:
    """Refuse what no sandbox can be made of.

    Raises:
        CallerError: it is not there, no image, cut off, not readable, or somebody else's.
        InfrastructureError: this machine can't mount it; says what to use instead.
    """
    try:
        if image.is_dir():
            _check_folder(image)
        elif image.exists():
            _check_file(image)
        else:
            raise CallerError(f"there is no {image}; 'prorl setup' builds the default image", field="image")
    except PermissionError as error:
        raise _refused(image, "can't be read by this user", "chmod -R a+rX it, folders above included") from error


def _check_folder(image: Path) -> None:
    if not os.access(image, os.R_OK | os.X_OK):
        raise PermissionError
    if not any(os.path.lexists(image / shell) for shell in ("bin/sh", "usr/bin/sh")):
        raise _refused(image, "is no image: it has no /bin/sh", f"unpack one with: {UNPACK} IMAGE")
    owner = image.stat().st_uid
    if os.geteuid() not in (0, owner):
        # The kernel would let nothing be changed in it, not even in the sandbox's own layer: there is no such user.
        raise _refused(image, f"belongs to user {owner}", f"make a copy of your own: {UNPACK} {image}")


def _check_file(image: Path) -> None:
    with image.open("rb") as file:
        header = file.read(_SIF_HEADER.size)
    if len(header) < _SIF_HEADER.size or _SIF_HEADER.unpack(header)[1] != _SIF_MAGIC:
        raise _refused(image, "is neither a SIF nor a folder", f"unpack it with: {UNPACK} {image}")
    *_, begin, size = _SIF_HEADER.unpack(header)
    if (there := image.stat().st_size) < begin + size:
        raise _refused(image, f"is cut off: {there} of {begin + size} bytes are there", "copy or build it again")
    # Root's sandboxes get a device of their own.
    if os.geteuid() and not os.access(FUSE, os.R_OK | os.W_OK):
        raise InfrastructureError(
            f"image: {image} is a SIF, which is mounted with FUSE, and {FUSE} is not ours to use here: unpack it with "
            f"'{UNPACK} {image}' and name FOLDER, or have the administrator chmod 0666 {FUSE}"
        )


def _refused(image: Path, what: str, fix: str) -> CallerError:
    return CallerError(f"{image} {what}; {fix}", field="image")
