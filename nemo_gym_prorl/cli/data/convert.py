# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl data``: converts published datasets into rows of an environment, and a corpus into an offline search index.

Each task family has a function that converts one record into a row, and a command in ``commands.py``. All
families share reading, writing and the handling of unusable records.
"""

from __future__ import annotations

import csv
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import orjson
from rich.console import Console

from nemo_gym_prorl.cli.json_lines import json_lines, json_value
from nemo_gym_prorl.cli.show import visible
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks import require_extras
from nemo_gym_prorl.tasks.dataset_records import UnsupportedSet, UnusableRecord, refuse_unsupported


if TYPE_CHECKING:
    from nemo_gym_prorl.tasks.stem.search import Passage


MAX_MESSAGES = 20  # printed refusals, and printed reasons for dropping: one screen each

SAMPLE_ROWS = 2
SAMPLE_CHARS = 300  # printed per field of a sample row

CSV_FIELD_BYTES = 64 << 20
"""Limit of a CSV field. Tests of some problems exceed Python's default of 128 KiB."""

_TEXT_FIELDS = ("text", "contents", "passage")
_SOURCE_FIELDS = ("source", "url", "id")
"""Fields of a corpus record with its text and its source; the first existing field is used."""

RowOf = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class Refusal(NamedTuple):
    """A record that is no row: its line, number or folder, and the reason with the invalid field."""

    place: int | str
    reason: str


@dataclass(slots=True)
class Summary:
    """Outcome of a conversion: records kept, dropped and refused.

    Attributes:
        first_dropped: place and example of the first record dropped for a reason.
    """

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: dict[str, Refusal] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)
    samples: list[Mapping[str, Any]] = field(default_factory=list)

    def drop(self, place: int | str, reason: str, example: str = "") -> None:
        self.dropped[reason] += 1
        self.first_dropped.setdefault(reason, Refusal(place, example))

    @property
    def records(self) -> int:
        return self.kept + self.dropped.total() + len(self.refused)


def convert(
    file: Path, output: Path | None, row_of: RowOf, data_source: str | None = None, *, dry_run: bool = False
) -> bool:
    """Convert a dataset's records into rows, and print a summary on standard error.

    A record without a gradable answer, or with the same row as an earlier record, is dropped and counted. A malformed
    record is refused and reported with its line.

    Args:
        file: ``.jsonl``, ``.json``, ``.parquet`` or ``.csv``.
        output: a JSONL file, written atomically; ``None`` for standard output.
        row_of: converts a record, or raises :class:`CallerError` with the invalid field.
        data_source: value of that field in all rows; ``None`` keeps the value of ``row_of``.

    Returns:
        Whether no record was refused.

    Raises:
        CallerError: the file cannot be read or has no usable record, or the output cannot be written or is the same
            file. No output is written then.
        UnsupportedSet: no record of the dataset can be graded; names the dataset.
    """
    # Resolved first, because a path through a missing folder may name the same file.
    if output is not None and (target := output.resolve()).exists() and target.samefile(file):
        raise CallerError("is the dataset itself; choose another file", field="--output")
    unit = "line" if {".jsonl", ".csv"} & {*file.suffixes} else "record"
    return convert_records(records(file), str(file), unit, output, row_of, data_source, dry_run=dry_run)


def convert_records(
    numbered: Iterable[tuple[int | str, Any]],
    title: str,
    unit: str,
    output: Path | None,
    row_of: RowOf,
    data_source: str | None,
    *,
    dry_run: bool,
) -> bool:
    """Convert records as :func:`convert` does.

    Args:
        numbered: place and value of each record; a :class:`CallerError` as a value is a refused record.
        title: name of the dataset, for errors.
        unit: name of a record, for the summary.
    """
    with nullcontext() if dry_run else _atomic_output(output) as lines:
        summary = _convert(numbered, title, row_of, data_source, lines)
        _print(summary, unit)
        if not summary.kept:
            raise CallerError(_no_row_reason(summary, unit), field=title)
    return not summary.refused


def _convert(
    numbered: Iterable[tuple[int | str, Any]],
    title: str,
    row_of: RowOf,
    data_source: str | None,
    lines: IO[bytes] | None,
) -> Summary:
    summary, seen = Summary(), set[bytes]()
    for place, record in numbered:
        try:
            if isinstance(record, CallerError):
                raise record
            if isinstance(record, list):  # some datasets have a pair of messages per record
                record = {str(index): part for index, part in enumerate(record)}
            if not isinstance(record, dict):
                raise CallerError("must be an object")
            refuse_unsupported(record)
            row = row_of(record)
            line = orjson.dumps(row if data_source is None else {**row, "data_source": data_source})
        except (UnusableRecord, UnsupportedSet) as error:
            if isinstance(error, UnsupportedSet) and not summary.kept:
                raise UnsupportedSet(error.complaint, field=title) from error
            summary.drop(place, error.reason, getattr(error, "example", ""))
        except CallerError as error:
            summary.refused.append(Refusal(place, error.reason))
        except orjson.JSONEncodeError as error:
            summary.refused.append(Refusal(place, f"cannot be written as JSON: {error}"))
        else:
            if (digest := hashlib.sha256(line).digest()) in seen:
                summary.drop(place, "makes the same row as an earlier one")
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
        console.print(visible(text).replace("\n", "\\n"), markup=False, soft_wrap=True)

    for refusal in summary.refused[:MAX_MESSAGES]:
        say(f"{unit} {refusal.place}: {refusal.reason}")
    for reason, count in summary.dropped.most_common(MAX_MESSAGES):
        first, example = summary.first_dropped[reason]
        say(f"dropped {count}: {reason}; first is {unit} {first}" + (f": {_short(example)}" if example else ""))
    for number, row in enumerate(summary.samples, 1):
        prompt = row.get("responses_create_params", {}).get("input")
        last = prompt[-1].get("content") if isinstance(prompt, list) and prompt else prompt
        say(f"row {number}: {_short(last)}")
        for name, value in row.items():
            if name not in ("responses_create_params", "question", "data_source"):
                say(f"  {name}: {_short(value)}")
    dropped, refused = summary.dropped.total(), len(summary.refused)
    say(f"{summary.records} {unit}s: {summary.kept} kept, {dropped} dropped, {refused} refused")


def _no_row_reason(summary: Summary, unit: str) -> str:
    if not summary.records:
        return "is empty"
    reasons = summary.dropped + Counter(refusal.reason for refusal in summary.refused)
    return f"none of {summary.records} {unit}s is usable; most frequent reason: {reasons.most_common(1)[0][0]}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    text = " ".join(text.split())
    return text if len(text) <= SAMPLE_CHARS else f"{text[:SAMPLE_CHARS]} … ({len(text)} characters)"


def records(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the records of a file with numbers from 1, which are line numbers in JSONL and CSV files.

    An invalid JSON line yields a :class:`CallerError` in place of a record.

    Raises:
        CallerError: the file cannot be read.
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
                raise CallerError(f"must have one of the suffixes {known}", field=str(file))
    except orjson.JSONDecodeError as error:
        raise CallerError(f"is not JSON: {error}", field=str(file)) from error
    except OSError as error:
        raise CallerError(f"cannot be read: {error.strerror or error}", field=str(file)) from error


def _is_array(file: Path) -> bool:
    """Return whether a ``.json`` file contains an array. On the Hugging Face Hub such files may hold JSON lines."""
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
        raise CallerError(f"is not a valid CSV file: {error}", field=str(file)) from error


def _parquet(file: Path) -> Iterator[Any]:
    require_extras("data")
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            for batch in table.iter_batches(1000):
                yield from batch.to_pylist()
    except ArrowInvalid as error:
        raise CallerError(f"is not a valid Parquet file: {error}", field=str(file)) from error


def convert_harbor(
    source: str,
    output: Path | None,
    *,
    name: str | None = None,
    replaced: Mapping[str, str],
    force_build: bool = False,
    data_source: str | None = None,
    dry_run: bool = False,
) -> bool:
    """Convert Harbor tasks as :func:`convert` converts records.

    Args:
        source: a task's folder, a folder of such folders, a registry, a file of packed tasks, or ``URL@REF[#FOLDER]``.
        name: data set of a registry.
        replaced: image that a task or its Dockerfile names to the one used in its place.
        force_build: whether Dockerfiles are built although tasks name a ``docker_image``.

    Raises:
        CallerError: as :func:`convert`, or no task names an image of ``replaced``.
        InfrastructureError: a repository cannot be fetched.
    """
    from nemo_gym_prorl.sandbox.dockerfile.builder import inspect_dockerfile
    from nemo_gym_prorl.sandbox.images.reference import parse
    from nemo_gym_prorl.tasks.harbor.task_folder import DockerfileFacts, make_row, refusing_anything

    taken: dict[str, Path] = {}
    unused = set(replaced)

    def facts_of(dockerfile: Path) -> DockerfileFacts:
        images, config = inspect_dockerfile(dockerfile)
        return DockerfileFacts(images, config.user, config.workdir)

    def row_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
        folder = record["folder"]
        with refusing_anything():
            row = make_row(folder, replaced=replaced, force_build=force_build, facts_of=facts_of)
        for image in (row["image"], *(one["image"] for one in row["harbor"].get("verifier_images", {}).values())):
            parse(image, "docker_image")
        if (other := taken.setdefault(row["instance_id"], folder)) != folder:
            raise CallerError(f"{row['instance_id']!r} is the name of {other}, too", field="name")
        unused.difference_update(row["harbor"].get("replaced", ()))
        return row

    def tasks() -> Iterator[tuple[str, Any]]:
        yield from _harbor_tasks(source, name)
        if unused:
            raise CallerError(
                f"no task names {min(unused)!r}, nor a Dockerfile that is built; see --force-build", field="--replace"
            )

    return convert_records(tasks(), source, "task", output, row_of, data_source, dry_run=dry_run)


def _harbor_tasks(source: str, name: str | None) -> Iterator[tuple[str, Any]]:
    """Yield the place of each task and its folder; an unavailable task is a :class:`CallerError`."""
    from nemo_gym_prorl.sandbox.images.entries import cache_dir
    from nemo_gym_prorl.tasks.harbor import sources
    from nemo_gym_prorl.tasks.harbor.task_folder import refusing_anything

    def say(text: str) -> None:
        Console(stderr=True, highlight=False).print(visible(text), markup=False, soft_wrap=True)

    cache, path = cache_dir() / "harbor", Path(source).expanduser()
    if name is not None and path.suffix != ".json":
        raise CallerError("is for a registry, a .json file", field="--name")
    if sources.is_git_url(source):
        yield from ((str(folder), {"folder": folder}) for folder in sources.tasks_of_url(source, cache, say))
    elif path.suffix == ".json":
        for place, found in sources.tasks_of_registry(path, name, cache, say):
            yield place, found if isinstance(found, CallerError) else {"folder": found}
    elif path.suffix == ".parquet":
        for number, record in records(path):
            place = f"{number} ({record.get('path')!s:.200})"
            try:
                with refusing_anything():
                    folder = sources.unpacked(record, cache)
            except CallerError as error:
                yield place, error
            else:
                yield place, {"folder": folder}
    else:
        for folder in sources.task_folders(path):
            yield str(folder.relative_to(path) if folder != path else folder), {"folder": folder}


def make_index(files: Sequence[Path], folder: Path) -> None:
    """Build a search index of the passages of files.

    Raises:
        CallerError: a file cannot be read, a record has no text, or the folder cannot be written.
    """
    from nemo_gym_prorl.tasks.stem.search import build

    count = build((passage for file in files for passage in passages(file)), folder)
    Console(stderr=True, highlight=False).print(f"{count} passages in {folder}", markup=False, soft_wrap=True)


def passages(file: Path) -> Iterator[Passage]:
    """Yield the passages of a file: the paragraphs of a plain text, or the text of each record.

    Raises:
        CallerError: the file cannot be read, or a record has no text; names the line.
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
            raise CallerError("must be an object", field=where)
        content = next((record[name] for name in _TEXT_FIELDS if record.get(name) is not None), None)
        if not isinstance(content, str):
            raise CallerError(f"has no text in any of the fields {', '.join(_TEXT_FIELDS)}", field=where)
        source = next((record[name] for name in _SOURCE_FIELDS if record.get(name) is not None), "")
        yield Passage(content, str(record.get("title") or ""), str(source))


@contextmanager
def _atomic_output(output: Path | None) -> Iterator[IO[bytes]]:
    """Yield a file that is renamed to ``output`` when complete.

    A device such as /dev/null is written directly, because a rename would replace the device.
    """
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
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as file:
                yield file
            part.rename(output)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise CallerError(f"cannot be written: {error.strerror or error}", field=str(output)) from error
