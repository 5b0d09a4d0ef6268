# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Answers of scripted engines to the service's probes, as an engine with a small, known distribution gives them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from nemo_gym_prorl.policy.engines.log_probs import LogProbMode


LOGITS = {10: 1.0, 11: 0.5, 12: 0.0, 13: -1.0}
"""The model's logits after every prompt."""


def settings_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a request, in any of the protocols."""
    settings: Mapping[str, Any] = body.get("sampling_params", body)
    return settings


def is_probe(body: Mapping[str, Any]) -> bool:
    """Whether the service asks about the engine itself, and not for a turn."""
    if "zqxj" in json.dumps(body):
        return True
    settings = settings_of(body)
    limit = next((settings[name] for name in ("max_tokens", "max_new_tokens") if name in settings), None)
    logged = body.get("top_logprobs_num") or body.get("top_logprobs")
    if body.get("logprobs") is not True:
        logged = logged or body.get("logprobs")
    return limit == 1 and bool(logged or settings.get("logit_bias"))


def sampled(
    settings: Mapping[str, Any], mode: str = LogProbMode.PROCESSED, logits: Mapping[int, float] = LOGITS
) -> tuple[int, dict[int, float]]:
    """The most probable token, which the engine takes, and the log-probs that an engine of this mode returns."""
    biased = dict(logits)
    for token, bias in (settings.get("logit_bias") or {}).items():
        biased[int(token)] = biased.get(int(token), -9.0) + bias
    heat = settings.get("temperature") or 1.0
    scaled = {token: logit / heat for token, logit in biased.items()}
    best = max(scaled, key=lambda token: scaled[token])
    kept = {best: scaled[best]} if settings.get("top_k") == 1 else scaled
    told = {LogProbMode.PROCESSED: kept, LogProbMode.SCALED: scaled}.get(LogProbMode(mode), {**biased, **logits})
    highest = max(told.values())
    norm = highest + math.log(sum(math.exp(logit - highest) for logit in told.values()))
    return best, {token: logit - norm for token, logit in told.items()}


def answer_of(
    body: Mapping[str, Any], mode: str = LogProbMode.PROCESSED, logits: Mapping[int, float] = LOGITS
) -> dict[str, Any]:
    """The engine's answer to one token's request, in the protocol of the request."""
    token, log_probs = sampled(settings_of(body), mode, logits)
    text = "zqxj" if "zqxj" in json.dumps(body) else "x"
    top = sorted(log_probs.items(), key=lambda one: -one[1])[:5]
    if "sampling_params" in body:
        about: dict[str, Any] = {
            "output_token_logprobs": [[log_probs[token], token, None]],
            "finish_reason": {"type": "length"},
        }
        return {
            "text": text,
            "meta_info": about | {"output_top_logprobs": [[[value, one, None] for one, value in top]]},
        }
    if "messages" in body:
        named = [{"token": f"token_id:{one}", "logprob": value} for one, value in top]
        content = [{"token": f"token_id:{token}", "logprob": log_probs[token], "top_logprobs": named}]
        message = {"role": "assistant", "content": text, "prompt_token_ids": [0]}
        choice = {"message": message, "logprobs": {"content": content}, "token_ids": [token]}
    else:
        named_top = {f"token_id:{one}": value for one, value in top}
        logged = {"token_logprobs": [log_probs[token]], "top_logprobs": [named_top]}
        choice = {"text": text, "token_ids": [token], "logprobs": logged}
    return {"choices": [choice | {"finish_reason": "length"}]}
