# SPDX-License-Identifier: Apache-2.0
"""A model server without a model: vLLM's wire protocol over scripted turns.

Machines without a GPU and without weights still have to show real rollouts: real servers, sandboxes, tool calls,
token ids and rewards. This server plays the part of the inference endpoint. Each request brings the script of its
rollout in ``metadata.script`` (Gym's model server forwards ``responses_create_params.metadata`` unchanged), so one
server serves any number of different rollouts and keeps no state between requests.

It never pretends: it is served as ``prorl-scripted-policy``, every answer carries that name as
``system_fingerprint``, and without a script it says so.

It also is the "instant model" of the benchmarks, so a request costs one JSON parse, one ``bytes`` join and one JSON
dump: plain dictionaries and routes, no response models.

Run it with ``python -m nemo_gym_prorl.policy.scripted --port 8000``, or in-process with :func:`serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI, Request, Response

from nemo_gym_prorl.policy import scripted_text as text
from nemo_gym_prorl.policy.scripted_text import MODEL_NAME, NO_SCRIPT_TURN, Script, ScriptError, Turn


@dataclass(frozen=True, slots=True)
class ScriptedConfig:
    """How the policy behaves.

    Attributes:
        model: the served model's name; other names get a 404, as from vLLM.
        max_model_len: context window in tokens, which are bytes here.
        latency_s: seconds that every generation takes.
        seed: seeds the log-probabilities.
    """

    model: str = MODEL_NAME
    max_model_len: int = 262_144
    latency_s: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Answer:
    """What to answer, and how long the policy pretends to think about it."""

    body: dict[str, Any]
    delay_s: float = 0.0


class _BadRequest(Exception):
    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class ScriptedPolicy:
    """The request handlers; everything they need is in the request and the configuration."""

    def __init__(self, config: ScriptedConfig) -> None:
        self.config = config
        drawn = random.Random(config.seed)
        # A token's log-probability depends on the seed, the token and its position, and on nothing else.
        self._log_probs = [round(math.log(1.0 - drawn.random() ** 3), 6) for _ in range(4096)]

    def chat_completions(self, body: dict[str, Any]) -> _Answer:
        """``POST /v1/chat/completions``."""
        messages = _messages(body)
        prompt = text.render_prompt(messages, body.get("tools"))
        script = _script(body)
        index = text.next_turn(messages)
        max_tokens = _first(body, "max_completion_tokens", "max_tokens")
        generated, whole, turn = self._generate(body, prompt, script, index, max_tokens)
        calls = turn.tool_calls if whole else ()
        content = turn.content if whole else generated.decode()
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
            "finish_reason": "length" if not whole else "tool_calls" if calls else "stop",
        }
        if body.get("logprobs"):
            choice["logprobs"] = {"content": self._chat_log_probs(body, generated)}
        answer = self._completed("chatcmpl", "chat.completion", choice, prompt, generated)
        if body.get("return_token_ids"):
            answer["prompt_token_ids"] = text.encode_ids(prompt)
            choice["token_ids"] = text.encode_ids(generated)
        return _Answer(answer, self._delay_s(turn))

    def completions(self, body: dict[str, Any]) -> _Answer:
        """``POST /v1/completions``: a prompt rendered by the caller, as text or token ids."""
        given = body.get("prompt")
        if isinstance(given, str):
            prompt = given.encode()
        elif isinstance(given, list) and given:
            prompt = text.decode_ids(given)
        else:
            raise _BadRequest("prompt: must be a string or a non-empty list of token ids")
        index = text.generated_turns(prompt)
        # vLLM's completions default to 16 tokens.
        max_tokens = body.get("max_tokens", 16)
        generated, whole, turn = self._generate(body, prompt, _script(body), index, max_tokens)
        choice: dict[str, Any] = {
            "index": 0,
            "text": (generated[:-1] if whole else generated).decode(),
            "logprobs": None,
            "finish_reason": "stop" if whole else "length",
        }
        if body.get("logprobs") is not None:
            ids_as_tokens = bool(body.get("return_tokens_as_token_ids"))
            choice["logprobs"] = {
                "tokens": [_token_name(token, ids_as_tokens) for token in generated],
                "token_logprobs": [self._log_prob(i, token) for i, token in enumerate(generated)],
                "top_logprobs": None,
                "text_offset": list(range(len(generated))),
            }
        if body.get("return_token_ids"):
            choice["prompt_token_ids"] = text.encode_ids(prompt)
            choice["token_ids"] = text.encode_ids(generated)
        answer = self._completed("cmpl", "text_completion", choice, prompt, generated)
        return _Answer(answer, self._delay_s(turn))

    def tokenize(self, body: dict[str, Any]) -> _Answer:
        """``POST /tokenize``: of messages or of a text."""
        self._check_model(body)
        if "messages" in body:
            rendered = text.render_prompt(_messages(body), body.get("tools"))
        elif isinstance(body.get("prompt"), str):
            rendered = body["prompt"].encode()
        else:
            raise _BadRequest("messages: give either messages (a list) or prompt (a string)")
        tokens = text.encode_ids(rendered)
        return _Answer({"count": len(tokens), "max_model_len": self.config.max_model_len, "tokens": tokens})

    def detokenize(self, body: dict[str, Any]) -> _Answer:
        """``POST /detokenize``: text of token ids, special tokens left out."""
        tokens = body.get("tokens")
        if not isinstance(tokens, list):
            raise _BadRequest("tokens: must be a list of token ids")
        return _Answer({"prompt": text.decode_ids(tokens).decode(errors="ignore")})

    def models(self) -> dict[str, Any]:
        """``GET /v1/models``."""
        card = {
            "id": self.config.model,
            "object": "model",
            "owned_by": "nemo-gym-prorl (scripted, no language model)",
            "max_model_len": self.config.max_model_len,
        }
        return {"object": "list", "data": [card]}

    def _generate(
        self, body: dict[str, Any], prompt: bytes, script: Script | None, index: int, max_tokens: Any
    ) -> tuple[bytes, bool, Turn]:
        self._check_model(body)
        if body.get("stream"):
            raise _BadRequest("stream: the scripted policy does not stream; send stream=false")
        if body.get("n") not in (None, 1):
            raise _BadRequest("n: the scripted policy answers with one choice; send n=1")
        turn = script.turn(index) if script else NO_SCRIPT_TURN
        generated, whole = text.finish(turn.body, self._room(len(prompt), max_tokens))
        return generated, whole, turn

    def _check_model(self, body: dict[str, Any]) -> None:
        model = body.get("model", self.config.model)
        if model != self.config.model:
            raise _BadRequest(
                f"The model `{model}` does not exist; this is `{self.config.model}`.", status=404, kind="NotFoundError"
            )

    def _room(self, prompt_tokens: int, max_tokens: Any) -> int:
        """How many tokens may be generated. The messages are vLLM's, since clients match on their words."""
        window = self.config.max_model_len
        room = window - prompt_tokens
        if room <= 0:
            raise _BadRequest(
                f"This model's maximum context length is {window} tokens. However, your request has {prompt_tokens} "
                "input tokens. Please reduce the length of the input messages."
            )
        if max_tokens is None:
            return room
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise _BadRequest(f"max_tokens must be at least 1, got {max_tokens}.")
        if max_tokens > room:
            raise _BadRequest(
                f"'max_tokens' or 'max_completion_tokens' is too large: {max_tokens}. This model's maximum context "
                f"length is {window} tokens and your request has {prompt_tokens} input tokens "
                f"({max_tokens} > {window} - {prompt_tokens})."
            )
        return max_tokens

    def _log_prob(self, position: int, token: int) -> float:
        return self._log_probs[(token * 31 + position * 7) & 4095]

    def _chat_log_probs(self, body: dict[str, Any], generated: bytes) -> list[dict[str, Any]]:
        ids_as_tokens = bool(body.get("return_tokens_as_token_ids"))
        top = body.get("top_logprobs") or 0
        if not isinstance(top, int) or not 0 <= top <= 20:
            raise _BadRequest("top_logprobs: must be an integer in [0, 20]")
        entries = []
        for position, token in enumerate(generated):
            chosen = self._log_prob(position, token)
            entry = {"token": _token_name(token, ids_as_tokens), "logprob": chosen, "bytes": [token]}
            # The chosen token leads; the others are less likely, one nat apart.
            others = ((token + rank) % text.VOCABULARY_SIZE for rank in range(top))
            entry["top_logprobs"] = [
                {"token": _token_name(other, ids_as_tokens), "logprob": chosen - rank, "bytes": [other]}
                for rank, other in enumerate(others)
            ]
            entries.append(entry)
        return entries

    def _delay_s(self, turn: Turn) -> float:
        return self.config.latency_s + turn.latency_s

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
        raise _BadRequest("messages: must be a non-empty list of objects")
    return messages


def _script(body: dict[str, Any]) -> Script | None:
    metadata = body.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise _BadRequest("metadata: must be an object")
    script = metadata.get("script")
    if script is None:
        return None
    if not isinstance(script, str):
        raise _BadRequest("metadata.script: must be JSON text (metadata values are strings)")
    return text.parse_script(script)


def _first(body: dict[str, Any], *names: str) -> Any:
    return next((body[name] for name in names if body.get(name) is not None), None)


def _token_name(token: int, as_id: bool) -> str:
    if as_id:
        return f"token_id:{token}"
    return chr(token) if token < 128 else f"<0x{token:02X}>"


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
    app.add_route("/detokenize", _endpoint(policy.detokenize), methods=["POST"])
    return app


def _endpoint(handle: Callable[[dict[str, Any]], _Answer]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            body = orjson.loads(await request.body())
            if not isinstance(body, dict):
                raise _BadRequest("the body must be a JSON object")
            answer = handle(body)
            if answer.delay_s and await _hangs_up(request, answer.delay_s):
                return Response(status_code=499)  # as vLLM does: a request whose caller is gone is dropped
            return _json(answer.body)
        except orjson.JSONDecodeError as error:
            return _error(_BadRequest(f"the body is not JSON: {error}"))
        except ScriptError as error:
            return _error(_BadRequest(str(error)))
        except _BadRequest as error:
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


def _error(error: _BadRequest) -> Response:
    details = {"message": str(error), "type": error.kind, "param": None, "code": error.status}
    return _json({"error": details}, error.status)


class _Server(uvicorn.Server):
    """Leaves the process's signal handlers alone: who embeds the server decides what Ctrl-C means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
    listener = socket.create_server((host, port), backlog=2048)
    server = _Server(_uvicorn_config(config))
    task = asyncio.create_task(server.serve(sockets=[listener]), name=MODEL_NAME)
    try:
        yield _base_url(listener)
    finally:
        server.should_exit = True
        await task
        listener.close()


def _uvicorn_config(config: ScriptedConfig | None) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(config), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
    )


def _base_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{host}:{port}/v1"


def main() -> None:
    """Run the policy as a process of its own until it is interrupted."""
    defaults = ScriptedConfig()
    parser = argparse.ArgumentParser(description="A model server that plays back scripted turns. No language model.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="TCP port; 0 takes a free one (default)")
    parser.add_argument("--model", default=defaults.model, help="name to serve (default: %(default)s)")
    parser.add_argument("--max-model-len", type=int, default=defaults.max_model_len, help="context window in tokens")
    parser.add_argument("--latency-s", type=float, default=defaults.latency_s, help="seconds per generation")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="seed of the log-probabilities")
    args = parser.parse_args()
    config = ScriptedConfig(args.model, args.max_model_len, args.latency_s, args.seed)
    with socket.create_server((args.host, args.port), backlog=2048) as listener:
        print(f"Scripted policy {config.model} (no language model) at {_base_url(listener)}", flush=True)
        uvicorn.Server(_uvicorn_config(config)).run(sockets=[listener])


if __name__ == "__main__":
    main()
