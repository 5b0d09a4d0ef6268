# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How a turn is to be sampled, in the names that engines share, and what a row has no say in.

Every request names all sampling parameters. An engine fills a missing one from the model's ``generation_config.json``,
and then samples from another distribution than the request says.
"""

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

NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Parameters that leave the model's distribution as it is, in the names of vLLM and SGLang."""

_GREEDY = 1e-5
"""vLLM takes the most probable token at temperatures below this."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample, in the names that OpenAI-style engines share. ``None`` is neutral.

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
        for name, value in self.settings.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise CallerError("is no number that JSON can carry", field=name)
        if taken := sorted(_OURS & self.extra.keys()):
            raise CallerError(
                f"must not set {', '.join(taken)}: what is sampled, and that tokens come back, is not a row's to say",
                field="extra_body",
            )

    @property
    def settings(self) -> dict[str, Any]:
        """All settings but ``max_tokens``, with neutral values for those that are not given."""
        named = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": list(self.stop) or None,
            "seed": self.seed,
        }
        given = {name: value for name, value in self.extra.items() if value is not None}
        return {**NEUTRAL, **given, **{name: value for name, value in named.items() if value is not None}}

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, which then has probability 1."""
        temperature = self.settings["temperature"]
        return isinstance(temperature, int | float) and 0.0 <= temperature < _GREEDY

    def probe(self, max_tokens: int, **extra: object) -> Sampling:
        """Return short sampling with the same temperature and ``top_p``, which some engines prescribe."""
        settings = self.settings
        return Sampling(max_tokens, settings["temperature"], settings["top_p"], extra=extra)

    def as_openai(self) -> dict[str, Any]:
        """Return the fields of a request for an OpenAI-style engine."""
        # Engines differ in where greedy sampling begins, so each gets an exact 0.
        greedy = {"temperature": 0.0} if self.greedy else {}
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return self.settings | greedy | limit
