# SPDX-License-Identifier: Apache-2.0
"""``prorl data math``."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from nemo_gym_prorl.commands.data import convert
from nemo_gym_prorl.tasks.math.rows import row_of


def convert_math(file: Path, output: Path | None, data_source: str | None = None) -> bool:
    """Write the rows of a file; says whether every record made one.

    Raises:
        CallerError: see :func:`.data.convert`.
    """
    return convert(file, output, row_of, Console(stderr=True, highlight=False), data_source)
