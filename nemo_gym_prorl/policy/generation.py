# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What an engine sampled in one go, and what it takes to be believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nemo_gym_prorl.http.routed_experts import RoutedExperts


class Finish(StrEnum):
    """Why sampling ended."""

    STOP = "stop"
    """The model ended its turn, or wrote a stop string."""
    LENGTH = "length"
    """The request's ``max_tokens`` were used up."""
    CONTEXT = "context"
    """The prompt left no room in the engine's context: nothing was sampled."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine sampled for one prompt.

    Attributes:
        ids: the sampled token ids, with the end-of-turn token if the model wrote one.
        log_probs: natural logarithm of each sampled token's probability, as long as ``ids``.
        finish: why it ended.
        cached_tokens: how many prompt tokens came from the prefix cache; ``None`` where the engine does not tell.
        prompt_ids: the prompt as the engine saw it, from engines that render messages themselves.
        message: the assistant message as the engine parsed it, from engines that parse themselves.
        routed_experts: of each token of prompt and sample, from engines that tell
            (:mod:`~nemo_gym_prorl.http.routed_experts`).
        log_prob_mode: the distribution that the log-probs belong to (:class:`.LogProbMode`).
        top: log-probs of the first position's most probable tokens, where the request asks for them.
        text: what the engine decoded; of a message, the part behind the thought.
    """

    ids: Sequence[int]
    log_probs: Sequence[float]
    finish: Finish
    cached_tokens: int | None = None
    prompt_ids: Sequence[int] | None = None
    message: Mapping[str, Any] | None = None
    routed_experts: str | None = None
    log_prob_mode: str | None = None
    top: Sequence[float] = ()
    text: str = ""


_ROUNDING = 1e-3
"""What engines of low precision put on top of a probability of 1."""


def checked(generation: Generation) -> Generation:
    """A generation, once it is known to consist of token ids and log-probs: what it holds is trained on.

    Raises:
        ValueError: it does not. Missing log-probs are for the ledger to refuse.
    """
    for ids in (generation.ids, generation.prompt_ids or ()):
        if ids and not (set(map(type, ids)) == {int} and min(ids) >= 0):
            raise ValueError("a token id that is no number from 0 up")
    if generation.routed_experts is not None:
        rows = RoutedExperts.read(generation.routed_experts).rows
        if rows != (tokens := len(generation.prompt_ids or ()) + len(generation.ids)):
            raise ValueError(f"routed_experts have {rows} rows for {tokens} tokens")
    if set(map(type, generation.log_probs)) == {float} and max(generation.log_probs) <= _ROUNDING:
        return generation  # as nearly all are
    for one in generation.log_probs:
        if one is not None and (type(one) not in (int, float) or one > _ROUNDING):
            raise ValueError(f"{one!r:.100} is not the logarithm of a probability")
    return generation
