# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl data``: rows of published datasets, as their own files hold them, into rows for an environment of ours.

A family of tasks brings one function, from a record to a row, and a command in ``cli_data.py``. Reading, writing and
what happens to a record that makes no row are the same for all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import orjson
from rich.console import Console

from nemo_gym_prorl.commands.rows import Refusal, json_lines
from nemo_gym_prorl.failures import CallerError


SHOWN = 20
"""So many refusals are printed in full."""


def convert(
    file: Path,
    output: Path | None,
    row_of: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    data_source: str | None = None,
) -> bool:
    """Write the rows that a dataset's records make, and name the records that make none, on standard error.

    Args:
        file: ``.jsonl``, ``.json`` (an array) or ``.parquet``.
        output: a JSONL file, which is there when it is complete; ``None`` for standard output.
        row_of: makes a row, or raises :class:`CallerError`, which says what field keeps it from that.
        data_source: what all rows have in that field; ``None`` for what ``row_of`` puts there.

    Returns:
        Whether every record made a row.

    Raises:
        CallerError: the file can't be read or makes no row at all, or the other file can't be written or is the
            same. Nothing is written then.
    """
    # Resolved as it will be for writing: a path through a folder that is not there names the same file all the same.
    if output is not None and (target := output.resolve()).exists() and target.samefile(file):
        raise CallerError("is the dataset itself", field="--output")
    console = Console(stderr=True, highlight=False)
    unit = "line" if file.suffix == ".jsonl" else "record"
    made, refused = 0, list[Refusal]()
    with _written(output) as lines:
        for number, record in records(file):
            try:
                if isinstance(record, CallerError):
                    raise record
                if not isinstance(record, dict):
                    raise CallerError("is no object")
                row = row_of(record)
            except CallerError as error:
                refused.append(Refusal(number, error.reason))
            else:
                if data_source is not None:
                    row = {**row, "data_source": data_source}
                lines.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
                made += 1
        for refusal in refused[:SHOWN]:
            console.print(f"{unit} {refusal.line}: {refusal.reason}", markup=False, soft_wrap=True)
        if not made:
            raise CallerError(
                f"none of its {len(refused)} {unit}s makes a row" if refused else "is empty", field=str(file)
            )
    console.print(f"{made} rows, {len(refused)} {unit}s refused", markup=False)
    return not refused


def records(file: Path) -> Iterator[tuple[int, Any]]:
    """The records of a file, counted from 1 (in JSON lines: by line). In place of a line that is no JSON stands the
    error that says so.

    Raises:
        CallerError: the file can't be read.
    """
    try:
        match file.suffix:
            case ".parquet":
                yield from enumerate(_parquet(file), 1)
            case ".json":
                data = orjson.loads(file.read_bytes())
                if not isinstance(data, list):
                    raise CallerError("is no array of records", field=str(file))
                yield from enumerate(data, 1)
            case ".jsonl":
                yield from json_lines(file)
            case other:
                raise CallerError(f"{other or 'no suffix'!r} is none of .jsonl, .json, .parquet", field=str(file))
    except orjson.JSONDecodeError as error:
        raise CallerError(f"is not JSON: {error}", field=str(file)) from error
    except OSError as error:
        raise CallerError(f"cannot be read: {error.strerror or error}", field=str(file)) from error


def _parquet(file: Path) -> Iterator[Any]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            for batch in table.iter_batches(1000):
                yield from batch.to_pylist()
    except ArrowInvalid as error:
        raise CallerError(f"is no Parquet file: {error}", field=str(file)) from error


@contextmanager
def _written(output: Path | None) -> Iterator[IO[bytes]]:
    """A file that gets its name when all is in it. What is there and is no file, as /dev/null, is written into: to
    take its place would take it from everybody."""
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if output.exists() and not output.is_file():
        try:
            with output.open("wb") as file:
                yield file
        except OSError as error:
            raise CallerError(f"cannot be written: {error.strerror or error}", field=str(output)) from error
        return
    output = output.resolve()
    part = output.with_name(f".{output.name}.part")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            yield file
        part.rename(output)
    except OSError as error:
        raise CallerError(f"cannot be written: {error.strerror or error}", field=str(output)) from error
    finally:
        part.unlink(missing_ok=True)
