# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs whose caller holds a connection open until the result is there.

Gym's client posts ``/run`` again, without end, when its connection drops. So:

- an identical row that arrives within a grace after its job's caller vanished joins that job, and so does one with the
  same id at any time. While the caller of a row without an id is connected, an identical one is another collector's,
  and a rollout of its own;
- a job whose last caller is gone past the grace is cancelled: nobody waits for it, and it holds a sandbox;
- a result that was delivered is forgotten. A trainer sends the very same row again under new weights and must get a
  new rollout, never an old answer.

Only rows that carry Gym's indices (``_ng_task_index``, ``_ng_rollout_index``) can be told to be the same rollout; two
equal rows without them are two rollouts.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fastapi import HTTPException, Request

from nemo_gym_prorl.failures import JobCancelled
from nemo_gym_prorl.rollout.handler_calls import start_eager_task
from nemo_gym_prorl.rollout.job import Job
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import JobConflict, JobRequest


class CallerGone(HTTPException):
    """The caller of this connection is gone; nobody reads what a route makes of this."""

    def __init__(self) -> None:
        super().__init__(499, "the caller is gone")


_NOTICE_S = 0.5
"""How long a caller's leaving may take to be known: whoever posts again has just closed another connection."""


@dataclass(slots=True, eq=False)
class _Call:
    job: Job
    row: dict[str, Any]
    key: bytes | None
    callers: int = 0
    farewell: asyncio.TimerHandle | None = None
    answer: bytes | Exception | None = None
    """What all callers that are connected get: the answer, or what went wrong in making it."""


def row_key(row: dict[str, Any], body: bytes) -> bytes | None:
    """What makes two posts of a Gym row the same rollout; ``None`` if nothing can tell.

    Args:
        row: the parsed body.
        body: the bytes it was parsed from; a client that posts again sends the same ones.
    """
    if "_ng_task_index" in row and "_ng_rollout_index" in row:
        return hashlib.sha256(body).digest()
    return None


class AttachedCallers:
    """Runs jobs for connected callers.

    Args:
        pipeline: runs the jobs.
        grace_s: seconds that a job goes on after its last caller vanished.
    """

    def __init__(self, pipeline: Pipeline, grace_s: float) -> None:
        self._pipeline = pipeline
        self._grace_s = grace_s
        self._by_key: dict[bytes, list[_Call]] = {}
        self._settling: set[asyncio.Task[None]] = set()

    async def run(
        self,
        wanted: JobRequest,
        key: bytes | None,
        connection: Request,
        render: Callable[[Job], bytes],
        started: Callable[[Job], None] = lambda job: None,
    ) -> bytes:
        """Run a job, or join the one of that key, and return its answer.

        Args:
            wanted: the job.
            key: equal keys are the same rollout, see :func:`row_key`.
            connection: watched for the caller's leaving; its body must have been read.
            render: makes the answer from the job with its outcome. Called once, also for several callers.
            started: called with the job when it is submitted or joined.

        Raises:
            CallerGone: the connection closed first. The job, or its result, waits for the grace.
            JobConflict: the job of that key runs, with another row, or the id belongs to somebody else's job.
            Draining: the service takes no new jobs.
        """
        store = self._pipeline.store
        if wanted.id is not None and store.get(wanted.id) is None and await store.fetch(wanted.id) is not None:
            raise JobConflict.with_anothers(wanted.id)
        for _ in range(10):
            if wanted.id is not None or not self._known(key) or self._abandoned(key):
                break
            await asyncio.sleep(_NOTICE_S / 10)
        call = self._join_or_submit(wanted, key)
        call.callers += 1
        gone = start_eager_task(_disconnected(connection))
        done = self._pipeline.answered(call.job)
        try:
            started(call.job)
            await asyncio.wait({gone, done}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():  # also if the result is there: into a closed connection it would be lost
                raise CallerGone
            return self._deliver(call, render)
        finally:
            gone.cancel()
            call.callers -= 1
            if not call.callers and call.answer is None:
                call.farewell = asyncio.get_running_loop().call_later(self._grace_s, self._give_up, call)

    def _known(self, key: bytes | None) -> list[_Call]:
        return [] if key is None else self._by_key.get(key, [])

    def _abandoned(self, key: bytes | None) -> _Call | None:
        return next((call for call in self._known(key) if not call.callers), None)

    def _join_or_submit(self, wanted: JobRequest, key: bytes | None) -> _Call:
        call = self._abandoned(key) if wanted.id is None else next(iter(self._known(key)), None)
        if call is not None:
            if call.row != wanted.row:
                raise JobConflict(f"job {wanted.id!r} runs with another row; choose another id", field="id")
            if call.farewell is not None:
                call.farewell.cancel()
                call.farewell = None
            return call
        wanted = replace(wanted, attached=True)
        known = None if wanted.id is None else self._pipeline.store.get(wanted.id)
        if known is not None and known.attached and not known.delivered:
            # Its callers are gone and it is about to end. This is a new rollout, for now under an id of its own.
            wanted = replace(wanted, id=None)
        call = _Call(self._pipeline.submit(wanted, bounded=False), wanted.row, key)
        if key is not None:
            self._by_key.setdefault(key, []).append(call)
        return call

    def _deliver(self, call: _Call, render: Callable[[Job], bytes]) -> bytes:
        """The answer, once and for all callers that are connected now."""
        if call.answer is None:
            job = call.job
            self._forget(call)
            try:
                call.answer = render(job)
            except Exception as error:  # raised below, for each caller; whoever asks again gets a new rollout
                call.answer = error
            self._pipeline.store.deliver(job)  # nobody asks for it again, and token arrays are large
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    def _give_up(self, call: _Call) -> None:
        self._forget(call)
        self._pipeline.request_cancel(call.job, JobCancelled("the caller is gone"))
        settling = asyncio.ensure_future(self._settle(call.job))
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)

    async def _settle(self, job: Job) -> None:
        """When a job that nobody waits for has ended, its memory and its id are free."""
        await self._pipeline.wait(job)
        if job.outcome is not None:
            self._pipeline.store.deliver(job)

    def _forget(self, call: _Call) -> None:
        if call.key is not None and call in (known := self._known(call.key)):
            known.remove(call)
            if not known:
                del self._by_key[call.key]


async def _disconnected(connection: Request) -> None:
    """Return when the peer closed the connection."""
    while (await connection.receive())["type"] != "http.disconnect":
        pass
