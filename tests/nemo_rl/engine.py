# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Stand-in for the HTTP server of NeMo RL's generation workers, which samples the script of a row.

The server has the same routes (neither ``/health`` nor ``/v1/completions``), the same check of sampling parameters
(failure: 500), and NeMo RL's own repair of prompts. vLLM's own parser, if given, extracts calls. Tokens are bytes.
Each turn ends with a sampled space that its text lacks, so a prompt rendered from text differs from the sampled
tokens.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from nemo_rl.models.generation.openai_server_utils import replace_prefix_tokens

from nemo_gym_prorl.cli.scripted import text
from tests.policy.scripted_engine import answer_of, is_probe


MODEL = "bytes"
PROFILES = {(1.0, 1.0), (0.6, 0.95)}
"""Temperature and ``top_p`` of training and of validation."""
MAX_MODEL_LEN = 65_536
_OPENING = bytes([text.START_OF_TURN]) + b"assistant\n"


type CallParser = Callable[[str], tuple[str | None, list[dict[str, Any]]]]


class ByteTokenizer:
    """What NeMo RL asks of a tokenizer, for tokens that are bytes."""

    eos_token_id = text.END_OF_TURN
    pad_token_id = 0

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def batch_decode(self, many: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(ids) for ids in many]

    def apply_chat_template(self, messages: list[dict[str, Any]], tokenize: bool = True) -> list[int]:
        return list(text.render_prompt(messages))


class Engine:
    """One data-parallel rank.

    Attributes:
        requests: bodies of all chat requests.
        in_flight: number of requests in progress.

    Args:
        parser: parser of tool calls; without one calls stay text.
    """

    def __init__(self, parser: CallParser | None) -> None:
        self._parser = parser
        self.requests: list[dict[str, Any]] = []
        self.in_flight = 0
        self._begun = Counter[str]()
        self.app = FastAPI()
        self.app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])
        self.app.add_api_route("/tokenize", self._tokenize, methods=["POST"])

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        probed = is_probe(body)
        if not probed:
            self.requests.append(body)
        assert body.get("top_k") in (None, -1), "top k must be unset"
        assert body.get("top_p") is not None, "top_p must be set explicitly on NeMo-RL requests"
        assert (body.get("temperature"), body["top_p"]) in PROFILES, "matches neither the train nor the val profile"
        if body["model"] != MODEL:
            return _error(404, f"The model `{body['model']}` does not exist.")
        if probed:
            return JSONResponse(answer_of(body))
        prompt = _prompt(body)
        room = MAX_MODEL_LEN - len(prompt)
        if room <= 0:
            return _error(400, f"This model's maximum context length is {MAX_MODEL_LEN} tokens.")
        written = (body.get("metadata") or {})["script"]
        index = text.next_turn(body["messages"])
        turn = self._turn(written, index)
        if turn.latency_s and await self._hangs_up(request, turn.latency_s):
            return Response(status_code=499)
        limit = min(body.get("max_completion_tokens") or body.get("max_tokens") or room, room)
        generated, _ = text.finish(turn.body + b" ", limit)
        answer = _answer(prompt, generated, self._parser if body.get("tools") else None)
        return JSONResponse(answer)

    def _turn(self, written: str, index: int) -> text.ScriptTurn:
        """Return a turn of a script; first turns rotate through ``openings``, so that rollouts differ."""
        script = json.loads(written)
        openings = script.pop("openings", None)
        if openings and index == 0:
            number = self._begun[written]
            self._begun[written] += 1
            script = {"turns": [openings[number % len(openings)]]}
        return text.parse_script(json.dumps(script)).turn(index)

    async def _hangs_up(self, request: Request, within_s: float) -> bool:
        self.in_flight += 1
        try:
            async with asyncio.timeout(within_s):
                while (await request.receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            return False
        else:
            return True
        finally:
            self.in_flight -= 1

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        tokens = _prompt(body) if "messages" in body else list(body["prompt"].encode())
        return JSONResponse({"count": len(tokens), "max_model_len": MAX_MODEL_LEN, "tokens": tokens})


def _prompt(body: dict[str, Any]) -> list[int]:
    """Render a prompt and replace its beginning by the earlier ids, as NeMo RL does."""
    messages, tools = body["messages"], body.get("tools")
    rendered = list(text.render_prompt(messages, tools))
    prefix = body.get("required_prefix_token_ids")
    if prefix is None:
        carriers = [message for message in messages if "prompt_token_ids" in message]
        prefix = carriers[-1]["prompt_token_ids"] + carriers[-1]["generation_token_ids"] if carriers else None
    if prefix is None:
        return rendered
    said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    known = messages[: said[-1] + 1] if said else messages
    before = list(text.render_prompt(known, tools).removesuffix(_OPENING))
    return list(replace_prefix_tokens(ByteTokenizer(), prefix, before, rendered))


def _answer(prompt: list[int], generated: bytes, parser: CallParser | None) -> dict[str, Any]:
    ids = list(generated)
    log_probs = [-(token % 7) / 8 - 0.125 for token in ids]
    whole = ids[-1:] == [text.END_OF_TURN]
    content: str | None = (generated[:-1].removesuffix(b" ") if whole else generated).decode()
    calls: list[dict[str, Any]] = []
    if parser is not None:
        content, calls = parser(content)
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": calls,
        "prompt_token_ids": prompt,
        "generation_token_ids": ids,
        "generation_log_probs": log_probs,
    }
    tokens = [
        {"token": f"token_id:{token}", "logprob": log_prob, "bytes": None, "top_logprobs": []}
        for token, log_prob in zip(ids, log_probs, strict=True)
    ]
    finish = "tool_calls" if calls and whole else "stop" if whole else "length"
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": {"content": tokens}, "finish_reason": finish}],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "total_tokens": len(prompt) + len(ids),
        },
    }


def _error(status: int, message: str) -> Response:
    return JSONResponse(
        {"error": {"message": message, "type": "invalid_request_error", "code": status}}, status_code=status
    )


@contextlib.contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """Serve from a thread, as NeMo RL does; give the base URL."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = uvicorn.Server(uvicorn.Config(engine.app, log_level="critical", timeout_keep_alive=120))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
