# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What the job API's routes ask of whoever runs the jobs: one node's pipeline, or the front of a fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from nemo_gym_prorl.failures import RolloutError
from nemo_gym_prorl.rollout.job import Job
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.schemas import StatusView
from nemo_gym_prorl.rollout.store import JobStore


class RolloutService(Protocol):
    """Takes jobs on, ends each once, and remembers them."""

    store: JobStore
    draining: bool
    on_finish: list[Callable[[Job], None]]
    """Called with each job that reached its outcome."""

    def submit(self, request: JobRequest, *, bounded: bool = True) -> Job:
        """Take a job on; the same id and row again is the same job. Raises a CallerError where it is refused."""
        ...

    async def fork(self, parent: Job, turn: int | None, requests: Sequence[JobRequest]) -> list[Job]:
        """Take jobs on that begin at a checkpoint of another one. Raises a CallerError where that can't be."""
        ...

    async def accept(self, request: JobRequest) -> Job:
        """The same, when it is on disk, where there is a journal."""
        ...

    async def wait(self, job: Job, timeout: float | None = None) -> bool:
        """Wait for a job's outcome; ``False`` if it has none after ``timeout`` seconds."""
        ...

    def done(self, job: Job) -> asyncio.Future[None]:
        """Done when the job has its outcome."""
        ...

    async def cancel(self, job: Job, reason: str = ...) -> None:
        """Cancel a job, and return when it has its outcome."""
        ...

    def request_cancel(self, job: Job, error: RolloutError) -> None:
        """Cancel a job without waiting for it."""
        ...

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new jobs and wait until every job has its outcome; ``False`` if some have none in time."""
        ...

    def resume(self) -> None:
        """Take jobs again after a drain."""
        ...

    def status(self) -> StatusView:
        """Counts per stage, pool and state."""
        ...
