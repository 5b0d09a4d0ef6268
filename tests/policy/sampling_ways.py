# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Ways to sample: the rows of :mod:`tests.policy.log_prob_table`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


CHOICES = ("yes", "yesterday", "no", "not now")


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way to sample.

    Attributes:
        name: in the table.
        sampling: fields of the request, as vLLM calls them.
        configured: needs a model folder whose generation settings are not neutral.
        thinks: the prompt opens a thought, and the engine needs a reasoning configuration.
    """

    name: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    configured: bool = False
    thinks: bool = False


NEUTRAL = Way("no setting")


def ways(common: Sequence[int], text_of: Callable[[int], str]) -> list[Way]:
    """Return the rows of the table.

    Args:
        common: ids that the model samples often, so that a rule about them has an effect.
        text_of: a token's text.
    """
    words = [text for token in common if (text := text_of(token)).strip().isalpha()]
    enum = {"type": "string", "enum": list(CHOICES)}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": enum}}
    settings: list[Mapping[str, Any]] = [
        {"temperature": 1.0},
        *({"temperature": value} for value in (0.5, 1.3, 0.01, 0.0)),
        *({"top_p": 0.8}, {"top_k": 5}, {"top_k": 1}, {"min_p": 0.1}),
        *({"presence_penalty": 0.8}, {"frequency_penalty": 0.6}, {"repetition_penalty": 1.3}),
        *({"min_tokens": 20}, {"seed": 7}),
        {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
        {"temperature": 1.2, "top_k": 30, "min_p": 0.02, "presence_penalty": 0.3, "seed": 3},
        {"temperature": 0.0, "frequency_penalty": 1.0},
    ]
    return [
        NEUTRAL,
        *(Way(", ".join(f"{name} {value}" for name, value in each.items()), each) for each in settings),
        Way("stop string", {"stop": words[:1] or ["."]}),
        Way("logit_bias", {"logit_bias": {str(token): 2.5 * (-1) ** n for n, token in enumerate(common[:8])}}),
        Way("bad_words", {"bad_words": [word.strip() for word in words[:3]]}),
        Way("allowed_token_ids", {"allowed_token_ids": sorted(common)}),
        Way("structured_outputs choice", {"structured_outputs": {"choice": list(CHOICES)}}),
        Way("response_format json_schema, temperature 0.7", {"response_format": schema, "temperature": 0.7}),
        Way("choice, top_p 0.8", {"structured_outputs": {"choice": list(CHOICES)}, "top_p": 0.8}),
        Way("no setting, but generation_config", configured=True),
        Way("temperature 1.0 over generation_config", {"temperature": 1.0}, configured=True),
        Way("thinking_token_budget 12", {"thinking_token_budget": 12}, thinks=True),
    ]
