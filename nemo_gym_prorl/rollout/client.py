# SPDX-License-Identifier: Apache-2.0
"""Async client of the job API.

    async with RolloutClient("http://127.0.0.1:8000") as client:
        job = await client.submit(row, group="prompt-7")
        done = await client.wait(job.id)
        print(done.reward, done.failure)

It returns the same models that the service sends, and raises :class:`ApiError` with the service's problem document. A
full queue is waited out as the service asks (``Retry-After``); a submission with an id is safe to repeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.problems import Problem
from nemo_gym_prorl.rollout.api import MAX_WAIT_S
from nemo_gym_prorl.rollout.schemas import CancelAnswer, EventView, JobView, Listing, StatusView


class ApiError(Exception):
    """The service refused a request.

    Attributes:
        problem: the RFC 9457 document that it answered with.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"HTTP {problem.status}: {problem.detail}")
        self.problem = problem


class RolloutClient:
    """A client of one service; use it as an async context manager.

    Args:
        url: base URL of ``prorl_agent``.
        token: the control token, if the service has one.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def submit(self, row: dict[str, Any], **options: Any) -> JobView:
        """Submit a rollout; waits while the queue is full.

        Args:
            row: a Gym dataset row.
            **options: ``id``, ``handler``, ``group``, ``client``, ``priority``, ``budgets``, ``max_attempts``.

        Raises:
            ApiError: the service refuses it for any other reason.
        """
        body = {"row": row, **options}
        while True:
            try:
                return JobView.model_validate(await self._call("POST", "/v1/rollouts", body))
            except ApiError as error:
                if error.problem.status != 429:
                    raise
            await asyncio.sleep(1.0)

    async def get(self, rollout_id: str, wait: float = 0.0) -> JobView:
        """The rollout as it is now, or within ``wait`` seconds (at most 60) when it ends."""
        return JobView.model_validate(await self._call("GET", f"/v1/rollouts/{rollout_id}?wait={wait}"))

    async def wait(self, rollout_id: str) -> JobView:
        """The rollout when it has its outcome, however long that takes."""
        while not (job := await self.get(rollout_id, MAX_WAIT_S / 2)).state.terminal:
            pass
        return job

    async def list(self, *, state: str | None = None, group: str | None = None, limit: int = 100) -> Listing:
        """Rollouts, oldest first."""
        query = {"state": state, "group": group, "limit": limit}
        return Listing.model_validate(await self._call("GET", "/v1/rollouts", query=query))

    async def ended(
        self, after: str, *, group: str | None = None, wait: float = 0.0, results: bool = False, limit: int = 100
    ) -> Listing:
        """Terminal outcomes from cursor ``after`` on, in the order in which they ended."""
        query = {"after": after, "group": group, "wait": wait, "results": str(results).lower(), "limit": limit}
        return Listing.model_validate(await self._call("GET", "/v1/rollouts", query=query))

    async def cancel(self, ids: Iterable[str] | None = None, *, group: str | None = None) -> CancelAnswer:
        """Cancel by id or by group; returns when the sandboxes are gone."""
        body = {"group": group} if ids is None else {"ids": [*ids]}
        return CancelAnswer.model_validate(await self._call("POST", "/v1/rollouts/cancel", body))

    async def status(self) -> StatusView:
        """Counts per stage, pool and state."""
        return StatusView.model_validate(await self._call("GET", "/status"))

    async def events(self, after: str | None = None) -> AsyncIterator[EventView]:
        """Transitions as they happen, until the caller stops or the service goes away.

        Args:
            after: ``cursor`` of the last one seen, or ``"0"`` for all that have been.

        Raises:
            ApiError: some behind ``after`` are forgotten, or this reader was too slow.
        """
        path = "/v1/events" if after is None else f"/v1/events?after={after}"
        async with self._open.get(self.url + path) as response:
            if response.status >= 400:
                raise ApiError(_problem(response.status, await response.read()))
            kind = b""
            async for line in response.content:
                if line.startswith(b"event: "):
                    kind = line[7:].strip()
                elif line.startswith(b"data: ") and kind == b"problem":
                    raise ApiError(_problem(response.status, line[6:]))
                elif line.startswith(b"data: "):
                    yield EventView.model_validate_json(line[6:])

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use the client as an async context manager")
        return self._session

    async def _call(self, method: str, path: str, body: Any = None, query: dict[str, Any] | None = None) -> Any:
        params = {key: value for key, value in (query or {}).items() if value is not None}
        data = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json"} if data else {}
        try:
            async with self._open.request(
                method, self.url + path, data=data, params=params, headers=headers
            ) as response:
                content = await response.read()
        except aiohttp.ClientConnectorError as error:
            raise InfrastructureError(
                f"no rollout service answers at {self.url}: {error}", kind=FailureKind.TRANSPORT_UNREACHABLE
            ) from error
        if response.status >= 400:
            raise ApiError(_problem(response.status, content))
        return orjson.loads(content)


def _problem(status: int, content: bytes) -> Problem:
    """The problem document of an answer, also if something in front of the service wrote it."""
    try:
        return Problem.model_validate_json(content)
    except ValueError:
        text = content.decode(errors="replace")[:500]
        return Problem(type="about:blank", title="HTTP error", status=status, detail=text or f"HTTP {status}")
