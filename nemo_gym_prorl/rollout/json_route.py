# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Routes that read JSON by the rules of :mod:`.rows`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.rows import read_json
from nemo_gym_prorl.serving.problems import ProblemRoute, problem_of


class JsonRoute(ProblemRoute):
    """A route that reads its body by :func:`read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler, for a request that reads its JSON strictly."""
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await inner(_JsonRequest(request.scope, request.receive))

        return handle


class _JsonRequest(Request):
    async def json(self) -> Any:
        try:
            return read_json(await self.body())
        except CallerError as error:
            raise problem_of(error) from None  # FastAPI lets pass what is an HTTPException, all else is 400 to it
