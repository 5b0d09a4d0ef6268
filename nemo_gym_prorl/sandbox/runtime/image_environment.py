# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The variables that an image sets, as a waiting shell of its own has them."""

from __future__ import annotations

import errno
from pathlib import Path

from nemo_gym_prorl.sandbox.launcher.requests import MOST_VARIABLES


def read(path: str) -> dict[str, str]:
    """The variables in a file, as the kernel has a process's.

    Raises:
        OSError: they are more than :data:`MOST_VARIABLES`.
    """
    with Path(path).open("rb") as file:
        variables = file.read(MOST_VARIABLES + 1)
    if len(variables) > MOST_VARIABLES:
        raise OSError(errno.E2BIG, f"the image sets more than {MOST_VARIABLES >> 20} MiB of variables")
    pairs = variables.decode("utf-8", "surrogateescape").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
