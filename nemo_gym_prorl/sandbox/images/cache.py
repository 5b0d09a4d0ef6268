# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The user's cache folder: where everything lies that set-up builds and that can be built again.

Several set-ups may run at once (two shells, a test run beside a demo, nodes that share a home folder), and any of
them may be killed at any moment: :mod:`.entries` keeps what is in it sound all the same.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path


Progress = Callable[[str], None]
"""Told one short line, without a full stop, whenever a longer step begins."""


def silent(_message: str) -> None:
    """The :data:`Progress` of those who do not want to know."""


def cache_dir() -> Path:
    """The cache folder: ``$PRORL_CACHE``, else ``$XDG_CACHE_HOME/nemo-gym-prorl``, else ``~/.cache/nemo-gym-prorl``.

    A relative ``XDG_CACHE_HOME`` is ignored, as its specification asks. The folder need not exist yet.
    """
    if own := os.environ.get("PRORL_CACHE"):
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if Path(xdg).is_absolute() else Path("~/.cache").expanduser()
    return base / "nemo-gym-prorl"


def machine() -> str:
    """The processor architecture, e.g. ``x86_64``: part of every name, since unlike nodes may share a home folder."""
    return platform.machine()
