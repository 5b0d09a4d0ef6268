# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The NeMo RL checkout that the recipes inherit from."""

from __future__ import annotations

import os
from pathlib import Path


ROOT_VARIABLE = "NRL_ROOT"
"""Environment variable with the folder of the NeMo RL checkout; the recipes inherit from its files."""


def checkout() -> Path | None:
    """The NeMo RL checkout, where the variable names one."""
    root = os.environ.get(ROOT_VARIABLE)
    return Path(root) if root and Path(root, "nemo_rl", "__init__.py").is_file() else None
