# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM, tokens in and tokens out.

It is always told how many to sample: left alone, its completions stop after 16.
"""

from __future__ import annotations

from dataclasses import replace

from nemo_gym_prorl.policy.engines.answers import cached_tokens, finish, only_choice, required
from nemo_gym_prorl.policy.engines.engine import Misconfigured, SampleRequest
from nemo_gym_prorl.policy.engines.http_engine import Asked, HttpEngine
from nemo_gym_prorl.policy.generation import Generation


class VllmCompletions(HttpEngine):
    """Stock vLLM, tokens in and tokens out, over ``POST /v1/completions``."""

    name = "vllm"
    _route = "/v1/completions"

    async def _generate(self, asked: Asked, request: SampleRequest) -> Generation:
        prompt, sampling = request.prompt, request.sampling
        room = self.room(asked, len(prompt), sampling.max_tokens)
        body = {
            "model": self.model,
            "logprobs": request.top,
            "return_token_ids": True,
            # Else tokens of the same text are one key among the most probable ones.
            **({"return_tokens_as_token_ids": True} if request.top else {}),
            "skip_special_tokens": False,
            **replace(sampling, max_tokens=room).as_openai(),
        }
        answer = await self._post(asked, body, ("prompt", prompt), echoed=True)
        choice = only_choice(answer, asked.url)
        sampled = required(choice, "token_ids", asked.url)
        echoed = choice.get("prompt_token_ids")
        if echoed and list(echoed) != list(prompt):
            raise Misconfigured(f"{asked.url} sampled after other tokens than it was given", field="tokenizer")
        logged = choice.get("logprobs") or {}
        return Generation(
            sampled,
            required(logged, "token_logprobs", asked.url),
            finish(choice.get("finish_reason"), asked.url),
            cached_tokens(answer),
            top=list(logged["top_logprobs"][0].values()) if request.top else (),
            text=choice.get("text") or "",
        )
