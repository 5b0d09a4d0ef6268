# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Inference endpoint of the trainer, with token ids as input and output, in vLLM's wire protocol.

A background task repeatedly samples one token for every sequence in flight, in a thread. New sequences and new weights
take effect between two tokens; sequences in flight continue under the new weights.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import torch
from fastapi import FastAPI, Request, Response
from tokenizers import Tokenizer
from torch import Tensor

from examples.tiny_dapo.lessons import END
from examples.tiny_dapo.policy import CONTEXT, TinyModel, padded
from nemo_gym_prorl.http.applications import served


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in flight: prompt ids, maximum number of tokens, and the tokens sampled so far."""

    prompt: list[int]
    max_tokens: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Engine:
    """Inference engine that samples at temperature 1.

    Args:
        model: model with the policy's architecture; :meth:`load` sets its weights.
        tokenizer: tokenizer of the policy, which the model server compares with its own.
        seed: seed of sampling; results also depend on the order of requests.
    """

    def __init__(self, model: TinyModel, tokenizer: Tokenizer, seed: int = 0) -> None:
        self._model = model.eval()
        self._weights: Mapping[str, Tensor] | None = None
        self._tokenizer, self._end = tokenizer, tokenizer.token_to_id(END)
        self._sequences: list[Sequence] = []
        self._arrived = asyncio.Event()
        self._random = torch.Generator().manual_seed(seed)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Sample from these weights from the next token on."""
        self._weights = {name: value.clone() for name, value in weights.items()}

    @contextlib.asynccontextmanager
    async def serve(self, port: int) -> AsyncIterator[None]:
        """Serve HTTP at this port of the loopback address within the context."""
        app = FastAPI(title="A tiny policy", openapi_url=None)
        app.add_api_route("/v1/models", self._models)
        app.add_api_route("/tokenize", self._tokenize, methods=["POST"])
        app.add_api_route("/v1/completions", self._completions, methods=["POST"])
        decoding = asyncio.create_task(self._decode())
        try:
            async with served(app, port=port):
                yield
        finally:
            decoding.cancel()
            await asyncio.wait([decoding])

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": CONTEXT}]}

    async def _tokenize(self, request: Request) -> dict[str, Any]:
        ids = self._tokenizer.encode(orjson.loads(await request.body())["prompt"], add_special_tokens=False).ids
        return {"tokens": ids, "count": len(ids), "max_model_len": CONTEXT}

    async def _completions(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        prompt, wanted = body["prompt"], body.get("max_tokens", 16)
        if not 0 < len(prompt) < CONTEXT or body.get("temperature") not in (None, 1):
            message = f"send 1 to {CONTEXT - 1} ids, and temperature 1, which the trainer assumes"
            error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
            return Response(orjson.dumps({"error": error}), status_code=400, media_type="application/json")
        sequence = Sequence(prompt, min(wanted, CONTEXT - len(prompt)))
        self._sequences.append(sequence)
        self._arrived.set()
        await sequence.ended.wait()
        choice = {
            "index": 0,
            "text": self._tokenizer.decode(sequence.ids, skip_special_tokens=False),
            "finish_reason": "stop" if sequence.ids[-1] == self._end else "length",
            "token_ids": sequence.ids,
            "prompt_token_ids": prompt,
            "logprobs": {"token_logprobs": sequence.log_probs},
        }
        answer = {"object": "text_completion", "model": "tiny", "choices": [choice]}
        return Response(orjson.dumps(answer), media_type="application/json")

    async def _decode(self) -> None:
        while True:
            await self._arrived.wait()
            self._sequences = live = [one for one in self._sequences if not one.ended.is_set()]
            if not live:
                self._arrived.clear()
                continue
            if self._weights is not None:
                self._model.load_state_dict(self._weights)
                self._weights = None
            live = [*live]  # requests may append to self._sequences while the thread samples
            for sequence, (token, log_prob) in zip(live, await asyncio.to_thread(self._sample, live), strict=True):
                sequence.ids.append(token)
                sequence.log_probs.append(log_prob)
                if token == self._end or len(sequence.ids) >= sequence.max_tokens:
                    sequence.ended.set()

    @torch.inference_mode()
    def _sample(self, live: list[Sequence]) -> list[tuple[int, float]]:
        """Draw the next token of each sequence, with its log-probability."""
        ids, _ = padded([([*one.prompt, *one.ids], []) for one in live])
        positions = torch.tensor([len(one.prompt) + len(one.ids) - 1 for one in live])
        log_probs = self._model(ids, positions).log_softmax(-1)
        drawn = torch.multinomial(log_probs.exp(), 1, generator=self._random)
        return [*zip(drawn[:, 0].tolist(), log_probs.gather(1, drawn)[:, 0].tolist(), strict=True)]
