# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Command ``prorl show``: prints a rollout as a table of input, turns, verdict and failures. Also reads JSONL files.

Text of a model or a sandbox is untrusted, so control characters are escaped before printing.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.turn_records import items, part, text_of, turns


SHORT_CHARACTERS = 1600
"""Maximum characters of a table cell without ``--full``: about one screen. The middle of a longer text is left out."""

LINE_CHARACTERS = 100
"""Maximum characters of a row field that is shown above the conversation; longer fields are shown below it."""

_NO_VERDICT = {"reward", "response", "responses_create_params", "rollout", "mask_sample"}
_TEXT_FIELDS = ("summary", "content", "arguments", "output", "action")
"""Fields that may contain an item's text; the first nonempty field is shown."""
_RESULT_PREFIXES = ("verdict", "failure_")
"""Prefixes of row fields that are shown above the conversation, whatever their length."""
_TERMINAL = {"succeeded", "failed", "cancelled", "timed_out"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, characters that change the text direction, and lone surrogates."""


def show(name: str, fetch: Callable[[str], dict[str, Any]], *, full: bool, as_json: bool) -> None:
    """Print a rollout, or a table of the rollouts in a file with several.

    Args:
        name: id of a rollout of the service, or a file of results, ``FILE`` or ``FILE:LINE``.
        fetch: returns the service's ``JobView`` of a rollout by id; its errors pass through.
        full: whether to print long texts in full.
        as_json: whether to print JSON; for ``FILE``, of all its rollouts.

    Raises:
        CallerError: a ``.jsonl`` file does not exist, a file has an invalid line, or the line has no rollout.
    """
    console = Console(highlight=False, emoji=False)
    path, line = _parse_argument(name)
    if path is not None:
        found = read_rollouts(path)
        if line is None and len(found) != 1 and not as_json:
            console.print(file_table(found))
            return
        if line is not None and line not in found:
            raise CallerError(
                f"has no result in this line; the file has {len(found)} results, in order of their ends", field=name
            )
        rows = [*found.values()] if line is None else [found[line]]
    else:
        job = fetch(name)
        rows = [{**(job.pop("result", None) or {}), "rollout": job}]
    for row in rows:
        if as_json:
            text = orjson.dumps(row, option=orjson.OPT_INDENT_2).decode()
            text = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
            console.print(Text(text), soft_wrap=True)
        else:
            console.print(rollout_table(row, full=full))


def rollout_table(row: Mapping[str, Any], *, full: bool) -> Table:
    """Return a rollout as a table with the columns turn, item and text; ``full``: whether to keep long texts."""
    given = part(row, "responses_create_params", "input")
    given = items([{"role": "user", "content": given}] if isinstance(given, str) else given)
    fields = [("", key, str(value)) for key, value in row.items() if isinstance(value, str | int | float | bool)]
    fields = [field for field in fields if field[1] not in _NO_VERDICT and not field[1].startswith("_")]
    long = [field for field in fields if not field[1].startswith(_RESULT_PREFIXES) and _one_line(field[2]) != field[2]]
    cells = [*_result(row), *(field for field in fields if field not in long), *(("", *_item(item)) for item in given)]
    for number, turn in enumerate(turns(items(part(row, "response", "output"))), 1):
        cells += [(str(number), *_item(item)) for item in turn]
    cells += ((turn, key, text if full else _one_line(text)) for turn, key, text in long)
    rows = (tuple(cell if full else shorten(cell) for cell in cells_of_row) for cells_of_row in cells)
    return _table(("turn", "item", "text"), rows)


def file_table(found: Mapping[int, Mapping[str, Any]]) -> Table:
    """Return a table with one row for each rollout; ``found``: rollouts by line of a results file."""
    cells = []
    for number, row in found.items():
        job = _job(row)
        about, state = (row.get("task_id", ""), "") if job is None else (job["id"], job["state"])
        count = sum(1 for _ in turns(items(part(row, "response", "output"))))
        cells.append((str(number), str(about), str(state), _reward(row, job), str(count)))
    return _table(("line of results", "rollout", "state", "reward", "turns"), cells)


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(cell.rstrip("\n"))) for cell in row))
    return table


def _result(row: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    if (job := _job(row)) is None:
        yield "", "reward", _reward(row, job)
    else:
        ended = f", ended by {job['finish_reason']}" if job.get("finish_reason") else ""
        ended = f"reward {_reward(row, job)}{ended}"
        if job["state"] not in _TERMINAL:
            ended = f"{job.get('turns', 0)} turns so far, which are shown once the rollout has ended"
        yield "", "rollout", f"{job['id']}: {job['state']}, {ended}"
        if harness := job.get("harness"):
            yield (
                "",
                "harness",
                ", ".join(f"{name} {told}" for name, told in harness.items() if not isinstance(told, list)),
            )
        for failure, times in distinct_failures(job):
            what = job["state"] if failure == job.get("failure") else "failed attempt"
            yield "", what, f"{failure_line(failure, times)}\n{failure.get('traceback') or ''}"


def _reward(row: Mapping[str, Any], job: Mapping[str, Any] | None) -> str:
    """Return the reward, or ``-`` if the rollout was not scored; followed by ``masked`` if the row is masked."""
    scored = "failure_kind" not in row if job is None else job["state"] == "succeeded"
    reward = row.get("reward") if job is None or job.get("reward") is None else job["reward"]
    number = f"{reward:g}" if isinstance(reward, int | float) else str(reward or "")
    return (number if scored else "-") + (" masked" if row.get("mask_sample") or (job or {}).get("masked") else "")


def _item(item: Mapping[str, Any]) -> tuple[str, str]:
    malformed = "(malformed)" if item.get("status") == "incomplete" else ""
    kind = (item.get("type", "message"), item.get("name") or item.get("role"), malformed)
    text = next(filter(None, (text_of(item.get(name)) for name in _TEXT_FIELDS)), "")
    return " ".join(str(word) for word in kind if word), text


def failure_line(failure: Mapping[str, Any], times: int) -> str:
    """Return kind, stage, number of attempts (if above 1), origin and reason of a failure as one line."""
    where = f" in {failure['stage']}" if failure.get("stage") else ""
    where += f", {times} attempts" if times > 1 else ""
    return f"{failure.get('kind')}{where} ({failure.get('origin')}): {failure.get('reason')}"


def distinct_failures(job: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], int]]:
    """Return distinct failures with their numbers of attempts; a failure that ended the rollout comes last."""
    last = job.get("failure")
    attempts = [orjson.dumps(failure) for failure in items(job.get("failed_attempts"))]
    times = Counter(attempts)
    distinct = {text: orjson.loads(text) for text in (*attempts, *([orjson.dumps(last)] if last else []))}
    counted = ((failure, times[text] or 1) for text, failure in distinct.items())
    return sorted(counted, key=lambda pair: pair[0] == last)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]} [… {len(text)} characters]"


def shorten(text: str) -> str:
    """Replace the middle of a text above :data:`SHORT_CHARACTERS` by the number of characters left out."""
    head, tail = SHORT_CHARACTERS * 3 // 4, SHORT_CHARACTERS // 4
    left_out = len(text) - head - tail
    return text if left_out <= 0 else f"{text[:head]}\n[… {left_out} characters]\n{text[-tail:]}"


def visible(text: str) -> str:
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))


def _job(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a row's report of its rollout; ``None`` if missing, as in Gym's own results, or malformed."""
    job = row.get("rollout")
    if not isinstance(job, dict) or not isinstance(job.get("id"), str) or not isinstance(job.get("state"), str):
        return None
    valid = isinstance(job.get("reward"), int | float | None) and isinstance(job.get("failure"), dict | None)
    return job if valid else None


def _parse_argument(argument: str) -> tuple[Path | None, int | None]:
    name, colon, line = argument.rpartition(":")
    if colon and line.isdecimal() and Path(name).is_file():
        return Path(name), int(line)
    if Path(argument).is_file():
        return Path(argument), None
    if argument.endswith(".jsonl") or name.endswith(".jsonl"):
        raise CallerError("no such file", field=argument)
    return None, None


_LONG_INTEGER = re.compile(rb"(?<![\d.eE])\d{19,}(?![\d.eE])")


def json_value(text: bytes) -> Any:
    """Parse UTF-8 JSON with exact integers; orjson alone parses integers beyond 64 bits as floats.

    Raises:
        orjson.JSONDecodeError: the text is not JSON.
    """
    value = orjson.loads(text)
    return json.loads(text) if _LONG_INTEGER.search(text) else value


def json_lines(path: Path, *, growing: bool = False) -> Iterator[tuple[int, Any]]:
    """Yield the line numbers (from 1) and values of a JSONL file. An invalid line yields a :class:`CallerError` as its
    value, and an empty line yields nothing.

    Args:
        path: the file; ``.gz`` files are decompressed.
        growing: whether the file may still be written, so that an incomplete last line is skipped.

    Raises:
        CallerError: the file cannot be read.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield number, json_value(line)
                    except orjson.JSONDecodeError as error:
                        if growing and not line.endswith(b"\n"):
                            return
                        yield number, CallerError(f"is not JSON: {error}")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise CallerError(f"cannot be read: {reason}", field=str(path)) from error


def read_rollouts(path: Path) -> dict[int, dict[str, Any]]:
    """Return the rollouts of a results file by line number (from 1), without an incomplete last line.

    Raises:
        CallerError: the file cannot be read, or a line is not a rollout.
    """
    found: dict[int, dict[str, Any]] = {}
    for number, row in json_lines(path, growing=True):
        if isinstance(row, CallerError):
            raise CallerError(row.reason, field=f"{path}:{number}")
        if not isinstance(row, dict) or not row.keys() & {"response", "rollout"}:
            raise CallerError("is not a rollout", field=f"{path}:{number}")
        found[number] = row
    return found
