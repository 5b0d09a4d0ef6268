# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Scripted inference endpoint: vLLM's HTTP protocol over scripted turns, without a model.

Each request carries the script of its rollout in ``metadata.script``; Gym's model server forwards
``responses_create_params.metadata`` unchanged. The server is stateless, so one server serves any number of rollouts.

Every answer has ``prorl-scripted-policy`` as ``system_fingerprint``, and by default as the model's name. The answer to
a request without a script reports the missing script.

Start the server with ``prorl scripted --port 8000``, or in-process with :func:`serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response

from nemo_gym_prorl.cli.scripted import text
from nemo_gym_prorl.cli.scripted.text import MODEL_NAME, NO_SCRIPT_TURN, Script, ScriptError, ScriptTurn
from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.http.applications import served


@dataclass(frozen=True, slots=True)
class ScriptedConfig:
    """Settings of the scripted policy.

    Attributes:
        model: name of the model; requests for other models get a 404, as from vLLM.
        max_model_len: context window in tokens; a token is a byte.
    """

    model: str = MODEL_NAME
    max_model_len: int = 262_144


type Answer = tuple[dict[str, Any], float]
"""Body of a 200 response, and the delay before the response in seconds."""


class BadRequest(Exception):
    """Invalid request, with the status that vLLM returns for it."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class ScriptedPolicy:
    """Stateless handlers from request body to :data:`Answer`; invalid requests raise BadRequest or ScriptError."""

    def __init__(self, config: ScriptedConfig) -> None:
        self.config = config
        generator = random.Random(0)
        # A token's log-probability only depends on the token and its position, so answers are reproducible.
        self._log_probs = [round(math.log(1.0 - generator.random() ** 3), 6) for _ in range(4096)]

    def chat_completions(self, body: dict[str, Any]) -> Answer:
        """Answer ``POST /v1/chat/completions``; streaming and several choices are refused."""
        messages = _messages(body)
        prompt = text.render_prompt(messages, body.get("tools"))
        script = _script(body)
        index = text.next_turn(messages)
        max_tokens = _first(body, "max_completion_tokens", "max_tokens")
        generated, complete, turn = self._generate(body, prompt, script, index, max_tokens)
        calls = turn.tool_calls if complete else ()
        content = turn.content if complete else generated.decode()
        choice: dict[str, Any] = {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": content,
                "tool_calls": [
                    {
                        "id": text.call_id(index, i),
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for i, call in enumerate(calls)
                ],
            },
            "logprobs": None,
            "finish_reason": "length" if not complete else "tool_calls" if calls else "stop",
        }
        if body.get("logprobs"):
            choice["logprobs"] = {"content": self._chat_log_probs(body, generated)}
        answer = self._completed("chatcmpl", "chat.completion", choice, prompt, generated)
        if body.get("return_token_ids"):
            answer["prompt_token_ids"] = text.encode_ids(prompt)
            choice["token_ids"] = text.encode_ids(generated)
        return answer, turn.latency_s

    def tokenize(self, body: dict[str, Any]) -> Answer:
        """Answer ``POST /tokenize`` for messages or a prompt string: token ids, their count and the context window."""
        self._check_model(body)
        if "messages" in body:
            rendered = text.render_prompt(_messages(body), body.get("tools"))
        elif isinstance(body.get("prompt"), str):
            rendered = body["prompt"].encode()
        else:
            raise BadRequest("messages: give either messages (a list) or prompt (a string)")
        tokens = text.encode_ids(rendered)
        return {"count": len(tokens), "max_model_len": self.config.max_model_len, "tokens": tokens}, 0.0

    def models(self) -> dict[str, Any]:
        card = {
            "id": self.config.model,
            "object": "model",
            "owned_by": "nemo-gym-prorl (scripted, no language model)",
            "max_model_len": self.config.max_model_len,
        }
        return {"object": "list", "data": [card]}

    def _generate(
        self, body: dict[str, Any], prompt: bytes, script: Script | None, index: int, max_tokens: Any
    ) -> tuple[bytes, bool, ScriptTurn]:
        self._check_model(body)
        if body.get("stream"):
            raise BadRequest("stream: the scripted policy does not stream; send stream=false")
        if body.get("n") not in (None, 1):
            raise BadRequest("n: the scripted policy answers with one choice; send n=1")
        turn = script.turn(index) if script else NO_SCRIPT_TURN
        generated, complete = text.finish(turn.body, self._token_limit(len(prompt), max_tokens))
        return generated, complete, turn

    def _check_model(self, body: dict[str, Any]) -> None:
        model = body.get("model", self.config.model)
        if model != self.config.model:
            raise BadRequest(
                f"The model `{model}` does not exist; this is `{self.config.model}`.", status=404, kind="NotFoundError"
            )

    def _token_limit(self, prompt_tokens: int, max_tokens: Any) -> int:
        """Return the maximum number of generated tokens. Errors have vLLM's messages: clients match on the text."""
        window = self.config.max_model_len
        room = window - prompt_tokens
        if room <= 0:
            raise BadRequest(
                f"This model's maximum context length is {window} tokens. However, your request has {prompt_tokens} "
                "input tokens. Please reduce the length of the input messages."
            )
        if max_tokens is None:
            return room
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise BadRequest(f"max_tokens must be at least 1, got {max_tokens}.")
        if max_tokens > room:
            raise BadRequest(
                f"'max_tokens' or 'max_completion_tokens' is too large: {max_tokens}. This model's maximum context "
                f"length is {window} tokens and your request has {prompt_tokens} input tokens "
                f"({max_tokens} > {window} - {prompt_tokens})."
            )
        return max_tokens

    def _log_prob(self, body: dict[str, Any], position: int, token: int) -> float:
        """Return a token's log-probability after temperature, like vLLM's ``processed_logprobs``; 0 if greedy.

        Before temperature, the first token has at most -1, so that a client can detect whether temperature is applied.
        """
        temperature = 0.0 if body.get("top_k") == 1 else body.get("temperature")
        log_prob = self._log_probs[(token * 31 + position * 7) & 4095]
        scale = min(temperature, 1.0) if isinstance(temperature, int | float) else 1
        return (log_prob if position else min(log_prob, -1.0)) * scale

    def _chat_log_probs(self, body: dict[str, Any], generated: bytes) -> list[dict[str, Any]]:
        ids_as_tokens = bool(body.get("return_tokens_as_token_ids"))
        top = body.get("top_logprobs") or 0
        if not isinstance(top, int) or not 0 <= top <= 20:
            raise BadRequest("top_logprobs: must be an integer in [0, 20]")
        entries = []
        for position, token in enumerate(generated):
            chosen = self._log_prob(body, position, token)
            entry = {"token": _token_name(token, ids_as_tokens), "logprob": chosen, "bytes": [token]}
            # The chosen token comes first; no other token has more than the remaining probability.
            left = math.log1p(-math.exp(chosen)) if chosen < -1e-9 else chosen - 50
            others = ((token + rank) % text.VOCABULARY_SIZE for rank in range(top))
            entry["top_logprobs"] = [
                {
                    "token": _token_name(other, ids_as_tokens),
                    "logprob": min(chosen - rank, left - rank) if rank else chosen,
                    "bytes": [other],
                }
                for rank, other in enumerate(others)
            ]
            entries.append(entry)
        return entries

    def _completed(self, prefix: str, kind: str, choice: dict[str, Any], prompt: bytes, done: bytes) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.config.model,
            "system_fingerprint": MODEL_NAME,
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(done),
                "total_tokens": len(prompt) + len(done),
            },
        }


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise BadRequest("messages: must be a non-empty list of objects")
    return messages


def _script(body: dict[str, Any]) -> Script | None:
    metadata = body.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise BadRequest("metadata: must be an object")
    script = metadata.get("script")
    if script is None:
        return None
    if not isinstance(script, str):
        raise BadRequest("metadata.script: must be JSON text (metadata values are strings)")
    return text.parse_script(script)


def _first(body: dict[str, Any], *names: str) -> Any:
    return next((body[name] for name in names if body.get(name) is not None), None)


def _token_name(token: int, as_id: bool) -> str:
    if as_id:
        return f"token_id:{token}"
    return chr(token) if token < 128 else f"<0x{token:02X}>"


def create_app(config: ScriptedConfig | None = None) -> FastAPI:
    policy = ScriptedPolicy(config or ScriptedConfig())
    app = FastAPI(title=f"{MODEL_NAME} (no language model)", docs_url=None, redoc_url=None, openapi_url=None)

    async def health(request: Request) -> Response:
        return Response()

    async def models(request: Request) -> Response:
        return _json(policy.models())

    # Starlette routes: FastAPI's parsing of arguments would dominate the time of a request.
    app.add_route("/health", health, methods=["GET"])
    app.add_route("/v1/models", models, methods=["GET"])
    app.add_route("/v1/chat/completions", _endpoint(policy.chat_completions), methods=["POST"])
    app.add_route("/tokenize", _endpoint(policy.tokenize), methods=["POST"])
    return app


def _endpoint(handle: Callable[[dict[str, Any]], Answer]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            body = orjson.loads(await request.body())
            if not isinstance(body, dict):
                raise BadRequest("the body must be a JSON object")
            answer, delay_s = handle(body)
            if delay_s and await _disconnects(request, delay_s):
                return Response(status_code=499)  # vLLM aborts a request whose client disconnects
            return _json(answer)
        except orjson.JSONDecodeError as error:
            return _error(BadRequest(f"the body is not JSON: {error}"))
        except ScriptError as error:
            return _error(BadRequest(str(error)))
        except BadRequest as error:
            return _error(error)

    return endpoint


async def _disconnects(request: Request, within_s: float) -> bool:
    """Return whether the client disconnects within ``within_s`` seconds; discards unread parts of the body."""
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
async def serve(config: ScriptedConfig | None = None, *, port: int = 0) -> AsyncIterator[str]:
    """Run the server in the current event loop until the block ends.

    Args:
        config: settings of the policy.
        port: TCP port of the loopback address; 0 selects a free port.

    Yields:
        The base URL for clients, ending in ``/v1``.

    Raises:
        OSError: the port is in use.
    """
    async with served(create_app(config), port=port) as url:
        yield f"{url}/v1"


async def run(port: int) -> None:
    """Print the server's address and serve until cancelled; implements ``prorl scripted``.

    Raises:
        InfrastructureError: the port is not available.
    """
    try:
        async with serve(port=port) as url:
            print(f"Scripted policy {MODEL_NAME} (no language model) at {url}", flush=True)
            await asyncio.Event().wait()
    except OSError as error:
        raise InfrastructureError(f"cannot listen on port {port}: {error.strerror}; choose another --port") from error
