# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What ``prorl serve`` says beforehand of an endpoint without which no rollout could sample."""

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from nemo_gym_prorl.commands.serve import policy_trouble
from nemo_gym_prorl.scripted.server import ScriptedConfig
from nemo_gym_prorl.scripted.server import serve as serve_scripted
from nemo_gym_prorl.scripted.text import MODEL_NAME
from tests.rollout.serving import serve


async def test_the_scripted_policy_is_known_by_its_name() -> None:
    async with serve_scripted(ScriptedConfig()) as url:
        assert await policy_trouble(url, MODEL_NAME, "none") is None
        assert await policy_trouble(url, "another", "none") == f"{url} serves {MODEL_NAME}, not another"


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (JSONResponse({"data": [{"id": "qwen"}]}), None),
        (PlainTextResponse("no list"), None),
        (JSONResponse([1]), None),
        (Response(status_code=404), None),
        (Response(status_code=401), "refuses the key"),
    ],
)
async def test_only_what_is_certain_is_told(answer: Response, trouble: str | None) -> None:
    app = FastAPI()

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        assert request.headers["authorization"] == "Bearer key"
        return answer

    async with serve(app) as url:
        told = await policy_trouble(f"{url}/v1", "qwen", "key")
        assert (told is None) if trouble is None else (told is not None and trouble in told)


async def test_nobody_at_the_address() -> None:
    assert "nothing answers at http://127.0.0.1:9/v1/models" in str(
        await policy_trouble("http://127.0.0.1:9/v1", "qwen", "key")
    )
