# SPDX-License-Identifier: Apache-2.0
"""``prorl data code``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rich.console import Console

from nemo_gym_prorl.commands.data import convert
from nemo_gym_prorl.tasks.code.convert import row_of


def convert_code(
    file: Path, output: Path | None, tests_folder: Path | None, time_factor: float, data_source: str | None = None
) -> bool:
    """Write the rows of a file; says whether every record made one.

    Args:
        file: the dataset's own.
        output: as :func:`.data.convert` has it.
        tests_folder: write the tests of each problem to a file there, rather than into its row.
        time_factor: what CodeContests' limits of time are multiplied by.
        data_source: as :func:`.data.convert` has it.

    Raises:
        CallerError: see :func:`.data.convert`.
    """
    converter = partial(row_of, tests_folder=tests_folder, time_factor=time_factor)
    return convert(file, output, converter, Console(stderr=True, highlight=False), data_source)
