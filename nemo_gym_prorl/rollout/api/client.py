# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Async client of the job API.

    async with RolloutClient("http://127.0.0.1:8000") as client:
        job = await client.submit(row, group="prompt-7")
        done = await client.wait(job.id)
        print(done.reward, done.failure)

Methods return the models of :mod:`.schemas`. Methods raise :class:`ApiError` with the service's problem document, or
:class:`~nemo_gym_prorl.failures.InfrastructureError` without a valid answer. Requests are retried after the service's
``Retry-After``; a submission with an id is idempotent.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlencode

import aiohttp
import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError
from yarl import URL

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.http.keys import authorization, trusted_authorities
from nemo_gym_prorl.http.problem_document import ApiError as ApiError
from nemo_gym_prorl.http.problem_document import problem_of_answer
from nemo_gym_prorl.rollout.api.schemas import (
    MAX_WAIT_S,
    CancelAnswer,
    CheckpointsView,
    DrainAnswer,
    ForkAnswer,
    JobView,
    Listing,
    TokenForm,
)
from nemo_gym_prorl.rollout.status import StatusView


if TYPE_CHECKING:
    from nemo_gym_prorl.rollout.storage.store import Transition

_MIN_RETRY_AFTER_S, _MAX_RETRY_AFTER_S = 0.1, 60.0
"""Bounds, in seconds, of the ``Retry-After`` that the client honours."""
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=MAX_WAIT_S + 120.0)
"""Time limits of a call. No answer takes longer than a long-poll, or than the release of sandboxes after a
cancellation. Without a limit, a connection to a machine without power would block until the machine is back."""

_KEEP_ALIVE_S = 3.0
"""Seconds for which an idle connection is reused; servers close theirs after 5 s, perhaps as a request arrives."""
_STREAM_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=60.0)
"""Read timeout of the event stream (the server sends a heartbeat every 15 s)."""

_PAGE = 1000
"""Rollouts per page of a listing; the service allows no more."""


class RolloutClient:
    """Client of one service; an async context manager.

    Args:
        url: base URL of ``prorl_agent`` or a gateway. For ``https``, the CA certificate of the service must be in the
            file that ``PRORL_CA`` names, by default in the system's store.
        token: control token or client key; ``None`` for a service without keys.
        patience_s: seconds for which a request is retried after a 503 with ``Retry-After``. A full queue (429) is the
            service's backpressure, so the client retries without limit.
    """

    def __init__(self, url: str, token: str | None = None, *, patience_s: float = 120.0) -> None:
        self.url = url.rstrip("/")
        self._headers = authorization(token)
        self._patience_s = patience_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        trusted = trusted_authorities() or True
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=trusted),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def submit(self, row: dict[str, Any], **options: Any) -> JobView:
        """Submit a rollout; wait while the queue is full.

        Args:
            row: a Gym dataset row.
            **options: ``id``, ``environment``, ``group``, ``client``, ``run``, ``priority``, ``budgets``,
                ``max_attempts``.

        Raises:
            ApiError: the service refuses the rollout for another reason than a full queue.
        """
        return await self._call(JobView, "POST", "/v1/rollouts", {"row": row, **options})

    async def submit_once(self, row: dict[str, Any], **options: Any) -> JobView:
        """Submit a rollout in one request: a full queue raises an :class:`ApiError` with ``retry_after_s``."""
        return await self._once(JobView, "POST", "/v1/rollouts", {"row": row, **options}, {})

    async def fork(self, rollout_id: str, turn: int | None = None, n: int = 1, **options: Any) -> list[JobView]:
        """Submit rollouts that continue another rollout after one of its turns; wait while the queue is full.

        Args:
            rollout_id: id of the parent, which may have ended.
            turn: turn of the fork; by default the latest with a checkpoint.
            n: number of forks.
            **options: ``ids``, one per fork, ``group``, ``client``, ``priority``, ``budgets``, ``max_attempts``; by
                default the parent's values.

        Raises:
            ApiError: no checkpoint after that turn (409, 410), an environment without checkpoints (422), or another
                refusal. Forks that were accepted before the refused one are cancelled.
        """
        query = {"turn": turn, "n": n}
        return (await self._call(ForkAnswer, "POST", f"{_path(rollout_id)}/fork", options, query)).rollouts

    async def fork_once(self, rollout_id: str, turn: int, *, id: str, **options: Any) -> JobView:
        """Submit one fork in one request, like :meth:`submit_once`; idempotent for the same id."""
        body = {"ids": [id], **options}
        [job] = (await self._once(ForkAnswer, "POST", f"{_path(rollout_id)}/fork", body, {"turn": turn})).rollouts
        return job

    async def get(self, rollout_id: str, wait: float = 0.0, tokens: TokenForm = TokenForm.ITEMS) -> JobView:
        """Return the rollout once it has its outcome, or after ``wait`` seconds, at most 60. ``tokens`` is the form of
        the rollout's tokens."""
        query = {"wait": wait, "tokens": tokens.value}
        return await self._call(JobView, "GET", _path(rollout_id), query=query)

    async def checkpoints(self, rollout_id: str) -> list[int]:
        """Return the turns after which the rollout can be forked."""
        return (await self._call(CheckpointsView, "GET", f"{_path(rollout_id)}/checkpoints")).turns

    async def wait(self, rollout_id: str) -> JobView:
        """Return the rollout once it has its outcome, without a time limit."""
        while not (job := await self.get(rollout_id, MAX_WAIT_S / 2)).state.terminal:
            pass
        return job

    async def list(
        self, *, state: str | None = None, group: str | None = None, limit: int = 100, page: str | None = None
    ) -> Listing:
        """Return up to ``limit`` rollouts (at most 1,000), oldest first. ``page``: field ``next`` of the previous
        page; ``None`` for the first page."""
        query = {"state": state, "group": group, "limit": limit, "from": page}
        return await self._call(Listing, "GET", "/v1/rollouts", query=query)

    async def every(self, *, state: str | None = None, group: str | None = None) -> AsyncIterator[JobView]:
        """Yield all rollouts that the service remembers and that match, oldest first, without their results."""
        page: str | None = None
        while True:
            listing = await self.list(state=state, group=group, limit=_PAGE, page=page)
            for job in listing.rollouts:
                yield job
            if (page := listing.next) is None:
                return

    async def ended(
        self, after: str, *, group: str | None = None, wait: float = 0.0, results: bool = False, limit: int = 100
    ) -> Listing:
        """Return up to ``limit`` ended rollouts behind the cursor ``after``, in order of their end; if there are none,
        wait up to ``wait`` seconds. ``results`` adds each rollout's result."""
        query = {"after": after, "group": group, "wait": wait, "results": str(results).lower(), "limit": limit}
        return await self._call(Listing, "GET", "/v1/rollouts", query=query)

    async def cancel(self, ids: Iterable[str] | None = None, *, group: str | None = None) -> CancelAnswer:
        """Cancel rollouts by id or group; return once their sandboxes are released."""
        body = {"group": group} if ids is None else {"ids": [*ids]}
        return await self._call(CancelAnswer, "POST", "/v1/rollouts/cancel", body)

    async def drain(self, timeout_s: float = 0.0) -> DrainAnswer:
        """Let the service refuse new rollouts; return when all have ended, or after ``timeout_s`` (at most 60)."""
        return await self._call(DrainAnswer, "POST", "/v1/drain", {"timeout_s": timeout_s})

    async def resume(self) -> DrainAnswer:
        """Let the service accept rollouts again."""
        return await self._call(DrainAnswer, "POST", "/v1/resume")

    async def status(self) -> StatusView:
        """Return counts per stage, pool and state."""
        return await self._call(StatusView, "GET", "/status")

    async def events(self, after: str | None = None) -> AsyncIterator[Transition]:
        """Yield transitions as they happen, until the caller stops or the connection ends.

        Args:
            after: ``cursor`` of the last transition seen, ``"0"`` for the whole history, ``None`` for none of it.

        Raises:
            ApiError: transitions behind ``after`` are forgotten, or this reader was too slow.
        """
        from nemo_gym_prorl.rollout.storage.store import Transition

        query, transition = {} if after is None else {"after": after}, TypeAdapter(Transition)
        with self._translated_errors():
            async with self._open.get(f"{self.url}/v1/events", params=query, timeout=_STREAM_TIMEOUT) as response:
                if response.status >= 400:
                    raise ApiError(problem_of_answer(self.url, response.status, await response.read()))
                kind = b""
                async for line in response.content:
                    if line.startswith(b"event: "):
                        kind = line[7:].strip()
                    elif line.startswith(b"data: ") and kind == b"problem":
                        raise ApiError(problem_of_answer(self.url, response.status, line[6:]))
                    elif line.startswith(b"data: "):
                        yield transition.validate_json(line[6:])

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use the client as an async context manager")
        return self._session

    async def _call[M: BaseModel](
        self, model: type[M], method: str, path: str, body: Any = None, query: dict[str, Any] | None = None
    ) -> M:
        """Send a request and return its answer; retry after 429 or 503 with ``Retry-After``."""
        started = time.monotonic()
        while True:
            try:
                return await self._once(model, method, path, body, query or {})
            except ApiError as error:
                delay = error.retry_after_s
                if delay is None or error.problem.status not in (429, 503):
                    raise
                if error.problem.status == 503 and time.monotonic() - started + delay > self._patience_s:
                    raise
            await asyncio.sleep(delay)

    async def _once[M: BaseModel](self, model: type[M], method: str, path: str, body: Any, query: dict[str, Any]) -> M:
        params = {key: value for key, value in query.items() if value is not None}
        data = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json"} if data else {}
        with self._translated_errors():
            url = URL(self.url + path + (f"?{urlencode(params)}" if params else ""), encoded=True)
            async with self._open.request(method, url, data=data, headers=headers, timeout=_TIMEOUT) as response:
                content = await response.read()
            if response.status >= 400:
                raise ApiError(
                    problem_of_answer(self.url, response.status, content),
                    _retry_after(response.headers.get("Retry-After")),
                )
            return model.model_validate(orjson.loads(content))

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except aiohttp.InvalidURL as error:
            raise CallerError(
                f"{self.url!r} is no URL; it must begin with http:// or https://", field="url"
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise InfrastructureError(
                f"no rollout service answers at {self.url}: {error}", kind=FailureKind.TRANSPORT_UNREACHABLE
            ) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise InfrastructureError(
                f"the connection to {self.url} broke: {str(error) or type(error).__name__}",
                kind=FailureKind.TRANSPORT_PEER_DROP,
            ) from error
        except (orjson.JSONDecodeError, ValidationError) as error:
            raise InfrastructureError(
                f"the server at {self.url} is no rollout service of this version",
                kind=FailureKind.TRANSPORT_UNREACHABLE,
            ) from error


def _path(rollout_id: str) -> str:
    return f"/v1/rollouts/{quote(rollout_id, safe='')}"


def _retry_after(header: str | None) -> float | None:
    """Return the clamped seconds of a ``Retry-After``; ``None`` if missing, or no number."""
    try:
        delay = float(header or "nan")
    except ValueError:
        return None
    return None if math.isnan(delay) else min(max(delay, _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S)
