# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""One generation of an engine, and its validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nemo_gym_prorl.http.routed_experts import RoutedExperts


class Finish(StrEnum):
    """Reason for which sampling ended."""

    STOP = "stop"
    """The model ended its turn, or wrote a stop string."""
    LENGTH = "length"
    """The request's ``max_tokens`` or the engine's context were used up."""
    CONTEXT = "context"
    """The prompt left no room in the engine's context, so nothing was sampled."""


@dataclass(frozen=True, slots=True)
class Generation:
    """An engine's sample for one prompt.

    Attributes:
        ids: the sampled token ids, including the end-of-turn token if the model wrote one.
        log_probs: natural logarithm of each sampled token's probability; one per id.
        finish: why sampling ended.
        cached_tokens: number of prompt tokens from the prefix cache; ``None`` if the engine does not report it.
        prompt_ids: the prompt as the engine saw it, from engines that render messages themselves.
        message: the assistant message as the engine parsed it, from engines that parse turns themselves.
        routed_experts: experts of each token of prompt and sample, from engines that report them
            (:mod:`~nemo_gym_prorl.http.routed_experts`).
        log_prob_mode: the distribution that the log-probs belong to (:class:`.LogProbMode`); ``None`` during a probe.
        top: log-probs of the first position's most probable tokens, if the request asks for these.
        text: the text that the engine decoded, without the reasoning that the engine parsed.
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


_MAX_LOG_PROB = 1e-3
"""Largest accepted log-prob; engines of low precision round slightly above probability 1."""


def validate_generation(generation: Generation) -> Generation:
    """Return a generation after checking its token ids, log-probs and routed experts.

    Raises:
        ValueError: ids, log-probs or experts are invalid. Missing log-probs (``None``) are left to the ledger.
    """
    for ids in (generation.ids, generation.prompt_ids or ()):
        if ids and not (set(map(type, ids)) == {int} and min(ids) >= 0):
            raise ValueError("a token id is not a non-negative integer")
    if generation.routed_experts is not None:
        rows = RoutedExperts.read(generation.routed_experts).rows
        if rows != (tokens := len(generation.prompt_ids or ()) + len(generation.ids)):
            raise ValueError(f"routed_experts has {rows} rows for {tokens} tokens")
    if set(map(type, generation.log_probs)) == {float} and max(generation.log_probs) <= _MAX_LOG_PROB:
        return generation  # fast path of nearly all generations
    for one in generation.log_probs:
        if one is not None and (type(one) not in (int, float) or one > _MAX_LOG_PROB):
            raise ValueError(f"{one!r:.100} is not the logarithm of a probability")
    return generation
