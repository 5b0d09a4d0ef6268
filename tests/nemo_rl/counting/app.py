# SPDX-License-Identifier: Apache-2.0
"""A Gym resources server without sandboxes, of Gym's own base class; a row may ask it to fail."""

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
    """HTTP statuses with which to fail."""

    seed: int | None = None
    verify: int | None = None


class SeedRequest(BaseSeedSessionRequest):
    model_config = ConfigDict(extra="allow")

    trouble: Trouble = Trouble()


class VerifyRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")

    trouble: Trouble = Trouble()


class AddRequest(BaseModel):
    number: int


class Counting(SimpleResourcesServer):
    """Adds numbers up; the reward is the sum over ten."""

    config: BaseResourcesServerConfig

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        self._sums: dict[str, int] = {}
        app.post("/add")(self.add)
        return app

    async def seed_session(self, request: Request, body: SeedRequest) -> BaseSeedSessionResponse:
        _fail(body.trouble.seed)
        self._sums[request.session[SESSION_ID_KEY]] = 0
        return BaseSeedSessionResponse()

    async def add(self, request: Request, body: AddRequest) -> dict[str, Any]:
        session = request.session[SESSION_ID_KEY]
        self._sums[session] += body.number
        return {"sum": self._sums[session]}

    async def verify(self, request: Request, body: VerifyRequest) -> BaseVerifyResponse:
        _fail(body.trouble.verify)
        total = self._sums.pop(request.session[SESSION_ID_KEY])
        return BaseVerifyResponse(**body.model_dump(), reward=total / 10)


def _fail(status: int | None) -> None:
    if status is not None:
        raise HTTPException(status, "as the row asks")


if __name__ == "__main__":
    Counting.run_webserver()
