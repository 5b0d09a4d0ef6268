# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym resources server with a faulty verifier; the row selects the fault."""

import asyncio
from typing import Any

from fastapi import Body, FastAPI, Response
from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer


ANSWERS = {
    "error": (500, '{"reward": 0.0}'),
    "no JSON": (200, "<html>"),
    "no object": (200, "[0.0]"),
    "no reward": (200, "{}"),
    "no number": (200, '{"reward": "0"}'),
    "truth": (200, '{"reward": false}'),
}


class FaultyServer(SimpleResourcesServer):
    """Server whose ``/verify`` fails, hangs or answers malformed data."""

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.router.routes = [route for route in app.router.routes if getattr(route, "path", None) != "/verify"]
        app.post("/verify")(self.answer)
        return app

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        raise NotImplementedError

    async def answer(self, body: dict[str, Any] = Body()) -> Response:
        if body["fault"] == "hangs":
            await asyncio.sleep(3600)
        status, content = ANSWERS[body["fault"]]
        return Response(content, status, media_type="application/json")


if __name__ == "__main__":
    FaultyServer.run_webserver()
