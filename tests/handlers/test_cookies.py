# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout's cookies at its servers: sent back as they were set."""

import pytest
from fastapi import FastAPI, Request, Response

from nemo_gym_prorl.handlers.gym_http import Address, CookieJar, GymServer, HttpClient
from tests.rollout.serving import serve


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["session=s1; path=/; httponly; samesite=lax"], {"session": "s1"}),
        (["a=1", "b=eyJ4IjoxfQ==.Zm9v.sig=; Max-Age=60"], {"a": "1", "b": "eyJ4IjoxfQ==.Zm9v.sig="}),
        (["a=1; Expires=Wed, 01 Jan 2031 00:00:00 GMT", "a=2"], {"a": "2"}),
        (['quoted="x;y"; path=/', "plain=1"], {"quoted": "x;y", "plain": "1"}),
        (["empty=; path=/"], {"empty": ""}),
        (["nameless", "=value"], {}),
    ],
)
async def test_a_jar_takes_what_was_set(given: list[str], kept: dict[str, str]) -> None:
    app = FastAPI()
    sent: list[str | None] = []

    @app.post("/")
    async def route(request: Request) -> Response:
        sent.append(request.headers.get("cookie"))
        response = Response()
        for cookie in given:
            response.headers.append("Set-Cookie", cookie)
        return response

    http, jar = HttpClient(), CookieJar()
    async with serve(app) as url:
        server = GymServer("environment", Address(url), http)
        await server.post("/", {}, jar)
        await server.post("/", {}, jar)
        await http.close()
    assert jar.values == kept
    assert sent == [None, jar.header().get("Cookie")]
