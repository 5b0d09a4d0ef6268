# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs of attached callers: a caller keeps its connection open until its job has a result.

Gym's client posts ``/run`` again, without limit, when its connection drops. So:

- An identical row joins the job of a disconnected caller within a grace period; a row with the same id joins at any
  time. While the caller of a row without an id is connected, an identical row is a rollout of another collector.
- A job without connected callers is cancelled after the grace period, because the job holds a sandbox.
- A delivered result is dropped. A trainer sends the same row again under new weights and must get a new rollout.

A repeated row without an id is recognised by its bytes if the row has Gym's indices (``_ng_task_index``,
``_ng_rollout_index``). Equal rows without the indices are separate rollouts.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fastapi import HTTPException, Request

from nemo_gym_prorl.async_tasks import start_eager_task
from nemo_gym_prorl.failures import JobCancelled
from nemo_gym_prorl.rollout.job import Job
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import JobConflict, JobRequest


class CallerGone(HTTPException):
    """The caller disconnected: drop the reply."""

    def __init__(self) -> None:
        super().__init__(499, "the caller disconnected")


_DISCONNECT_NOTICE_S = 0.5
"""Longest wait, in seconds, until the server notices that a repeated post's earlier connection is closed."""


@dataclass(slots=True, eq=False)
class _AttachedCall:
    job: Job
    row: dict[str, Any]
    key: bytes | None
    callers: int = 0
    give_up_timer: asyncio.TimerHandle | None = None
    answer: bytes | Exception | None = None
    """Answer for all connected callers, or the exception of ``render``; ``None`` until rendered."""


def row_key(row: dict[str, Any], body: bytes) -> bytes | None:
    """Return an idempotency key, equal for repeated posts of a Gym row; ``None`` for a row without Gym's indices.

    Args:
        row: the parsed body.
        body: bytes of the body, which are equal in a repeated post.
    """
    if "_ng_task_index" in row and "_ng_rollout_index" in row:
        return hashlib.sha256(body).digest()
    return None


class AttachedCallers:
    """Jobs of attached callers in one pipeline.

    Args:
        grace_s: seconds for which a job continues after its last caller disconnected.
    """

    def __init__(self, pipeline: Pipeline, grace_s: float) -> None:
        self._pipeline = pipeline
        self._grace_s = grace_s
        self._by_key: dict[bytes, list[_AttachedCall]] = {}
        self._settling: set[asyncio.Task[None]] = set()

    async def run(
        self,
        wanted: JobRequest,
        key: bytes | None,
        connection: Request,
        render: Callable[[Job], bytes],
        started: Callable[[Job], None] = lambda job: None,
    ) -> bytes:
        """Run a job, or join the job with the same key, and return its answer.

        Args:
            key: idempotency key (:func:`row_key`); ``None`` joins no job.
            connection: request of the caller, watched for a disconnect; its body must have been read.
            render: builds the answer from the job with its outcome. Called once for all callers of the job.
            started: called with the job when it is submitted or joined.

        Raises:
            CallerGone: the connection closed first. The job or its result is kept for the grace period.
            JobConflict: the job with that key runs with another row, or the id belongs to another caller.
            CallerError: as for :meth:`.RolloutService.submit`.
            Exception: any exception of ``render``.
        """
        store = self._pipeline.store
        if wanted.id is not None and store.get(wanted.id) is None and await store.fetch(wanted.id) is not None:
            raise JobConflict.with_anothers(wanted.id)
        for _ in range(10):
            if wanted.id is not None or not self._known(key) or self._abandoned(key):
                break
            await asyncio.sleep(_DISCONNECT_NOTICE_S / 10)
        call = self._join_or_submit(wanted, key)
        call.callers += 1
        gone = start_eager_task(_disconnected(connection))
        done = self._pipeline.answered(call.job)
        try:
            started(call.job)
            await asyncio.wait({gone, done}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():  # checked first: a result sent into a closed connection would be lost
                raise CallerGone
            return self._deliver(call, render)
        finally:
            gone.cancel()
            call.callers -= 1
            if not call.callers and call.answer is None:
                call.give_up_timer = asyncio.get_running_loop().call_later(self._grace_s, self._give_up, call)

    def _known(self, key: bytes | None) -> list[_AttachedCall]:
        return [] if key is None else self._by_key.get(key, [])

    def _abandoned(self, key: bytes | None) -> _AttachedCall | None:
        return next((call for call in self._known(key) if not call.callers), None)

    def _join_or_submit(self, wanted: JobRequest, key: bytes | None) -> _AttachedCall:
        call = self._abandoned(key) if wanted.id is None else next(iter(self._known(key)), None)
        if call is not None:
            if call.row != wanted.row:
                raise JobConflict(f"job {wanted.id!r} runs with another row; choose another id", field="id")
            if call.give_up_timer is not None:
                call.give_up_timer.cancel()
                call.give_up_timer = None
            return call
        wanted = replace(wanted, attached=True)
        known = None if wanted.id is None else self._pipeline.store.get(wanted.id)
        if known is not None and known.attached and not known.delivered:
            # All callers disconnected, and the job is being cancelled. Start a new rollout under a generated id.
            wanted = replace(wanted, id=None)
        call = _AttachedCall(self._pipeline.submit(wanted, bounded=False), wanted.row, key)
        if key is not None:
            self._by_key.setdefault(key, []).append(call)
        return call

    def _deliver(self, call: _AttachedCall, render: Callable[[Job], bytes]) -> bytes:
        """Return the answer of an ended job; render it at the first call, and then free the job's result."""
        if call.answer is None:
            job = call.job
            self._forget(call)
            try:
                call.answer = render(job)
            except Exception as error:  # raised below, for each caller; a later post starts a new rollout
                call.answer = error
            self._pipeline.store.deliver(job)
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    def _give_up(self, call: _AttachedCall) -> None:
        self._forget(call)
        self._pipeline.request_cancel(call.job, JobCancelled("the caller disconnected"))
        settling = asyncio.ensure_future(self._settle(call.job))
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)

    async def _settle(self, job: Job) -> None:
        """Free the result and the id of a cancelled job once the job has its outcome."""
        await self._pipeline.wait(job)
        if job.outcome is not None:
            self._pipeline.store.deliver(job)

    def _forget(self, call: _AttachedCall) -> None:
        if call.key is not None and call in (known := self._known(call.key)):
            known.remove(call)
            if not known:
                del self._by_key[call.key]


async def _disconnected(connection: Request) -> None:
    while (await connection.receive())["type"] != "http.disconnect":
        pass
