# SPDX-License-Identifier: Apache-2.0
"""Which NeMo RL and which Gym this was tried with, and which are here."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from pathlib import Path


ROOT_VARIABLE = "NRL_ROOT"
"""Environment variable with the folder of the NeMo RL checkout; the recipes inherit from its files."""

TESTED_NEMO_RL = "7ea279abf"
"""Commit of NeMo RL (0.6.0, 22 August 2026)."""

TESTED_GYM = "0.4.0"
"""Version of nemo-gym."""

_GIT_S = 10.0


def checkout() -> Path | None:
    """The NeMo RL checkout, where the variable names one."""
    root = os.environ.get(ROOT_VARIABLE)
    return Path(root) if root and Path(root, "nemo_rl", "__init__.py").is_file() else None


def commit_of(root: Path) -> str | None:
    """The commit that is checked out; ``None`` where git doesn't know, as in a container's copy."""
    try:
        # Whoever the files belong to: containers are started by others than those who built them.
        done = subprocess.run(
            ["git", "-c", f"safe.directory={root}", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def mentions(root: Path, key: str) -> bool:
    """Whether NeMo RL's sources have a key, in quotes, somewhere."""
    return any(f'"{key}"' in file.read_text(errors="replace") for file in (root / "nemo_rl").rglob("*.py"))


def gym_version() -> str | None:
    """The nemo-gym that is installed."""
    try:
        return importlib.metadata.version("nemo-gym")
    except importlib.metadata.PackageNotFoundError:
        return None
