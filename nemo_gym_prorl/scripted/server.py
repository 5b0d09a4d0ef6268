# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A model server without a model: vLLM's wire protocol over scripted turns.

Machines without a GPU and without weights still have to show real rollouts: real servers, sandboxes, tool calls,
token ids and rewards. This server plays the part of the inference endpoint. Each request brings the script of its
rollout in ``metadata.script`` (Gym's model server forwards ``responses_create_params.metadata`` unchanged), so one
server serves any number of different rollouts and keeps no state between requests.

It never pretends: it is served as ``prorl-scripted-policy``, every answer carries that name as
``system_fingerprint``, and without a script it says so.

A request costs one JSON parse, one ``bytes`` join and one JSON dump, without response models.

Run it with ``prorl scripted --port 8000``, or in-process with :func:`serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.scripted.policy import BadRequest, ScriptedAnswer, ScriptedConfig, ScriptedPolicy
from nemo_gym_prorl.scripted.text import MODEL_NAME, ScriptError
from nemo_gym_prorl.serving.applications import served


def create_app(config: ScriptedConfig | None = None) -> FastAPI:
    """The web application of one scripted policy."""
    policy = ScriptedPolicy(config or ScriptedConfig())
    app = FastAPI(title=f"{MODEL_NAME} (no language model)", docs_url=None, redoc_url=None, openapi_url=None)

    async def health(request: Request) -> Response:
        return Response()

    async def models(request: Request) -> Response:
        return _json(policy.models())

    # Plain routes: FastAPI's argument machinery would cost more than the rest of the request.
    app.add_route("/health", health, methods=["GET"])
    app.add_route("/v1/models", models, methods=["GET"])
    app.add_route("/v1/chat/completions", _endpoint(policy.chat_completions), methods=["POST"])
    app.add_route("/v1/completions", _endpoint(policy.completions), methods=["POST"])
    app.add_route("/tokenize", _endpoint(policy.tokenize), methods=["POST"])
    return app


def _endpoint(handle: Callable[[dict[str, Any]], ScriptedAnswer]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            body = orjson.loads(await request.body())
            if not isinstance(body, dict):
                raise BadRequest("the body must be a JSON object")
            answer = handle(body)
            if answer.delay_s and await _hangs_up(request, answer.delay_s):
                return Response(status_code=499)  # as vLLM does: a request whose caller is gone is dropped
            return _json(answer.body)
        except orjson.JSONDecodeError as error:
            return _error(BadRequest(f"the body is not JSON: {error}"))
        except ScriptError as error:
            return _error(BadRequest(str(error)))
        except BadRequest as error:
            return _error(error)

    return endpoint


async def _hangs_up(request: Request, within_s: float) -> bool:
    """Wait ``within_s``, or less if the caller goes away; whether it did. The body must have been read."""
    try:
        async with asyncio.timeout(within_s):
            while (await request.receive())["type"] != "http.disconnect":
                pass
    except TimeoutError:
        return False
    return True


def _json(data: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(data), status_code=status, media_type="application/json")


def _error(error: BadRequest) -> Response:
    details = {"message": str(error), "type": error.kind, "param": None, "code": error.status}
    return _json({"error": details}, error.status)


@contextlib.asynccontextmanager
async def serve(config: ScriptedConfig | None = None, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Run the policy inside the current event loop.

    Args:
        config: how it behaves.
        host: address to listen on; loopback unless told otherwise.
        port: TCP port; 0 takes a free one.

    Yields:
        The base URL for clients, ending in ``/v1``.

    Raises:
        OSError: the port is taken.
    """
    async with served(create_app(config), host, port) as url:
        yield f"{url}/v1"


async def run(config: ScriptedConfig, host: str, port: int) -> None:
    """Serve until it is cancelled, for ``prorl scripted``.

    Raises:
        InfrastructureError: the address can't be listened on.
    """
    try:
        async with serve(config, host=host, port=port) as url:
            print(f"Scripted policy {config.model} (no language model) at {url}", flush=True)
            await asyncio.Event().wait()
    except OSError as error:
        raise InfrastructureError(f"can't listen on {host}:{port}: {error.strerror}; try another --port") from error
