# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Records of the journal: serialisation of jobs and outcomes, and the reader.

Reads open connections of their own and never wait for the writer thread (:mod:`.journal`). Listings read only the
column ``about``. The column ``content`` is large: row, result, tokens and steps as they are served, compressed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import batched
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import zstandard

from nemo_gym_prorl.failures import Failure, FailureKind, Origin, Stage
from nemo_gym_prorl.rollout.gym_rows import NO_TOKENS
from nemo_gym_prorl.rollout.job import Job, JobState, Outcome, Progress, ResumePoint, StageTime
from nemo_gym_prorl.rollout.settings import Budgets
from nemo_gym_prorl.rollout.turn_records import NO_STEPS


LOGGER = logging.getLogger(__name__)

MAX_BATCH = 500
"""Largest number of entries in a commit and of ids in a statement, far below SQLite's limits."""


class Unfinished(NamedTuple):
    """Accepted job of an earlier process that has no outcome. ``restarts`` counts the starts of the service since the
    job was accepted. ``node`` and ``name`` are the job's node in a fleet and its id there; ``None`` without a node."""

    job: Job
    restarts: int
    node: str | None
    name: str | None


class JournalReader:
    """Reader of the jobs and outcomes of a journal.

    Args:
        folder: the journal's folder, for messages.
        path: the journal's database file.
        start_number: number of the service's starts, including the current one.
    """

    def __init__(self, folder: str, path: Path, start_number: int) -> None:
        self._folder, self._path, self._start_number = folder, path, start_number

    async def find(self, ids: Sequence[str]) -> Mapping[str, Job | None]:
        """Return ended jobs by id; ``None`` for a forgotten job. Omits unknown ids and attached callers' jobs."""

        def read() -> dict[str, Job | None]:
            found: dict[str, Job | None] = {}
            for some in batched(ids, MAX_BATCH):
                where = f"NOT held AND id IN ({sql_marks(some)})"
                found |= {row["id"]: self._outcome(row, content=True) for row in self._read(where, some, content=True)}
            return found

        return await asyncio.to_thread(read)

    async def between(self, start: int, end: int, *, content: bool) -> dict[int, Job]:
        """Return the jobs at positions ``start`` to before ``end`` of the log, by position, except forgotten jobs. The
        jobs have their rows and results only with ``content``."""

        def read() -> dict[int, Job]:
            rows = self._read("position >= ? AND position < ?", (start, end), content=content)
            jobs = {row["position"]: self._outcome(row, content=content) for row in rows}
            return {position: job for position, job in jobs.items() if job is not None}

        return await asyncio.to_thread(read)

    async def listed(
        self,
        *,
        state: JobState | None = None,
        group: str | None = None,
        after: int = 0,
        limit: int | None = None,
        content: bool = False,
    ) -> list[Job]:
        """Return the first ``limit`` ended jobs that match and have a ``number`` above ``after``, by number. Jobs of
        attached callers are left out. ``content``: as for :meth:`between`."""
        where, given = "NOT held AND number > ?", list[Any]([after])
        for column, wanted in (("state", state and state.value), ("job_group", group)):
            if wanted is not None:
                where, given = f"{where} AND {column} = ?", [*given, wanted]
        where, given = f"{where} ORDER BY number LIMIT ?", [*given, -1 if limit is None else limit]

        def read() -> list[Job]:
            rows = self._read(where, given, content=content)
            return [job for row in rows if (job := self._outcome(row, content=content)) is not None]

        return await asyncio.to_thread(read)

    def unfinished(self) -> list[str]:
        """Return the ids of jobs of earlier processes that have no outcome. Jobs at nodes come first, since they hold
        slots there; the others follow in order of acceptance. Blocks."""
        with self._reading() as connection:
            found = connection.execute(
                "SELECT id FROM jobs WHERE life < ? ORDER BY node IS NULL, seq", (self._start_number,)
            )
            return [job_id for (job_id,) in found]

    def found(self, ids: Sequence[str]) -> list[Unfinished]:
        """Return accepted jobs without an outcome, in the order of ``ids``; damaged entries are logged and skipped.
        Blocks."""
        zstd, order = zstandard.ZstdDecompressor(), {job_id: index for index, job_id in enumerate(ids)}
        with self._reading() as connection:
            rows = connection.execute(f"SELECT * FROM jobs WHERE id IN ({sql_marks(ids)})", ids).fetchall()
        found = []
        for row in sorted(rows, key=lambda row: order[row["id"]]):
            try:
                job = job_to_run(row["id"], row["asked"], zstd.decompress(row["row"]))
            except (zstandard.ZstdError, ValueError, LookupError, TypeError):  # a damaged entry blocks no other entry
                LOGGER.exception("journal at %s: rollout %r is damaged and skipped", self._folder, row["id"])
            else:
                found.append(Unfinished(job, self._start_number - row["life"], row["node"], row["name"]))
        return found

    def _read(self, where: str, given: Sequence[Any], *, content: bool) -> list[sqlite3.Row]:
        columns = "position, id, about, content" if content else "position, id, about"
        with self._reading() as connection:
            return connection.execute(f"SELECT {columns} FROM outcomes WHERE {where}", given).fetchall()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self._path)) as connection:
            connection.row_factory = sqlite3.Row
            yield connection

    def _outcome(self, row: sqlite3.Row, *, content: bool) -> Job | None:
        """Return the job of a table row; ``None`` if the job is forgotten. A damaged outcome becomes a masked failure,
        so that no trainer uses it and the other outcomes stay readable."""
        if row["about"] is None:
            return None
        try:
            return ended_job(row["id"], row["about"], row["content"] if content else None)
        except (zstandard.ZstdError, ValueError, TypeError) as error:
            LOGGER.error("journal: outcome %d, rollout %r, is damaged: %s", row["position"], row["id"], error)
            job = ended_job(row["id"], row["about"], None)
            reason = f"its result in the journal is damaged: {error}"
            failure = Failure(FailureKind.SESSION_LOST, Origin.INFRASTRUCTURE, None, reason)
            job.state, job.outcome = JobState.FAILED, Outcome(JobState.FAILED, {}, None, failure)
            return job


def sql_marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


_JOB_FIELDS = (
    *("environment", "handler", "submitted_at", "group", "client", "run", "priority", "max_attempts", "forked_from"),
)


def job_record(job: Job) -> tuple[bytes, bytes]:
    """Return the options of a new job, and its row, as JSON."""
    return orjson.dumps(_job_options(job)), orjson.dumps(job.stored_row)


def job_to_run(job_id: str, options: bytes, row: bytes) -> Job:
    """Return the new job that :func:`job_record` wrote; raise a ``ValueError``, ``LookupError`` or ``TypeError`` for a
    damaged record."""
    return _job(job_id, orjson.loads(options), orjson.loads(row))


def _job_options(job: Job) -> dict[str, Any]:
    options = {
        "digest": job.digest.hex(),
        "budgets": job.budgets.model_dump(),
        **{name: getattr(job, name) for name in _JOB_FIELDS},
    }
    optional = {"begin": job.resume_point, "tries": job.tries, "scope": job.scope}
    return options | {name: value for name, value in optional.items() if value}


def _job(job_id: str, record: dict[str, Any], row: dict[str, Any] | bytes) -> Job:
    options = {name: record[name] for name in _JOB_FIELDS} | {"budgets": Budgets(**record["budgets"])}
    job = Job(job_id, row, bytes.fromhex(record["digest"]), **options)
    job.tries, job.scope = record.get("tries", []), record.get("scope")
    if (begin := record.get("begin")) is not None:
        job.resume_point = ResumePoint(**begin | {name: tuple(begin[name]) for name in ("tries", "parents")})
    return job


def outcome_record(job: Job, outcome: Outcome, finished_at: float) -> tuple[bytes, bytes | None]:
    """Return the columns ``about`` and ``content`` (not yet compressed) for a packed job and its outcome. An attached
    job has no content, because its caller has the answer."""
    row = job.stored_row if isinstance(job.stored_row, bytes) else b"{}"
    parts = () if job.attached else (row, outcome.body, job.tokens, job.steps)
    about = _job_options(job) | {
        "held": job.attached,
        "number": job.number,
        "times": {stage.value: time for stage, time in job.times.items()},
        "failures": job.failures,
        "turns": job.progress.turns,
        "tool_calls": job.progress.tool_calls,
        "finish_reason": job.progress.finish_reason,
        "labels": job.progress.labels,
        "harness": job.progress.harness,
        "token_in_rate": job.progress.token_in_rate,
        "resumed": job.resumed,
        "kept_turns": job.kept_turns,
        "finished_at": finished_at,
        "state": outcome.state,
        "reward": outcome.reward,
        "failure": outcome.failure,
        "masked": outcome.masked,
        "sizes": [len(part) for part in parts],
    }
    return orjson.dumps(about), b"".join(parts) if parts else None


def ended_job(job_id: str, about: bytes, content: bytes | None) -> Job:
    """Return the ended job that :func:`outcome_record` wrote. ``content`` is compressed; with ``None`` the job has
    neither row nor result. Raise a ``ZstdError`` or ``ValueError`` for a damaged content."""
    record = orjson.loads(about)
    parts = [] if content is None else _parts(content, record["sizes"])
    row, body, tokens, steps = parts or (b"{}", b"{}", NO_TOKENS, NO_STEPS)
    job = _job(job_id, record, row)
    job.state, job.attached, job.delivered = JobState(record["state"]), record["held"], record["held"]
    job.number, job.finished_at, job.resumed = record["number"], record["finished_at"], record["resumed"]
    job.kept_turns = record["kept_turns"]
    job.times = {Stage(stage): StageTime(**time) for stage, time in record["times"].items()}
    job.failures = [_failure(failure) for failure in record["failures"]]
    versions = [{"first": label, "last": label} for label in record["labels"]]
    job.progress = Progress(record["turns"], record["tool_calls"], record["finish_reason"], versions)
    job.progress.harness, job.progress.token_in_rate = record.get("harness", {}), record.get("token_in_rate")
    failure = _failure(record["failure"]) if record["failure"] else None
    job.outcome = Outcome(job.state, body, record["reward"], failure, record["masked"])
    job.tokens, job.steps = tokens, steps
    return job


def _failure(record: dict[str, Any]) -> Failure:
    known = {field.name: record[field.name] for field in fields(Failure) if field.name in record}
    stage = Stage(record["stage"]) if record["stage"] else None
    return Failure(**known | {"kind": FailureKind(record["kind"]), "origin": Origin(record["origin"]), "stage": stage})


def _parts(content: bytes, sizes: Sequence[int]) -> list[bytes]:
    raw, parts, at = zstandard.decompress(content), [], 0
    if len(raw) != sum(sizes):
        raise ValueError(f"expected {sum(sizes)} bytes, found {len(raw)}")
    for size in sizes:
        parts.append(raw[at : at + size])
        at += size
    return parts
