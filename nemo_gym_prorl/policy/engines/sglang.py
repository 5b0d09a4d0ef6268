# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""SGLang, tokens in and tokens out.

It is always told how many to sample: left alone, it stops after 128.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nemo_gym_prorl.policy.engines.answers import finish, required
from nemo_gym_prorl.policy.engines.engine import SampleRequest
from nemo_gym_prorl.policy.engines.http_engine import Asked, HttpEngine, metric
from nemo_gym_prorl.policy.generation import Generation


def _parameters(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Further parameters under SGLang's names, which refuses those that it does not know."""
    parameters = {name: value for name, value in extra.items() if name not in ("metadata", "user")}
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
    _reset_route = "/flush_cache"
    _reset_hint = "SGLang has it since 0.2"
    _kept_free = 1

    async def _generate(self, asked: Asked, request: SampleRequest) -> Generation:
        prompt, sampling = request.prompt, request.sampling
        room = self.room(asked, len(prompt), sampling.max_tokens)
        parameters = {
            "max_new_tokens": room,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop) or None,
            "sampling_seed": sampling.seed,
            "skip_special_tokens": False,
        }
        parameters = _parameters(sampling.extra) | {name: v for name, v in parameters.items() if v is not None}
        body = {"sampling_params": parameters, "return_logprob": True}
        answer = await self._post(asked, body, ("input_ids", prompt))
        about = required(answer, "meta_info", asked.url)
        pairs = required(about, "output_token_logprobs", asked.url)
        ids, log_probs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
        return Generation(
            ids, log_probs, finish(about["finish_reason"]["type"], asked.url), about.get("cached_tokens")
        )

    def _capacity(self, metrics: str) -> int | None:
        tokens = metric(metrics, "sglang:max_total_num_tokens")
        return int(tokens) if tokens else None
