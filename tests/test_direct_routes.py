# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Routes in front of an application: they answer as its own would, and the application gets the rest."""

from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI, Request, Response

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.serving.access import KeyGuard
from nemo_gym_prorl.serving.applications import DirectRoutes, put_in_front
from nemo_gym_prorl.serving.keys import authorization
from nemo_gym_prorl.serving.problems import ProblemError
from tests.rollout.serving import serve


async def echo(request: Request) -> Response:
    return Response(await request.body(), media_type="application/json")


def application(route: Any, key: str | None = None) -> FastAPI:
    app = FastAPI()
    put_in_front(app, lambda rest: KeyGuard(DirectRoutes(rest, {"/run": route}), key))

    @app.middleware("http")  # as Gym adds one of its own when it has got the application
    async def late(request: Request, call_next: Any) -> Response:
        answer: Response = await call_next(request)
        answer.headers["X-Went-Through"] = "all"
        return answer

    for path in ("/run", "/other"):
        app.get(path)(lambda: "the application")
        app.post(path)(lambda: "the application")
    return app


async def test_only_post_to_the_route_is_taken() -> None:
    async with serve(application(echo)) as url, aiohttp.ClientSession() as http:
        async with http.post(f"{url}/run", data=b'{"a": 1}') as answer:
            assert (await answer.read(), answer.headers.get("X-Went-Through")) == (b'{"a": 1}', None)
        for method, path in (("GET", "/run"), ("POST", "/other"), ("POST", "/run/")):
            async with http.request(method, f"{url}{path}", allow_redirects=False) as answer:
                assert answer.headers["X-Went-Through"] == "all"
        async with http.get(f"{url}/openapi.json") as answer:
            assert "post" in (await answer.json())["paths"]["/run"]


@pytest.mark.parametrize(
    ("error", "status", "end"),
    [
        (CallerError("is wrong", field="row.a"), 422, ":invalid-request"),
        (ProblemError(409, "id-conflict", "taken"), 409, ":id-conflict"),
        (InfrastructureError("gone", kind=FailureKind.SESSION_LOST), 500, ":session_lost"),
        (KeyError("a defect"), 500, ":http-500"),
    ],
)
async def test_errors_are_problem_documents(error: Exception, status: int, end: str) -> None:
    async def failing(request: Request) -> Response:
        raise error

    async with (
        serve(application(failing)) as url,
        aiohttp.ClientSession() as http,
        http.post(f"{url}/run", data=b"{}") as answer,
    ):
        assert answer.status == status
        assert answer.content_type == "application/problem+json"
        assert (await answer.json())["type"].endswith(end)


async def test_a_guard_stands_before_the_routes_and_the_application() -> None:
    async with serve(application(echo, key="s3cret")) as url, aiohttp.ClientSession() as http:
        for path in ("/run", "/other"):
            async with http.post(f"{url}{path}", data=b"{}") as answer:
                assert answer.status == 401
            async with http.post(f"{url}{path}", data=b"{}", headers=authorization("s3cret")) as answer:
                assert answer.status == 200
