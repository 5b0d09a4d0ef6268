# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl show``: one rollout as a table: input, turns, verdict and failures.

Text of a model or a sandbox is untrusted: control characters are escaped before a terminal sees them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_gym_prorl.cli.files import read_rollouts
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.turns import items, part, text_of, turns


SHORT_CHARACTERS = 1600
"""Characters of a cell that are shown without ``--full``: about a screen; the middle is left out."""

_NO_VERDICT = {"reward", "response", "responses_create_params", "rollout", "mask_sample"}
_TEXTS = ("summary", "content", "arguments", "output", "action")
"""Fields of an item that may hold its text; the first one with a text is shown."""
_TERMINAL = {"succeeded", "failed", "cancelled", "timed_out"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys, including those that turn the direction of text."""


def show(url: str | None, token: str | None, what: str, *, full: bool, as_json: bool) -> None:
    """Print a rollout of a service, by id, or of a file of results, ``FILE`` or ``FILE:LINE``.

    Raises:
        CallerError: the file has no such line, or it is no rollout.
    """
    console = Console(highlight=False, emoji=False)
    path, line = _file(what)
    if path is not None:
        found = read_rollouts(path)
        if line is None and len(found) != 1 and not as_json:
            console.print(file_table(found))
            return
        if line is not None and line not in found:
            raise CallerError(f"there is no rollout in this line; the file has {len(found)}", field=what)
        rows = [*found.values()] if line is None else [found[line]]
    else:
        from nemo_gym_prorl.cli.jobs import connect  # a file is shown without an HTTP client

        job = connect(url, token).rollout(what)
        rows = [{**(job.pop("result", None) or {}), "rollout": job}]
    for row in rows:
        if as_json:
            text = orjson.dumps(row, option=orjson.OPT_INDENT_2).decode()
            text = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
            console.print(Text(text), soft_wrap=True)
        else:
            console.print(rollout_table(row, full=full))


def rollout_table(row: Mapping[str, Any], *, full: bool) -> Table:
    """Return a rollout as a table of three columns: turn, kind of item, text."""
    given = part(row, "responses_create_params", "input")
    given = items([{"role": "user", "content": given}] if isinstance(given, str) else given)
    cells = [*_ending(row), *(("", *_item(item)) for item in given)]
    for number, turn in enumerate(turns(items(part(row, "response", "output"))), 1):
        cells += [(str(number), *_item(item)) for item in turn]
    return _table(("turn", "item", "text"), (tuple(cell if full else shorten(cell) for cell in one) for one in cells))


def file_table(found: Mapping[int, Mapping[str, Any]]) -> Table:
    """Return the rollouts of a file as a table, one a line."""
    cells = []
    for number, row in found.items():
        job = _job(row)
        about, state = (row.get("task_id", ""), "") if job is None else (job["id"], job["state"])
        count = sum(1 for _ in turns(items(part(row, "response", "output"))))
        cells.append((str(number), str(about), str(state), str(row.get("reward", "")), str(count)))
    return _table(("line", "rollout", "state", "reward", "turns"), cells)


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(cell.rstrip("\n"))) for cell in row))
    return table


def _ending(row: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield state, reward and failures, and the verdict's other fields."""
    if (job := _job(row)) is None:
        yield "", "reward", str(row.get("reward"))
    else:
        reward = "" if job.get("reward") is None else f", reward {job['reward']:g}"
        ended = "" if job["state"] in _TERMINAL else "; it has not ended"
        yield "", "rollout", f"{job['id']}: {job['state']}{reward}{ended}"
        for failure, times in told_once(job):
            what = job["state"] if failure == job.get("failure") else "failed attempt"
            yield "", what, f"{failure_line(failure, times)}\n{failure.get('traceback') or ''}"
    for key, value in row.items():
        if key not in _NO_VERDICT and not key.startswith("_") and isinstance(value, str | int | float | bool):
            yield "", key, str(value)


def _item(item: Mapping[str, Any]) -> tuple[str, str]:
    malformed = "(malformed)" if item.get("status") == "incomplete" else ""
    kind = (item.get("type", "message"), item.get("name") or item.get("role"), malformed)
    text = next(filter(None, (text_of(item.get(name)) for name in _TEXTS)), "")
    return " ".join(str(word) for word in kind if word), text


def failure_line(failure: Mapping[str, Any], times: int) -> str:
    """Return what failed, where, how often and why, as one line."""
    where = f" in {failure['stage']}" if failure.get("stage") else ""
    where += f", {times} attempts" if times > 1 else ""
    return f"{failure.get('kind')}{where} ({failure.get('origin')}): {failure.get('reason')}"


def told_once(job: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], int]]:
    """Return each different failure with its number of attempts; the failure that ended the rollout comes last."""
    last = job.get("failure")
    attempts = [orjson.dumps(failure) for failure in items(job.get("failed_attempts"))]
    times = Counter(attempts)
    told = {text: orjson.loads(text) for text in (*attempts, *([orjson.dumps(last)] if last else []))}
    return sorted(((failure, times[text] or 1) for text, failure in told.items()), key=lambda one: one[0] == last)


def shorten(text: str) -> str:
    """Return a text's beginning and end, with the number of characters left out between them."""
    head, tail = SHORT_CHARACTERS * 3 // 4, SHORT_CHARACTERS // 4
    left_out = len(text) - head - tail
    return text if left_out <= 0 else f"{text[:head]}\n[… {left_out} characters]\n{text[-tail:]}"


def visible(text: str) -> str:
    """Return the text with its control characters escaped."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))


def _job(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the job of a row; ``None`` for Gym's own results, which have none."""
    job = row.get("rollout")
    if not isinstance(job, dict) or not isinstance(job.get("id"), str) or not isinstance(job.get("state"), str):
        return None
    sound = isinstance(job.get("reward"), int | float | None) and isinstance(job.get("failure"), dict | None)
    return job if sound else None


def _file(what: str) -> tuple[Path | None, int | None]:
    name, colon, line = what.rpartition(":")
    if colon and line.isdecimal() and Path(name).is_file():
        return Path(name), int(line)
    if Path(what).is_file():
        return Path(what), None
    if what.endswith(".jsonl") or name.endswith(".jsonl"):
        raise CallerError("there is no such file", field=what)
    return None, None
