# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tavily's search engine, with a server that has the same protocol."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.tasks.stem import search
from nemo_gym_prorl.tasks.stem.search import BadQuery, Passage, TavilySearch
from tests.rollout.serving import serve


KEY = "tvly-secret"
TAVILY = {
    "query": "light",
    "results": [
        {"title": "Light", "url": "https://a.example/1", "content": "It is fast.", "score": 0.9, "raw_content": None},
        {"title": "Nothing", "url": "https://a.example/2", "content": "", "score": 0.5, "raw_content": None},
        {"title": "Lamp", "url": "https://a.example/3", "content": "It is bright.", "score": 0.4, "raw_content": None},
    ],
}
FOUND = [
    Passage("It is fast.", "Light", "https://a.example/1"),
    Passage("It is bright.", "Lamp", "https://a.example/3"),
]


class Service:
    """Search service; ``answers`` replace the regular responses in turn."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[Any] = []
        self.answers: list[Callable[[], Response]] = []

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/search", response_model=None)
        async def search(request: Request) -> Response:
            self.asked.append(await request.json())
            if request.headers.get("Authorization") != f"Bearer {KEY}":
                return JSONResponse({"detail": {"error": "Unauthorized: missing or invalid API key."}}, 401)
            return self.answers.pop(0)() if self.answers else JSONResponse(TAVILY)

        return app

    def engine(self, key: str = KEY) -> TavilySearch:
        return TavilySearch(key, url=f"{self.url}/search", timeout_s=10.0)


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    monkeypatch.setattr(search, "PAUSES_S", (0.0, 0.0))
    made = Service()
    async with serve(made.app()) as made.url:
        yield made


async def test_it_is_spoken_to_in_its_words(service: Service) -> None:
    engine = service.engine()
    await engine.prepare()
    assert await engine.search("light", 30) == FOUND
    assert await engine.search("light", 1) == FOUND[:1]
    assert service.asked[0] == {"query": "light", "max_results": 20}
    service.answers = [lambda: JSONResponse({"results": []})]
    assert await engine.search("zebra", 5) == []
    await engine.aclose()


@pytest.mark.parametrize("status", [400, 422])
async def test_a_query_that_is_refused_is_the_policys(service: Service, status: int) -> None:
    engine = service.engine()
    service.answers = [lambda: JSONResponse({"detail": {"error": "Query is too long."}}, status)]
    with pytest.raises(BadQuery):
        await engine.search("light", 5)
    assert len(service.asked) == 1
    await engine.aclose()


TROUBLES: dict[str, tuple[Callable[[], Response], FailureKind]] = {
    "down": (lambda: Response("upstream", status_code=502), FailureKind.PROVIDER_UNAVAILABLE),
    "plan": (lambda: JSONResponse({"detail": "limit"}, 432), FailureKind.PROVIDER_QUOTA_EXHAUSTED),
    "no JSON": (lambda: Response("<html>"), FailureKind.PROVIDER_UNAVAILABLE),
    "no list": (lambda: JSONResponse({"results": {}}), FailureKind.PROVIDER_UNAVAILABLE),
}


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_what_may_pass_is_tried_again_and_then_ours(service: Service, trouble: str) -> None:
    answer, kind = TROUBLES[trouble]
    engine = service.engine()
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
    engine = service.engine(key="wrong")
    with pytest.raises(InfrastructureError, match="refuses the key") as error:
        await engine.search("light", 5)
    assert error.value.field == "search.api_key"
    assert len(service.asked) == 1
    await engine.aclose()
