# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's own HTTP server in front of its vLLM workers."""

from __future__ import annotations

from typing import Any

import orjson

from nemo_gym_prorl.policy.engines.engine import SampleRequest
from nemo_gym_prorl.policy.engines.vllm_chat import VllmChat
from nemo_gym_prorl.policy.tokens.prompt import json_of_ids


class NemoRl(VllmChat):
    """NeMo RL's own HTTP server: chat completions whose prompt continues exactly the ids it is told to continue.

    It refuses requests whose temperature and ``top_p`` are not those of its training or validation profile, and any
    ``top_k``.
    """

    name = "nemo_rl"
    log_probs_fix = "set policy.generation.vllm_cfg.logprobs_mode to processed_logprobs"
    _fixed_sampling = True
    _also, _foreign = None, "/v1/completions"
    reset_route = None
    reset_hint = "NeMo RL does it: set async_rl.recompute_kv_cache_after_weight_updates to true"

    def _body(self, request: SampleRequest) -> dict[str, Any]:
        body = super()._body(request)
        body["return_tokens_as_token_ids"] = True
        if request.prompt:
            body["required_prefix_token_ids"] = orjson.Fragment(b"".join(json_of_ids(request.prompt)))
        return body
