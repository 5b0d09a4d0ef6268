# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Command ``prorl show``: prints a rollout as a table of outcome, input, turns and verdict. Also reads JSONL files.

Text of a model or a sandbox is untrusted, so control characters are escaped before printing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_gym_prorl.cli.json_lines import read_rollouts
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.turn_records import items, part, text_of, turns


SHORT_CHARACTERS = 1600
"""Maximum characters of a table cell without ``--full``: about one screen. The middle of a longer text is left out."""

_NO_VERDICT = {"reward", "response", "responses_create_params", "rollout", "mask_sample"}
_TEXT_FIELDS = ("summary", "content", "arguments", "output", "action")
"""Fields that may contain an item's text; the first nonempty field is shown."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, characters that change the text direction, and lone surrogates."""


def show(name: str, fetch: Callable[[str], dict[str, Any]], *, full: bool) -> None:
    """Print a rollout, or a table of the rollouts in a file with several.

    Args:
        name: id of a rollout of the service, or a file of results, ``FILE`` or ``FILE:LINE``.
        fetch: returns the service's ``JobView`` of a rollout by id; its errors pass through.
        full: whether to print long texts in full.

    Raises:
        CallerError: a ``.jsonl`` file does not exist, a file has an invalid line, or the line has no rollout.
    """
    console = Console(highlight=False, emoji=False)
    path, line = _parse_argument(name)
    if path is None:
        job = fetch(name)
        row = {**(job.pop("result", None) or {}), "rollout": job}
    else:
        found = read_rollouts(path)
        if line is None and len(found) != 1:
            console.print(file_table(found))
            return
        line = next(iter(found)) if line is None else line
        if line not in found:
            raise CallerError(
                f"has no result in this line; the file has {len(found)} results, in order of their ends", field=name
            )
        row = found[line]
    console.print(rollout_table(row, full=full))


def rollout_table(row: Mapping[str, Any], *, full: bool) -> Table:
    """Return a rollout as a table with the columns turn, item and text; ``full``: whether to keep long texts."""
    given = part(row, "responses_create_params", "input")
    given = items([{"role": "user", "content": given}] if isinstance(given, str) else given)
    cells = [*_outcome(row), *(("", *_item(item)) for item in given)]
    for number, turn in enumerate(turns(items(part(row, "response", "output"))), 1):
        cells += [(str(number), *_item(item)) for item in turn]
    fields = {key: value for key, value in row.items() if key not in _NO_VERDICT and not key.startswith("_")}
    cells += [("", key, str(value)) for key, value in fields.items() if isinstance(value, str | int | float | bool)]
    rows = (tuple(cell if full else shorten(cell) for cell in cells_of_row) for cells_of_row in cells)
    return _table(("turn", "item", "text"), rows)


def file_table(found: Mapping[int, Mapping[str, Any]]) -> Table:
    """Return a table with one row for each rollout; ``found``: rollouts by line of a results file."""
    cells = []
    for number, row in found.items():
        job = _job(row)
        count = sum(1 for _ in turns(items(part(row, "response", "output"))))
        about = (job.get("id", row.get("task_id", "")), job.get("state", ""), _reward(row))
        cells.append((str(number), *map(str, about), str(count)))
    return _table(("line of results", "rollout", "state", "reward", "turns"), cells)


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(cell.rstrip("\n"))) for cell in row))
    return table


def _outcome(row: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    job = _job(row)
    if not job:
        yield "", "reward", _reward(row)
        return
    ended = f"reward {_reward(row)}" + (f", ended by {job['finish_reason']}" if job.get("finish_reason") else "")
    yield "", "rollout", f"{job['id']}: {job['state']}, {ended}"
    for failure, times in distinct_failures(job):
        what = job["state"] if failure == job.get("failure") else "failed attempt"
        yield "", what, f"{failure_line(failure, times)}\n{failure.get('traceback') or ''}"


def _reward(row: Mapping[str, Any]) -> str:
    """Return the reward, or ``-`` if the rollout was not scored; followed by ``masked`` if the row is masked."""
    job = _job(row)
    scored = job["state"] == "succeeded" if job else "failure_kind" not in row
    reward = row.get("reward") if job.get("reward") is None else job["reward"]
    number = f"{reward:g}" if isinstance(reward, int | float) else str(reward or "")
    return (number if scored else "-") + (" masked" if row.get("mask_sample") or job.get("masked") else "")


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


def shorten(text: str) -> str:
    """Replace the middle of a text above :data:`SHORT_CHARACTERS` by the number of characters left out."""
    head, tail = SHORT_CHARACTERS * 3 // 4, SHORT_CHARACTERS // 4
    left_out = len(text) - head - tail
    return text if left_out <= 0 else f"{text[:head]}\n[… {left_out} characters]\n{text[-tail:]}"


def visible(text: str) -> str:
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))


def _job(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's report of its rollout; empty if missing, as in Gym's own results."""
    job = row.get("rollout")
    return job if isinstance(job, dict) and {"id", "state"} <= job.keys() else {}


def _parse_argument(argument: str) -> tuple[Path | None, int | None]:
    name, colon, line = argument.rpartition(":")
    if colon and line.isdecimal() and Path(name).is_file():
        return Path(name), int(line)
    if Path(argument).is_file():
        return Path(argument), None
    if argument.endswith(".jsonl") or name.endswith(".jsonl"):
        raise CallerError("no such file", field=argument)
    return None, None
