# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The two files of ``prorl submit``: the rows that go in, the results that come out.

Rows are checked by the service's own model before anything is submitted, so that a mistake in line 9,000 is known
before 8,999 rollouts have run. Results are written as they come, a line each; what is there already is not run again.
A line says which row of which run it belongs to, and with what contents, so that results of other rows are not taken
for these.
"""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nemo_gym_prorl.cli.files import json_lines
from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.http.problem_document import field_errors, in_words
from nemo_gym_prorl.rollout.api.schemas import JobView, SubmitRequest
from nemo_gym_prorl.rollout.gym_rows import require_writable, row_digest
from nemo_gym_prorl.rollout.turns import ROLLOUT_OPTIONS_KEY, TRAJECTORY, gym_reads_trajectories, ng_trajectory


_AGENT = {"type": "responses_api_agents", "name": "prorl_agent"}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that is not run: its line in the file, counted from 1, and why (with the field that is wrong)."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Which rollout of a file: the row's line, counted from 1, and the repeat, counted from 0."""

    line: int
    repeat: int


class Source(BaseModel):
    """What a line of results was made from."""

    run: str
    line: int
    repeat: int
    row: str


def read_rows(path: Path) -> tuple[dict[int, dict[str, Any]], list[Refusal]]:
    """The rows of a JSONL file by line, and the lines that are none. Empty lines are passed over.

    Raises:
        CallerError: there is no row in it, it holds results, or it cannot be read.
    """
    rows: dict[int, dict[str, Any]] = {}
    refused: list[Refusal] = []
    for number, row in json_lines(path):
        if isinstance(row, dict) and {"reward", "response"} <= row.keys():
            raise CallerError("has results, not rows; `prorl show` and `prorl view` read it", field=f"{path}:{number}")
        try:
            if isinstance(row, CallerError):
                raise row
            require_writable(row)
            SubmitRequest.model_validate({"row": row})
        except CallerError as error:
            refused.append(Refusal(number, error.reason))
        except ValidationError as error:
            refused.append(Refusal(number, in_words(field_errors([*map(_in_the_row, error.errors())]))))
        else:
            rows[number] = row
    if not rows and not refused:
        raise CallerError("has no rows", field=str(path))
    return rows, refused


def _in_the_row(error: ErrorDetails) -> dict[str, Any]:
    """An error with its place in the row: what a row wishes is judged as if it stood beside it."""
    place = error["loc"]
    return {**error, "loc": place if place[:1] == ("row",) else ("row", ROLLOUT_OPTIONS_KEY, *place)}


class Results:
    """A JSONL file of results; a context manager that holds it open and to itself.

    Args:
        path: made with its folder, if missing.
        rows: the rows whose results it is to hold.
        run: whose results; ``None`` for those of the run that the file belongs to already.

    Raises:
        CallerError: it cannot be written, another process writes it, or it holds something else.
    """

    def __init__(self, path: Path, rows: dict[int, dict[str, Any]], run: str | None) -> None:
        self._path = path
        self._digests = {line: row_digest(row).hex()[:16] for line, row in rows.items()}
        self.run = run
        self.done: dict[Place, JobView] = {}
        """What was there when it was opened, without the results themselves."""
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
            raise CallerError("another process writes it", field=str(self._path)) from None
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, run: str, place: Place, job: JobView) -> None:
        """Add a line: what the environment's ``/verify`` answered, and under ``rollout`` how it came about."""
        source = Source(run=run, line=place.line, repeat=place.repeat, row=self._digests[place.line])
        about = job.model_dump(mode="json", exclude={"result"}) | {"source": source.model_dump()}
        result = {**(job.result or {}), "rollout": about}
        if gym_reads_trajectories():
            # By these Gym's tools tell rows from each other.
            result |= {"_ng_task_index": place.line, "_ng_rollout_index": place.repeat}
            result["agent_ref"] = result.get("agent_ref") or _AGENT
            result[TRAJECTORY] = ng_trajectory(result)
        try:
            self._file.write(orjson.dumps(result) + b"\n")
            self._file.flush()
        except OSError as error:
            raise InfrastructureError(f"{self._path}: cannot be written: {error.strerror}") from error

    def _read(self) -> None:
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n") and line.startswith(b'{"') and not _json(line):
                break  # the disk was full, or the machine went down, in mid-line; the rollout is not done
            end += len(line)
            if line.strip():
                self._take(number, line)
        self._file.truncate(end)

    def _take(self, number: int, line: bytes) -> None:
        here = f"{self._path}:{number}"
        try:
            about = orjson.loads(line)["rollout"]
            source, job = Source.model_validate(about["source"]), JobView.model_validate(about)
        except (ValueError, KeyError, TypeError):
            raise CallerError("is no result of `prorl submit`; give another --output", field=here) from None
        self.run = self.run or source.run
        if self._digests.get(source.line) != source.row:
            raise CallerError(
                f"is the result of another row than line {source.line} of the rows; give another --output", field=here
            )
        self.done[Place(source.line, source.repeat)] = job


def _json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True
