# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rollout services without sockets, for virtual time: pipeline and routes are real, connections are calls.

A machine dies (connections break, new ones are refused, its rollouts are forgotten), freezes (no request and no answer
arrives, connections stay open), has a proxy that answers in its place, or drains, each for a while or for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Self, override
from urllib.parse import urlencode

import aiohttp
import httpx
import orjson
from pydantic import BaseModel

from nemo_gym_prorl.http.problem_document import problem_of_answer
from nemo_gym_prorl.rollout.api import client as client_module
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.settings import PipelineSettings
from nemo_gym_prorl.rollout.storage.store import Transition
from tests.dapo.test_runner import SETTINGS, Scorer
from tests.rollout.handlers import Bench, application


READ_S = 180.0
"""Seconds that :data:`.client._TIMEOUT` allows a response."""
LATENCY_S = 0.001


class Machine:
    """Rollout service at one address.

    Attributes:
        answers: path prefix and status of a proxy that answers instead of the service; ``None`` without a proxy.
    """

    def __init__(self, name: str, settings: PipelineSettings = SETTINGS) -> None:
        self.url, self._settings = f"http://{name}:1", settings
        self.answers: tuple[str, int] | None = None
        self.up = self._frozen = False
        self._broken = asyncio.Event()
        self.begin()

    def begin(self) -> None:
        """Restart without memory of rollouts."""
        self.handler = Scorer()
        self.pipeline: Pipeline = Bench(self._settings, self.handler).pipeline()
        routes = httpx.ASGITransport(application(self.pipeline))
        self._http = httpx.AsyncClient(transport=routes, base_url=self.url, trust_env=False)
        self.up, self._broken = True, asyncio.Event()

    async def die(self) -> None:
        """Break connections and forget all rollouts."""
        self.up = False
        self._broken.set()
        await self.pipeline.close()

    async def fail(self, how: str, seconds: float | None) -> None:
        """Fail as ``how`` says, and recover after ``seconds``, or never."""
        match how:
            case "dies":
                await self.die()
            case "freezes":
                self._frozen = True
            case "drains":
                self.pipeline.draining = True
            case _:
                path, status = how.split()
                self.answers = path, int(status)
        if seconds is None:
            return
        await asyncio.sleep(seconds)
        self._frozen, self.answers, self.pipeline.draining = False, None, False
        if not self.up:
            self.begin()

    async def request(self, method: str, path: str, query: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and content of a response."""
        if not self.up:
            raise aiohttp.ServerDisconnectedError
        async with asyncio.timeout(READ_S):
            call = asyncio.create_task(self._call(method, path, query, body))
            cut = asyncio.create_task(self._broken.wait())
            try:
                await asyncio.wait({call, cut}, return_when=asyncio.FIRST_COMPLETED)
                if not call.done():
                    raise aiohttp.ServerDisconnectedError
                return call.result()
            finally:
                for task in (call, cut):
                    task.cancel()

    async def events(self) -> AsyncIterator[Transition]:
        """Yield transitions of rollouts until the connection breaks."""
        if not self.up:
            raise aiohttp.ServerDisconnectedError
        seen = self.pipeline.store.events(None)
        while self.up and not self._frozen:
            try:
                async with asyncio.timeout(15.0):
                    transition = await anext(seen)
            except TimeoutError:
                return
            yield transition

    async def _call(self, method: str, path: str, query: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if self._frozen:
            await asyncio.Event().wait()
        if self.answers is not None and path.startswith(self.answers[0]):
            return self.answers[1], {}, b""
        headers = {"Content-Type": "application/json"} if body else {}
        answer = await self._http.request(method, f"{path}?{query}", content=body, headers=headers)
        await asyncio.sleep(LATENCY_S)
        if self._frozen:
            await asyncio.Event().wait()
        return answer.status_code, dict(answer.headers), answer.content


class Line(RolloutClient):
    """Client whose connections are calls."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.url)
        self._machine = machine

    @override
    async def __aenter__(self) -> Self:
        return self

    @override
    async def _once[M: BaseModel](self, model: type[M], method: str, path: str, body: Any, query: dict[str, Any]) -> M:
        params = urlencode({key: value for key, value in query.items() if value is not None})
        with self._translated_errors():
            sent = b"" if body is None else orjson.dumps(body)
            status, headers, content = await self._machine.request(method, path, params, sent)
            if status >= 400:
                pause = client_module._retry_after(headers.get("retry-after"))
                raise ApiError(problem_of_answer(self.url, status, content), pause)
            return model.model_validate(orjson.loads(content))

    @override
    async def events(self, after: str | None = None) -> AsyncIterator[Transition]:
        with self._translated_errors():
            async for transition in self._machine.events():
                yield transition
