# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM, messages in and tokens out: for engines whose template or tokenizer nobody else has."""

from __future__ import annotations

from typing import Any

from nemo_gym_prorl.policy.engines.answers import cached_tokens, finish, only_choice, required
from nemo_gym_prorl.policy.engines.engine import Misconfigured, SampleRequest
from nemo_gym_prorl.policy.engines.http_engine import Asked, HttpEngine
from nemo_gym_prorl.policy.engines.log_probs import LogProbMode
from nemo_gym_prorl.policy.generation import Generation


class VllmChat(HttpEngine):
    """vLLM, messages in and tokens out, over ``POST /v1/chat/completions`` with ``return_token_ids``.

    The engine renders the prompt. It comes back as ids, so a rewritten history is noticed, though not prevented. Where
    the request has no ``max_tokens``, chat completions sample into what is left of the context.
    """

    name = "vllm_chat"
    takes_tokens = False
    _biased_mode = LogProbMode.PROCESSED
    _route = "/v1/chat/completions"
    _also: str | None = "/v1/completions"  # NeMo RL's engine has none, and must be told where its prompts start

    def _body(self, request: SampleRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(request.messages),
            "logprobs": True,
            "top_logprobs": request.top,
            "return_token_ids": True,
            **request.sampling.as_openai(),
        }
        if request.tools:
            body["tools"] = list(request.tools)
            if request.tool_choice is not None:
                body["tool_choice"] = request.tool_choice
        if request.effort is not None:
            body["reasoning_effort"] = request.effort
        if request.template_variables:
            body["chat_template_kwargs"] = dict(request.template_variables)
        return body

    async def _generate(self, asked: Asked, request: SampleRequest) -> Generation:
        answer = await self._post(asked, self._body(request))
        choice = only_choice(answer, asked.url)
        message = required(choice, "message", asked.url)
        prompt_ids = message.get("prompt_token_ids") or answer.get("prompt_token_ids")
        ids = message.get("generation_token_ids", choice.get("token_ids"))
        log_probs = message.get("generation_log_probs")
        logged = choice.get("logprobs") or {}
        if log_probs is None:
            content = required(logged, "content", asked.url)
            log_probs = [token["logprob"] for token in content]
            if ids is None and all(token["token"].startswith("token_id:") for token in content):
                ids = [int(token["token"].removeprefix("token_id:")) for token in content]
        if prompt_ids is None or ids is None:
            raise Misconfigured(
                f"{asked.url} returned no token ids: it must understand return_token_ids (vLLM 0.10.2 or later)",
                field="policy_base_url",
            )
        return Generation(
            ids,
            log_probs,
            finish(choice.get("finish_reason"), asked.url),
            cached_tokens(answer),
            prompt_ids=prompt_ids,
            message=message,
            routed_experts=message.pop("routed_experts", None),
            top=[one["logprob"] for one in logged["content"][0]["top_logprobs"]] if request.top else (),
            text=message.get("content") or "",
        )
