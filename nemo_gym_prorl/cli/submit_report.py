# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Input and output of ``prorl submit``: the file of rows, the file of results, and the report.

All rows are validated before the first is submitted. Results are appended as they arrive, one per line, and rollouts
with a result are skipped. The digest in each :class:`ResultSource` reveals results of other rows, which are refused.

The report counts failures beside rewards; a failed rollout never counts as reward 0. Failures have the same cause if
kind, stage and reason agree, apart from quoted texts and words with digits in the reason.
"""

from __future__ import annotations

import fcntl
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_gym_prorl.cli.json_lines import json_lines
from nemo_gym_prorl.cli.show import visible
from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.http.problem_document import field_errors, in_words
from nemo_gym_prorl.rollout.api.schemas import FailureView, JobView, SubmitRequest
from nemo_gym_prorl.rollout.gym_rows import require_writable, row_digest
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.turn_records import ROLLOUT_OPTIONS_KEY, TRAJECTORY, gym_reads_trajectories, ng_trajectory


_OTHER_FORMAT_LINES = 20  # first lines without a row that show another format, so that a large file is not read
_NO_ROWS = "must be JSONL with a row in each line; make rows of a dataset's records by `prorl data`"
_AGENT = {"type": "responses_api_agents", "name": "prorl_agent"}


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """Row that is not submitted: its line in the file, from 1, and the reason with the invalid field."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True, order=True)
class RowRepeat:
    """Position of a rollout in a submission: the row's line, from 1, and the repeat, from 0."""

    line: int
    repeat: int


class ResultSource(BaseModel):
    """Origin of a result: name of the submission, the row's line, the repeat, and a hexadecimal digest of the row."""

    run: str
    line: int
    repeat: int
    row: str


def read_rows(path: Path) -> tuple[dict[int, dict[str, Any]], list[RefusedRow]]:
    """Return the valid rows of a JSONL file by line (from 1), and the invalid lines; skip empty lines.

    Raises:
        CallerError: the file is no JSONL, has no rows, contains results, or cannot be read.
    """
    if path.is_dir():
        raise CallerError(_NO_ROWS, field=str(path))
    rows: dict[int, dict[str, Any]] = {}
    refused: list[RefusedRow] = []
    begins_with_object = True
    for number, row in json_lines(path):
        if not rows and not refused:
            begins_with_object = isinstance(row, dict)
        if len(refused) == _OTHER_FORMAT_LINES and not rows and not begins_with_object:
            break
        if isinstance(row, dict) and {"reward", "response"} <= row.keys():
            raise CallerError(
                "is a result, not a row; use `prorl show` or `prorl view` for results", field=f"{path}:{number}"
            )
        try:
            if isinstance(row, CallerError):
                raise row
            if isinstance(row, dict) and "responses_create_params" not in row:
                raise CallerError(
                    "row.responses_create_params: missing; make rows of a dataset's records by `prorl data`"
                )
            require_writable(row)
            SubmitRequest.model_validate({"row": row})
        except CallerError as error:
            refused.append(RefusedRow(number, error.reason))
        except ValidationError as error:
            refused.append(RefusedRow(number, in_words(field_errors([*map(_with_row_path, error.errors())]))))
        else:
            rows[number] = row
    if not rows and (not refused or not begins_with_object):
        raise CallerError(_NO_ROWS if refused else "has no rows", field=str(path))
    return rows, refused


def _with_row_path(error: ErrorDetails) -> dict[str, Any]:
    """Return a validation error of a request, located by a path in the row: options are nested under ``rollout``."""
    path = error["loc"]
    return {**error, "loc": path if path[:1] == ("row",) else ("row", ROLLOUT_OPTIONS_KEY, *path)}


class ResultsFile:
    """JSONL file of results; a context manager that locks and reads the file, and removes an incomplete last line.

    Args:
        path: the file, created with its folder if missing.
        rows: the rows of the submission by line.
        run: name of the submission; ``None`` uses the name in the file's first result, if any.

    Raises:
        CallerError: the file cannot be written, is locked, or has a line that is no result of ``rows``.
    """

    def __init__(self, path: Path, rows: dict[int, dict[str, Any]], run: str | None) -> None:
        self._path = path
        self._digests = {line: row_digest(row).hex()[:16] for line, row in rows.items()}
        self.run = run
        self.done: dict[RowRepeat, JobView] = {}
        """Rollouts in the file when the context was entered, without their results."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise CallerError(f"cannot be written: {error.strerror}", field=str(path)) from error

    def __enter__(self) -> Self:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self._file.close()
            raise CallerError("is in use by another process", field=str(self._path)) from None
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, run: str, position: RowRepeat, job: JobView) -> None:
        """Append a result: the environment's row, with the rollout's report under ``rollout``. Raises
        InfrastructureError if the file cannot be written."""
        source = ResultSource(run=run, line=position.line, repeat=position.repeat, row=self._digests[position.line])
        about = job.model_dump(mode="json", exclude={"result"}) | {"source": source.model_dump()}
        result = {**(job.result or {}), "rollout": about}
        if gym_reads_trajectories():
            # Gym's tools identify rows by these indices.
            result |= {"_ng_task_index": position.line, "_ng_rollout_index": position.repeat}
            result["agent_ref"] = result.get("agent_ref") or _AGENT
            result[TRAJECTORY] = ng_trajectory(result)
        try:
            self._file.write(orjson.dumps(result) + b"\n")
            self._file.flush()
        except OSError as error:
            raise InfrastructureError(f"cannot write {self._path}: {error.strerror}") from error

    def _read(self) -> None:
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n") and line.startswith(b'{"') and not _json(line):
                break  # a full disk or a crash truncated the line, so the rollout has no result
            end += len(line)
            if line.strip():
                self._read_line(number, line)
        self._file.truncate(end)

    def _read_line(self, number: int, line: bytes) -> None:
        field = f"{self._path}:{number}"
        try:
            about = orjson.loads(line)["rollout"]
            source, job = ResultSource.model_validate(about["source"]), JobView.model_validate(about)
        except (ValueError, KeyError, TypeError):
            raise CallerError("is not a result of `prorl submit`; choose another --output", field=field) from None
        self.run = self.run or source.run
        if self._digests.get(source.line) != source.row:
            raise CallerError(
                f"is a result of another row than line {source.line} of the file of rows; choose another --output",
                field=field,
            )
        self.done[RowRepeat(source.line, source.repeat)] = job


def _json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


MAX_CAUSES = 20  # printed causes, about one screen; further causes are counted

_REASON_CHARS = 400  # compared and printed characters of a failure's reason, about five lines
_MAX_BARS = 10  # bars of the histogram, half a screen; more distinct rewards are grouped into intervals
_BAR_CHARS = 40  # length of the longest bar, half a line of a terminal

_WORD = r"[^\s,;:=()\[\]]"
_VARIABLE_PARTS = re.compile(rf"""(?<!\w)(?:'[^']*'|"[^"]*")|(?<!{_WORD})(?<!HTTP ){_WORD}*\d{_WORD}*""")
"""Parts of a reason that vary among failures of one cause: quoted text, and words with digits except HTTP statuses."""


def pass_at_k(rewards: Sequence[float], k: int) -> float:
    """Return the expected maximum reward of ``k`` rollouts, drawn without replacement from a row's rollouts.

    For rewards of 0 and 1 this is the unbiased estimator of pass@k, ``1 - C(n - c, k) / C(n, k)``. ``len(rewards)``
    must be at least ``k``.
    """
    draws = comb(len(rewards), k)
    # The reward at index i of the sorted list is the maximum of C(i, k - 1) draws.
    return sum(reward * (comb(i, k - 1) / draws) for i, reward in enumerate(sorted(rewards)))


@dataclass
class RunSummary:
    """Outcomes of a submission's ``total`` rollouts so far, and its refused rows. ``states`` counts outcomes by job
    state, ``failures`` has the failed rollouts' positions and ids, and ``rewards`` has rewards by the row's line."""

    total: int
    refused: list[RefusedRow] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[RowRepeat, str, FailureView]] = field(default_factory=list)
    rewards: dict[int, list[float]] = field(default_factory=dict)

    def add(self, position: RowRepeat, job: JobView) -> None:
        self.states[job.state] += 1
        if job.failure is not None:
            self.failures.append((position, job.id, job.failure))
        if job.reward is not None:
            self.rewards.setdefault(position.line, []).append(job.reward)

    @property
    def ended(self) -> int:
        """Number of rollouts with an outcome."""
        return self.states.total()

    @property
    def all_scored(self) -> bool:
        """Return whether every rollout was scored and no row was refused."""
        return not self.refused and self.states[JobState.SUCCEEDED] == self.total

    def line(self) -> str:
        parts = [f"{count} {state}" for state, count in sorted(self.states.items())]
        if count := len(self.refused):
            parts.append(f"{count} row{'s' * (count > 1)} refused")
        if scored := [reward for rewards in self.rewards.values() for reward in rewards]:
            parts.append(f"mean reward {sum(scored) / len(scored):.3f} over {len(scored)}")
        kinds = Counter(str(failure.kind) for _, _, failure in self.failures)
        parts += [f"{kind}: {count}" for kind, count in sorted(kinds.items())]
        return ", ".join(parts) or "no rollout has ended"


def _group_by_cause[T](problems: Iterable[T], key: Callable[[T], tuple[str, ...]]) -> list[list[T]]:
    """Group problems by key, the largest group first. A key's last string is a reason; variable parts are ignored."""
    by_cause: dict[tuple[str, ...], list[T]] = {}
    for problem in problems:
        *names, reason = key(problem)
        by_cause.setdefault((*names, _VARIABLE_PARTS.sub("#", reason)[:_REASON_CHARS]), []).append(problem)
    return sorted(by_cause.values(), key=len, reverse=True)


def print_report(console: Console, summary: RunSummary, repeats: int) -> None:
    """Print the histogram of rewards, pass@k, the failures and the counts; ``repeats``: rollouts per row."""
    if summary.rewards:
        console.print(_histogram([reward for of_row in summary.rewards.values() for reward in of_row]))
        if repeats > 1:
            uniform = sum(len(set(of_row)) == 1 for of_row in summary.rewards.values() if len(of_row) > 1)
            console.print(
                f"{uniform} of {len(summary.rewards)} rows have the same reward in all rollouts", style="dim"
            )
        console.print(_pass_at_k_table(summary.rewards, repeats))
    if summary.failures:
        _print_failures(console, summary.failures)
    console.print(summary.line(), highlight=False, soft_wrap=True)


def print_refused(console: Console, file: str, refused: Sequence[RefusedRow]) -> None:
    """Print a line for each cause of refused rows, the most frequent first, at most :data:`MAX_CAUSES` lines."""
    by_cause = _group_by_cause(refused, lambda row: (row.reason,))
    for rows in by_cause[:MAX_CAUSES]:
        first, more = rows[0], len(rows) - 1
        lines = ", ".join(str(row.line) for row in rows[1:6]) + ", …" * (more > 5)
        others = f" (and {more} more row{'s' * (more > 1)}: {lines})" if more else ""
        console.print(f"{file}:{first.line}: {first.reason}{others}", style="red", markup=False, soft_wrap=True)
    _print_rest(console, by_cause)


def _print_rest(console: Console, by_cause: Sequence[Sequence[object]]) -> None:
    if rest := by_cause[MAX_CAUSES:]:
        console.print(f"… and {len(rest)} more causes, {sum(map(len, rest))} in total", style="red", highlight=False)


def _histogram(rewards: Sequence[float]) -> Table:
    """Return a table with a bar for each distinct reward, or for each of 10 equal intervals if there are more."""
    counts: Counter[float] = Counter(rewards)
    bars = [(f"{reward:.6g}", count) for reward, count in sorted(counts.items())]
    if len(counts) > _MAX_BARS:
        lowest, width = min(counts), (max(counts) - min(counts)) / _MAX_BARS
        filled = Counter(min(int((reward - lowest) / width), _MAX_BARS - 1) for reward in rewards)
        edges = [f"{lowest + width * index:.3g}" for index in range(_MAX_BARS + 1)]
        bars = [(f"{edges[index]} … {edges[index + 1]}", filled[index]) for index in range(_MAX_BARS)]
    table = Table(box=None, pad_edge=False)
    for column in ("reward", "rollouts"):
        table.add_column(column, justify="right")
    table.add_column("")
    most = max(count for _, count in bars)
    for name, count in bars:
        table.add_row(name, str(count), "█" * -(-count * _BAR_CHARS // most))
    return table


def _pass_at_k_table(rewards: Mapping[int, Sequence[float]], repeats: int) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("k", "pass@k", "rows"):
        table.add_column(column, justify="right")
    for k in (1 << power for power in range(repeats.bit_length())):
        # A row with fewer than k scored rollouts has no estimate.
        estimates = [pass_at_k(of_row, k) for of_row in rewards.values() if len(of_row) >= k]
        if estimates:
            table.add_row(str(k), f"{sum(estimates) / len(estimates):.3f}", str(len(estimates)))
    return table


def _print_failures(console: Console, failures: Sequence[tuple[RowRepeat, str, FailureView]]) -> None:
    by_cause = _group_by_cause(failures, lambda item: (item[2].kind, item[2].stage or "", item[2].reason))
    table = Table("failure", "stage", box=None, pad_edge=False)
    table.add_column("count", justify="right")
    table.add_column("example", overflow="fold")
    for same_cause in by_cause[:MAX_CAUSES]:
        position, rollout_id, failure = same_cause[0]
        reason = failure.reason[:_REASON_CHARS] + "…" * (len(failure.reason) > _REASON_CHARS)
        example = f"row of line {position.line}, {rollout_id}: {reason}"
        table.add_row(failure.kind, failure.stage or "", str(len(same_cause)), escape(visible(example)))
    console.print(table)
    _print_rest(console, by_cause)
