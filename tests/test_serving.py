# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Parts that all servers share: keys, addresses to listen on, direct routes, shutdown, limits of open files."""

import asyncio
import errno
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI, Request, Response

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, Origin, Stage, classify
from nemo_gym_prorl.http.applications import DirectRoutes, served, wrap_outermost
from nemo_gym_prorl.http.key_guard import KeyGuard, check_exposure
from nemo_gym_prorl.http.keys import authorization
from nemo_gym_prorl.http.problems import ProblemError
from nemo_gym_prorl.http.server_process import open_files_needed
from tests.rollout.serving import serve


@pytest.mark.parametrize(
    ("hosts", "key", "refusal"),
    [
        ((None, "localhost", "127.8.9.10", "::1"), None, None),
        (("0.0.0.0", "::", "127.0.0.1.example.org"), None, "control_token: the server would listen on"),
        (("0.0.0.0", "::", "127.0.0.1.example.org"), "s3cret", None),
        (("127.0.0.1",), "", "control_token"),
        (("127.0.0.1",), "schlüssel", "control_token"),
    ],
    ids=["loopback", "reachable", "reachable with a key", "an empty key", "a key that no header carries"],
)
def test_what_others_can_reach_needs_a_key(
    hosts: tuple[str | None, ...], key: str | None, refusal: str | None
) -> None:
    for host in hosts:
        with pytest.raises(CallerError, match=refusal) if refusal else nullcontext():
            check_exposure(host, key)


async def test_every_route_but_the_pulse_needs_the_key() -> None:
    app = FastAPI()
    app.add_middleware(KeyGuard, key="s3cret")
    for path in ("/healthz", "/run", "/deep/route"):
        app.get(path)(lambda: "ok")
    async with serve(app) as url, aiohttp.ClientSession() as http:
        wrong = [{}, authorization("other"), {"Authorization": "s3cret"}, {"Authorization": "Bearer s3cret\xfc"}]
        for headers in wrong:
            for path in ("/run", "/deep/route", "/openapi.json", "/no/route"):
                async with http.get(url + path, headers=headers) as response:
                    assert response.status == 401
                    assert response.content_type == "application/problem+json"
                    assert response.headers["WWW-Authenticate"] == "Bearer"
            async with http.get(url + "/healthz", headers=headers) as response:
                assert response.status == 200
        async with http.get(url + "/run", headers=authorization("s3cret")) as response:
            assert response.status == 200


async def echo(request: Request) -> Response:
    return Response(await request.body(), media_type="application/json")


def application(route: Any) -> FastAPI:
    app = FastAPI()
    wrap_outermost(app, lambda rest: DirectRoutes(rest, {"/run": route}))

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


@pytest.mark.parametrize(("path", "printed"), [("/waits", ""), ("/fails", "ZeroDivisionError")])
async def test_the_end_cancels_what_waits_without_a_word(
    path: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app, begun = FastAPI(), asyncio.Event()

    @app.get("/waits")
    async def waits() -> None:
        begun.set()
        await asyncio.sleep(600)

    @app.get("/fails")
    async def fails() -> None:
        begun.set()
        raise ZeroDivisionError

    async with aiohttp.ClientSession() as http:
        async with served(app) as url:
            request = asyncio.create_task(http.get(url + path))
            await begun.wait()
        await asyncio.gather(request, return_exceptions=True)
    said = capsys.readouterr().err
    assert printed in said if printed else said == "", said


def test_a_server_raises_its_soft_limit_to_the_hard_one() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))\n"
        "from nemo_gym_prorl.http import server_process as o\n"
        "print(o.raise_open_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["200", "(200,", "200)"]
    assert open_files_needed(1000) > 4000


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_our_own_want_of_descriptors_is_named_as_such(number: int) -> None:
    failure = classify(OSError(number, os.strerror(number)), Stage.INIT)
    assert failure.kind is FailureKind.PROVIDER_QUOTA_EXHAUSTED
    assert failure.origin is Origin.INFRASTRUCTURE
    assert "ulimit -n" in failure.reason
