# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A Gym resources server without sandboxes, of Gym's own base class; a row may ask it to fail."""

from collections import Counter
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import BaseModel, ConfigDict


class Trouble(BaseModel):
    """HTTP statuses with which to fail: always, or ``times`` times for all rows that have the ``name``."""

    seed: int | None = None
    verify: int | None = None
    times: int | None = None
    name: str = ""


class SeedRequest(BaseSeedSessionRequest):
    model_config = ConfigDict(extra="allow")

    trouble: Trouble = Trouble()


class VerifyRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")

    trouble: Trouble = Trouble()
    traces: list[dict[str, Any]] | None = None


class VerifyResponse(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")


class AddRequest(BaseModel):
    number: int


class Counting(SimpleResourcesServer):
    """Adds numbers up; the reward is the sum over ten."""

    config: BaseResourcesServerConfig

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        self._sums: dict[str, int] = {}
        self._failed = Counter[str]()
        app.post("/add")(self.add)
        return app

    async def seed_session(self, request: Request, body: SeedRequest) -> BaseSeedSessionResponse:
        self._fail(body.trouble, body.trouble.seed)
        self._sums[request.session[SESSION_ID_KEY]] = 0
        return BaseSeedSessionResponse()

    async def add(self, request: Request, body: AddRequest) -> dict[str, Any]:
        session = request.session[SESSION_ID_KEY]
        self._sums[session] += body.number
        return {"sum": self._sums[session]}

    async def verify(self, request: Request, body: VerifyRequest) -> VerifyResponse:
        self._fail(body.trouble, body.trouble.verify)
        total = self._sums.pop(request.session[SESSION_ID_KEY])
        traced = {"training_traces": {"traces": body.traces}} if body.traces else {}
        return VerifyResponse(**body.model_dump(), **traced, reward=total / 10)

    def _fail(self, trouble: Trouble, status: int | None) -> None:
        if status is None or (trouble.times is not None and self._failed[trouble.name] >= trouble.times):
            return
        self._failed[trouble.name] += 1
        raise HTTPException(status, "as the row asks")


if __name__ == "__main__":
    Counting.run_webserver()
