# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""SGLang, tokens in and tokens out.

It is always told how many to sample: left alone, it stops after 128.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemo_gym_prorl.policy.engines.answers import finish, required
from nemo_gym_prorl.policy.engines.engine import SampleRequest
from nemo_gym_prorl.policy.engines.http_engine import Asked, HttpEngine, metric
from nemo_gym_prorl.policy.generation import Generation


def _parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under SGLang's names, which refuses those that it does not know."""
    parameters = {name: value for name, value in settings.items() if name not in ("metadata", "user")}
    if "seed" in parameters:
        parameters["sampling_seed"] = parameters.pop("seed")
    match parameters.pop("response_format", None):
        case {"type": "json_object"}:
            parameters["json_schema"] = '{"type": "object"}'
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            parameters["json_schema"] = json.dumps(schema)
    return parameters


class SglangGenerate(HttpEngine):
    """SGLang, tokens in and tokens out, over ``POST /generate``."""

    name = "sglang"
    _route = "/generate"
    _load_names = ("sglang:num_queue_reqs", "sglang:token_usage")
    reset_route = "/flush_cache"
    reset_hint = "SGLang has it since 0.2"
    _kept_free = 1
    log_probs_fix = "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB (truncation is never included)"

    async def _generate(self, asked: Asked, request: SampleRequest) -> Generation:
        prompt, sampling = request.prompt, request.sampling
        room = self.room(asked, len(prompt), sampling.max_tokens)
        parameters = {
            **_parameters(replace(sampling, max_tokens=None).as_openai()),
            "max_new_tokens": room,
            "skip_special_tokens": False,
        }
        body = {"sampling_params": parameters, "return_logprob": True}
        if request.top:
            body["top_logprobs_num"] = request.top
        answer = await self._post(asked, body, ("input_ids", prompt))
        about = required(answer, "meta_info", asked.url)
        pairs = required(about, "output_token_logprobs", asked.url)
        ids, log_probs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
        return Generation(
            ids,
            log_probs,
            finish(about["finish_reason"]["type"], asked.url),
            about.get("cached_tokens"),
            top=[one[0] for one in about["output_top_logprobs"][0]] if request.top else (),
            text=answer.get("text") or "",
        )

    def _capacity(self, metrics: str) -> int | None:
        tokens = metric(metrics, "sglang:max_total_num_tokens")
        return int(tokens) if tokens else None
