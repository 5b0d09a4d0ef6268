# SPDX-License-Identifier: Apache-2.0
"""Jobs whose caller holds a connection open until the result is there.

Gym's client posts ``/run`` again, without end, when its connection drops. So:

- an identical row that arrives while its job runs, or within a grace after its caller vanished, joins that job;
- a job whose last caller is gone past the grace is cancelled: nobody waits for it, and it holds a sandbox;
- a result that was delivered is forgotten. A trainer sends the very same row again under new weights and must get a
  new rollout, never an old answer.

Only rows that carry Gym's indices (``_ng_task_index``, ``_ng_rollout_index``) can be told to be the same rollout; two
equal rows without them are two rollouts.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, replace
from typing import Any

import orjson
from fastapi import Request

from nemo_gym_prorl.failures import JobCancelled
from nemo_gym_prorl.rollout.job import Job
from nemo_gym_prorl.rollout.pipeline import JobRequest, Pipeline


class CallerGone(Exception):
    """The caller of this connection is gone; there is nobody to answer."""


@dataclass(slots=True)
class _Call:
    job: Job
    key: bytes | None
    callers: int = 0
    farewell: asyncio.TimerHandle | None = None
    answer: bytes | None = None


class CallerWatch:
    """Runs rows for connected callers.

    Args:
        pipeline: runs the jobs.
        grace_s: seconds that a job goes on after its last caller vanished.
    """

    def __init__(self, pipeline: Pipeline, grace_s: float) -> None:
        self._pipeline = pipeline
        self._grace_s = grace_s
        self._by_key: dict[bytes, _Call] = {}

    async def run(self, row: dict[str, Any], body: bytes, request: Request) -> bytes:
        """Run a row, or join the job that runs it already, and return the answer as JSON.

        Args:
            row: the parsed body.
            body: the bytes it was parsed from; equal bytes are an identical row.
            request: the connection to watch.

        Raises:
            CallerGone: the connection closed first. The job goes on for the grace.
            Draining: the service takes no new jobs.
        """
        call = self._join_or_submit(row, body)
        call.callers += 1
        gone = asyncio.ensure_future(_disconnected(request))
        done = asyncio.ensure_future(self._pipeline.wait(call.job))
        try:
            await asyncio.wait({gone, done}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise CallerGone
            return self._deliver(call)
        finally:
            gone.cancel()
            done.cancel()
            call.callers -= 1
            if not call.callers and call.answer is None:
                call.farewell = asyncio.get_running_loop().call_later(self._grace_s, self._give_up, call)

    def _join_or_submit(self, row: dict[str, Any], body: bytes) -> _Call:
        key = hashlib.sha256(body).digest() if "_ng_task_index" in row and "_ng_rollout_index" in row else None
        if key is not None and (call := self._by_key.get(key)) is not None:
            if call.farewell is not None:
                call.farewell.cancel()
                call.farewell = None
            return call
        call = _Call(self._pipeline.submit(JobRequest(row), bounded=False), key)
        if key is not None:
            self._by_key[key] = call
        return call

    def _deliver(self, call: _Call) -> bytes:
        """The answer, once and for all callers that are connected now."""
        if call.answer is None:
            job = call.job
            assert job.outcome is not None, "a job that is done has its outcome"
            call.answer = orjson.dumps(job.outcome.result | {"rollout": _summary(job)})
            # Nobody asks for these again, and token arrays are large.
            job.row, job.outcome = {}, replace(job.outcome, result={})
            self._forget(call)
        return call.answer

    def _give_up(self, call: _Call) -> None:
        self._forget(call)
        self._pipeline.request_cancel(call.job, JobCancelled("the caller is gone"))

    def _forget(self, call: _Call) -> None:
        if call.key is not None:
            self._by_key.pop(call.key, None)


async def _disconnected(request: Request) -> None:
    """Return when the peer closed the connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _summary(job: Job) -> dict[str, Any]:
    """What a row says about how it came about."""
    return {
        "id": job.id,
        "state": job.state.value,
        "turns": job.progress.turns,
        "tool_calls": job.progress.tool_calls,
        "finish_reason": job.progress.finish_reason,
        "seconds": {
            stage.value: {"waited": time.waited_s, "worked": time.worked_s} for stage, time in job.times.items()
        },
        "failed_attempts": [failure.kind.value for failure in job.failures],
    }
