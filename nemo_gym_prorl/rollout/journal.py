# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Journal of accepted jobs and of the log of outcomes: one SQLite file in a folder of this machine.

Invariants:

- One thread writes. A job is acknowledged, and an outcome becomes visible, only after the commit that holds it is on
  the disk (WAL, ``synchronous=FULL``). Positions in the log follow the order of commits.
- One process owns the folder, by a lock on it. SQLite's locks hold on one machine only, so a folder on a file system
  that machines share is refused.
- A failed commit is rolled back. Its outcomes wait, invisible, and are written again; its new jobs are refused.
- What arrives during a commit goes into the next one, so that a slow disk makes larger commits, not a longer queue.
- The oldest outcomes are forgotten by age and by bytes. Their rows stay without content, so that their ids stay known.

Listings read ``about`` alone. ``content`` is large and seldom read: row, result, tokens and steps, byte for byte as
they are served, compressed with zstd at level 1, which takes a ninth of zlib's processor time for the same size.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import queue
import re
import secrets
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import batched
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import zstandard

from nemo_gym_prorl.background import PROCESS_LOOPS
from nemo_gym_prorl.failures import CallerError, Failure, FailureKind, Origin, Stage
from nemo_gym_prorl.filesystems import filesystem_type, is_shared
from nemo_gym_prorl.rollout.checkpoints import Begin
from nemo_gym_prorl.rollout.job import Budgets, Job, JobState, Outcome, Progress, StageTime
from nemo_gym_prorl.rollout.request import Draining
from nemo_gym_prorl.rollout.rows import NO_TOKENS
from nemo_gym_prorl.rollout.service import JOURNAL_KEEP_BYTES, JOURNAL_KEEP_S
from nemo_gym_prorl.rollout.steps import NO_STEPS


LOGGER = logging.getLogger(__name__)

REMEMBERED_IDS = 1_000_000  # a forgotten id is known until so many outcomes later; about 100 bytes each
_FILE = "journal.sqlite"
_MAX_BATCH = 500  # entries of a commit, and ids of a statement: both far below SQLite's limits
_COMMIT_INTERVAL_S = 0.05  # a commit costs as much as a dozen jobs; after a longer pause one is made at once
_RETRY_S = 1.0
_FORGET_INTERVAL_S = 60.0

_TABLES = (
    # Accepted jobs without an outcome. node and name: where in a fleet a job is, and its id there.
    """CREATE TABLE jobs (seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, life INTEGER NOT NULL, node TEXT,
        name TEXT, asked BLOB NOT NULL, row BLOB NOT NULL)""",
    # The log of outcomes. about: what listings show. content: row, result, tokens and steps, compressed.
    # A forgotten outcome has neither, and no number.
    """CREATE TABLE outcomes (position INTEGER PRIMARY KEY, id TEXT NOT NULL, number INTEGER, held INTEGER NOT NULL,
        state TEXT NOT NULL, job_group TEXT, ended_at REAL NOT NULL, bytes INTEGER NOT NULL, about BLOB,
        content BLOB)""",
)
_INDEXES = (
    "CREATE INDEX outcomes_id ON outcomes (id)",
    "CREATE INDEX outcomes_group ON outcomes (job_group, number)",
    "CREATE INDEX outcomes_number ON outcomes (number, bytes)",  # also covers the sums at the start
)
_INSERT_JOB = "INSERT OR REPLACE INTO jobs (id, life, asked, row) VALUES (?, ?, ?, ?)"  # in place of a damaged one
_PLACE_JOB = "UPDATE jobs SET node = ?, name = ? WHERE id = ?"
_INSERT_OUTCOME = "INSERT INTO outcomes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


class JournalFails(Draining):
    """What is submitted cannot be kept, so it is not taken."""

    problem = "journal-fails"
    retry_after_s = 5


class Unfinished(NamedTuple):
    """A job of an earlier life without an outcome; ``lives`` counts the service's starts since it was accepted."""

    job: Job
    lives: int
    node: str | None
    name: str | None


@dataclass(slots=True, eq=False)
class _Entry:
    """One thing to be written; exactly one of ``new``, ``placed`` and ``ended`` is set."""

    future: asyncio.Future[Any]
    job_id: str
    new: tuple[bytes, bytes] | None = None
    named: bool = False
    """The id of a new job was chosen by its caller, so it may have been used before."""
    placed: tuple[str, str] | None = None
    ended: tuple[Any, ...] | None = None
    """Columns of an outcome but its position; the content not compressed yet."""
    packed: bytes | None = None
    """The compressed content."""


class Journal:
    """The journal of one service, for this process alone.

    Args:
        place: an absolute folder.
        keep_s: age after which an outcome is forgotten.
        keep_bytes: bound of all outcomes, compressed; above it the oldest are forgotten.
        keep_unread_s: no outcome is forgotten before it was there for so long in one life of the service.

    Raises:
        CallerError: the folder cannot be used, or another process uses it.
    """

    def __init__(
        self,
        place: str,
        keep_s: float = JOURNAL_KEEP_S,
        keep_bytes: int = JOURNAL_KEEP_BYTES,
        keep_unread_s: float = 3600.0,
    ) -> None:
        self._keep_s, self._keep_bytes, self._keep_unread_s = keep_s, keep_bytes, keep_unread_s
        self._place = place
        self._zstd = zstandard.ZstdCompressor(level=1, write_checksum=True)
        self._path = _checked_folder(place) / _FILE
        with contextlib.ExitStack() as undo:
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lock = _locked(self._path.parent)
                undo.callback(os.close, self._lock)
                # For the owner alone, whoever made the folder; SQLite's other files take the mode of this one.
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                for path in self._path.parent.glob(f"{_FILE}*"):
                    path.chmod(0o600)
                self._writer = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
                undo.callback(self._writer.close)
                self.epoch, self._life = self._begin()
                self._measure()
            except (OSError, sqlite3.Error) as error:
                raise _refusal(f"{place} cannot be opened: {error}") from error
            undo.pop_all()
        self.failing: str | None = None
        """Why nothing can be written now."""
        self._closing = self._over = False
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._batch: list[_Entry] = []
        """Entries that are being written; they outlive a restart of the thread's loop."""
        self._looked = 0.0
        self._ages: deque[tuple[float, int]] = deque()
        """Ends of the log by when they were seen, monotonic: an age that no change of the machine's clock touches."""
        self._thread = threading.Thread(
            target=PROCESS_LOOPS.run_thread, args=("journal", self._work), name="journal", daemon=True
        )
        self._thread.start()

    def _begin(self) -> tuple[str, int]:
        """Make the tables where there are none, and count one life more.

        Two pragmas of the file name the log: ``application_id`` is its epoch, ``user_version`` the number of lives.
        """
        for pragma in ("journal_mode=WAL", "synchronous=FULL"):
            self._writer.execute(f"PRAGMA {pragma}")
        with self._writing() as connection:
            there = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
            if not there:
                for statement in (*_TABLES, *_INDEXES, f"PRAGMA application_id = {1 + secrets.randbelow(2**31 - 1)}"):
                    connection.execute(statement)
            elif there != {*_TABLES, *_INDEXES}:
                raise _refusal(
                    f"{self._path} was written by another version and cannot be read by this one; let that version "
                    "end its rollouts, then name an empty folder"
                )
            (epoch,), (lives,) = (
                connection.execute(f"PRAGMA {pragma}").fetchone() for pragma in ("application_id", "user_version")
            )
            connection.execute(f"PRAGMA user_version = {lives + 1}")
        return f"{epoch:08x}", lives + 1

    def _measure(self) -> None:
        read = self._writer.execute
        kept = "SELECT position FROM outcomes WHERE number IS NOT NULL ORDER BY position LIMIT 1"
        (last,) = read("SELECT max(position) FROM outcomes").fetchone()
        first = read(kept).fetchone()
        size, number = read("SELECT coalesce(sum(bytes), 0), coalesce(max(number), 0) FROM outcomes").fetchone()
        self.end: int = 0 if last is None else last + 1
        """Position behind the last outcome."""
        self.first: int = self.end if first is None else first[0]
        """Position of the first one that is kept."""
        self.bytes: int = size
        self.numbered: int = number
        """The largest ``number`` of a job."""

    # -- writing -------------------------------------------------------------------------------------------------

    async def accepted(self, job: Job, *, named: bool = True) -> bool:
        """Return when a new job is on disk; false if a job of its id has ended, which only a ``named`` one can meet.

        Raises:
            JournalFails: it cannot be written.
        """
        self.check()
        return bool(await self._put(_Entry(self._future(), job.id, new=job_record(job), named=named)))

    async def placed(self, job_id: str, node: str, name: str) -> None:
        """Return when it is on disk at which node an accepted job is, and what it is called there."""
        await self._put(_Entry(self._future(), job_id, placed=(node, name)))

    async def ended(self, job: Job, outcome: Outcome, finished_at: float) -> int | None:
        """Return the position of the outcome of a job, which is packed, when it is on disk. ``None`` if it could not
        be written before :meth:`close`; then the job has no outcome."""
        about, content = outcome_record(job, outcome, finished_at)
        columns = (job.id, job.number, job.held, outcome.state.value, job.group, finished_at, about, content)
        position: int | None = await self._put(_Entry(self._future(), job.id, ended=columns))
        return position

    def check(self) -> None:
        """Raise if nothing can be written now.

        Raises:
            JournalFails: says why.
        """
        if self.failing is not None:
            raise self._fails()

    def stop_trying(self) -> None:
        """Give up what cannot be written from now on."""
        self._closing = True

    async def close(self) -> None:
        """Write what is waiting, and let other processes have the journal."""
        self.stop_trying()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _fails(self) -> JournalFails:
        return JournalFails(f"the journal at {self._place} cannot be written, which is tried again: {self.failing}")

    def _future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    def _put(self, entry: _Entry) -> asyncio.Future[Any]:
        self._queue.put(entry)
        return entry.future

    def _work(self) -> None:
        next_at = 0.0
        while not self._over or self._batch:
            self._over = self._take(self._batch, next_at) or self._over
            next_at = time.monotonic() + _COMMIT_INTERVAL_S
            try:
                done = self._write(self._batch)
            except Exception as error:  # no other thread writes, so this one outlives every defect
                self._batch = self._refuse(self._batch, error)
                if self._batch:
                    time.sleep(_RETRY_S)
                continue
            self.failing, self._batch = None, []
            _resolve(done)
            try:
                self._forget()
            except Exception as error:
                self._refuse([], error)
        self._writer.close()
        os.close(self._lock)

    def _take(self, batch: list[_Entry], at: float) -> bool:
        """Take the entries that are there at some time; wait for one if none is left from before. True at the end."""
        try:
            entry = self._queue.get(timeout=0 if batch else _RETRY_S if self.failing else _FORGET_INTERVAL_S)
            if (early := at - time.monotonic()) > 0:
                time.sleep(early)
            while entry is not None:
                batch.append(entry)
                if len(batch) >= _MAX_BATCH:
                    return False
                entry = self._queue.get_nowait()
        except queue.Empty:
            return False
        return True

    def _refuse(self, batch: list[_Entry], error: Exception) -> list[_Entry]:
        """Refuse the new jobs of a failed commit, and return what is to be tried again."""
        if self.failing is None:
            trace = None if isinstance(error, sqlite3.Error | OSError) else error
            LOGGER.error("the journal at %s cannot be written: %s", self._place, error, exc_info=trace)
        self.failing = str(error)
        _resolve([(entry.future, self._fails()) for entry in batch if entry.new is not None])
        left = [entry for entry in batch if entry.new is None]
        if self._closing:
            _resolve([(entry.future, None) for entry in left])
            return []
        return left

    def _write(self, batch: list[_Entry]) -> list[tuple[asyncio.Future[Any], Any]]:
        """Commit a batch. An empty one finds out whether a disk that failed can be written again."""
        if not batch and self.failing is None:
            return []
        done: list[tuple[asyncio.Future[Any], Any]] = []
        end, size = self.end, self.bytes
        with self._writing() as connection:
            if not batch:
                connection.execute(f"PRAGMA user_version = {self._life}")
            used = self._used([entry.job_id for entry in batch if entry.named])
            for entry in batch:
                result: Any = None
                if entry.new is not None:
                    result = entry.job_id not in used
                    if result:
                        asked, row = entry.new
                        values = entry.job_id, self._life, asked, self._zstd.compress(row)
                        connection.execute(_INSERT_JOB, values)
                elif entry.placed is not None:
                    connection.execute(_PLACE_JOB, (*entry.placed, entry.job_id))
                elif entry.ended is not None:
                    *light, about, content = entry.ended
                    if entry.packed is None:
                        entry.packed = self._zstd.compress(content)
                    stored = len(about) + len(entry.packed)
                    connection.execute(_INSERT_OUTCOME, (end, *light, stored, about, entry.packed))
                    if not light[2]:  # no job of that id was accepted where a connection held this one
                        connection.execute("DELETE FROM jobs WHERE id = ?", (entry.job_id,))
                    result, end, size = end, end + 1, size + stored
                done.append((entry.future, result))
        self.end, self.bytes = end, size
        return done

    def _used(self, ids: Sequence[str]) -> set[str]:
        """Which of these ids were those of jobs that have ended; at most one batch."""
        found = self._writer.execute(f"SELECT id FROM outcomes WHERE NOT held AND id IN ({_marks(ids)})", ids)
        return {job_id for (job_id,) in found}

    def _forget(self) -> None:
        """Forget the oldest outcomes that are too old, or too many."""
        now, tick = time.time(), time.monotonic()
        if self.bytes <= self._keep_bytes and 0 <= tick - self._looked < _FORGET_INTERVAL_S:
            return
        self._looked = tick
        if not self._ages or tick - self._ages[-1][0] >= self._keep_unread_s / 60:
            self._ages.append((tick, self.end))
        while len(self._ages) > 1 and tick - self._ages[1][0] >= self._keep_unread_s:
            self._ages.popleft()
        seen, before = self._ages[0]
        if tick - seen < self._keep_unread_s:
            return
        oldest = self._writer.execute(
            "SELECT position, ended_at, bytes FROM outcomes WHERE position >= ? AND position < ? LIMIT ?",
            (self.first, min(before, self.end - 1), _MAX_BATCH),  # the last one says where the log goes on
        ).fetchall()
        first, left = self.first, self.bytes
        for position, ended_at, stored in oldest:
            if left <= self._keep_bytes and now - ended_at <= self._keep_s:
                break
            first, left = position + 1, left - stored
        if first == self.first:
            return
        with self._writing() as connection:
            gone = (self.first, first)
            connection.execute("DELETE FROM outcomes WHERE held AND position >= ? AND position < ?", gone)
            connection.execute(
                "UPDATE outcomes SET number = NULL, bytes = 0, about = NULL, content = NULL "
                "WHERE position >= ? AND position < ?",
                gone,
            )
            connection.execute("DELETE FROM outcomes WHERE position < ?", (first - REMEMBERED_IDS,))
        self.first, self.bytes = first, left
        self._looked = 0.0  # there may be more

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction of the one writer."""
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            yield self._writer
            self._writer.execute("COMMIT")
        except BaseException:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            raise

    # -- reading, beside the writer ------------------------------------------------------------------------------

    async def find(self, ids: Sequence[str]) -> Mapping[str, Job | None]:
        """Ended jobs by id; ``None`` for those that were forgotten. Unknown ids are left out."""

        def read() -> dict[str, Job | None]:
            found: dict[str, Job | None] = {}
            for some in batched(ids, _MAX_BATCH):
                where = f"NOT held AND id IN ({_marks(some)})"
                found |= {row["id"]: self._outcome(row, content=True) for row in self._read(where, some, content=True)}
            return found

        return await asyncio.to_thread(read)

    async def between(self, start: int, end: int, *, content: bool) -> dict[int, Job]:
        """The kept outcomes of these positions of the log."""

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
        """Ended jobs that fit, of a ``number`` above ``after``, by that; not those whose answer was taken away."""
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
        """Return the ids of jobs of earlier lives without an outcome: those at nodes first, which have places there,
        the others as they came. Blocks."""
        with self._reading() as connection:
            found = connection.execute("SELECT id FROM jobs WHERE life < ? ORDER BY node IS NULL, seq", (self._life,))
            return [job_id for (job_id,) in found]

    def found(self, ids: Sequence[str]) -> list[Unfinished]:
        """Return these of them as they were accepted. Blocks."""
        zstd, order = zstandard.ZstdDecompressor(), {job_id: place for place, job_id in enumerate(ids)}
        with self._reading() as connection:
            rows = connection.execute(f"SELECT * FROM jobs WHERE id IN ({_marks(ids)})", ids).fetchall()
        found = []
        for row in sorted(rows, key=lambda row: order[row["id"]]):
            try:
                job = job_to_run(row["id"], row["asked"], zstd.decompress(row["row"]))
            except (zstandard.ZstdError, ValueError, LookupError, TypeError):  # a damaged one holds up no other
                LOGGER.exception("rollout %r of the journal at %s cannot be read", row["id"], self._place)
            else:
                found.append(Unfinished(job, self._life - row["life"], row["node"], row["name"]))
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
        """``None`` if it is forgotten. A damaged one becomes a masked failure, so that no trainer uses what is left of
        it and the others can be read."""
        if row["about"] is None:
            return None
        try:
            return ended_job(row["id"], row["about"], row["content"] if content else None)
        except (zstandard.ZstdError, ValueError, TypeError) as error:
            LOGGER.error("rollout %r: outcome %d of the journal is damaged: %s", row["id"], row["position"], error)
            job = ended_job(row["id"], row["about"], None)
            reason = f"its result in the journal is damaged: {error}"
            failure = Failure(FailureKind.SESSION_LOST, Origin.INFRASTRUCTURE, None, reason)
            job.state, job.outcome = JobState.FAILED, Outcome(JobState.FAILED, {}, None, failure)
            return job


def _checked_folder(place: str) -> Path:
    folder = Path(place).expanduser()
    if re.match(r"\w[\w+.-]*://", place):
        raise _refusal(f"{place.split('@')[-1]} is no folder; a journal is a folder on this machine's own disk")
    if not folder.is_absolute():
        raise _refusal(f"{place!r} is relative to wherever the server starts; give a folder that begins with /")
    if is_shared(folder):
        raise _refusal(
            f"{folder} is on a file system that machines share ({filesystem_type(folder)}), where SQLite loses data; "
            "name a folder on this machine's own disk"
        )
    return folder


def _locked(folder: Path) -> int:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise _refusal(f"{folder} is in use by another process; end that, or name another folder") from error
    return lock


def _refusal(complaint: str) -> CallerError:
    return CallerError(complaint, field="journal")


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


def _resolve(done: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    """Resolve futures of the event loop from the thread, in order."""

    def resolve() -> None:
        for future, result in done:
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    if done:
        done[0][0].get_loop().call_soon_threadsafe(resolve)


_ASKED = (
    *("environment", "handler", "submitted_at", "group", "client", "run", "priority", "budgets", "max_attempts"),
    "forked_from",
)


def job_record(job: Job) -> tuple[bytes, bytes]:
    """Return what was asked for with a new job, and its row."""
    return orjson.dumps(_asked(job)), orjson.dumps(job.stored_row)


def job_to_run(job_id: str, asked: bytes, row: bytes) -> Job:
    """Return the job of a :func:`job_record`."""
    return _job(job_id, orjson.loads(asked), orjson.loads(row))


def _asked(job: Job) -> dict[str, Any]:
    asked = {"digest": job.digest.hex(), **{name: getattr(job, name) for name in _ASKED}}
    return asked | {name: value for name in ("begin", "tries", "scope") if (value := getattr(job, name))}


def _job(job_id: str, told: dict[str, Any], row: dict[str, Any] | bytes) -> Job:
    asked = {name: told[name] for name in _ASKED} | {"budgets": Budgets(**told["budgets"])}
    job = Job(job_id, row, bytes.fromhex(told["digest"]), **asked)
    job.tries, job.scope = told.get("tries", []), told.get("scope")
    if (begin := told.get("begin")) is not None:
        job.begin = Begin(**begin | {name: tuple(begin[name]) for name in ("tries", "parents")})
    return job


def outcome_record(job: Job, outcome: Outcome, finished_at: float) -> tuple[bytes, bytes]:
    """Return ``about`` and ``content`` of a packed job and its outcome. A job that a connection held keeps no content:
    its caller has taken the answer."""
    row = job.stored_row if isinstance(job.stored_row, bytes) else b"{}"
    parts = () if job.held else (row, outcome.body, job.tokens, job.steps)
    about = _asked(job) | {
        "held": job.held,
        "number": job.number,
        "times": {stage.value: time for stage, time in job.times.items()},
        "failures": job.failures,
        "turns": job.progress.turns,
        "tool_calls": job.progress.tool_calls,
        "finish_reason": job.progress.finish_reason,
        "labels": job.progress.labels,
        "resumed": job.resumed,
        "kept_turns": job.kept_turns,
        "finished_at": finished_at,
        "state": outcome.state,
        "reward": outcome.reward,
        "failure": outcome.failure,
        "masked": outcome.masked,
        "sizes": [len(part) for part in parts],
    }
    return orjson.dumps(about), b"".join(parts)


def ended_job(job_id: str, about: bytes, content: bytes | None) -> Job:
    """Return the job of an :func:`outcome_record` whose content is compressed; without content it has neither row nor
    result.

    Raises:
        ZstdError, ValueError: the content is damaged.
    """
    told = orjson.loads(about)
    parts = [] if content is None else _parts(content, told["sizes"])
    row, body, tokens, steps = parts or (b"{}", b"{}", NO_TOKENS, NO_STEPS)
    job = _job(job_id, told, row)
    job.state, job.held, job.delivered = JobState(told["state"]), told["held"], told["held"]
    job.number, job.finished_at, job.resumed = told["number"], told["finished_at"], told["resumed"]
    job.kept_turns = told["kept_turns"]
    job.times = {Stage(stage): StageTime(**time) for stage, time in told["times"].items()}
    job.failures = [_failure(failure) for failure in told["failures"]]
    versions = [{"first": label, "last": label} for label in told["labels"]]
    job.progress = Progress(told["turns"], told["tool_calls"], told["finish_reason"], versions)
    failure = _failure(told["failure"]) if told["failure"] else None
    job.outcome = Outcome(job.state, body, told["reward"], failure, told["masked"])
    job.tokens, job.steps = tokens, steps
    return job


def _failure(told: dict[str, Any]) -> Failure:
    known = {field.name: told[field.name] for field in fields(Failure)}
    stage = Stage(told["stage"]) if told["stage"] else None
    return Failure(**known | {"kind": FailureKind(told["kind"]), "origin": Origin(told["origin"]), "stage": stage})


def _parts(content: bytes, sizes: Sequence[int]) -> list[bytes]:
    raw, parts, at = zstandard.decompress(content), [], 0
    if len(raw) != sum(sizes):
        raise ValueError(f"it has {len(raw)} bytes in place of {sum(sizes)}")
    for size in sizes:
        parts.append(raw[at : at + size])
        at += size
    return parts
