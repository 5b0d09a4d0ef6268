# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Accepted jobs and the log of outcomes, on disk before anybody is told of them.

One thread writes. All that came while it was busy goes into its next commit, so that a slow disk makes larger commits
instead of a longer queue. So does a fast one where much comes, since a commit costs as much as a dozen jobs. Whatever
is large is in its file, and that on the disk, before the commit that names it.

A disk that is full, or fails, loses nothing: an outcome waits, visible to nobody, and is written again; what is newly
submitted is refused. Who is told is told in the order of the log, since there is one thread and one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Any, NamedTuple

import zstandard
from sqlalchemy import BindParameter, Connection, bindparam, delete, func, insert, select
from sqlalchemy.exc import SQLAlchemyError

from nemo_gym_prorl.background import PROCESS_LOOPS
from nemo_gym_prorl.rollout.job import Job, Outcome
from nemo_gym_prorl.rollout.journal.database import ENDED, FORGOTTEN, JOBS, KEPT, META, PLACED, Database, said
from nemo_gym_prorl.rollout.journal.files import ContentFiles
from nemo_gym_prorl.rollout.journal.outcomes import Outcomes
from nemo_gym_prorl.rollout.journal.records import ended_record, job_record, job_to_run
from nemo_gym_prorl.rollout.request import Draining
from nemo_gym_prorl.rollout.settings import JOURNAL_KEEP_BYTES, JOURNAL_KEEP_S


LOGGER = logging.getLogger(__name__)

REMEMBERED_IDS = 1_000_000
"""Ids of forgotten jobs, by how many outcomes ago, that are still known to have been."""
_IN_TABLE = 32 * 1024
"""Contents up to this size, compressed, are not worth a file."""
_MOST_AT_ONCE = 500
_APART_S = 0.05
"""From the begin of a commit to that of the next. What comes after a longer pause is written at once."""
_RETRY_S = 1.0
_LOOK_S = 60.0
"""How often it is looked whether something is too old."""


class JournalFails(Draining):
    """What is submitted cannot be kept, so it is not taken."""

    problem = "journal-fails"
    retry_after_s = 5


class Unfinished(NamedTuple):
    """A job of an earlier life without an outcome; ``lives`` is how many began since it was accepted."""

    job: Job
    lives: int
    node: str | None
    name: str | None


@dataclass(slots=True)
class _Entry:
    """Something to be written, and who is to be told."""

    future: asyncio.Future[Any]
    job_id: str
    new: tuple[bytes, bytes] | None = None
    """What was asked for, and the row."""
    named: bool = False
    """A caller gave it its id."""
    placed: tuple[str, str] | None = None
    ended: dict[str, Any] | None = None
    """Its row of :data:`ENDED`, and what belongs to that."""


class Journal:
    """The journal of one service.

    Args:
        place: an absolute folder, or the URL of a PostgreSQL.
        keep_s: how long an outcome is kept.
        keep_bytes: how much all of them may take; the oldest go first. Neither holds for one that
            :meth:`make_room` was not told of.

    Raises:
        CallerError: it cannot be opened, or another process has it.
    """

    def __init__(self, place: str, keep_s: float = JOURNAL_KEEP_S, keep_bytes: int = JOURNAL_KEEP_BYTES) -> None:
        self._keep_s, self._keep_bytes = keep_s, keep_bytes
        self._database = Database(place)
        self._files = ContentFiles(self._database.folder / "outcomes") if self._database.folder else None
        self.outcomes = Outcomes(self._database, self._files)
        self._zstd = zstandard.ZstdCompressor(level=1, write_checksum=True)
        self.epoch, self.seal = self._database.epoch, self._database.seal
        with self._database.reading() as connection:
            self._seq = connection.execute(select(func.coalesce(func.max(JOBS.c.seq), 0))).scalar_one()
            ended = select(func.min(ENDED.c.position), func.max(ENDED.c.position), func.sum(ENDED.c.bytes))
            first, last, size = connection.execute(ended).one()
            number = connection.execute(select(func.coalesce(func.max(ENDED.c.number), 0))).scalar_one()
        self.end = 0 if last is None else last + 1
        """Position behind the last outcome."""
        self.first = self.end if first is None else first
        """Position of the first one that is kept."""
        self.bytes = int(size or 0)
        self.numbered: int = number
        """The largest ``number`` of a job."""
        self.failing: str | None = None
        """Why nothing can be written now."""
        self.wants_room = False
        """Something is too much, or too old."""
        self._looked = 0.0
        self._closing = self._given_up = False
        """To be closed; and a commit has failed since, of which the next life will see whether it came through."""
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._forget_before = 0
        self._batch: list[_Entry] = []
        """Entries that are being written; they outlive a restart of the thread's loop."""
        self._over = False
        self._ghosts: list[str] = []
        """New jobs that were refused since a commit failed. Who knows whether it did."""
        self._thread = threading.Thread(
            target=PROCESS_LOOPS.run_thread, args=("journal", self._work), name="journal", daemon=True
        )
        self._thread.start()

    # -- writing -------------------------------------------------------------------------------------------------

    async def accepted(self, job: Job, *, named: bool = True) -> bool:
        """Return when a new job is on disk; false if one of its id has been, which a ``named`` one can hit.

        Raises:
            JournalFails: it cannot be written.
        """
        self.check()
        return bool(await self._put(_Entry(self._future(), job.id, new=job_record(job), named=named)))

    async def placed(self, job_id: str, node: str, name: str) -> None:
        """Return when it is on disk at which node an accepted job is, and what it is called there."""
        await self._put(_Entry(self._future(), job_id, placed=(node, name)))

    async def ended(self, job: Job, outcome: Outcome, finished_at: float) -> int | None:
        """Return when the outcome of a job, which is packed, is on disk: its position in the log. ``None`` if it could
        not be written before :meth:`close`; then it has none."""
        about, content = ended_record(job, outcome, finished_at)
        told = {"id": job.id, "number": job.number, "held": job.held, "state": outcome.state.value, "group": job.group}
        told |= {"ended_at": finished_at, "about": about, "content": content}
        position: int | None = await self._put(_Entry(self._future(), job.id, ended=told))
        return position

    def check(self) -> None:
        """Raise if nothing can be written now.

        Raises:
            JournalFails: says why.
        """
        if self.failing is not None:
            raise self._fails()

    def _fails(self) -> JournalFails:
        where = f"the journal at {self._database.place}"
        return JournalFails(f"{where} cannot be written, which is tried again: {self.failing}")

    def make_room(self, before: int) -> None:
        """Outcomes before this position may be forgotten, as far as there is need."""
        self._forget_before = min(before, self.end - 1)  # the last one says where the log goes on
        self.wants_room = False

    def stop_trying(self) -> None:
        """What cannot be written from now on is given up."""
        self._closing = True

    async def close(self) -> None:
        """Write what is waiting, and let others have the journal."""
        self.stop_trying()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    def _put(self, entry: _Entry) -> asyncio.Future[Any]:
        self._queue.put(entry)
        return entry.future

    def _work(self) -> None:
        next_at = 0.0
        while not self._over or self._batch:
            self._over = self._take(self._batch, next_at) or self._over
            next_at = time.monotonic() + _APART_S
            try:
                if self._given_up:
                    raise self._fails()
                told = self._write(self._batch)
            except Exception as error:  # of whatever kind: this thread is the only one that writes
                self._given_up = self._closing
                self._batch = self._refuse(self._batch, error)
                if self._batch:
                    time.sleep(_RETRY_S)
                continue
            self.failing, self._batch = None, []
            _tell(told)
            try:
                self._make_room()
            except Exception as error:
                self._refuse([], error)
        self._database.close()

    def _take(self, batch: list[_Entry], at: float) -> bool:
        """Take the entries that are there at some time; wait for one if none is left from before. True at the end."""
        try:
            entry = self._queue.get(timeout=0 if batch else _RETRY_S if self.failing else _LOOK_S)
            if (early := at - time.monotonic()) > 0:
                time.sleep(early)
            while entry is not None:
                batch.append(entry)
                if len(batch) >= _MOST_AT_ONCE:
                    return False
                entry = self._queue.get_nowait()
        except queue.Empty:
            return False
        return True

    def _refuse(self, batch: list[_Entry], error: Exception) -> list[_Entry]:
        """What is left to be tried again."""
        if self.failing is None:
            trace = None if isinstance(error, SQLAlchemyError | OSError) else error
            LOGGER.error("the journal at %s cannot be written: %s", self._database.place, said(error), exc_info=trace)
        self.failing = said(error)
        again = [] if self._given_up else [entry for entry in batch if entry.new is None]
        told: list[tuple[asyncio.Future[Any], Any]] = []
        for entry in batch:
            if entry.new is not None:
                self._ghosts.append(entry.job_id)
                told.append((entry.future, self._fails()))
            elif self._given_up:
                told.append((entry.future, None))
        _tell(told)
        return again

    def _write(self, batch: list[_Entry]) -> list[tuple[asyncio.Future[Any], Any]]:
        """One commit. An empty one looks whether a disk that failed can be written again."""
        if not batch and self.failing is None:
            return []
        told: list[tuple[asyncio.Future[Any], Any]] = []
        ended, kept, over = [], [], []
        position, size = self.end, self.bytes
        landed = self._landed() if self.failing else 0
        for entry in batch:
            if entry.ended is None:
                continue
            row = entry.ended
            if "bytes" not in row:  # else it is tried again
                row["content"] = self._zstd.compress(row["content"])
                row["bytes"] = len(row["about"]) + len(row["content"])
            told.append((entry.future, position))
            if position >= self.end + landed:
                content: bytes | None = row["content"]
                if self._files is not None and len(row["content"]) > _IN_TABLE:
                    self._files.write(position, row["content"])
                    content = None
                kept.append({"position": position, "about": row["about"], "content": content})
                ended.append({name: row[name] for name in row if name not in kept[-1]} | {"position": position})
                over += [] if row["held"] else [entry.job_id]
            position, size = position + 1, size + row["bytes"]
        if self._files is not None:
            self._files.sync()
        with self._database.writing() as connection:
            for ghosts in batched(self._ghosts, _MOST_AT_ONCE):
                connection.execute(_DELETE_JOBS, {"ids": ghosts})
            told += self._accept(connection, batch)
            if not batch:
                connection.execute(META.update().where(META.c.name == "epoch").values(value=self.epoch))
            if placed := {entry.job_id: entry.placed for entry in batch if entry.placed is not None}:
                connection.execute(_DELETE_PLACED, {"ids": [*placed]})
                rows = [{"id": job_id, "node": node, "name": name} for job_id, (node, name) in placed.items()]
                connection.execute(_INSERT_PLACED, rows)
                told += [(entry.future, None) for entry in batch if entry.placed is not None]
            if ended:
                connection.execute(_INSERT_ENDED, ended)
                connection.execute(_INSERT_KEPT, kept)
            if over:
                connection.execute(_DELETE_JOBS, {"ids": over})
                connection.execute(_DELETE_PLACED, {"ids": over})
        self.end, self.bytes = position, size
        self._ghosts = []
        return told

    def _landed(self) -> int:
        """How many outcomes, of those of a commit that failed, are on disk all the same."""
        with self._database.reading() as connection:
            last: int | None = connection.execute(select(func.max(ENDED.c.position))).scalar()
        return 0 if last is None else last + 1 - self.end

    def _accept(self, connection: Connection, batch: list[_Entry]) -> list[tuple[asyncio.Future[Any], Any]]:
        new = [entry for entry in batch if entry.new is not None]
        known: set[str] = set()
        if named := [entry.job_id for entry in new if entry.named]:
            for wanted in (_HAS_ENDED, _IS_FORGOTTEN):
                known.update(connection.scalars(wanted, {"ids": named}))
        rows = []
        for entry in new:
            if entry.new is not None and entry.job_id not in known:
                self._seq += 1
                asked, row = entry.new
                about = {"id": entry.job_id, "seq": self._seq, "life": self._database.life}
                rows.append({**about, "asked": asked, "row": self._zstd.compress(row)})
        if rows:
            connection.execute(_INSERT_JOBS, rows)
        return [(entry.future, entry.job_id not in known) for entry in new]

    def _make_room(self) -> None:
        """Forget the oldest while there is need and they may go. A file goes before its row: one that is left over
        would never be found."""
        now = time.time()
        if self.wants_room or (self.bytes <= self._keep_bytes and 0 <= now - self._looked < _LOOK_S):
            return
        self._looked = now
        oldest = select(ENDED).where(ENDED.c.position < self._forget_before)
        with self._database.reading() as connection:
            found = connection.execute(oldest.order_by(ENDED.c.position).limit(_MOST_AT_ONCE)).all()
            left = self.bytes
            going = []
            for row in found:
                if left <= self._keep_bytes and now - row.ended_at <= self._keep_s:
                    break
                left -= row.bytes
                going.append(row)
            if not going:
                age = now - (connection.execute(select(func.min(ENDED.c.ended_at))).scalar() or now)
                self.wants_room = left > self._keep_bytes or age > self._keep_s
                return
        self.outcomes.forgotten_before = going[-1].position + 1
        for row in going:
            if self._files is not None:
                self._files.remove(row.position)
        last = going[-1].position
        gone = [{"position": row.position, "id": row.id} for row in going if not row.held]
        with self._database.writing() as connection:
            for table in (ENDED, KEPT):
                connection.execute(delete(table).where(table.c.position <= last))
            if gone:
                connection.execute(insert(FORGOTTEN), gone)
            connection.execute(delete(FORGOTTEN).where(FORGOTTEN.c.position < last - REMEMBERED_IDS))
        self.first, self.bytes = last + 1, left
        self._looked = 0.0  # there may be more

    # -- reading -------------------------------------------------------------------------------------------------

    def unfinished(self) -> list[str]:
        """Ids of the jobs of earlier lives without an outcome: those at nodes first, which have places there, the
        others as they came. Blocks."""
        earlier = select(JOBS.c.id).where(JOBS.c.life < self._database.life)
        with self._database.reading() as connection:
            return [*connection.scalars(earlier.outerjoin(*_PLACED).order_by(PLACED.c.id.is_(None), JOBS.c.seq))]

    def found(self, ids: Sequence[str]) -> list[Unfinished]:
        """These of them, as they were accepted. Blocks."""
        zstd, order = zstandard.ZstdDecompressor(), {job_id: place for place, job_id in enumerate(ids)}
        some = select(JOBS, PLACED.c.node, PLACED.c.name).outerjoin(*_PLACED).where(JOBS.c.id.in_(ids))
        with self._database.reading() as connection:
            rows = sorted(connection.execute(some), key=lambda row: order[row.id])
        found = []
        for row in rows:
            try:
                job = job_to_run(row.id, row.asked, zstd.decompress(row.row))
            except (zstandard.ZstdError, ValueError, LookupError, TypeError):  # one that is damaged holds up no other
                LOGGER.exception("rollout %r of the journal at %s cannot be read", row.id, self._database.place)
            else:
                found.append(Unfinished(job, self._database.life - row.life, row.node, row.name))
        return found


# Made once: to make a statement costs more than to carry it out.
_PLACED = (PLACED, PLACED.c.id == JOBS.c.id)
_IDS: BindParameter[Any] = bindparam("ids", expanding=True)
_INSERT_JOBS, _INSERT_PLACED, _INSERT_ENDED, _INSERT_KEPT = map(insert, (JOBS, PLACED, ENDED, KEPT))
_DELETE_JOBS, _DELETE_PLACED = (delete(table).where(table.c.id.in_(_IDS)) for table in (JOBS, PLACED))
_HAS_ENDED = select(ENDED.c.id).where(ENDED.c.id.in_(_IDS), ~ENDED.c.held)
_IS_FORGOTTEN = select(FORGOTTEN.c.id).where(FORGOTTEN.c.id.in_(_IDS))


def _tell(told: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    """Resolve futures of the event loop from the thread, in order."""

    def resolve() -> None:
        for future, result in told:
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    if told:
        told[0][0].get_loop().call_soon_threadsafe(resolve)
