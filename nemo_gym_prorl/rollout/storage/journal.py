# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Journal of accepted jobs and of the log of outcomes: one SQLite file on a disk of this machine.

Invariants:

- One thread writes. A job is acknowledged, and an outcome becomes visible, only after its commit is on the disk (WAL,
  ``synchronous=FULL``). Positions in the log follow the order of commits.
- One process owns the folder, by a lock on it. SQLite's locks work on one machine only, so a folder on a shared file
  system is refused.
- A failed commit is rolled back. The commit's outcomes stay invisible and are written again; its new jobs are
  refused.
- Entries that arrive during a commit go into the next one, so a slow disk makes larger commits rather than a longer
  queue.
- The oldest outcomes are forgotten by age and by bytes. Table rows of forgotten outcomes stay without content, so that
  the ids stay known.

:mod:`.journal_records` serialises the entries and reads the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import queue
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched, chain
from pathlib import Path
from typing import Any

import zstandard

from nemo_gym_prorl.async_tasks import PROCESS_LOOPS
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.filesystems import filesystem_type, is_shared
from nemo_gym_prorl.rollout.job import Job, Outcome
from nemo_gym_prorl.rollout.request import Draining
from nemo_gym_prorl.rollout.settings import JOURNAL_KEEP_BYTES, JOURNAL_KEEP_S
from nemo_gym_prorl.rollout.storage.journal_records import (
    MAX_BATCH,
    JournalReader,
    job_record,
    outcome_record,
    sql_marks,
)


LOGGER = logging.getLogger(__name__)

REMEMBERED_IDS = 1_000_000  # ids of forgotten outcomes, about 100 bytes each
_FILE = "journal.sqlite"
_COMMIT_INTERVAL_S = 0.05  # least time between two commits: a commit costs as much as a dozen jobs
_RETRY_S = 1.0  # before a failed commit is retried, so that a full disk causes no busy loop
_FORGET_INTERVAL_S = 60.0  # between two searches for old outcomes, which live for days

_TABLES = (
    # Accepted jobs without an outcome. life: start_number when the job was accepted. node, name: the job's node in a
    # fleet, and its id there. asked: options of the job.
    """CREATE TABLE jobs (seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, life INTEGER NOT NULL, node TEXT,
        name TEXT, asked BLOB NOT NULL, row BLOB NOT NULL)""",
    # The log of outcomes. held: of an attached job. about: fields of listings. content: row, result, tokens and steps,
    # compressed. A forgotten outcome has no number, about and content.
    """CREATE TABLE outcomes (position INTEGER PRIMARY KEY, id TEXT NOT NULL, number INTEGER, held INTEGER NOT NULL,
        state TEXT NOT NULL, job_group TEXT, ended_at REAL NOT NULL, bytes INTEGER NOT NULL, about BLOB,
        content BLOB)""",
)
_INDEXES = (
    "CREATE INDEX outcomes_id ON outcomes (id)",
    "CREATE INDEX outcomes_group ON outcomes (job_group, number)",
    "CREATE INDEX outcomes_number ON outcomes (number, bytes)",  # covers the queries of _measure
)
_PLACE_JOB = "UPDATE jobs SET node = ?, name = ? WHERE id = ?"
# Statements for many rows: SQLite releases the lock of the interpreter for every statement, and beside a busy event
# loop the writer waits up to 5 ms to get the lock back.
# REPLACE: an entry that was damaged, and so not recovered, may have the same id.
_INSERT_JOBS = "INSERT OR REPLACE INTO jobs (id, life, asked, row) VALUES {rows}"
_INSERT_OUTCOMES = "INSERT INTO outcomes VALUES {rows}"
_DELETE_JOBS = "DELETE FROM jobs WHERE id IN (VALUES {rows})"
_MAX_VALUES = 999  # in a statement; SQLite before 3.32 accepts no more, and RHEL 8 has 3.26


class JournalUnavailable(Draining):
    """The journal cannot be written, so the service refuses new jobs."""

    problem = "journal-fails"
    retry_after_s = 5


@dataclass(slots=True, eq=False)
class _Entry:
    """One write request; exactly one of ``new``, ``placed`` and ``ended`` is set."""

    future: asyncio.Future[Any]
    job_id: str
    new: bytes | None = None
    """Options of a new job."""
    placed: tuple[str, str] | None = None
    ended: tuple[Any, ...] | None = None
    """Columns of an outcome without its position and content."""
    content: bytes | None = None
    """Row of a new job or content of an outcome, not yet compressed."""
    packed: Any = None
    """The compressed content, a buffer."""


class Journal(JournalReader):
    """Journal of one service, owned by this process alone.

    Args:
        folder: absolute path of a folder on a local disk; created if missing.
        keep_s: age in seconds after which an outcome is forgotten.
        keep_bytes: size limit of all outcomes, compressed; above the limit the oldest outcomes are forgotten.

    Raises:
        CallerError: the folder cannot be used, another process uses it, or another version wrote it.
    """

    def __init__(
        self,
        folder: str,
        keep_s: float = JOURNAL_KEEP_S,
        keep_bytes: int = JOURNAL_KEEP_BYTES,
    ) -> None:
        self._keep_s, self._keep_bytes = keep_s, keep_bytes
        self._folder = folder
        self._zstd = zstandard.ZstdCompressor(level=1, write_checksum=True)
        self._path = _checked_folder(folder) / _FILE
        with contextlib.ExitStack() as undo:
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lock = _locked(self._path.parent)
                undo.callback(os.close, self._lock)
                # Readable only by the owner; SQLite gives its other files the mode of the database file.
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                for path in self._path.parent.glob(f"{_FILE}*"):
                    path.chmod(0o600)
                self._writer = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
                undo.callback(self._writer.close)
                self.epoch, start_number = self._begin()
                super().__init__(folder, self._path, start_number)
                self._measure()
            except (OSError, sqlite3.Error) as error:
                complaint = f"{folder} cannot be opened: {error}; name a folder that this user can write"
                raise _refusal(complaint) from error
            undo.pop_all()
        self.failing: str | None = None
        """Error of the last commit; ``None`` after a successful commit."""
        self._closing = self._over = False
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._batch: list[_Entry] = []
        """Entries that are being written; they survive a restart of the thread's loop."""
        self._checked_at = 0.0
        self._thread = threading.Thread(
            target=PROCESS_LOOPS.run_thread, args=("journal", self._work), name="journal", daemon=True
        )
        self._thread.start()

    def _begin(self) -> tuple[str, int]:
        """Create missing tables and count one more start; return the epoch of the log and the number of starts. The
        file stores the epoch in its pragma ``application_id``, and the number of starts in ``user_version``."""
        for pragma in ("journal_mode=WAL", "synchronous=FULL"):
            self._writer.execute(f"PRAGMA {pragma}")
        with self._writing() as connection:
            there = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
            if not there:
                for statement in (*_TABLES, *_INDEXES, f"PRAGMA application_id = {1 + secrets.randbelow(2**31 - 1)}"):
                    connection.execute(statement)
            elif there != {*_TABLES, *_INDEXES}:
                raise _refusal(
                    f"{self._path} was written by another version and cannot be read; let that version finish its "
                    "rollouts, then name an empty folder"
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
        """Position of the first outcome that is not forgotten."""
        self.bytes: int = size
        self.numbered: int = number
        """Largest ``number`` of a job."""

    async def accepted(self, job: Job) -> bool:
        """Write a new job; return ``True`` once the job is on disk, or ``False`` if a job with its id has ended.

        Raises:
            JournalUnavailable: the journal cannot be written.
        """
        self.check()
        options, row = job_record(job)
        return bool(await self._put(_Entry(self._future(), job.id, new=options, content=row)))

    async def placed(self, job_id: str, node: str, name: str) -> None:
        """Write the node of an accepted job, and the job's id there; return once both are on disk."""
        await self._put(_Entry(self._future(), job_id, placed=(node, name)))

    async def ended(self, job: Job, outcome: Outcome, finished_at: float) -> int | None:
        """Write the outcome of a packed job, and return its position in the log once the outcome is on disk. Return
        ``None`` if writing fails while the journal is being closed; then the job has no outcome."""
        about, content = outcome_record(job, outcome, finished_at)
        columns = (job.number, job.attached, outcome.state.value, job.group, finished_at, about)
        position: int | None = await self._put(_Entry(self._future(), job.id, ended=columns, content=content))
        return position

    def check(self) -> None:
        """Raise :class:`JournalUnavailable` if the last commit failed."""
        if self.failing is not None:
            raise self._fails()

    def stop_trying(self) -> None:
        """From now on, give up the entries of a failed commit instead of retrying the commit."""
        self._closing = True

    async def close(self) -> None:
        """Write the waiting entries, and release the journal for other processes."""
        self.stop_trying()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _fails(self) -> JournalUnavailable:
        return JournalUnavailable(
            f"the journal at {self._folder} cannot be written: {self.failing}; writing is retried"
        )

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
            except Exception as error:  # no other thread writes, so this thread must survive every error
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
        """Move queued entries to the batch, not before ``at`` (monotonic); wait for an entry if the batch is empty.
        Return whether the journal is being closed."""
        try:
            entry = self._queue.get(timeout=0 if batch else _RETRY_S if self.failing else _FORGET_INTERVAL_S)
            if (early := at - time.monotonic()) > 0:
                time.sleep(early)
            while entry is not None:
                batch.append(entry)
                if len(batch) >= MAX_BATCH:
                    return False
                entry = self._queue.get_nowait()
        except queue.Empty:
            return False
        return True

    def _refuse(self, batch: list[_Entry], error: Exception) -> list[_Entry]:
        """Refuse the new jobs of a failed commit, and return the entries to retry."""
        if self.failing is None:
            trace = None if isinstance(error, sqlite3.Error | OSError) else error
            LOGGER.error("journal at %s: commit failed: %s; it is retried", self._folder, error, exc_info=trace)
        self.failing = str(error)
        _resolve([(entry.future, self._fails()) for entry in batch if entry.new is not None])
        left = [entry for entry in batch if entry.new is None]
        if self._closing:
            _resolve([(entry.future, None) for entry in left])
            return []
        return left

    def _write(self, batch: list[_Entry]) -> list[tuple[asyncio.Future[Any], Any]]:
        """Commit a batch, and return the results of its entries. After a failure, an empty batch tests whether the
        disk is writable again."""
        if not batch and self.failing is None:
            return []
        self._compress(batch)
        done: list[tuple[asyncio.Future[Any], Any]] = []
        new, placed, outcomes, over = (list[tuple[Any, ...]]() for _ in range(4))
        end, size = self.end, self.bytes
        with self._writing() as connection:
            if not batch:
                connection.execute(f"PRAGMA user_version = {self._start_number}")
            used = self._used([entry.job_id for entry in batch if entry.new is not None])
            for entry in batch:
                result: Any = None
                if entry.new is not None:
                    result = entry.job_id not in used
                    if result:
                        new.append((entry.job_id, self._start_number, entry.new, entry.packed))
                elif entry.placed is not None:
                    placed.append((*entry.placed, entry.job_id))
                elif entry.ended is not None:
                    number, held, state, group, at, about = entry.ended
                    stored = len(about) + (0 if entry.packed is None else len(entry.packed))
                    outcomes.append((end, entry.job_id, number, held, state, group, at, stored, about, entry.packed))
                    if not held:  # the jobs table has no entries of attached jobs
                        over.append((entry.job_id,))
                    result, end, size = end, end + 1, size + stored
                done.append((entry.future, result))
            for statement, rows in ((_INSERT_JOBS, new), (_INSERT_OUTCOMES, outcomes), (_DELETE_JOBS, over)):
                for some in batched(rows, _MAX_VALUES // max(map(len, rows), default=1)):
                    marks = ", ".join([f"({sql_marks(some[0])})"] * len(some))
                    connection.execute(statement.format(rows=marks), [*chain.from_iterable(some)])
            connection.executemany(_PLACE_JOB, placed)
        self.end, self.bytes = end, size
        return done

    def _compress(self, batch: Sequence[_Entry]) -> None:
        todo = [(entry, entry.content) for entry in batch if entry.content is not None and entry.packed is None]
        if todo:
            packed = self._zstd.multi_compress_to_buffer([content for _, content in todo])
            for index, (entry, _) in enumerate(todo):
                entry.packed = packed[index]

    def _used(self, ids: Sequence[str]) -> set[str]:
        """Return those of at most :data:`MAX_BATCH` ids that belong to ended jobs."""
        found = self._writer.execute(f"SELECT id FROM outcomes WHERE NOT held AND id IN ({sql_marks(ids)})", ids)
        return {job_id for (job_id,) in found}

    def _forget(self) -> None:
        now, tick = time.time(), time.monotonic()
        if self.bytes <= self._keep_bytes and 0 <= tick - self._checked_at < _FORGET_INTERVAL_S:
            return
        self._checked_at = tick
        oldest = self._writer.execute(
            "SELECT position, ended_at, bytes FROM outcomes WHERE position >= ? AND position < ? LIMIT ?",
            (self.first, self.end - 1, MAX_BATCH),  # the last row is kept: it marks the log's end
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
        self._checked_at = 0.0  # search again at once: there may be more old outcomes

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            yield self._writer
            self._writer.execute("COMMIT")
        except BaseException:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            raise


def _checked_folder(given: str) -> Path:
    folder = Path(given).expanduser()
    if not folder.is_absolute():
        raise _refusal(f"{given!r} is a relative path; give a folder that begins with /")
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
        raise _refusal(f"{folder} is in use by another process; end that process, or name another folder") from error
    return lock


def _refusal(complaint: str) -> CallerError:
    return CallerError(complaint, field="journal")


def _resolve(done: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    """Resolve futures of the event loop from the writer thread, in order."""

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
