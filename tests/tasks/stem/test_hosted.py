# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Hosted search engines, by a server that speaks as the real ones do."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.tasks.stem.search import hosted
from nemo_gym_prorl.tasks.stem.search.engine import BadQuery, Passage
from nemo_gym_prorl.tasks.stem.search.hosted import DIALECTS, HostedSearch
from nemo_gym_prorl.tasks.stem.search.settings import SearchSettings
from tests.rollout.serving import serve


KEY = "tvly-secret"
TAVILY = {
    "query": "light",
    "follow_up_questions": None,
    "answer": None,
    "images": [],
    "results": [
        {"title": "Light", "url": "https://a.example/1", "content": "It is fast.", "score": 0.9, "raw_content": None},
        {"title": "Nothing", "url": "https://a.example/2", "content": "", "score": 0.5, "raw_content": None},
        {"title": "Lamp", "url": "https://a.example/3", "content": "It is bright.", "score": 0.4, "raw_content": None},
    ],
    "response_time": 1.1,
    "request_id": "1",
}
SERPER = {
    "searchParameters": {"q": "light", "type": "search", "num": 2, "engine": "google"},
    "organic": [
        {"title": "Light", "link": "https://a.example/1", "snippet": "It is fast.", "position": 1},
        {"title": "Lamp", "link": "https://a.example/3", "snippet": "It is bright.", "date": "x", "position": 2},
    ],
    "credits": 1,
}
FOUND = [
    Passage("It is fast.", "Light", "https://a.example/1"),
    Passage("It is bright.", "Lamp", "https://a.example/3"),
]


class Service:
    """Both services on one port. ``answers`` comes in place of the good answer, one after the other."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, Any]] = []
        self.answers: list[Callable[[], Response]] = []

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/tavily", response_model=None)
        async def tavily(request: Request) -> Response:
            good = request.headers.get("Authorization") == f"Bearer {KEY}"
            return await self.answer("tavily", request, good, TAVILY)

        @app.post("/serper", response_model=None)
        async def serper(request: Request) -> Response:
            return await self.answer("serper", request, request.headers.get("X-API-KEY") == KEY, SERPER)

        return app

    async def answer(self, name: str, request: Request, good: bool, found: object) -> Response:
        self.asked.append((name, await request.json()))
        if not good:
            return JSONResponse({"detail": {"error": "Unauthorized: missing or invalid API key."}}, 401)
        return self.answers.pop(0)() if self.answers else JSONResponse(found)

    def engine(self, name: str, key: str = KEY, timeout_s: float = 10.0) -> HostedSearch:
        return HostedSearch(DIALECTS[name], key, url=f"{self.url}/{name}", timeout_s=timeout_s)


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    monkeypatch.setattr(hosted, "PAUSES_S", (0.0, 0.0))
    made = Service()
    async with serve(made.app()) as made.url:
        yield made


@pytest.mark.parametrize(
    ("name", "body"), [("tavily", {"query": "light", "max_results": 20}), ("serper", {"q": "light", "num": 30})]
)
async def test_each_is_spoken_to_in_its_words(service: Service, name: str, body: object) -> None:
    engine = service.engine(name)
    await engine.prepare()
    assert await engine.search("light", 30) == FOUND
    assert await engine.search("light", 1) == FOUND[:1]
    assert service.asked[0] == (name, body)
    service.answers = [lambda: JSONResponse({"searchParameters": {}, "results": []})]
    assert await engine.search("zebra", 5) == []
    await engine.aclose()


@pytest.mark.parametrize("status", [400, 422])
async def test_a_query_that_is_refused_is_the_policys(service: Service, status: int) -> None:
    engine = service.engine("tavily")
    service.answers = [lambda: JSONResponse({"detail": {"error": "Query is too long."}}, status)]
    with pytest.raises(BadQuery):
        await engine.search("light", 5)
    assert len(service.asked) == 1
    await engine.aclose()


TROUBLES: dict[str, tuple[Callable[[], Response], FailureKind]] = {
    "down": (lambda: Response("upstream", status_code=502), FailureKind.PROVIDER_UNAVAILABLE),
    "quota": (lambda: JSONResponse({"detail": "limit"}, 429), FailureKind.PROVIDER_QUOTA_EXHAUSTED),
    "plan": (lambda: JSONResponse({"detail": "limit"}, 432), FailureKind.PROVIDER_QUOTA_EXHAUSTED),
    "moved": (lambda: Response(status_code=307, headers={"Location": "/serper"}), FailureKind.PROVIDER_UNAVAILABLE),
    "no JSON": (lambda: Response("<html>"), FailureKind.PROVIDER_UNAVAILABLE),
    "no object": (lambda: JSONResponse([]), FailureKind.PROVIDER_UNAVAILABLE),
    "no results": (lambda: JSONResponse({"searchParameters": {}}), FailureKind.PROVIDER_UNAVAILABLE),
    "no list": (lambda: JSONResponse({"results": {}}), FailureKind.PROVIDER_UNAVAILABLE),
    "flood": (lambda: Response(b" " * (5 * 2**20)), FailureKind.PROVIDER_UNAVAILABLE),
}


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_what_may_pass_is_tried_again_and_then_ours(service: Service, trouble: str) -> None:
    answer, kind = TROUBLES[trouble]
    engine = service.engine("tavily")
    service.answers = [answer, answer]
    assert await engine.search("light", 5) == FOUND
    service.answers = [answer] * 3
    with pytest.raises(InfrastructureError) as error:
        await engine.search("light", 5)
    assert error.value.kind is kind
    assert KEY not in error.value.reason
    assert len(service.asked) == 6
    await engine.aclose()


async def test_a_wrong_key_is_told_at_once(service: Service) -> None:
    engine = service.engine("serper", key="wrong")
    with pytest.raises(InfrastructureError, match="does not accept the key") as error:
        await engine.search("light", 5)
    assert error.value.field == "search.api_key"
    assert len(service.asked) == 1
    await engine.aclose()


async def test_nobody_there_and_nobody_who_answers(service: Service) -> None:
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    engine = HostedSearch(DIALECTS["tavily"], KEY, url=f"http://127.0.0.1:{port}", timeout_s=0.3)
    with pytest.raises(InfrastructureError) as error:
        await engine.search("light", 5)
    assert error.value.kind is FailureKind.TRANSPORT_TIMEOUT
    await engine.aclose()
    silent.close()
    engine = HostedSearch(DIALECTS["tavily"], KEY, url="http://127.0.0.1:1", timeout_s=5)
    with pytest.raises(InfrastructureError) as error:
        await engine.search("light", 5)
    assert error.value.kind is FailureKind.TRANSPORT_UNREACHABLE
    await engine.aclose()


def test_settings() -> None:
    with pytest.raises(ValidationError, match=r"search.api_key: tavily takes a key"):
        SearchSettings(engine="tavily")
    assert KEY not in repr(SearchSettings(engine="tavily", api_key=KEY))
    assert SearchSettings(engine="serper", api_key=KEY).page.results == 5
