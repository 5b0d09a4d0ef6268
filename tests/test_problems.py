# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Errors as problem documents, on applications as Gym builds and changes them."""

import json
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI, Request
from fastapi.exception_handlers import request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
from pydantic import BaseModel, ConfigDict, ValidationError

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.http.problem_document import field_errors, in_words
from nemo_gym_prorl.http.problems import MEDIA_TYPE, Declared, ProblemError, add_problem_handlers
from tests.rollout.serving import serve


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    number: int


def application() -> FastAPI:
    """As Gym's ``run_webserver`` leaves it: its own handler for invalid bodies comes after ours."""
    app = FastAPI()
    app.post("/typed")(_typed)
    app.post("/raw")(_raw)
    add_problem_handlers(app, {"/raw": Declared((500,), Body)})

    @app.exception_handler(RequestValidationError)
    async def gyms(request: Request, error: RequestValidationError) -> Any:
        json.dumps(error.errors(), indent=4)  # fails on a body of bytes, and so answers 500
        return await request_validation_exception_handler(request, error)

    return app


async def _typed(body: Body) -> str:
    return "ok"


async def _raw(request: Request) -> str:
    raise InfrastructureError("the sandbox is gone")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "title"),
    [
        ("POST", "/typed", b"{}", 422, "Invalid request"),
        ("POST", "/typed", b"\xff", 422, "Invalid request"),
        ("POST", "/typed", b"[" * 3000 + b"]" * 3000, 422, "Invalid request"),
        ("POST", "/typed", b'{"number": 1, "\\ud800": 1}', 422, "Invalid request"),
        ("POST", "/typed", json.dumps({str(n): 1 for n in range(1000)}).encode(), 422, "Invalid request"),
        ("GET", "/typed", b"", 405, "Method Not Allowed"),
        ("POST", "/nowhere", b"", 404, "Not Found"),
        ("POST", "/raw", b"", 500, "Provider unavailable"),
    ],
)
async def test_every_error_is_a_problem_document(method: str, path: str, body: bytes, status: int, title: str) -> None:
    async with serve(application()) as url, aiohttp.ClientSession() as http:
        headers = {"Content-Type": "application/json"}
        async with http.request(method, url + path, data=body, headers=headers) as response:
            content = await response.read()
    problem = json.loads(content)
    assert (response.status, response.content_type) == (status, MEDIA_TYPE)
    assert (problem["status"], problem["title"]) == (status, title)
    assert problem["detail"]
    assert problem["type"].startswith("urn:nemo-gym-prorl:problem:")
    assert len(content) < 5_000, "whoever sends a thousand wrong fields is told of some"


@pytest.mark.parametrize(
    ("content_type", "body", "told"),
    [
        ("application/json", b"", "body: Field required"),
        ("application/json", b"[1]", "body: must be an object"),
        ("application/x-www-form-urlencoded", b"{}", "body: must be JSON; send Content-Type: application/json"),
        ("text/plain", b'{"number": 1}', "body: must be JSON; send Content-Type: application/json"),
    ],
)
async def test_a_body_that_is_not_read_is_told_why(content_type: str, body: bytes, told: str) -> None:
    headers = {"Content-Type": content_type}
    async with serve(application()) as url, aiohttp.ClientSession() as http:
        response = await http.post(f"{url}/typed", data=body, headers=headers)
        assert (response.status, (await response.json(content_type=None))["detail"]) == (422, told)


def test_the_document_says_so() -> None:
    document = application().openapi()
    problem = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    typed, raw = (document["paths"][path]["post"] for path in ("/typed", "/raw"))
    assert typed["responses"]["422"]["content"] == problem
    assert {status: answer["content"] for status, answer in raw["responses"].items() if status != "200"} == {
        "401": problem, "422": problem, "500": problem,
    }  # fmt: skip
    assert raw["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Body"}
    assert set(document["components"]["schemas"]) == {"Body", "Problem"}
    assert set(document["components"]["schemas"]["Problem"]["properties"]) == {
        "type", "title", "status", "detail", "errors",
    }  # fmt: skip


def test_a_problem_quotes_what_is_no_text() -> None:
    error = ProblemError(422, "invalid-request", "no \ud800", errors=[{"field": "\ud800", "message": "\udfff"}])
    assert json.loads(bytes(error.response().body))["detail"] == "no \\ud800"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"input": [{"role": "user"}]}, "input.0.content: Field required"),
        ({"input": [{"role": "us", "content": "x"}]}, "input.0.role: Input should be 'user', 'assistant', 'system'"),
        ({"input": "x", "tools": [{"type": "func", "name": "x"}]}, "tools.0.parameters: Field required; "),
        ({"input": "x", "tool_choice": "often"}, "tool_choice: Input should be 'none', 'auto' or 'required'; tool_"),
        ({"input": "x", "Aa": 1, "Bb": 1}, "Aa: Extra inputs are not permitted; Bb: Extra inputs are not permitted"),
    ],
)
def test_of_what_a_value_may_be_one_is_told(body: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as refused:
        NeMoGymResponseCreateParamsNonStreaming.model_validate(body)
    said = in_words(field_errors(refused.value.errors()))
    assert said.startswith(told), said
    assert len(said) < 200
