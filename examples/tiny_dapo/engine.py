# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The trainer's inference endpoint: tokens in, tokens out, in vLLM's wire protocol.

One thread decodes all sequences in flight together, a token of each at a time; new ones join between two steps, as do
new weights, under which sequences in flight go on. So nothing waits for anything but the arithmetic.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from tokenizers import Tokenizer
from torch import Tensor

from examples.tiny_dapo.model import CONTEXT, KeyValues, Shape, TinyModel
from examples.tiny_dapo.vocabulary import END


MODEL_NAME = "tiny"


@dataclass(slots=True)
class Sequence:
    """A prompt, and what has been sampled after it."""

    prompt: list[int]
    max_tokens: int
    done: asyncio.Future[str]
    """Of the reason why it ended, in vLLM's word."""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    abandoned: bool = False

    @property
    def place(self) -> int:
        """Of the last token."""
        return len(self.prompt) + len(self.ids) - 1


class Engine:
    """Samples at temperature 1.

    Args:
        shape: of the model.
        tokenizer: for the end of a turn, and for callers who compare theirs.
        slots: sequences that are decoded together; others wait.
        seed: of what is sampled, up to the order in which requests come.
    """

    def __init__(self, shape: Shape, tokenizer: Tokenizer, slots: int = 32, seed: int = 0) -> None:
        self._model = TinyModel(shape).eval()
        self._tokenizer = tokenizer
        self._end = tokenizer.token_to_id(END)
        self._slots: list[Sequence | None] = [None] * slots
        self._cache = KeyValues(shape, slots)
        self._waiting: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._weights = threading.Lock()
        self._random = torch.Generator().manual_seed(seed)
        self._thread = threading.Thread(target=self._decode, name="decode", daemon=True)
        self.sampled = 0
        """Tokens so far."""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Sample from these from the next token on."""
        with self._weights:
            self._model.load_state_dict(weights)

    @contextlib.asynccontextmanager
    async def serve(self, port: int) -> AsyncIterator[None]:
        """Answers at this port of the loopback address."""
        listener = socket.create_server(("127.0.0.1", port), backlog=512)
        config = uvicorn.Config(self._app(), log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]  # the trainer's business
        self._thread.start()
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            server.should_exit = True
            await task
            self._waiting.put(None)
            await asyncio.to_thread(self._thread.join)

    # HTTP

    def _app(self) -> FastAPI:
        app = FastAPI(title="A tiny policy", openapi_url=None)

        @app.get("/health")
        async def health() -> Response:
            return Response()

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": MODEL_NAME, "object": "model", "max_model_len": CONTEXT}]}

        @app.post("/tokenize")
        async def tokenize(request: Request) -> dict[str, Any]:
            ids = self._tokenizer.encode(orjson.loads(await request.body())["prompt"], add_special_tokens=False).ids
            return {"tokens": ids, "count": len(ids), "max_model_len": CONTEXT}

        app.add_api_route("/v1/completions", self._completions, methods=["POST"])
        return app

    async def _completions(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        prompt, wanted = body["prompt"], body.get("max_tokens", 16)
        if any(body.get(name) not in (None, 1) for name in ("temperature", "top_p")):
            return _refused("temperature and top_p must be 1: the trainer's log-probs are of that distribution")
        if type(wanted) is not int or wanted < 1:
            return _refused("max_tokens must be a number of tokens, at least 1")
        known = range(self._tokenizer.get_vocab_size())
        if not isinstance(prompt, list) or not prompt or not all(type(t) is int and t in known for t in prompt):
            return _refused("prompt must be ids of the vocabulary, at least one")
        if (room := CONTEXT - len(prompt)) < 1:
            return _refused(f"This model's maximum context length is {CONTEXT} tokens; the prompt has {len(prompt)}.")
        sequence = Sequence(prompt, min(wanted, room), asyncio.get_running_loop().create_future())
        self._waiting.put(sequence)
        gone = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait((sequence.done, gone), return_when=asyncio.FIRST_COMPLETED)
            if not sequence.done.done():
                return Response(status_code=499)
        finally:
            gone.cancel()
            sequence.abandoned = True
        choice = {
            "index": 0,
            "text": self._tokenizer.decode(sequence.ids, skip_special_tokens=False),
            "finish_reason": sequence.done.result(),
            "token_ids": sequence.ids,
            "prompt_token_ids": prompt,
            "logprobs": {"token_logprobs": sequence.log_probs},
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sequence.ids)}
        answer = {"object": "text_completion", "model": MODEL_NAME, "choices": [choice], "usage": usage}
        return Response(orjson.dumps(answer), media_type="application/json")

    # The thread

    @torch.inference_mode()
    def _decode(self) -> None:
        torch.set_num_threads(1)
        while self._admit():
            live = [slot for slot, sequence in enumerate(self._slots) if sequence is not None]
            if not live:
                continue
            ids = torch.zeros(len(self._slots), dtype=torch.int64)
            places = torch.zeros(len(self._slots), dtype=torch.int64)
            for slot in live:
                sequence = self._slots[slot]
                assert sequence is not None
                ids[slot], places[slot] = sequence.ids[-1], sequence.place
            with self._weights:
                logits = self._model.step(ids, places, self._cache)
            self._sample(live, logits[live])

    def _admit(self) -> bool:
        """Take in what waits, if there is room; wait if there is nothing else to do. Whether to go on."""
        idle = not any(self._slots)
        for slot, taken in enumerate(self._slots):
            if taken is not None:
                continue
            try:
                sequence = self._waiting.get(block=idle)
            except queue.Empty:
                break
            if sequence is None:
                return False
            idle = False
            if sequence.abandoned:
                continue
            self._slots[slot] = sequence
            with self._weights:
                logits = self._model.read(torch.tensor(sequence.prompt), self._cache, slot)
            self._sample([slot], logits[None])
        return True

    def _sample(self, slots: list[int], logits: Tensor) -> None:
        log_probs = logits.log_softmax(-1)
        drawn = torch.multinomial(log_probs.exp(), 1, generator=self._random)
        chosen = log_probs.gather(1, drawn)
        for slot, token, log_prob in zip(slots, drawn[:, 0].tolist(), chosen[:, 0].tolist(), strict=True):
            sequence = self._slots[slot]
            assert sequence is not None
            sequence.ids.append(token)
            sequence.log_probs.append(log_prob)
            self.sampled += 1
            if token == self._end or len(sequence.ids) >= sequence.max_tokens or sequence.abandoned:
                self._slots[slot] = None
                reason = "stop" if token == self._end else "length"
                with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                    sequence.done.get_loop().call_soon_threadsafe(_resolve, sequence.done, reason)


def _resolve(done: asyncio.Future[str], reason: str) -> None:
    if not done.done():
        done.set_result(reason)


def _refused(message: str) -> Response:
    body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
    return Response(orjson.dumps(body), status_code=400, media_type="application/json")
