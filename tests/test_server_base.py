# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sessions and defects in our Gym servers, inside the application and in front of it, beside Gym's own middlewares."""

from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from nemo_gym.server_utils import (
    SESSION_ID_KEY,
    BaseRunServerInstanceConfig,
    BaseServerConfig,
    ServerClient,
    SimpleServer,
)
from omegaconf import DictConfig

from nemo_gym_prorl.http.applications import DirectRoutes, wrap_outermost
from nemo_gym_prorl.servers.server_base import ServerBase
from tests.rollout.serving import serve


class Gyms(SimpleServer):
    """A server with Gym's own middlewares."""

    def setup_webserver(self) -> FastAPI:
        app = FastAPI()
        self.setup_session_middleware(app)
        app.post("/who")(self.who)
        app.post("/defect")(self.defect)
        app.post("/half")(self.half)
        self.setup_exception_middleware(app)
        return app

    async def who(self, request: Request) -> JSONResponse:
        return JSONResponse(request.session[SESSION_ID_KEY])

    async def defect(self, request: Request) -> JSONResponse:
        raise KeyError("lost")

    async def half(self, request: Request) -> StreamingResponse:
        async def parts() -> Any:
            yield b"half"
            raise KeyError("lost")

        return StreamingResponse(parts())


class Ours(ServerBase, Gyms):
    """The same server with ours, and a route in front of the application."""

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        wrap_outermost(app, lambda rest: DirectRoutes(rest, {"/direct": self.who}, self.in_session))
        return app


def test_gym_connects_no_server_of_ours_to_ray() -> None:
    assert Ours.ray_enabled is False


def application() -> FastAPI:
    config = BaseRunServerInstanceConfig(host="127.0.0.1", port=0, entrypoint="app.py", name="server", domain="other")
    head = BaseServerConfig(host="127.0.0.1", port=0)
    return Ours(
        config=config, server_client=ServerClient(head_server_config=head, global_config_dict=DictConfig({}))
    ).setup_webserver()


async def test_a_session_is_its_cookie_which_each_answer_repeats() -> None:
    """Gym's agents keep only the cookies of the latest answer."""
    paths = ("/who", "/direct", "/who")
    async with serve(application()) as url, aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http:
        told = []
        for first in paths:
            cookies: Any = {}
            for path in (first, *paths):
                async with http.post(url + path, cookies=cookies) as answer:
                    told.append((first, await answer.json()))
                    cookies = {name: morsel.value for name, morsel in answer.cookies.items()}
                    assert [*cookies] == ["Ours___server"]
                    assert answer.cookies["Ours___server"]["max-age"]
        async with http.post(url + paths[1], cookies={"Ours___server": "forged"}) as answer:
            told.append(("forged", await answer.json()))
    sessions = [session for _, session in told]
    size = len(paths) + 1
    assert all(len(set(sessions[at : at + size])) == 1 for at in range(0, size * len(paths), size))
    assert len(set(sessions)) == len(paths) + 1


async def test_a_defect_is_an_answer() -> None:
    async with serve(application()) as url, aiohttp.ClientSession() as http:
        async with http.post(f"{url}/defect") as answer:
            assert (answer.status, answer.content_type) == (500, "application/problem+json")
            assert (await answer.json())["detail"] == "KeyError('lost')"
        with pytest.raises(aiohttp.ClientError):
            async with http.post(f"{url}/half") as answer:
                await answer.read()
