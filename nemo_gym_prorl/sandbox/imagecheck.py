# SPDX-License-Identifier: Apache-2.0
"""Whether a sandbox can be made of an image at all, found out in well under a millisecond before anything is started.

The runtime would find out, too, but says it in its own words, some of them about other things.
"""

from __future__ import annotations

import os
from pathlib import Path

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.cache import machine
from nemo_gym_prorl.sandbox.store import sif, tree


UNPACK = "apptainer build --sandbox FOLDER"
"""How to unpack an image; its source follows."""


def check_image(image: Path) -> None:
    """Refuse what no sandbox can be made of.

    Raises:
        CallerError: it is not there, no image, cut off, not readable, or somebody else's.
        InfrastructureError: this machine can't mount it; says what to use instead.
    """
    try:
        if image.is_dir():
            tree.check_root(image, machine())
        elif image.exists():
            _check_file(image)
        else:
            raise CallerError(f"there is no {image}; 'prorl setup' builds the default image", field="image")
    except PermissionError as error:
        raise CallerError(f"{image} is closed to you: chmod a+rX it and the folders above", field="image") from error


def fuse_trouble() -> str | None:
    """Why sandboxes can't start from a mounted SIF here, with the fix; ``None`` if they can."""
    device = Path("/dev/fuse")
    if not device.exists():
        return "there is no /dev/fuse (modprobe fuse, by the machine's administrator)"
    # Root's sandboxes get a device of their own.
    if os.geteuid() and not os.access(device, os.R_OK | os.W_OK):
        return "/dev/fuse is closed to ordinary users (chmod 666 /dev/fuse, by the machine's administrator)"
    return None


def _check_file(image: Path) -> None:
    sif.read(image, machine())
    if trouble := fuse_trouble():
        raise InfrastructureError(
            f"image: {image} is a SIF, which can't be mounted: {trouble}; or unpack it with '{UNPACK} {image}' and "
            "name FOLDER"
        )
