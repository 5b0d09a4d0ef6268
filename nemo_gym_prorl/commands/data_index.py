# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl data index``: a corpus as an offline search index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from nemo_gym_prorl.commands.data import records
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.stem.search import Passage
from nemo_gym_prorl.tasks.stem.search_engines import build


_TEXT = ("text", "contents", "passage")
_SOURCE = ("source", "url", "id")


def make_index(files: Sequence[Path], folder: Path) -> None:
    """Make an index of the passages of some files.

    Raises:
        CallerError: a file can't be read, a record has no text (names the line), or the folder can't be written.
    """
    count = build((passage for file in files for passage in passages(file)), folder)
    Console(stderr=True, highlight=False).print(f"{count} passages in {folder}", markup=False, soft_wrap=True)


def passages(file: Path) -> Iterator[Passage]:
    """The passages of a file: of a text its paragraphs, else of each record its text.

    Raises:
        CallerError: it can't be read, or a record has no text; names the line.
    """
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
