# SPDX-License-Identifier: Apache-2.0
"""``prorl data swe``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_gym_prorl.commands.data import Record, convert
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.images.reference import registry
from nemo_gym_prorl.tasks.swe.datasets import CONVERTERS, Converter


def convert_swe(
    file: Path, dataset: str, prefix: str | None, output: Path | None, data_source: str | None = None
) -> bool:
    """Write the rows of a file; says whether every record made one.

    Raises:
        CallerError: there is no such dataset, or see :func:`.data.convert`.
    """
    if dataset not in CONVERTERS:
        raise CallerError(f"{dataset!r} is none of {', '.join(CONVERTERS)}", field="--dataset")
    row_of = partial(_row, CONVERTERS[dataset], prefix.rstrip("/") if prefix else None)
    return convert(file, output, row_of, Console(stderr=True, highlight=False), data_source)


def _row(converter: Converter, prefix: str | None, record: Record) -> Mapping[str, Any]:
    row = converter(record, prefix)
    registry(row["image"])
    return row
