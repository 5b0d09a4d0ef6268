# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How a turn is to be sampled, in the names that engines share, and what a row has no say in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_prorl.failures import CallerError


_OURS = frozenset(
    {
        *("model", "prompt", "messages", "input_ids", "text", "tools", "tool_choice", "stream", "echo", "n"),
        *("max_tokens", "max_completion_tokens", "max_new_tokens", "truncate_prompt_tokens", "prompt_embeds"),
        *("logprobs", "top_logprobs", "return_logprob", "return_token_ids", "return_tokens_as_token_ids"),
        *("skip_special_tokens", "detokenize", "required_prefix_token_ids", "use_beam_search"),
        *("suffix", "best_of"),
    }
)
"""Fields of a request that make an exact trajectory; a request for something else would not be noticed."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample, in the names that OpenAI-style engines share. ``None`` leaves it to the engine.

    ``extra`` goes into the request as it is, for what only some engines know; what has a name here comes before it.

    Raises:
        CallerError: it asks for nothing, or for something else than one continuation of the prompt with its tokens.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            # Not to be taken for a context that has no room left, which is a rollout's end and scored.
            raise CallerError("must be at least 1", field="max_output_tokens")
        for name in ("temperature", "top_p"):
            if not math.isfinite(getattr(self, name) or 0.0):
                raise CallerError("is no number that JSON can carry", field=name)
        if taken := sorted(_OURS & self.extra.keys()):
            raise CallerError(
                f"must not set {', '.join(taken)}: what is sampled, and that tokens come back, is not a row's to say",
                field="extra_body",
            )

    def as_openai(self) -> dict[str, Any]:
        named = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": list(self.stop) or None,
            "seed": self.seed,
        }
        return dict(self.extra) | {name: value for name, value in named.items() if value is not None}
