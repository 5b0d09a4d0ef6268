# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Python packages for an image without pip: wheels, chosen for the *image's* Python and unpacked from outside.

The host's pip does it, with its own settings (mirrors, proxies, certificates), which an image knows nothing of, or uv
with its own where the environment has no pip, as those that uv makes. The host's Python needs not be of the same
version. Only wheels: nothing of them is run on the host.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

import uv

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.images.building import programs


TIMEOUT_S = 600.0


def unpack(packages: Iterable[str], root: Path, target: Path) -> None:
    """Unpack packages and what they need into the new folder ``target``, for the Python of the image ``root``.

    Raises:
        InfrastructureError: the image has no Python, or there are no such wheels; with pip's words.
    """
    libraries = [*root.glob("usr/local/lib/python3.*/os.py"), *root.glob("usr/lib/python3.*/os.py")]
    if not libraries:
        raise InfrastructureError(f"there is no Python in {root} to choose wheels for")
    version = libraries[0].parent.name.removeprefix("python")
    if importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    else:
        command = [uv.find_uv_bin(), "pip", "install"]
    command += ["--quiet", "--only-binary=:all:", f"--python-version={version}", f"--target={target}"]
    command += sorted(packages)
    try:
        programs.run(command, None, TIMEOUT_S)
    except InfrastructureError as error:
        raise InfrastructureError(f"the wheels can't be had: {error.reason}") from error
    # uv's, which is no package; a recipe that moves those expects nothing else.
    (target / ".lock").unlink(missing_ok=True)
