# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The outcomes that a journal keeps, to be read beside its writer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from itertools import batched
from typing import Any

import zstandard
from sqlalchemy import Row, select

from nemo_gym_prorl.failures import Failure, FailureKind, Origin
from nemo_gym_prorl.rollout.job import Job, JobState, Outcome
from nemo_gym_prorl.rollout.journal.database import ENDED, FORGOTTEN, KEPT, Database
from nemo_gym_prorl.rollout.journal.files import ContentFiles
from nemo_gym_prorl.rollout.journal.records import ended_job


LOGGER = logging.getLogger(__name__)

_MOST_IDS = 10_000
"""At once: databases bound the parameters of a statement, PostgreSQL's driver by 65,535."""
_GONE = select(FORGOTTEN.c.id)
_EVERY = select(ENDED.c.position, ENDED.c.id, KEPT).join(KEPT, KEPT.c.position == ENDED.c.position)


class Outcomes:
    """Those of one journal.

    Args:
        database: it.
        files: what is too large for that; ``None`` where all is in there.
    """

    def __init__(self, database: Database, files: ContentFiles | None) -> None:
        self._database, self._files = database, files
        self.forgotten_before = 0
        """Files of those before this position may be gone."""

    async def find(self, ids: Sequence[str]) -> Mapping[str, Job | None]:
        """Ended jobs by id; ``None`` for those that were forgotten. Those that are unknown are left out."""

        def read() -> dict[str, Job | None]:
            found: dict[str, Job | None] = {}
            with self._database.reading() as connection:
                for some in batched(ids, _MOST_IDS):
                    found |= dict.fromkeys(connection.scalars(_GONE.where(FORGOTTEN.c.id.in_(some))))
                    rows = connection.execute(_EVERY.where(ENDED.c.id.in_(some), ~ENDED.c.held))
                    found |= {row.id: self._job(row, content=True) for row in rows}
            return found

        return await asyncio.to_thread(read)

    async def between(self, start: int, end: int, *, content: bool) -> dict[int, Job]:
        """Those of these positions of the log that are kept."""

        def read() -> dict[int, Job]:
            with self._database.reading() as connection:
                rows = connection.execute(_EVERY.where(ENDED.c.position >= start, ENDED.c.position < end)).all()
            jobs = {row.position: self._job(row, content=content) for row in rows}
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
        wanted = _EVERY.where(~ENDED.c.held, ENDED.c.number > after)
        if state is not None:
            wanted = wanted.where(ENDED.c.state == state.value)
        if group is not None:
            wanted = wanted.where(ENDED.c.group == group)

        def read() -> list[Job]:
            with self._database.reading() as connection:
                rows = connection.execute(wanted.order_by(ENDED.c.number).limit(limit)).all()
            return [job for row in rows if (job := self._job(row, content=content)) is not None]

        return await asyncio.to_thread(read)

    def _job(self, row: Row[Any], *, content: bool) -> Job | None:
        """``None`` if it is forgotten just now."""
        try:
            stored: bytes | None = row.content if content else None
            if content and stored is None and self._files is not None:
                stored = self._files.read(row.position)
            return ended_job(row.id, row.about, stored)
        except (OSError, zstandard.ZstdError, ValueError) as error:
            if row.position < self.forgotten_before:
                return None
            # Nobody is to train on what is left of it, and the others are read.
            LOGGER.error("rollout %r: outcome %d of the journal is damaged: %s", row.id, row.position, error)
            job = ended_job(row.id, row.about, None)
            reason = f"its result in the journal is damaged: {error}"
            failure = Failure(FailureKind.SESSION_LOST, Origin.INFRASTRUCTURE, None, reason)
            job.state, job.outcome = JobState.FAILED, Outcome(JobState.FAILED, {}, None, failure)
            return job
