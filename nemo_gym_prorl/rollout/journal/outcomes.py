# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The outcomes that a journal keeps, to be read beside its writer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row, select

from nemo_gym_prorl.rollout.job import Job, JobState
from nemo_gym_prorl.rollout.journal.database import ENDED, FORGOTTEN, KEPT, Database
from nemo_gym_prorl.rollout.journal.files import ContentFiles
from nemo_gym_prorl.rollout.journal.records import ended_job


_EVERY = select(ENDED.c.position, ENDED.c.id, KEPT).join(KEPT, KEPT.c.position == ENDED.c.position)


class Outcomes:
    """Those of one journal.

    Args:
        database: it.
        files: what is too large for that; ``None`` where all is in there.
    """

    def __init__(self, database: Database, files: ContentFiles | None) -> None:
        self._database, self._files = database, files

    async def find(self, ids: Sequence[str]) -> Mapping[str, Job | None]:
        """Ended jobs by id; ``None`` for those that were forgotten. Those that are unknown are left out."""

        def read() -> dict[str, Job | None]:
            with self._database.reading() as connection:
                found: dict[str, Job | None] = dict.fromkeys(
                    connection.scalars(select(FORGOTTEN.c.id).where(FORGOTTEN.c.id.in_(ids)))
                )
                wanted = _EVERY.where(ENDED.c.id.in_(ids), ~ENDED.c.held)
                rows = connection.execute(wanted).all()
            return found | {row.id: self._job(row, content=True) for row in rows}

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
        stored: bytes | None = row.content if content else None
        if content and stored is None and self._files is not None:
            try:
                stored = self._files.read(row.position)
            except FileNotFoundError:
                return None
        return ended_job(row.id, row.about, stored)
