# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl data``: rows of published datasets, as their own files hold them, into rows for an environment of ours; a
corpus into an offline search index.

A family of tasks brings one function, from a record to a row, and a command in ``cli_data.py``. Reading, writing and
what happens to a record that makes no row are the same for all.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import orjson
from rich.console import Console

from nemo_gym_prorl.cli.files import json_lines, json_value
from nemo_gym_prorl.cli.rows import Refusal
from nemo_gym_prorl.cli.show import visible
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.extras import require_extras
from nemo_gym_prorl.tasks.records import UnsupportedSet, UnusableRecord, refuse_unsupported


if TYPE_CHECKING:
    from nemo_gym_prorl.tasks.stem.search import Passage


SHOWN = 20
"""Most refusals, and most reasons for dropping, that are printed."""

SAMPLE_ROWS = 2
SAMPLE_CHARS = 300
"""How much of each field of a sample row is printed."""

CSV_FIELD_BYTES = 64 << 20
"""Longest field of a CSV file. Python's default of 128 KiB is less than some problems have of tests."""

_TEXT = ("text", "contents", "passage")
_SOURCE = ("source", "url", "id")
"""Fields of a corpus' record that may hold its text and where that is from; the first one that is there counts."""

RowOf = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(slots=True)
class Summary:
    """Outcome of a conversion: records kept, dropped and refused."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    refused: list[Refusal] = field(default_factory=list)
    samples: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def records(self) -> int:
        return self.kept + self.dropped.total() + len(self.refused)


def convert(
    file: Path, output: Path | None, row_of: RowOf, data_source: str | None = None, *, dry_run: bool = False
) -> bool:
    """Write the rows that a dataset's records make, and print on standard error what became of the records.

    A record that its set publishes without an answer that can be graded is dropped, and so is one that makes the same
    row as an earlier one. Both are counted. A malformed record is refused by its line.

    Args:
        file: ``.jsonl``, ``.json``, ``.parquet`` or ``.csv``.
        output: a JSONL file, which is there when it is complete; ``None`` for standard output.
        row_of: makes a row, or raises :class:`CallerError`, which says what field keeps it from that.
        data_source: what all rows have in that field; ``None`` for what ``row_of`` puts there.
        dry_run: write nothing.

    Returns:
        Whether no record was refused.

    Raises:
        CallerError: the file can't be read or makes no row at all, or the other file can't be written or is the
            same. Nothing is written then.
        UnsupportedSet: no record of the set can be graded; names the set.
    """
    # Resolved as it will be for writing: a path through a folder that is not there names the same file all the same.
    if output is not None and (target := output.resolve()).exists() and target.samefile(file):
        raise CallerError("is the dataset itself", field="--output")
    unit = "line" if {".jsonl", ".csv"} & {*file.suffixes} else "record"
    with nullcontext() if dry_run else _written(output) as lines:
        summary = _convert(file, row_of, data_source, lines)
        _print(summary, unit)
        if not summary.kept:
            raise CallerError(_no_row(summary, unit), field=str(file))
    return not summary.refused


def _convert(file: Path, row_of: RowOf, data_source: str | None, lines: IO[bytes] | None) -> Summary:
    summary, seen = Summary(), set[bytes]()
    for number, record in records(file):
        try:
            if isinstance(record, CallerError):
                raise record
            if isinstance(record, list):  # a pair of messages
                record = {str(place): part for place, part in enumerate(record)}
            if not isinstance(record, dict):
                raise CallerError("is no object")
            refuse_unsupported(record)
            row = row_of(record)
            line = orjson.dumps(row if data_source is None else {**row, "data_source": data_source})
        except (UnusableRecord, UnsupportedSet) as error:
            if isinstance(error, UnsupportedSet) and not summary.kept:
                raise UnsupportedSet(error.complaint, field=str(file)) from error
            summary.dropped[error.reason] += 1
        except CallerError as error:
            summary.refused.append(Refusal(number, error.reason))
        except orjson.JSONEncodeError as error:
            summary.refused.append(Refusal(number, f"cannot be written as JSON: {error}"))
        else:
            if (digest := hashlib.sha256(line).digest()) in seen:
                summary.dropped["makes the same row as an earlier one"] += 1
                continue
            seen.add(digest)
            summary.kept += 1
            if len(summary.samples) < SAMPLE_ROWS:
                summary.samples.append(row)
            if lines is not None:
                lines.write(line + b"\n")
    return summary


def _print(summary: Summary, unit: str) -> None:
    console = Console(stderr=True, highlight=False)

    def say(text: str) -> None:
        console.print(visible(text), markup=False, soft_wrap=True)

    for refusal in summary.refused[:SHOWN]:
        say(f"{unit} {refusal.line}: {refusal.reason}")
    for reason, count in summary.dropped.most_common(SHOWN):
        say(f"dropped {count}: {reason}")
    for number, row in enumerate(summary.samples, 1):
        asked = row.get("responses_create_params", {}).get("input")
        last = asked[-1].get("content") if isinstance(asked, list) and asked else asked
        say(f"row {number}: {_short(last)}")
        for name, value in row.items():
            if name not in ("responses_create_params", "question", "data_source"):
                say(f"  {name}: {_short(value)}")
    dropped, refused = summary.dropped.total(), len(summary.refused)
    say(f"{summary.records} {unit}s: {summary.kept} kept, {dropped} dropped, {refused} refused")


def _no_row(summary: Summary, unit: str) -> str:
    if not summary.records:
        return "is empty"
    reasons = summary.dropped + Counter(refusal.reason for refusal in summary.refused)
    return f"none of its {summary.records} {unit}s makes a row, most often because of {reasons.most_common(1)[0][0]}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    text = " ".join(text.split())
    return text if len(text) <= SAMPLE_CHARS else f"{text[:SAMPLE_CHARS]} … ({len(text)} characters)"


def records(file: Path) -> Iterator[tuple[int, Any]]:
    """The records of a file, counted from 1 (in JSON lines: by line). In place of a line that is no JSON stands the
    error that says so.

    Raises:
        CallerError: the file can't be read.
    """
    try:
        match file.suffixes[-2:]:
            case [*_, ".parquet"]:
                yield from enumerate(_parquet(file), 1)
            case [*_, ".json"] if _is_array(file):
                yield from enumerate(json_value(file.read_bytes()), 1)
            case [*_, ".jsonl" | ".json"] | [*_, ".jsonl", ".gz"]:
                yield from json_lines(file)
            case [*_, ".csv"]:
                yield from _csv(file)
            case _:
                known = ".jsonl, .jsonl.gz, .json, .parquet, .csv"
                raise CallerError(f"{file.suffix or 'no suffix'!r} is none of {known}", field=str(file))
    except orjson.JSONDecodeError as error:
        raise CallerError(f"is not JSON: {error}", field=str(file)) from error
    except OSError as error:
        raise CallerError(f"cannot be read: {error.strerror or error}", field=str(file)) from error


def _is_array(file: Path) -> bool:
    """Whether a ``.json`` file holds an array; the Hub has JSON lines under that suffix, too."""
    with file.open("rb") as content:
        return next((line for line in content if line.strip()), b"[").lstrip().startswith(b"[")


def _csv(file: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(CSV_FIELD_BYTES)
    try:
        with file.open(encoding="utf-8-sig", newline="") as content:
            rows = csv.DictReader(content, strict=True)
            for record in rows:
                yield rows.line_num, {name: value for name, value in record.items() if name}
    except (csv.Error, UnicodeDecodeError) as error:
        raise CallerError(f"is no CSV file: {error}", field=str(file)) from error


def _parquet(file: Path) -> Iterator[Any]:
    require_extras("data")
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            for batch in table.iter_batches(1000):
                yield from batch.to_pylist()
    except ArrowInvalid as error:
        raise CallerError(f"is no Parquet file: {error}", field=str(file)) from error


def make_index(files: Sequence[Path], folder: Path) -> None:
    """Make an index of the passages of some files.

    Raises:
        CallerError: a file can't be read, a record has no text (names the line), or the folder can't be written.
    """
    from nemo_gym_prorl.tasks.stem.search import build

    count = build((passage for file in files for passage in passages(file)), folder)
    Console(stderr=True, highlight=False).print(f"{count} passages in {folder}", markup=False, soft_wrap=True)


def passages(file: Path) -> Iterator[Passage]:
    """The passages of a file: of a text its paragraphs, else of each record its text.

    Raises:
        CallerError: it can't be read, or a record has no text; names the line.
    """
    from nemo_gym_prorl.tasks.stem.search import Passage

    if file.suffix in (".txt", ".md"):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CallerError(f"cannot be read: {error}", field=str(file)) from error
        yield from (Passage(part, source=file.name) for part in text.split("\n\n") if part.strip())
        return
    for number, record in records(file):
        where = f"{file}:{number}"
        if isinstance(record, CallerError):
            raise CallerError(record.reason, field=where) from record
        if not isinstance(record, dict):
            raise CallerError("is no object", field=where)
        content = next((record[name] for name in _TEXT if record.get(name) is not None), None)
        if not isinstance(content, str):
            raise CallerError(f"has no text ({', '.join(_TEXT)})", field=where)
        source = next((record[name] for name in _SOURCE if record.get(name) is not None), "")
        yield Passage(content, str(record.get("title") or ""), str(source))


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
        with part.open("ab") as file:
            _own(file, part, output)
            try:
                file.truncate(0)
                yield file
                file.flush()
                part.rename(output)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise CallerError(f"cannot be written: {error.strerror or error}", field=str(output)) from error


def _own(file: IO[bytes], part: Path, output: Path) -> None:
    """Lock a file that is being written, so that two runs do not write one output.

    Raises:
        CallerError: another run has the lock, or has just given the file its name.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if part.exists() and os.path.samestat(os.fstat(file.fileno()), part.stat()):
            return
    except BlockingIOError:
        pass
    raise CallerError("another `prorl data` writes it; wait for it, or name another --output", field=str(output))
