# SPDX-License-Identifier: Apache-2.0
"""One rollout service as the runner sees it: submits, cancels, and tells every outcome of what is its own, once.

A service may be away for a while, or begin a new life that remembers nothing: then its rollouts are asked for one by
one, and those that it does not know are submitted again under their ids, which is safe to do with those it knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from nemo_gym_prorl.failures import FailureKind, InfrastructureError, Origin
from nemo_gym_prorl.rollout.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.schemas import JobView


LOG = logging.getLogger(__name__)

_FOLLOW_S = 30.0
_AWAY = (InfrastructureError, aiohttp.ClientError, TimeoutError)
"""The service does not answer. Whoever asks, asks again."""
_AT_ONCE = 64
"""Calls to a service at a time."""


class Service:
    """See the module. To be used as an async context manager, within which it follows the service.

    Args:
        client: an open client.
        ended: told of every rollout of ours that has an outcome.
        refused: told of every rollout that the service does not take, or has forgotten; whose doing that is, and why.
        broke: told of an error that ends it: a defect of ours, or a service that refuses us altogether.
        retry_s: how long to wait before a service that is away is asked again.
    """

    def __init__(
        self,
        client: RolloutClient,
        *,
        ended: Callable[[JobView], None],
        refused: Callable[[str, Origin, str], None],
        broke: Callable[[BaseException], None],
        retry_s: float = 1.0,
    ) -> None:
        self.client = client
        self.live: dict[str, Mapping[str, Any]] = {}
        """Bodies of submissions that have no outcome, by id."""
        self.away = False
        """Whether it did not answer when it was asked last."""
        self._ended, self._refused, self._broke = ended, refused, broke
        self._retry_s = retry_s
        self._calls = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._submitting: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Begin to follow it."""
        self._spawn(self._follow())

    async def close(self) -> None:
        """Stop whatever is under way here; the service is told nothing."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def submit(self, rollout: str, body: Mapping[str, Any]) -> None:
        """Have a rollout submitted, now or when the service takes more on."""
        self.live[rollout] = body
        self._submitting[rollout] = self._spawn(self._submit(rollout, body))

    def cancel(self, rollouts: list[str]) -> None:
        """Have rollouts cancelled; each outcome is told when its sandbox is gone."""
        self._spawn(self._cancel([rollout for rollout in rollouts if rollout in self.live]))

    async def result(self, rollout: str) -> JobView:
        """A rollout that had its outcome before.

        Raises:
            InfrastructureError: the service does not know it any more.
        """
        try:
            job = await self.client.get(rollout)
        except ApiError as error:
            raise InfrastructureError(error.problem.detail, kind=FailureKind.SESSION_LOST) from error
        if job.result is None:
            raise InfrastructureError("it has no result", kind=FailureKind.SESSION_LOST)
        return job

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broke(error)

    async def _submit(self, rollout: str, body: Mapping[str, Any]) -> None:
        options = {name: value for name, value in body.items() if name != "row"}
        try:
            while rollout in self.live:
                try:
                    async with self._calls:
                        job = await self.client.submit(dict(body["row"]), id=rollout, **options)
                    if job.state.terminal:
                        await self._fetch(rollout)
                    return
                except ApiError as error:
                    if error.problem.status in (410, 422):
                        origin = Origin.CALLER if error.problem.status == 422 else Origin.INFRASTRUCTURE
                        self._refuse(rollout, origin, error.problem.detail)
                        return
                    if error.problem.status < 500:
                        raise
                except _AWAY as error:
                    self._is_away(error)
                await asyncio.sleep(self._retry_s)
        finally:
            self._submitting.pop(rollout, None)

    async def _cancel(self, rollouts: list[str]) -> None:
        submitting = [task for rollout in rollouts if (task := self._submitting.get(rollout))]
        for task in submitting:
            task.cancel()
        await asyncio.gather(*submitting, return_exceptions=True)
        while rollouts:
            try:
                answer = await self.client.cancel(rollouts)
            except ApiError as error:
                if error.problem.status < 500:
                    raise
            except _AWAY as error:
                self._is_away(error)
            else:
                for job in answer.rollouts:
                    self._tell(job)
                for rollout in answer.unknown:
                    self._refuse(rollout, Origin.CALLER, "cancelled before it was submitted")
                return
            await asyncio.sleep(self._retry_s)

    async def _follow(self) -> None:
        cursor: str | None = None
        while True:
            try:
                if cursor is None:
                    cursor = (await self.client.list(limit=1)).cursor
                    await self._ask_for_each()
                page = await self.client.ended(cursor, wait=_FOLLOW_S, limit=1000)
                self.away = False
                cursor = page.cursor
                await asyncio.gather(*(self._fetch(job.id) for job in page.rollouts if job.id in self.live))
                continue
            except ApiError as error:
                if error.problem.status == 410:
                    cursor = None
                    continue
                if error.problem.status < 500:
                    raise
            except _AWAY as error:
                self._is_away(error)
            await asyncio.sleep(self._retry_s)

    async def _ask_for_each(self) -> None:
        """How each of ours is now; what the service does not know is submitted again."""
        await asyncio.gather(*(self._fetch(rollout) for rollout in self.live if rollout not in self._submitting))

    async def _fetch(self, rollout: str) -> None:
        try:
            async with self._calls:
                job = await self.client.get(rollout)
        except ApiError as error:
            if error.problem.status == 404 and rollout in self.live:
                self.submit(rollout, self.live[rollout])
            elif error.problem.status == 410:
                self._refuse(rollout, Origin.INFRASTRUCTURE, error.problem.detail)
            elif error.problem.status not in (404, 410):
                raise
            return
        self._tell(job)

    def _tell(self, job: JobView) -> None:
        if job.state.terminal and self.live.pop(job.id, None) is not None:
            self._ended(job)

    def _refuse(self, rollout: str, origin: Origin, why: str) -> None:
        if self.live.pop(rollout, None) is not None:
            self._refused(rollout, origin, why)

    def _is_away(self, error: BaseException) -> None:
        if not self.away:
            LOG.warning("%s does not answer, asking again every %s s: %s", self.client.url, self._retry_s, error)
        self.away = True
